"""Different guides and different prompts in one batch: each row is read as it is alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import CacheLayoutError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import stack
from kvtransfer.hf.graft import grafted
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.relocate import relocate
from kvtransfer.hf.run import generate, prefill, score

from .prose import prose
from .ropes import LONGROPE, YARN

PREFIXES, LIVES = (12, 5, 9), (6, 3, 5)
WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "rotary": ("llama", {}),
    "stretched": ("llama", {"rope_parameters": YARN}),
    "norms": ("qwen3", {}),
    "partial": ("gpt_neox", {}),
    "interleaved": ("glm", {}),
    "some without": ("cohere2", {}),
    "two thetas": ("gemma3_text", {"sliding_window_pattern": 2}),
    "sinks": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "learned": ("gpt2", {}),
    "learned, counted": ("opt", {}),
    "alibi": ("bloom", {}),
}
"""Models that tell hidden columns from tokens, wherever they are."""

NARROW: dict[str, tuple[str, dict[str, Any]]] = {
    "window": ("mistral", {"sliding_window": 8}),
    "some windows": ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "chunks": ("llama4_text", {"attention_chunk_size": 8}),
    "alibi by column": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 4}),
}
"""Models that count columns behind the first token: padding may stand at the left only."""


def make(tiny: Callable[..., LanguageModel], name: str) -> LanguageModel:
    architecture, config = (WIDE | NARROW)[name]
    return tiny(architecture, num_hidden_layers=2, **config)


def rows(model: LanguageModel, lives: Sequence[int] = LIVES) -> tuple[list[KVCache], list[Tensor]]:
    """A prefix and a prompt a row, of different texts and lengths."""
    prefixes = [
        prefill(model, prose(model, length, skip=40 * row)) for row, length in enumerate(PREFIXES)
    ]
    return prefixes, [prose(model, n, skip=200 + 20 * row) for row, n in enumerate(lives)]


def padded(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts of one batch, padded at the left with a token like any other, and their mask."""
    length = max(prompt.shape[1] for prompt in prompts)
    ids = torch.full((len(prompts), length), 7)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, length - prompt.shape[1] :] = prompt[0]
        mask[row, length - prompt.shape[1] :] = 1
    return ids, mask


def require_rows_as_alone(
    model: LanguageModel, prefixes: Sequence[KVCache], prompts: Sequence[Tensor]
) -> None:
    ids, mask = padded(prompts)

    together = score(model, ids, stack(prefixes), mask=mask)

    for row, (prefix, prompt) in enumerate(zip(prefixes, prompts, strict=True)):
        alone = score(model, prompt, prefix)
        torch.testing.assert_close(
            together[row : row + 1, -prompt.shape[1] :], alone, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("name", WIDE)
def test_each_row_scores_as_alone_in_any_order(
    tiny: Callable[..., LanguageModel], name: str
) -> None:
    model = make(tiny, name)
    prefixes, prompts = rows(model)

    for order in ([0, 1, 2], [2, 0, 1], [1, 2], [1]):
        require_rows_as_alone(model, [prefixes[i] for i in order], [prompts[i] for i in order])


@pytest.mark.parametrize("name", NARROW)
def test_where_columns_are_counted_padding_may_stand_at_the_left_only(
    tiny: Callable[..., LanguageModel], name: str
) -> None:
    model = make(tiny, name)
    prefixes, prompts = rows(model, lives=(5, 5, 5))
    require_rows_as_alone(model, prefixes, prompts)
    prefixes, prompts = rows(model)
    ids, mask = padded(prompts)

    with pytest.raises(CacheLayoutError, match=r"counts it: (layer \d sees 8|its att)") as caught:
        score(model, ids, stack(prefixes), mask=mask)

    assert "one at a time" in str(caught.value.hint)
    with grafted(model, stack(prefixes)) as cache, pytest.raises(CacheLayoutError, match="counts"):
        answers(model, ids, cache, torch.cat((stack(prefixes).mask, mask), dim=1))
    if name != "alibi by column":  # a row that lies within the window has nothing to lose
        few = [prefix.prefix(2) for prefix in prefixes]
        require_rows_as_alone(model, few, prompts)


def answers(model: LanguageModel, ids: Tensor, cache: Any, mask: Tensor, **more: Any) -> Tensor:
    """What transformers' own generate adds."""
    module: Any = model.module
    options = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0} | more
    out = module.generate(ids, cache=cache, attention_mask=mask, **options)
    assert isinstance(out, Tensor)
    return out[:, ids.shape[1] :]


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", WIDE)
def test_each_row_is_answered_as_alone(
    tiny: Callable[..., LanguageModel], name: str, beams: int
) -> None:
    model = make(tiny, name)
    prefixes, prompts = rows(model)
    ids, mask = padded(prompts)
    asked = {"num_beams": beams, "num_return_sequences": min(beams, 2)}
    whole = stack([prefix.expand(beams) for prefix in prefixes])
    shown = torch.cat((whole.mask[::beams], mask), dim=1)

    with grafted(model, whole) as cache:
        together = answers(model, ids, cache, shown, **asked)

    for row, (prefix, prompt) in enumerate(zip(prefixes, prompts, strict=True)):
        with grafted(model, prefix.expand(beams)) as cache:
            own = torch.cat((prefix.mask, torch.ones_like(prompt)), dim=1)
            alone = answers(model, prompt, cache, own, **asked)
        given = together[row * len(alone) : (row + 1) * len(alone)]
        assert given[:, : alone.shape[1]].tolist() == alone.tolist()
        assert not bool(given[:, alone.shape[1] :].any())  # padded where others wrote longer
        if beams == 1:
            greedy = list(generate(model, prompt[0], prefix, max_new_tokens=5))
            assert alone[0, : len(greedy)].tolist() == greedy


def test_padding_that_is_shown_or_numbered_is_another_text(
    tiny: Callable[..., LanguageModel],
) -> None:
    """The twin: what a stack is without its padding, and without the positions of its rows."""
    model = make(tiny, "rotary")
    prefixes, prompts = rows(model)
    ids, mask = padded(prompts)
    whole = stack(prefixes)
    right = score(model, ids, whole, mask=mask)

    shown = score(model, ids, replace(whole, padding=None), mask=mask)
    live = score(model, ids, whole)

    assert torch.equal(right[0], shown[0])  # the longest row has no padding
    assert torch.equal(right[0], live[0])
    assert float((right[1, -3:] - shown[1, -3:]).abs().max()) > 0.1
    assert float((right[1, -3:] - live[1, -3:]).abs().max()) > 0.1


def test_rows_may_stand_anywhere_and_have_no_prefix_at_all(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = make(tiny, "stretched")
    (first, second, third), prompts = rows(model)
    moved = [relocate(model, first, 30), second.prefix(0), third]

    require_rows_as_alone(model, moved, prompts)

    ids, mask = padded(prompts)
    whole = stack(moved)
    with grafted(model, whole) as cache:
        together = answers(model, ids, cache, torch.cat((whole.mask, mask), dim=1))
    for row, (prefix, prompt) in enumerate(zip(moved, prompts, strict=True)):
        alone = list(generate(model, prompt[0], prefix, max_new_tokens=5))
        assert together[row, : len(alone)].tolist() == alone


def test_prompts_may_be_padded_without_any_prefix(tiny: Callable[..., LanguageModel]) -> None:
    model = make(tiny, "learned")
    _, prompts = rows(model)
    ids, mask = padded(prompts)

    together = score(model, ids, mask=mask)

    for row, prompt in enumerate(prompts):
        alone = score(model, prompt)
        torch.testing.assert_close(
            together[row : row + 1, -prompt.shape[1] :], alone, atol=1e-4, rtol=1e-4
        )


def test_no_row_gets_the_table_of_a_longer_one(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny("llama", num_hidden_layers=2, rope_parameters=LONGROPE)  # changes beyond 128
    short, long = prefill(model, prose(model, 20)), prefill(model, prose(model, 140))
    live = prose(model, 4, skip=300)

    with pytest.raises(CacheLayoutError, match=r"another table|one table for all"):
        score(model, live.expand(2, -1), stack([short, long]))
    with pytest.raises(CacheLayoutError, match=r"end at 4 to 144, and beyond 128"):
        score(model, live.expand(2, -1), stack([short.prefix(0), long]))
    require_rows_as_alone(model, [short, short.prefix(7)], [live, live])
    require_rows_as_alone(model, [long, prefill(model, prose(model, 150))], [live, live])
