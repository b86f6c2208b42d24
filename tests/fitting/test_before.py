"""Maps may read the token before: what an induction head's keys tell of."""

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from sklearn.metrics import r2_score
from torch import Tensor

from kvtransfer.errors import ArtifactError
from kvtransfer.fitting.affine import Affine
from kvtransfer.fitting.capture import Capture, Sample, capture
from kvtransfer.fitting.choice import Choice, choose
from kvtransfer.fitting.columns import Columns
from kvtransfer.fitting.features import KINDS, Features, flat, late, rows_of, spaced, state_rows
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.layer_map import LayerMap
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.problem import problem
from kvtransfer.fitting.report import FitReport
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill
from kvtransfer.hf.start import prefill_with_states, width

from .conftest import MakeMapping
from .test_columns import CHUNKS, HELD_OUT, fitted_ids
from .test_layers import DEPTH, FEATURES, spec
from .test_moments import assert_same

IDS = torch.arange(5, 65, 2)[None]
OFFERED = (2, 0)


def taken(source: LanguageModel, target: LanguageModel, **asked: Any) -> Capture:
    return capture(source, target, CHUNKS, tokens=10_000, batch=4, before=OFFERED, **asked)


def test_the_first_token_has_none_before_it() -> None:
    block = torch.arange(1.0, 9.0).view(1, 2, 4, 1)

    assert late(block).flatten().tolist() == [0, 1, 2, 3, 0, 5, 6, 7]


@pytest.mark.parametrize(
    ("depth", "count", "expected"),
    [
        (24, 6, (2, 6, 10, 14, 18, 22)),
        (30, 6, (2, 7, 12, 17, 22, 27)),
        (4, 6, (0, 1, 2, 3)),
        (5, 1, (2,)),
    ],
)
def test_the_layers_that_are_offered_are_evenly_spaced(
    depth: int, count: int, expected: tuple[int, ...]
) -> None:
    assert spaced(depth, count) == expected


@pytest.mark.parametrize("starts", [(), (1,)])
@pytest.mark.parametrize("features", ["same", "both"])
def test_what_is_gathered_is_every_token_beside_the_one_before_it(
    source: LanguageModel, target: LanguageModel, features: Features, starts: tuple[int, ...]
) -> None:
    found = taken(source, target, features=features, starts=starts)

    content = prefill(source, fitted_ids()).content()
    own, _ = prefill_with_states(target, fitted_ids(), starts)
    columns = Columns.of(found, source.spec, target.spec, start=starts[0] if starts else None)
    state = width(target) if starts else 0
    for kind in KINDS:
        kinds = KINDS if features == "both" else (kind,)
        blocks = {"keys": content.keys, "values": content.values}
        parts = [flat(blocks[each][1]) for each in kinds]
        parts += [flat(late(blocks[each][s])) for s in OFFERED for each in kinds]
        expected = Moments.of(torch.cat(parts, dim=1), rows_of(own.content(), kind))
        read = columns.reads(kind, [1], OFFERED)
        moments: Moments = getattr(found.fit, kind)
        width_y = len(expected.mean_y)
        mine = moments.select(read[: len(read) - state], torch.arange(width_y))
        assert_same(mine, expected, rtol=1e-4)
        assert len(read) == len(expected.mean_x) + state
        heads = columns.heads(kind, [1], 1, OFFERED)
        assert len(heads.source) == len(heads.count) == len(read)
    assert found.before == OFFERED
    with pytest.raises(ValueError, match=r"layer 1 at the token before, of a capture of \(2, 0\)"):
        columns.reads("keys", [0], [1])


@pytest.mark.parametrize("start", [None, 0])
def test_what_is_applied_is_what_was_fitted(
    source: LanguageModel, target: LanguageModel, start: int | None
) -> None:
    """R² from moments is that of the mapping's own output on the held-out tokens."""
    starts = () if start is None else (start,)
    found = taken(source, target, features="both", starts=starts)
    settings = FitSettings(features="both", before=2, start=start, strength=1e-3, layers=2)
    choice = Choice(
        target=1, sources=(1,), strength_keys=1e-3, strength_values=1e-3,
        r2_keys=0.0, r2_values=0.0, before=(2,),
    )  # fmt: skip
    choices = [replace(choice, target=0), choice] if start is None else [choice]

    report = fit_captured(found, source, target, settings, choices=choices)

    held = torch.stack([CHUNKS[number] for number in HELD_OUT])
    own, states = prefill_with_states(target, held, starts)
    state = None if start is None else states[start]
    content, wanted = prefill(source, held).content(), own.content()
    for kind in KINDS:
        layer = report.mapping.layers[-1]
        assert (layer.sources, layer.before) == ((1,), (2,))
        rows = report.mapping.rows(
            content, layer, kind, None if state is None else state_rows(state)
        )
        made = getattr(layer, kind)(rows).flatten(0, 1)
        true = flat(getattr(wanted, kind)[1])
        heads = target.spec.layers[1].kv_heads
        scores = [
            r2_score(a, b, multioutput="variance_weighted")
            for a, b in zip(
                true.view(len(true), heads, -1).unbind(1),
                made.view(len(made), heads, -1).unbind(1),
                strict=True,
            )
        ]
        assert getattr(report.layers[-1], f"r2_{kind}") == pytest.approx(
            sum(scores) / heads, abs=1e-4
        )
    (*_, listed) = json.loads(report.to_json())["layers"]
    assert (listed["sources"], listed["before"]) == ([1], [2])
    assert "1 | 2" in text_of(report)
    assert "| at the token before" in text_of(report)
    assert report.mapping.settings["before"] == 2


def text_of(report: FitReport) -> str:
    console = Console(width=200, file=StringIO(), record=True)
    console.print(report)
    return console.export_text()


# Chosen where it helps


def rows(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Target layer 0 is source layer 3 at the token before; layer 1 is layers 1 and 4 at its own.

    Of the token before, layers 1 and 3 are offered.
    """
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, DEPTH + 2, FEATURES, generator=random, dtype=torch.float64)
    noise = 0.2 * torch.randn(n, 2, FEATURES, generator=random, dtype=torch.float64)
    y = torch.stack((x[:, DEPTH + 1] + 0.3 * x[:, 3], x[:, 1] + x[:, 4]), dim=1) + noise
    return x.flatten(1), y.flatten(1)


def invented() -> Capture:
    def sample(n: int, seed: int, *, twin: bool) -> Sample:
        x, y = rows(n, seed)
        moments = Moments.of(x, torch.cat((y, y.flip(0)), dim=1) if twin else y)
        return Sample(keys=moments, values=moments)

    return Capture(
        fit=sample(400, 0, twin=True),
        heldout=sample(200, 1, twin=False),
        seconds={},
        before=(1, 3),
    )


def test_a_layer_is_read_at_the_token_before_where_that_explains_more() -> None:
    found, source, target = invented(), spec(DEPTH), spec(2)

    plain = list(choose(found, source, target, FitSettings(layers=2)))
    first, second = choose(found, source, target, FitSettings(layers=2, before=2))

    assert (first.sources, first.before) == ((3,), (3,))
    assert first.r2_keys > plain[0].r2_keys + 0.5
    assert (second.sources, second.before) == ((1, 4), ())
    assert (second.r2_keys, second.r2_values) == (plain[1].r2_keys, plain[1].r2_values)
    posed = problem(found, Columns.of(found, source, target), "keys", [3], 0, before=[3])
    assert len(posed.fit.mean_x) == 2 * FEATURES  # no more than two layers are
    (alone, _) = choose(found, source, target, FitSettings(layers=1, before=2))
    assert alone.before == ()


# Saved and read


@pytest.fixture
def mapping(make_mapping: MakeMapping) -> KVMapping:
    """Its second layer reads source layer 1, and layer 0 at the token before."""
    made = make_mapping()

    def with_before(layer: LayerMap) -> LayerMap:
        weights = (torch.randn(64, 32, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
        keys, values = (Affine(weight, torch.zeros(32)) for weight in weights)
        return LayerMap((1,), keys, values, before=(0,))

    return replace(
        made,
        layers=(made.layers[0], with_before(made.layers[1])),
        shuffled=(made.shuffled[0], with_before(made.shuffled[1])),
    )


def test_only_what_came_before_is_read(mapping: KVMapping, source: LanguageModel) -> None:
    cache = prefill(source, IDS)
    blocks = [block.clone() for block in cache.content().values]
    blocks[0][:, :, 7] += 1.0

    plain = mapping(cache.content())
    moved = mapping(replace(cache.content(), values=tuple(blocks)))

    for layer, expected in ((0, [7]), (1, [8])):
        changed = (moved.values[layer] - plain.values[layer]).abs().amax((0, 1, 3)) > 1e-4
        assert changed.nonzero().flatten().tolist() == expected
    assert all(map(torch.equal, moved.keys, plain.keys))


def test_a_mapping_keeps_what_it_reads_at_the_token_before(
    mapping: KVMapping, source: LanguageModel, tmp_path: Path
) -> None:
    mapping.save_pretrained(tmp_path / "m")

    loaded = KVMapping.from_pretrained(tmp_path / "m")

    assert [layer.before for layer in loaded.layers] == [(), (0,)]
    cache = prefill(source, IDS)
    one, other = mapping(cache), loaded(cache)
    assert all(map(torch.equal, (*one.keys, *one.values), (*other.keys, *other.values)))
    rounded = mapping.rounded("bfloat16")
    assert [layer.before for layer in rounded.layers] == [(), (0,)]


def test_a_mapping_from_before_there_was_such_a_thing_reads_none(
    make_mapping: MakeMapping, tmp_path: Path
) -> None:
    make_mapping().save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text()) | {"format": 2}
    del config["before"]
    path.write_text(json.dumps(config))

    assert [each.before for each in KVMapping.from_pretrained(tmp_path / "m").layers] == [(), ()]


@pytest.mark.parametrize("before", [None, [[0]], [[], [3]], [[], [True]], [[], 0], {"0": []}])
def test_a_config_that_reads_what_is_not_there_is_refused(
    mapping: KVMapping, tmp_path: Path, before: Any
) -> None:
    mapping.save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"before": before}))

    with pytest.raises(ArtifactError, match="'before' is no table of 2 target layers"):
        KVMapping.from_pretrained(tmp_path / "m")


def test_a_negative_number_of_layers_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="before must be ≥ 0, got -1"):
        FitSettings(before=-1)


def test_a_twin_is_still_found_exactly(tiny: Callable[..., LanguageModel]) -> None:
    from tests.theorems.twins import twin_of

    model = tiny("llama")
    found = fit(
        model,
        twin_of(model),
        builtin("fit"),
        FitSettings(tokens=2048, chunk=64, batch=16, layers=2, before=4),
    )

    assert found.r2_keys > 1 - 1e-6
    assert all(layer.before == () for layer in found.layers)
