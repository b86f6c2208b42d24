"""A few kept rows rank layers as all the sums of a capture do."""

from collections.abc import Callable
from itertools import islice

import pytest
import torch

from kvtransfer.errors import TextError
from kvtransfer.fitting.capture import capture
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.layer_rows import HOLDOUT, rank_from_text
from kvtransfer.fitting.layers import rank_layers
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel


@pytest.mark.parametrize("heads", [2, 4])
def test_rows_rank_layers_as_sums_do(tiny: Callable[..., LanguageModel], heads: int) -> None:
    source = tiny("llama", seed=1, num_hidden_layers=3)
    target = tiny("qwen3", seed=2, num_hidden_layers=2, num_key_value_heads=heads)
    sequences = chunks(builtin("fit"), target.encode, length=32, opening=target.opening)
    summed = capture(source, target, sequences, tokens=256, holdout=HOLDOUT)

    ranked = rank_from_text(source, target, builtin("fit"), tokens=256, chunk=32)

    expected = rank_layers(summed, source.spec, target.spec)
    torch.testing.assert_close(ranked.scores, expected, atol=1e-6, rtol=0)
    assert (ranked.rows, ranked.heldout) == (summed.fit.rows, summed.heldout.rows)
    assert ranked.scores.shape == (2, 3)


def test_every_layer_explains_itself_and_no_other_as_well(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama", num_hidden_layers=3)

    scores = rank_from_text(model, model, builtin("fit"), tokens=512, chunk=32).scores

    torch.testing.assert_close(scores.diagonal(), torch.ones(3).double(), atol=1e-3, rtol=0)
    assert bool((scores.argmax(1) == torch.arange(3)).all())
    assert float(scores[~torch.eye(3, dtype=torch.bool)].max()) < 0.99


def test_a_text_of_one_chunk_leaves_nothing_to_hold_out(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama", num_hidden_layers=2)
    long = model.decode(next(islice(chunks(builtin("fit"), model.encode, length=40), 1)))

    with pytest.raises(TextError, match="fewer than two chunks of 32"):
        rank_from_text(model, model, [long], chunk=32)
    with pytest.raises(TextError, match="fewer than one chunk"):
        rank_from_text(model, model, ["short"], chunk=32)
