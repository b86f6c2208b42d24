"""What concat refuses, and that nothing opens a text twice."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from tokenizers import processors
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, IncompatibleModels, RotationError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides.concat import concat
from kvtransfer.guides.recompute import recompute
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score

from ..theorems.compare import cache_error

ONE, TWO = torch.arange(5, 45, 3)[None].split([8, 6], dim=1)
BEGIN = torch.tensor([[0]])


@pytest.fixture(scope="module")
def model(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("qwen2", num_hidden_layers=2)


@pytest.fixture(scope="module")
def opened(model: LanguageModel) -> LanguageModel:
    """The same model with a tokenizer that opens every text with token 0."""
    tokenizer = deepcopy(model.tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    found = replace(model, tokenizer=tokenizer)
    assert found.opening.tolist() == [0]
    return found


def begun(ids: Tensor) -> Tensor:
    return torch.cat((BEGIN.expand(len(ids), -1), ids), dim=1)


@pytest.mark.parametrize("rows", [1, 2])
def test_what_opens_every_text_opens_the_whole_once(opened: LanguageModel, rows: int) -> None:
    one, two = ONE.repeat(rows, 1), TWO.repeat(rows, 1)
    first, second = prefill(opened, begun(one)), prefill(opened, begun(two))
    joint = prefill(opened, torch.cat((begun(one), two), dim=1))

    found = concat(opened, [first, second, second])

    assert found.tokens == 9 + 6 + 6
    torch.testing.assert_close(found.prefix(15).keys[0], joint.keys[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.values[0][:, :, 9:15], second.values[0][:, :, 1:])
    assert found.approximate == (
        "pieces 2, 3 of 3 never saw what stands before them; what opens every text was left out "
        "of piece 2; what opens every text was left out of piece 3"
    )


def test_it_is_seen_through_what_a_map_or_a_few_bits_do_to_it(opened: LanguageModel) -> None:
    second = prefill(opened, begun(TWO))
    scale = second.values[0].std()
    noise = torch.Generator().manual_seed(0)
    blurred = second.map(
        lambda block: block + 0.2 * scale * torch.randn(block.shape, generator=noise)
    )

    assert concat(opened, [prefill(opened, begun(ONE)), blurred]).tokens == 9 + 6


def test_a_text_that_was_not_opened_loses_nothing(
    opened: LanguageModel, model: LanguageModel
) -> None:
    first = prefill(opened, begun(ONE))
    for start in range(1, 512, 7):  # whichever token a text begins with
        text = torch.cat((torch.tensor([[start]]), TWO), dim=1)
        assert concat(opened, [first, prefill(opened, text)]).tokens == 9 + 7
    # Where the tokenizer opens no text, token 0 is a token like any other.
    assert concat(model, [first, prefill(model, begun(TWO))]).tokens == 9 + 7


def test_nothing_but_the_opening_leaves_nothing(opened: LanguageModel) -> None:
    first = prefill(opened, begun(ONE))

    found = concat(opened, [first, prefill(opened, BEGIN)])

    assert found.tokens == 9


def test_rows_that_begin_otherwise_are_refused(opened: LanguageModel) -> None:
    mixed = torch.cat((begun(TWO), begun(TWO).roll(-1, dims=1)))

    with pytest.raises(CacheLayoutError, match=r"piece 2 of 2: some rows .* \[True, False\]"):
        concat(opened, [prefill(opened, begun(ONE)).expand(2), prefill(opened, mixed)])


def test_pieces_of_another_kind_are_refused_by_number(
    model: LanguageModel, tiny: Callable[..., LanguageModel]
) -> None:
    first, second = prefill(model, ONE), prefill(model, TWO)
    other = prefill(tiny("qwen2", num_hidden_layers=2, seed=5), TWO)
    wrong: list[tuple[KVCache, type[Exception], str]] = [
        (other, IncompatibleModels, r"piece 2 of 2: .* fingerprint"),
        (
            second.to(dtype=torch.bfloat16),
            CacheLayoutError,
            r"piece 2 of 2: this cache is torch\.bfloat16",
        ),
        (second.expand(2), CacheLayoutError, "piece 1 is of batch 1, piece 2 of batch 2"),
        (replace(second, rotations=None), RotationError, r"piece 2 of 2: .* no record"),
        (prefill(model, TWO.repeat(1, 85)), CacheLayoutError, r"piece 2 of 2: .* at most 512"),
    ]

    for piece, kind, says in wrong:
        with pytest.raises(kind, match=says) as caught:
            concat(model, [first, piece])
        assert getattr(caught.value, "hint", None)
    with pytest.raises(CacheLayoutError, match="no pieces"):
        concat(model, [])


def test_empty_pieces_add_nothing(model: LanguageModel) -> None:
    first, second = prefill(model, ONE), prefill(model, TWO)

    assert concat(model, [first.prefix(0), first, second.prefix(0)]) is first
    assert concat(model, [first.prefix(0)]).tokens == 0
    assert concat(model, [first, first.prefix(0), second]).tokens == 14


def test_what_is_known_of_the_pieces_is_said_of_the_whole(model: LanguageModel) -> None:
    first = replace(prefill(model, ONE), note="dequantised", approximate="mapped from a")
    second = replace(prefill(model, TWO), note="dequantised", approximate="mapped from b")

    found = concat(model, [first, second])

    assert found.note == "dequantised"
    assert found.approximate == (
        "the second of 2 pieces never saw what stands before it; mapped from a; "
        "piece 2: mapped from b"
    )


def test_reading_the_later_pieces_again_makes_the_whole_exact(model: LanguageModel) -> None:
    ids = torch.cat((ONE, TWO), dim=1)
    joint, right = concat(model, [prefill(model, ONE), prefill(model, TWO)]), prefill(model, ids)

    repaired = recompute(model, ids, joint, 1.0, after=ONE.shape[1])

    assert repaired.approximate is None
    assert cache_error(joint, right) > 0.01
    assert cache_error(repaired, right) < 1e-5


def test_text_is_read_on_after_all_pieces(model: LanguageModel) -> None:
    live = torch.tensor([[50, 51, 52]])
    first, second = prefill(model, ONE), prefill(model, TWO)

    both = score(model, live, concat(model, [first, second]))

    for fewer in (first, second):
        assert not torch.allclose(both, score(model, live, fewer), atol=0.1)
