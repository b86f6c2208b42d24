"""A capture is the moments of what both models cache of the same tokens, held-out chunks apart."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import TextError
from kvtransfer.fitting.capture import Capture, capture
from kvtransfer.fitting.features import KINDS, rows_of
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.pairs import PairMoments
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill

from .test_moments import assert_same

CHUNKS = list(torch.randint(3, 500, (20, 12), generator=torch.Generator().manual_seed(0)))
HELD_OUT = (1, 9, 17)


def taken(source: LanguageModel, target: LanguageModel, **changed: int) -> Capture:
    asked = {"tokens": 10_000, "batch": 4, "holdout": 8, "seed": 0} | changed
    return capture(source, target, CHUNKS, **asked)  # type: ignore[arg-type]


def dense(moments: Moments | PairMoments) -> Moments:
    assert isinstance(moments, PairMoments)
    return moments.dense()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 4, 7])
def test_a_capture_is_the_moments_of_content_keys_and_values_chunk_by_chunk(
    source: LanguageModel, target: LanguageModel, kind: str, batch: int
) -> None:
    def rows(model: LanguageModel, numbers: list[int]) -> Tensor:
        caches = [prefill(model, CHUNKS[number][None]).content() for number in numbers]
        return torch.cat([rows_of(cache, kind) for cache in caches])  # type: ignore[arg-type]

    found = taken(source, target, batch=batch)

    for part, numbers in (
        ("fit", [n for n in range(20) if n not in HELD_OUT]),
        ("heldout", list(HELD_OUT)),
    ):
        moments: Moments = getattr(getattr(found, part), kind)
        width = len(moments.mean_y) // (2 if part == "fit" else 1)
        plain = moments.select(torch.arange(len(moments.mean_x)), torch.arange(width))
        expected = Moments.of(rows(source, numbers), rows(target, numbers))
        assert_same(plain, expected, rtol=1e-4)
        assert getattr(found, part).rows == 12 * len(numbers)


def test_the_shuffled_twin_has_the_same_targets_paired_with_other_tokens(
    source: LanguageModel, target: LanguageModel
) -> None:
    fit = dense(
        taken(source, target, batch=20).fit.values
    )  # all rows in the one batch that is permuted
    width = len(fit.mean_y) // 2

    torch.testing.assert_close(fit.mean_y[width:], fit.mean_y[:width])
    torch.testing.assert_close(fit.yy[width:], fit.yy[:width])
    assert float((fit.xy[:, width:] - fit.xy[:, :width]).abs().max()) > 0.1 * float(
        fit.xy.abs().max()
    )


def test_batches_that_are_not_permuted_add_nothing_to_the_twin(
    source: LanguageModel, target: LanguageModel
) -> None:
    fit = taken(source, target, batch=4).fit.values  # the first batch of four and the last
    whole = taken(source, target, batch=20).fit.values
    width = len(fit.mean_y) // 2

    torch.testing.assert_close(fit.yy[:width], whole.yy[:width])
    assert 0 < float(fit.yy[width:].sum()) < 0.75 * float(whole.yy[width:].sum())


def test_the_seed_is_of_the_shuffle_alone(source: LanguageModel, target: LanguageModel) -> None:
    one, other = (dense(taken(source, target, seed=seed).fit.keys) for seed in (0, 1))
    width = len(one.mean_y) // 2

    assert torch.equal(one.xx, other.xx)
    assert torch.equal(one.xy[:, :width], other.xy[:, :width])
    assert not torch.allclose(one.xy[:, width:], other.xy[:, width:])


def test_no_more_chunks_are_read_than_were_asked_for(
    source: LanguageModel, target: LanguageModel
) -> None:
    read: list[int] = []

    def chunks() -> Iterator[Tensor]:
        for number, chunk in enumerate(CHUNKS):
            read.append(number)
            yield chunk

    found = capture(source, target, chunks(), tokens=30)

    assert found.fit.rows == 36  # whole chunks
    assert found.heldout.rows == 12
    assert read == [0, 1, 2, 3]


def test_two_chunks_are_enough_and_one_is_not(source: LanguageModel, target: LanguageModel) -> None:
    found = capture(source, target, CHUNKS[:2], tokens=5)
    assert (found.fit.rows, found.heldout.rows) == (12, 12)

    with pytest.raises(TextError, match="none is left to hold out") as caught:
        capture(source, target, CHUNKS[:1], tokens=5)
    assert caught.value.hint


def test_time_is_kept_by_stage_and_progress_told_in_tokens(
    source: LanguageModel, target: LanguageModel
) -> None:
    told: list[int] = []

    found = capture(source, target, CHUNKS, tokens=10_000, progress=told.append)

    assert set(found.seconds) == {"source_forward", "target_forward", "statistics"}
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert sum(told) == 20 * 12
