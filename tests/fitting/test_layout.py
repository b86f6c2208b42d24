"""What a band leaves in is as it would be without, and what it leaves out is an error."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtransfer.fitting.band import Band
from kvtransfer.fitting.capture import Capture, Sample, capture
from kvtransfer.fitting.choice import choose
from kvtransfer.fitting.columns import Columns
from kvtransfer.fitting.features import GROUPS, KINDS, Features, Kind
from kvtransfer.fitting.layers import rank_layers
from kvtransfer.fitting.layout import Layout, moments_bytes
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.pairs import PairMoments
from kvtransfer.fitting.problem import problem
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.sums import Sums
from kvtransfer.geometry.spec import LayerSpec, ModelSpec
from kvtransfer.hf.model import LanguageModel

from .test_columns import CHUNKS

STATE = 2
FLAT = ("gram", "cross", "twin")


def spec(widths: Sequence[int], *, heads: int = 1, values: int | None = None) -> ModelSpec:
    layers = [
        LayerSpec(kind="full", kv_heads=heads, key_dim=w, value_dim=values or w) for w in widths
    ]
    return ModelSpec(
        name="m", architecture="llama", layers=tuple(layers), dtype="float32", positions="none"
    )


# Bands


@given(source=st.integers(1, 40), target=st.integers(1, 40), width=st.integers(0, 12))
def test_a_band_is_what_lies_within_a_width_of_the_proportional_depth(
    source: int, target: int, width: int
) -> None:
    band = Band(width, source, target)

    for t in range(target):
        depth = t * (source - 1) / max(1, target - 1)
        near = [s for s in range(source) if abs(s - int(depth + 0.5)) <= width]
        assert list(band.candidates(t)) == near
        assert near  # some layer is always left
    for s in range(source):
        assert list(band.readers(s)) == [t for t in range(target) if s in band.candidates(t)]


@given(
    source=st.integers(2, 30), target=st.integers(1, 30), k=st.integers(1, 30), first=st.integers(0)
)
def test_the_band_that_is_named_is_the_narrowest_that_does(
    source: int, target: int, k: int, first: int
) -> None:
    k, first = min(k, source), first % target
    narrow = Band(0, source, target)
    if k == 1:
        narrow.require(k, first)
        return

    with pytest.raises(ValueError, match=rf"{k} source layers, and a band of 0 leaves") as caught:
        narrow.require(k, first)

    named = int(str(caught.value).split("give a band of ")[1].split(" ")[0])
    Band(named, source, target).require(k, first)
    with pytest.raises(ValueError, match="leaves some target layer"):
        Band(named - 1, source, target).require(k, first)


# What is gathered under them


@dataclass(frozen=True)
class Pair:
    """Two models, and what is gathered of them."""

    source: ModelSpec
    target: ModelSpec
    features: Features
    before: tuple[int, ...]
    starts: tuple[int, ...]
    width: int

    def layouts(self, width: int | None) -> list[Layout]:
        band = Band(width, len(self.source.layers), len(self.target.layers))
        return [
            Layout.of(
                self.source, self.target, group, band,
                before=self.before, states=[STATE] * len(self.starts),
            )
            for group in GROUPS[self.features]
        ]  # fmt: skip


small = st.integers(1, 3)
places = st.lists(st.integers(0, 5), unique=True, max_size=3)

Drawn = tuple[list[int], list[int], int, int, Features, list[int], list[int], int]

drawn_pairs = st.tuples(
    st.lists(small, min_size=1, max_size=6),
    st.lists(small, min_size=1, max_size=5),
    small,
    small,
    st.sampled_from(("same", "both")),
    places,
    places,
    st.integers(0, 3),
)
"""Widths of both models' layers, and of their values; and what is gathered of them."""


def made(drawn: Drawn) -> Pair:
    reads, writes, read_values, written_values, features, before, starts, width = drawn
    return Pair(
        spec(reads, values=read_values),
        spec(writes, values=written_values),
        features,
        tuple(s for s in before if s < len(reads)),
        tuple(t for t in starts if t < len(writes)),
        width,
    )


def rows_of(layout: Layout) -> tuple[Tensor, Tensor]:
    """Whole numbers with a mean of nothing, whose products and sums are exact in any order."""
    random = torch.Generator().manual_seed(layout.p)
    half = torch.randint(-9, 10, (8, layout.p + layout.q), generator=random).double()
    x, y = torch.cat((half, -half)).split((layout.p, layout.q), dim=1)
    return x, y


def gathered(layout: Layout) -> PairMoments:
    sums = Sums(layout, twins=True)
    sums.add(*rows_of(layout), order=torch.arange(16).roll(3))
    return sums.moments()


def captured(pair: Pair, width: int | None) -> Capture:
    """As if both models had cached those rows."""
    (keys, *more) = [gathered(layout) for layout in pair.layouts(width)]
    values = more[0] if more else keys
    if not more:
        (layout,) = pair.layouts(width)
        ends = [0, *accumulate(len(piece) for piece in layout.targets)]
        split, q = ends[len(pair.target.layers)], layout.q
        mine = torch.arange(2 * q)
        keys, values = keys.targets(mine[mine % q < split]), values.targets(mine[mine % q >= split])
    sample = Sample(keys=keys, values=values)
    return Capture(
        fit=sample, heldout=sample, seconds={}, features=pair.features, before=pair.before,
        starts=pair.starts, state_width=STATE, band=width,
    )  # fmt: skip


@settings(max_examples=60)
@given(
    drawn=drawn_pairs,
    start=st.integers(0, 3),
    layer=st.integers(0, 4),
    sources=st.lists(st.integers(0, 5), unique=True, min_size=1, max_size=4),
    late=st.lists(st.integers(0, 2), unique=True, max_size=2),
)
def test_whatever_a_band_allows_is_as_it_is_without_one_and_nothing_else_is_to_be_had(
    drawn: Drawn, start: int, layer: int, sources: list[int], late: list[int]
) -> None:
    pair = made(drawn)
    narrow, wide = captured(pair, pair.width), captured(pair, None)
    band = narrow.limits(pair.source, pair.target)
    columns = Columns.of(
        narrow, pair.source, pair.target, start=(*pair.starts, None)[start % (len(pair.starts) + 1)]
    )
    layer %= len(pair.target.layers)
    sources = list({s % len(pair.source.layers) for s in sources})
    before = [pair.before[i] for i in late if i < len(pair.before)]
    read = {*sources, *before}

    def posed(found: Capture, kind: Kind) -> list[Moments]:
        one = problem(found, columns, kind, sources, layer, before=before)
        return [one.fit, one.shuffled, one.heldout]

    for kind in KINDS:
        if not read <= set(band.candidates(layer)):
            with pytest.raises(ValueError, match=rf"a band of {pair.width}") as caught:
                posed(narrow, kind)
            assert any(f"source layer {s}" in str(caught.value) for s in read) or any(
                f"layers {a} and {b}" in str(caught.value) for a, b in product(read, read)
            )
            continue
        for mine, whole in zip(posed(narrow, kind), posed(wide, kind), strict=True):
            for field in ("mean_x", "mean_y", "xx", "xy", "yy"):
                assert torch.equal(getattr(mine, field), getattr(whole, field))


@settings(max_examples=30)
@given(drawn=drawn_pairs)
def test_without_a_band_all_products_are_numpys_and_a_full_one_is_none(drawn: Drawn) -> None:
    pair = made(drawn)
    for free, full in zip(pair.layouts(None), pair.layouts(len(pair.source.layers)), strict=True):
        x, y = rows_of(free)
        found, bound = gathered(free), gathered(full)
        for name in FLAT:
            assert torch.equal(getattr(found, name), getattr(bound, name))
        whole = found.dense()
        assert torch.equal(whole.xx, x.mT @ x)
        assert torch.equal(whole.xy, x.mT @ torch.cat((y, y.roll(3, 0)), dim=1))
        assert torch.equal(found.diagonal, x.square().sum(0))


def test_symmetric_pieces_are_little_more_than_half_of_the_work() -> None:
    for depth in (1, 2, 8, 24):
        (layout, _) = Pair(spec([4] * depth), spec([4] * 3), "same", (), (), 0).layouts(None)

        assert layout.gram_numbers == layout.p**2 * (1 + 1 / depth) / 2
        assert layout.cross_numbers == layout.p * layout.q


@pytest.mark.parametrize("features", ["same", "both"])
@pytest.mark.parametrize("band", [None, 0, 1])
def test_a_capture_holds_as_many_bytes_as_were_foretold(
    source: LanguageModel, target: LanguageModel, features: Features, band: int | None
) -> None:
    asked = {"features": features, "before": (1,), "attention": True, "band": band}
    found = capture(source, target, CHUNKS, tokens=100, starts=(0,), **asked)  # type: ignore[arg-type]

    flat: dict[int, int] = {}
    for sample in (found.fit, found.heldout, found.weighted):
        assert sample is not None
        for moments in (sample.keys, sample.values):
            assert isinstance(moments, PairMoments)
            held = [getattr(moments, name) for name in FLAT]
            flat |= {each.data_ptr(): each.nbytes for each in held if each is not None}
    told = moments_bytes(source.spec, target.spec, states=[found.state_width], **asked)  # type: ignore[arg-type]
    assert found.nbytes == {name: each["held"] for name, each in told.items()}
    assert sum(found.nbytes.values()) == sum(flat.values())


def test_the_moments_of_the_papers_largest_pair_take_what_the_formula_says() -> None:
    """Qwen3-14B → 32B: 40 and 64 layers of 8 heads of 128; in single precision, 6.7 and 10.7 GB."""
    source, target = spec([128] * 40, heads=8), spec([128] * 64, heads=8)

    free, banded = (
        moments_bytes(source, target, band=band, itemsize=4)["keys"] for band in (None, 6)
    )

    assert free["gram_full"] == 4 * (40 * 1024) ** 2
    assert free["cross"] == 4 * (40 * 1024) * (64 * 1024)
    assert round(free["gram_full"] / 1e9, 1) == 6.7
    assert round(free["cross"] / 1e9, 1) == 10.7
    assert free["gram"] == 4 * (40 * 41 // 2) * 1024**2  # little more than half
    assert banded["held"] < free["held"] / 2


# Choosing under a band


def test_only_candidates_are_ranked_and_chosen(
    source: LanguageModel, target: LanguageModel
) -> None:
    free, bound = (capture(source, target, CHUNKS, tokens=10_000, band=band) for band in (None, 1))
    ends = source.spec, target.spec
    everything, some = rank_layers(free, *ends), rank_layers(bound, *ends)
    band = bound.limits(*ends)

    for t, s in product(range(2), range(3)):
        if s in band.candidates(t):
            torch.testing.assert_close(some[t, s], everything[t, s])
        else:
            assert some[t, s] == float("-inf")
    assert not bool(some.isfinite().all())
    for layers in ("auto", 2, "all"):
        for choice in choose(bound, *ends, FitSettings(layers=layers, band=1)):
            assert set(choice.sources) <= set(band.candidates(choice.target))
            assert layers == "auto" or len(choice.sources) == 2
