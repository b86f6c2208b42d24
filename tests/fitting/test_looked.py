"""What queries see of content keys makes scores, and weights are shares of attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import UnsupportedModel
from kvtransfer.fitting.looked import SHARE_BATCHES, Looked
from kvtransfer.hf.attention import Attend, watching
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill

IDS = torch.randint(3, 500, (3, 24), generator=torch.Generator().manual_seed(0))


def queries_of(model: LanguageModel, ids: Tensor) -> list[Tensor]:
    """As attention sees them, layer by layer."""
    found = []

    def see(layer: int, attend: Attend, *_: Any) -> None:
        found.append(attend.query)

    with watching(model.module, see):
        prefill(model, ids)
    return found


def sees(model: LanguageModel, batches: list[Tensor], *, seed: int = 0) -> list[Tensor]:
    looked = Looked(model, seed=seed)
    for ids in batches:
        with looked:
            prefill(model, ids)
    found = looked.sees()
    assert len(found) == len(model.spec.layers)
    return [each for each in found if each is not None]


def second_moment(queries: Tensor) -> Tensor:
    """Of two KV heads, each read by two query heads; traces of mean one a dim."""
    rows = queries.double().unflatten(1, (2, 2)).movedim(1, 0).flatten(1, 3)
    moment = rows.mT @ rows
    scaled: Tensor = moment / moment.diagonal(dim1=-2, dim2=-1).mean()
    return scaled


def test_without_a_rotation_it_is_the_plain_second_moment_of_queries(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("smollm3", no_rope_layer_interval=2)
    rotated = [layer.rotation is not None for layer in model.spec.layers]
    assert sorted(rotated) == [False, False, True, True]

    found, queries = sees(model, [IDS[:1], IDS[1:]]), queries_of(model, IDS)

    for turned, moment, query in zip(rotated, found, queries, strict=True):
        plain = second_moment(query)
        assert torch.allclose(moment, plain, rtol=1e-4, atol=1e-5) is not turned


def test_with_a_rotation_it_is_the_mean_over_the_tokens_before(
    tiny: Callable[..., LanguageModel],
) -> None:
    """Drawn one pair a query, so it comes near the mean over all pairs with the number of rows."""
    model = tiny("llama", num_hidden_layers=1)
    (query,) = queries_of(model, IDS)
    rows = []
    for at in range(24):
        rotation = model.rotary(torch.full((3, 24), at))[0]
        assert rotation is not None
        # The transpose of the rotation, which is its inverse where it does not stretch.
        rows.append(rotation.undo(query)[:, :, at:] / torch.arange(at + 1, 25)[:, None].sqrt())
    expected = second_moment(torch.cat(rows, dim=2))

    few, many = (sees(model, [IDS] * 16, seed=1)[0], sees(model, [IDS], seed=1)[0])

    near, far = ((each - expected).norm() / expected.norm() for each in (few, many))
    assert float(near) < 0.1
    assert float(near) < float(far)
    wrong = second_moment(query)  # as they meet cached keys
    assert float((wrong - expected).norm() / expected.norm()) > 2 * float(near)


def test_where_a_rotation_stretches_part_of_a_key_queries_see_the_stretch(
    tiny: Callable[..., LanguageModel],
) -> None:
    """YaRN lengthens what it turns: a content key's rotated dims count the more in a score."""
    stretch = 1.7
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_factor": stretch,
        "partial_rotary_factor": 0.5,
    }
    model = tiny("stablelm", num_hidden_layers=1, rope_parameters=rope)
    layer = model.spec.layers[0].rotation
    assert layer is not None
    assert layer.rotary_dim < 16
    at = torch.zeros(1, 1, dtype=torch.long)
    rotation = model.rotary(at)[0]
    assert rotation is not None
    assert float(rotation.cos.mean()) == pytest.approx(stretch)

    (found,), (query,) = sees(model, [IDS[:1, :1]]), queries_of(model, IDS[:1, :1])

    # One token, at position 0: score = qᵀ R k, and R stretches the first dims by 1.7.
    met = torch.cat((stretch * query[..., : layer.rotary_dim], query[..., layer.rotary_dim :]), -1)
    torch.testing.assert_close(found, second_moment(met), rtol=1e-4, atol=1e-5)


def test_only_the_first_batches_are_gathered(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny("llama", num_hidden_layers=1)
    batches = [IDS[:1]] * SHARE_BATCHES

    (enough,), (more,) = sees(model, batches), sees(model, [*batches, IDS[1:]])
    (other,) = sees(model, [*batches[:-1], IDS[1:]])

    assert torch.equal(more, enough)
    assert not torch.equal(other, enough)


def test_the_weight_of_a_token_is_the_root_of_the_attention_paid_by_those_after_it(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama", num_hidden_layers=2, attn_implementation="eager")
    module: Any = model.module
    with torch.no_grad():
        shares = torch.stack(module.base_model(IDS, output_attentions=True).attentions)
    paid = shares.mean((0, 2)).sum(1) / torch.arange(24, 0, -1)  # of those that can see it
    expected = paid.sqrt() / paid.sqrt().mean()
    looked = Looked(model)

    with looked:
        prefill(model, IDS)

    torch.testing.assert_close(looked.weight, expected.flatten(), rtol=1e-4, atol=1e-5)
    assert float(looked.weight.mean()) == pytest.approx(1, abs=1e-5)
    assert float(looked.weight.std()) > 0.1


def test_the_weight_is_of_the_last_prefill(tiny: Callable[..., LanguageModel]) -> None:
    model, looked = tiny("llama", num_hidden_layers=2), None
    weights = []
    for batches in ([IDS[:1], IDS[1:]], [IDS[1:]]):
        looked = Looked(model)
        for ids in batches:
            with looked:
                prefill(model, ids)
        weights.append(looked.weight)

    assert torch.equal(*weights)
    assert weights[0].shape == (2 * 24,)


def test_what_is_not_seen_says_so(tiny: Callable[..., LanguageModel]) -> None:
    """Bloom computes its attention itself."""
    model = tiny("bloom", num_hidden_layers=2)
    looked = Looked(model)

    with looked:
        prefill(model, IDS)

    assert looked.sees() == (None, None)
    with pytest.raises(UnsupportedModel, match="computes attention by itself"):
        _ = looked.weight
