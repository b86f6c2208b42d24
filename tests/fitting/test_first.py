"""The first token counts for more where all first tokens are alike, as an attention sink's are."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import UnderdeterminedFit
from kvtransfer.fitting.capture import Capture, First, Sample, capture
from kvtransfer.fitting.choice import choose
from kvtransfer.fitting.columns import Columns
from kvtransfer.fitting.features import KINDS, Features, gathered, rows_of
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.problem import Problem, problem
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solvers import Ridge
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill

from .test_columns import CHUNKS, fitted_ids
from .test_layers import DEPTH, FEATURES, spec
from .test_moments import assert_same

SOURCE, TARGET = spec(DEPTH), spec(1)
CHUNK = 20


@pytest.mark.parametrize("features", ["same", "both"])
def test_first_tokens_of_the_fit_are_kept_as_they_are(
    source: LanguageModel, target: LanguageModel, features: Features
) -> None:
    found = capture(source, target, CHUNKS, tokens=10_000, batch=4, features=features, before=(1,))

    read, own = (prefill(model, fitted_ids()).content() for model in (source, target))
    for kind in KINDS:
        group = KINDS if features == "both" else (kind,)
        x = gathered(read, group, (1,), ())[:: len(CHUNKS[0])]
        torch.testing.assert_close(found.first[kind].x, x, rtol=1e-4, atol=1e-5)
        y = rows_of(own, kind)[:: len(CHUNKS[0])]
        torch.testing.assert_close(found.first[kind].y, y, rtol=1e-4, atol=1e-5)


def leaning(*, alike: bool, noise: float = 0.5) -> tuple[Capture, Tensor, Tensor]:
    """Chunks whose first target rows are far from the others; all the same, if ``alike``.

    No line goes through all rows, so one that is to be right at the first must be told to.
    """

    def rows(n: int, seed: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(n, DEPTH * FEATURES, generator=random, dtype=torch.float64)
        y = x[:, :FEATURES] + noise * torch.randn(n, FEATURES, generator=random).double()
        if alike:
            x[::CHUNK] = 9.0 + 0.05 * x[::CHUNK]
            y[::CHUNK] = -4.0 + 0.01 * y[::CHUNK]
        return x, y

    x, y = rows(400, 0)
    heldout = Moments.of(*rows(200, 1))
    fit = Moments.of(x, torch.cat((y, y.flip(0)), dim=1))
    first = First(x[::CHUNK].float(), y[::CHUNK].float())
    made = Capture(
        fit=Sample(keys=fit, values=fit),
        heldout=Sample(keys=heldout, values=heldout),
        seconds={},
        first=dict.fromkeys(KINDS, first),
    )
    return made, x[::CHUNK], y[::CHUNK]


def posed(found: Capture, **how: Any) -> Problem:
    return problem(found, Columns.of(found, SOURCE, TARGET), "keys", [0, 1], 0, **how)


def test_a_sink_is_hit_where_it_counts() -> None:
    found, x, y = leaning(alike=True)
    read = x[:, : 2 * FEATURES]

    light, heavy = (Ridge(1e-4).solve(posed(found, first=first).fit) for first in (1, 256))

    missed = [float((fitted(read) - y).square().mean()) for fitted in (light, heavy)]
    assert missed[1] < missed[0] / 20
    # What is right at one token in twenty costs the others little.
    assert posed(found).score(heavy) > posed(found).score(light) - 0.05


def test_first_tokens_that_are_as_varied_as_others_count_as_others() -> None:
    found, _, _ = leaning(alike=False)

    for first in (2, 256):
        assert_same(posed(found, first=first).fit, posed(found).fit, rtol=1e-12)


def test_they_count_for_as_many_rows_as_they_are_more_alike() -> None:
    found, x, y = leaning(alike=True)
    read = x[:, : 2 * FEATURES].float().double()
    one = Moments.of(read, y.float().double())
    plain = posed(found).fit

    mine = posed(found, first=7).fit

    assert mine.n == plain.n == 400  # they count for more, and are no more rows
    wide = plain + one + one + one + one + one + one
    assert_same(mine, wide.counted_as(400), rtol=1e-6)
    assert_same(wide, mine.counted_as(400 + 6 * 20), rtol=1e-6)
    assert plain.more_varied_than(one) > 1000
    assert one.more_varied_than(plain) == 1
    assert plain.more_varied_than(plain) == 1
    assert plain.more_varied_than(Moments.of(read[:1], y[:1])) == 1  # one row says nothing of that


def test_the_control_and_the_judge_stay_as_they_are() -> None:
    found, _, _ = leaning(alike=True)

    plain, weighted = posed(found), posed(found, first=256)

    for part in ("heldout", "shuffled"):
        assert_same(getattr(plain, part), getattr(weighted, part), rtol=1e-12)
    without = replace(found, first={})
    assert_same(posed(without, first=256).fit, plain.fit, rtol=1e-12)


def test_too_few_rows_are_too_few_whatever_some_count_for() -> None:
    found, _, _ = leaning(alike=True)
    p = 2 * FEATURES
    few = Sample(keys=replace(found.fit.keys, n=p), values=found.fit.values)

    mine = posed(replace(found, fit=few), first=256).fit

    with pytest.raises(UnderdeterminedFit, match=rf"\b{p} rows"):
        Ridge(1e-4).solve(mine)


def test_strengths_are_chosen_for_what_is_solved() -> None:
    found, _, _ = leaning(alike=True)

    (choice,) = choose(found, SOURCE, TARGET, FitSettings(layers=2, strength=1e-4))

    chosen = problem(found, Columns.of(found, SOURCE, TARGET), "keys", choice.sources, 0, first=256)
    assert choice.r2_keys == pytest.approx(chosen.score(Ridge(1e-4).solve(chosen.fit)))


def test_where_a_start_gives_it_it_is_not_mapped(
    source: LanguageModel, target: LanguageModel
) -> None:
    found = capture(source, target, CHUNKS, tokens=10_000, batch=4, starts=(0,))
    alike = {
        kind: First(each.x, each.y.mean(0, keepdim=True).expand_as(each.y).clone())
        for kind, each in found.first.items()
    }
    found = replace(found, first=alike)

    for start, same in ((0, True), (None, False)):
        columns = Columns.of(found, source.spec, target.spec, start=start)
        one, other = (
            problem(found, columns, "keys", [0], 1, first=first).fit.mean_y for first in (1, 256)
        )
        assert torch.equal(one, other) is same


def test_a_token_counts_for_one_at_least() -> None:
    with pytest.raises(ValueError, match="first must be positive, got 0"):
        FitSettings(first=0)
