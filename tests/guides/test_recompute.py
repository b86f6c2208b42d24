"""A share of 0 is the graft, a share of 1 a prefill, and what is most wrong is repaired first."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvtransfer.errors import CacheLayoutError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides.recompute import deviation, recompute, worst
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.relocate import relocate
from kvtransfer.hf.run import prefill, score
from tests.hf.architectures import MODELS
from tests.theorems.compare import cache_error

FIRST, CHUNK = 16, 24
IDS = torch.randint(3, 500, (1, FIRST + CHUNK), generator=torch.Generator().manual_seed(1))
LIVE = torch.randint(3, 500, (1, 8), generator=torch.Generator().manual_seed(2))
UNMOVABLE = ("learned positions", "alibi", "chunks", "answers in tuples")


def displaced(model: LanguageModel) -> KVCache:
    """A chunk after text that it never saw."""
    first = prefill(model, IDS[:, :FIRST])
    second = relocate(model, prefill(model, IDS[:, FIRST:]), FIRST)
    positions = torch.cat((first.positions, second.positions), 1)
    return replace(
        first,
        keys=tuple(torch.cat(pair, 2) for pair in zip(first.keys, second.keys, strict=True)),
        values=tuple(torch.cat(pair, 2) for pair in zip(first.values, second.values, strict=True)),
        positions=positions,
        rotations=model.rotary(positions),
        approximate="read apart",
    )


def wrong_at(cache: KVCache, tokens: list[int]) -> KVCache:
    """A cache with other numbers at some tokens, in every layer."""

    def spoil(block: torch.Tensor) -> torch.Tensor:
        spoiled = block.clone()
        spoiled[:, :, tokens] = spoiled[:, :, tokens].flip(-1) + 1
        return spoiled

    return replace(cache.map(spoil), approximate="spoiled")


@pytest.mark.parametrize("name", [name for name in MODELS if name not in UNMOVABLE])
def test_a_displaced_chunk_is_the_graft_at_0_and_a_prefill_at_1(
    tiny: Callable[..., LanguageModel], name: str
) -> None:
    architecture, config = MODELS[name]
    model = tiny(architecture, **config)
    full, graft = prefill(model, IDS), displaced(model)

    assert recompute(model, IDS, graft, 0.0) is graft
    for after in (0, FIRST):
        whole = recompute(model, IDS, graft, 1.0, after=after)
        torch.testing.assert_close(
            score(model, LIVE, whole), score(model, LIVE, full), atol=1e-4, rtol=0
        )
        assert cache_error(whole, full) < 1e-4
    # Otherwise there would be nothing to repair.
    assert cache_error(graft, full) > 0.1


def test_the_more_is_recomputed_the_nearer_it_comes(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny("llama")
    full, graft = prefill(model, IDS), displaced(model)

    def off(share: float) -> float:
        made = recompute(model, IDS, graft, share, after=FIRST)
        return float(deviation(full, made, layers=4).sum())

    errors = [off(share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-6 < errors[0]


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_an_exact_cache_stays_as_it_is_at_any_share(
    tiny: Callable[..., LanguageModel], share: float
) -> None:
    for architecture in ("llama", "phi", "qwen3"):
        model = tiny(architecture)
        full = prefill(model, IDS)

        made = recompute(model, IDS, full, share)

        assert cache_error(made, full) < 1e-5
        assert made.approximate is None


def test_tokens_that_are_wrong_are_recomputed_first(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny("llama")
    full = prefill(model, IDS)
    tokens = [5, 11, 12, 30]

    spoiled = wrong_at(full, tokens)
    repaired = recompute(model, IDS, spoiled, len(tokens) / IDS.shape[1])

    assert cache_error(spoiled, full) > 0.1
    assert cache_error(repaired, full) < 1e-5
    found = deviation(full, spoiled, layers=2)
    assert worst(found, 4).tolist() == [tokens]
    # With one token fewer, one of them stays wrong.
    less = recompute(model, IDS, spoiled, (len(tokens) - 1) / IDS.shape[1])
    assert cache_error(less, full) > 0.1


def test_what_is_known_to_be_right_is_neither_read_again_nor_counted(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama")
    spoiled = wrong_at(prefill(model, IDS), [2, 20])

    made = recompute(model, IDS, spoiled, 1 / CHUNK, after=FIRST)

    for layer in range(4):
        assert torch.equal(made.keys[layer][:, :, :FIRST], spoiled.keys[layer][:, :, :FIRST])
    assert torch.equal(made.keys[3][:, :, 21:], spoiled.keys[3][:, :, 21:])
    assert not torch.allclose(made.keys[3][:, :, 20], spoiled.keys[3][:, :, 20], atol=0.1)
    assert recompute(model, IDS, spoiled, 1.0, after=IDS.shape[1]) is spoiled


def test_each_row_of_a_batch_has_its_own_tokens(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny("llama")
    ids = torch.cat((IDS, IDS.flip(1)))
    full = prefill(model, ids)
    spoiled = full.map(torch.clone)
    for layer in range(4):
        for row, token in ((0, 4), (1, 31)):
            spoiled.keys[layer][row, :, token] += 3
    spoiled = replace(spoiled, approximate="spoiled")

    assert cache_error(recompute(model, ids, spoiled, 1 / ids.shape[1]), full) < 1e-5


def test_a_repaired_cache_says_how_much_of_it_was_recomputed(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama")
    graft = displaced(model)

    assert recompute(model, IDS, graft, 0.25).approximate == (
        "read apart; 10 of 40 tokens recomputed"
    )
    assert recompute(model, IDS, graft, 1e-9).approximate == "read apart; 1 of 40 tokens recomputed"
    assert recompute(model, IDS, graft, 1.0).approximate is None
    assert recompute(model, IDS, graft, 1.0, after=FIRST).approximate is None


@pytest.mark.parametrize(
    ("share", "named", "says"),
    [
        (-0.1, {}, "a share of -0.1"),
        (1.1, {}, "a share of 1.1"),
        (float("nan"), {}, "a share of nan"),
        (0.5, {"layers": 0}, "0 layers are to be looked at, and the model has 4"),
        (0.5, {"layers": 5}, "5 layers"),
        (0.5, {"after": 41}, "41 tokens are said to be right, of 40"),
        (0.5, {"after": -1}, "-1 tokens"),
    ],
)
def test_what_is_out_of_range_is_a_mistake(
    tiny: Callable[..., LanguageModel], share: float, named: dict[str, int], says: str
) -> None:
    model = tiny("llama")

    with pytest.raises(ValueError, match=says):
        recompute(model, IDS, prefill(model, IDS), share, **named)


def test_ids_of_other_tokens_are_refused_also_where_nothing_is_recomputed(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama")

    with pytest.raises(CacheLayoutError, match=r"\(1, 39\)"):
        recompute(model, IDS[:, 1:], prefill(model, IDS), 0.0)


def test_another_texts_ids_are_not_taken_for_those_of_an_exact_cache(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama")
    exact = prefill(model, IDS)

    with pytest.raises(CacheLayoutError, match="not of these ids"):
        recompute(model, IDS.flip(1), exact, 0.5)
    repaired = recompute(model, IDS.flip(1), replace(exact, approximate="another text's"), 1.0)
    assert cache_error(repaired, prefill(model, IDS.flip(1))) < 1e-5


def test_a_model_of_one_layer_is_read_whole(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny("llama", num_hidden_layers=1)
    full = prefill(model, IDS)

    assert cache_error(recompute(model, IDS, wrong_at(full, [3]), 0.2, layers=1), full) < 1e-5
