"""The zoo's trained pairs and the mappings that ship with them, on text nobody fitted."""

import pytest

from kvtransfer import (
    KVMapping,
    LanguageModel,
    builtin,
    check,
    evaluate,
    load,
    prefill,
    read_guides,
)
from kvtransfer.evaluation.evaluate import BUILTIN_GUIDES
from kvtransfer.evaluation.report import EvalReport
from kvtransfer.zoo import PAIRS

Pair = tuple[LanguageModel, LanguageModel, KVMapping]


@pytest.fixture(scope="module", params=sorted(PAIRS))
def pair(request: pytest.FixtureRequest) -> Pair:
    source, target = PAIRS[request.param]
    mapping = KVMapping.from_pretrained(f"{source}-to-{target}")
    return load(source), load(target), mapping


@pytest.fixture(scope="module")
def report(pair: Pair) -> EvalReport:
    tiny = pair[0].spec.name.startswith("tiny")
    return evaluate(
        *pair,
        texts=builtin("heldout"),
        guides=None if tiny else read_guides(BUILTIN_GUIDES)[:1],
        items=16 if tiny else 4,
    )


def test_the_checker_asks_for_a_map(pair: Pair) -> None:
    assert check(pair[0].spec.name, pair[1].spec.name).verdict == "map"


def test_the_shipped_mapping_belongs_to_these_weights(pair: Pair) -> None:
    source, target, mapping = pair

    mapping.check_ends(source.spec, target.spec)


def test_the_mapped_prefix_beats_every_control(report: EvalReport) -> None:
    assert report.text is not None
    margins = report.text.margins()

    assert {"none", "zeroed", "unrotated", "shuffled"} <= set(margins)
    assert all(margin.low is not None and margin.low > 0 for margin in margins.values()), margins
    assert report


def test_floor_and_ceiling_frame_the_gap(report: EvalReport) -> None:
    assert report.text is not None
    nll = {name: found["nll"].mean() for name, found in report.text.columns.items()}

    assert nll["own"] < nll["mapped"] < nll["none"] < nll["zeroed"]


def test_mapping_changes_nothing_in_the_cache_it_reads(pair: Pair) -> None:
    source, _, mapping = pair
    cache = prefill(source, source.encode("The tide comes in twice a day.")[None])
    before = [block.clone() for block in (*cache.keys, *cache.values)]

    mapping(cache)

    after = (*cache.keys, *cache.values)
    assert all(bool((a == b).all()) for a, b in zip(before, after, strict=True))
