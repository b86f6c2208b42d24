"""What is read out of a capture is what would have been captured, and what was not is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import UnsupportedModel
from kvtransfer.fitting.capture import Capture, capture
from kvtransfer.fitting.choice import choose
from kvtransfer.fitting.columns import EVERY_HEAD, Columns
from kvtransfer.fitting.features import KINDS, Features, Kind, rows_of, state_rows
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.problem import problem
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill
from kvtransfer.hf.start import prefill_with_states, width

from .test_moments import assert_same

CHUNKS = list(torch.randint(3, 500, (20, 12), generator=torch.Generator().manual_seed(0)))
HELD_OUT = (1, 9, 17)
STARTS = (1, 0)


def taken(source: LanguageModel, target: LanguageModel, **asked: Any) -> Capture:
    return capture(source, target, CHUNKS, tokens=10_000, batch=4, **asked)


def fitted_ids() -> Tensor:
    return torch.stack([chunk for n, chunk in enumerate(CHUNKS) if n not in HELD_OUT])


@pytest.mark.parametrize("features", ["same", "both"])
def test_the_states_that_were_asked_for_are_features_and_come_last(
    source: LanguageModel, target: LanguageModel, features: Features
) -> None:
    found = taken(source, target, features=features, starts=STARTS)

    content = prefill(source, fitted_ids()).content()
    own, states = prefill_with_states(target, fitted_ids(), STARTS)
    given = torch.cat([state_rows(states[start]).flatten(0, 1) for start in STARTS], dim=1)
    assert (found.starts, found.state_width) == (STARTS, width(target))
    for kind in KINDS:
        kinds = KINDS if features == "both" else (kind,)
        x = torch.cat([*(rows_of(content, each) for each in kinds), given], dim=1)
        y = rows_of(own.content(), kind)
        mine: Moments = getattr(found.fit, kind)
        plain = mine.select(torch.arange(x.shape[1]), torch.arange(y.shape[1]))
        assert_same(plain, Moments.of(x, y), rtol=1e-4)
        assert len(mine.mean_x) == x.shape[1]


@pytest.mark.parametrize("gathered", ["same", "both"])
@pytest.mark.parametrize("start", STARTS)
def test_each_start_is_read_where_it_stands(
    source: LanguageModel, target: LanguageModel, start: int, gathered: Features
) -> None:
    found = taken(source, target, features=gathered, starts=STARTS)
    columns = Columns.of(found, source.spec, target.spec, start=start)
    _, states = prefill_with_states(target, fitted_ids(), STARTS)
    mean = state_rows(states[start]).flatten(0, 1).double().mean(0)

    for kind in KINDS:
        read = columns.reads(kind, [2, 0])[-width(target) :]
        moments: Moments = getattr(found.fit, kind)
        torch.testing.assert_close(moments.mean_x[read], mean, rtol=1e-4, atol=1e-5)
        heads = columns.heads(kind, [2, 0], 1)
        assert len(heads.source) == len(heads.count) == len(columns.reads(kind, [2, 0]))
        assert bool((heads.source[-width(target) :] == EVERY_HEAD).all())
        assert bool((heads.source[: -width(target)] >= 0).all())


def test_state_rows_keep_the_direction_and_not_the_size() -> None:
    state = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([1e-2, 1.0, 1e3])[:, None]

    torch.testing.assert_close(state_rows(sizes * state), state_rows(state))
    torch.testing.assert_close(state_rows(state).square().mean(-1), torch.ones(2, 3))
    assert not torch.allclose(state_rows(-state), state_rows(state))
    assert not state_rows(torch.zeros(1, 8)).any()


@pytest.mark.parametrize("start", [None, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_kind_out_of_a_capture_of_both_is_what_a_capture_of_the_same_kind_is(
    source: LanguageModel, target: LanguageModel, kind: Kind, start: int | None
) -> None:
    starts = () if start is None else (start,)
    both, same = (
        taken(source, target, features=features, starts=starts) for features in ("both", "same")
    )
    posed, expected = (
        problem(
            each,
            Columns.of(each, source.spec, target.spec, features="same", start=start),
            kind,
            [2, 0],
            1,
        )
        for each in (both, same)
    )

    for part in ("fit", "heldout", "shuffled"):
        assert_same(getattr(posed, part), getattr(expected, part), rtol=1e-6)
    assert torch.equal(posed.heads.source, expected.heads.source)
    wide = problem(both, Columns.of(both, source.spec, target.spec, start=start), kind, [2, 0], 1)
    assert len(wide.fit.mean_x) > len(posed.fit.mean_x)


def test_a_fit_to_the_same_kind_does_not_depend_on_what_else_was_captured(
    source: LanguageModel, target: LanguageModel
) -> None:
    settings = FitSettings(tokens=200, chunk=12, layers=1, strength=1e-3)
    one, other = (
        fit_captured(
            taken(source, target, features=features, starts=starts), source, target, settings
        )
        for features, starts in (("same", ()), ("both", STARTS))
    )

    cache = prefill(source, fitted_ids()[:1])
    a, b = one.mapping(cache), other.mapping(cache)
    for mine, theirs in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_what_was_not_captured_is_refused(source: LanguageModel, target: LanguageModel) -> None:
    found = taken(source, target, starts=(1,))

    Columns.of(found, source.spec, target.spec, features="same", start=1)
    with pytest.raises(ValueError, match="'both' asked of a capture of 'same'"):
        Columns.of(found, source.spec, target.spec, features="both")
    with pytest.raises(ValueError, match=r"a start of 0 asked of a capture of starts \(1,\)"):
        Columns.of(found, source.spec, target.spec, start=0)
    columns = Columns.of(found, source.spec, target.spec)
    with pytest.raises(ValueError, match="of a capture without attention"):
        problem(found, columns, "keys", [0], 0, attention=True)
    with pytest.raises(ValueError, match="a start of 7 layers"):
        taken(source, target, starts=(7,))


def test_layers_that_a_start_gives_are_not_chosen_for(
    source: LanguageModel, target: LanguageModel
) -> None:
    found = taken(source, target, starts=STARTS)

    def targets(start: int | None) -> list[int]:
        settings = FitSettings(layers=1, strength=1e-3, start=start)
        made = choose(found, source.spec, target.spec, settings)
        return [each.target for each in made]

    assert targets(None) == [0, 1]
    assert targets(0) == [1]


# Weighted by attention


def test_weighted_rows_are_weighted_and_the_others_are_not(
    source: LanguageModel, target: LanguageModel
) -> None:
    found, plain = (taken(source, target, attention=each) for each in (True, False))

    assert found.weighted is not None
    assert plain.weighted is None
    assert plain.sees == ()
    assert len(found.sees) == len(target.spec.layers)
    for kind in KINDS:
        mine: Moments = getattr(found.weighted, kind).dense()
        fit: Moments = getattr(found.fit, kind).dense()
        assert mine.n == fit.n
        assert not torch.allclose(mine.mean_x, fit.mean_x, rtol=0.05)
        half = fit.select(torch.arange(len(mine.mean_x)), torch.arange(len(mine.mean_y)))
        assert not torch.allclose(mine.xy, half.xy, rtol=0.05)
        assert_same(fit, getattr(plain.fit, kind).dense(), rtol=1e-9)


def test_a_model_whose_attention_is_not_seen_is_refused_and_told_what_to_do(
    source: LanguageModel, tiny: Any
) -> None:
    """Bloom computes its attention itself."""
    bloom = tiny("bloom", num_hidden_layers=2)

    with pytest.raises(UnsupportedModel, match="computes attention by itself") as caught:
        taken(source, bloom, attention=True)
    assert "another solver" in str(caught.value.hint)
    taken(source, bloom)  # and without attention there is nothing amiss
