"""Caches put together as values: nothing is lost, mixed up, or taken for something else."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvtransfer.errors import CacheLayoutError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import behind, one_after_another, stack

from .test_cache import blocks, cache, same


def row(stacked: KVCache, index: int) -> KVCache:
    """One row of a batch, without its padding."""
    assert stacked.padding is not None
    start, this = int(stacked.padding[index]), slice(index, index + 1)
    return replace(
        stacked,
        keys=tuple(block[this, :, start:] for block in stacked.keys),
        values=tuple(block[this, :, start:] for block in stacked.values),
        positions=stacked.positions[this, start:],
        rotations=None,
        padding=None,
    )


def test_a_stack_holds_its_caches_row_by_row() -> None:
    caches = [cache(tokens=5), cache(tokens=2), cache(tokens=3, batch=2), cache(tokens=0)]

    found = stack(caches)

    assert found.padding is not None
    assert found.padding.tolist() == [0, 3, 2, 2, 5]
    assert found.mask.tolist() == [
        [1, 1, 1, 1, 1],
        [0, 0, 0, 1, 1],
        [0, 0, 1, 1, 1],
        [0, 0, 1, 1, 1],
        [0, 0, 0, 0, 0],
    ]
    assert same(row(found, 0), caches[0])
    assert same(row(found, 1), caches[1])
    assert torch.equal(row(found, 3).keys[0], caches[2].keys[0][1:])
    assert not bool(found.values[1][1, :, :3].any())
    assert "padded by [0, 3, 2, 2, 5]" in repr(found)


def test_stacks_of_stacks_and_of_equal_lengths() -> None:
    one, two, three = cache(tokens=5), cache(tokens=2), cache(tokens=4)

    assert same(stack([stack([one, two]), three]), stack([one, two, three]))
    nested = stack([cache(tokens=7), stack([one, two])]).padding
    assert nested is not None
    assert nested.tolist() == [0, 2, 5]
    assert stack([one, one]).padding is None
    assert same(stack([two]), two)


def test_padding_stays_through_all_that_keeps_rows_and_columns() -> None:
    found = stack([cache(tokens=5), cache(tokens=2)])
    content = found.content()

    for changed in (
        found.to(dtype=torch.float64),
        found.to(device="cpu"),
        found.map(torch.neg),
        found.prefix(5),
        content,
        content.rotated(found.rotations or ()),
    ):
        assert changed.padding is not None
        assert changed.padding.tolist() == [0, 3]
    single = replace(cache(tokens=5), padding=torch.tensor([2])).expand(3).padding
    assert single is not None
    assert single.tolist() == [2, 2, 2]
    # Rows that were turned back are those of their own caches turned back.
    assert same(row(content, 1), cache(tokens=2).content())


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda c: c.prefix(4), "cut"),
        (lambda c: behind(c, 1), "cut"),
        (lambda c: c.content().take(torch.zeros(2, 1).long(), torch.zeros(2, 1).long()), "taken"),
        (lambda c: one_after_another([c, c]), "put one after another"),
    ],
    ids=["prefix", "behind", "take", "one after another"],
)
def test_rows_of_different_lengths_are_not_cut_together(
    act: Callable[[KVCache], object], says: str
) -> None:
    with pytest.raises(CacheLayoutError, match=rf"padded by \[0, 3\] columns cannot be {says}"):
        act(stack([cache(tokens=5), cache(tokens=2)]))


@pytest.mark.parametrize("padding", [[0], [0, -1], [0, 6], [[0, 1]], [0.0, 1.0]])
def test_padding_is_a_number_of_columns_a_row(padding: list[float]) -> None:
    wrong = torch.tensor(padding)
    with pytest.raises((CacheLayoutError, TypeError)) as caught:  # beartype sees shapes first
        replace(cache(batch=2), padding=wrong)
    assert isinstance(caught.value, TypeError) or "columns in 2 rows of 5" in str(caught.value)


@pytest.mark.parametrize("together", [stack, one_after_another], ids=["stack", "one after another"])
@pytest.mark.parametrize(
    ("other", "says"),
    [
        (cache(model="xyz"), "differ in model: abc and xyz"),
        (cache().to(dtype=torch.float64), r"differ in dtype: torch\.float32 and torch\.float64"),
        (cache().content(), "kind of keys: cached and content"),
        (
            cache(keys=blocks([(1, 1, 5, 8)] * 2), values=blocks([(1, 1, 5, 8)] * 2)),
            "heads and widths",
        ),
        (
            cache(keys=blocks([(1, 2, 5, 8)]), values=blocks([(1, 2, 5, 8)]), rotations=(None,)),
            "differ in layers: 2 and 1",
        ),
    ],
    ids=["model", "dtype", "content", "heads", "layers"],
)
def test_caches_of_different_kinds_are_refused_with_both_values(
    together: Callable[[list[KVCache]], KVCache], other: KVCache, says: str
) -> None:
    with pytest.raises(CacheLayoutError, match=says) as caught:
        together([cache(), other])

    assert caught.value.hint
    with pytest.raises(CacheLayoutError, match=r"no \w+s to put together"):
        together([])


def test_reasons_and_notes_say_of_which_cache_they_are() -> None:
    mapped, plain = cache(approximate="mapped", note="dequantised"), cache(tokens=2)

    assert stack([mapped, plain]).approximate == "cache 1: mapped"
    assert stack([mapped, mapped]).approximate == "mapped"
    assert stack([plain, plain]).approximate is None
    assert stack([plain, mapped]).note == "dequantised"


def test_unknown_tables_stay_unknown() -> None:
    known, unknown = cache(), cache(tokens=2, rotations=None)

    assert stack([known, unknown]).rotations is None
    assert stack([unknown, known]).rotations is None
    assert one_after_another([known, unknown]).rotations is None


def test_what_is_behind_and_what_is_before_make_the_whole() -> None:
    whole = cache()

    again = one_after_another([whole.prefix(2), behind(whole, 2)])

    assert same(again, whole)
    assert same(again.content(), whole.content())
