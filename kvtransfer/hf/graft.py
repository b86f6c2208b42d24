"""Hand a prefix to transformers' own ``forward`` and ``generate``, and watch their calls."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard
from uuid import uuid4

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import DynamicCache

from kvtransfer.errors import CacheLayoutError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.blind import require_blindable
from kvtransfer.hf.cache import write
from kvtransfer.hf.call import cache_keyword, named_arguments, takes
from kvtransfer.hf.edited import Edit, effective
from kvtransfer.hf.fits import check_fits, check_padding, check_room, check_tables
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.rows import check_columns, check_gaps, check_one_table, next_positions, span
from kvtransfer.hf.watched import watched_generate


@contextmanager
def grafted(
    model: LanguageModel, prefix: KVCache, *, edit: Edit | None = None
) -> Iterator[DynamicCache]:
    """A cache that holds ``prefix``, for one run of ``model.module`` or its ``generate``.

    >>> with grafted(model, prefix) as cache:
    ...     mask = torch.cat((prefix.mask, torch.ones_like(live)), dim=1)
    ...     out = model.module.generate(live, cache=cache, attention_mask=mask)

    Within the block every call that uses the cache, or a copy of it, is looked at first, because
    transformers takes a mask of the wrong length, or none, without a word, and drops live tokens
    or hides the prefix. Positions go on from where each row's prefix ends, also where that is not
    its length. The padding of a stacked batch is hidden, and a mask must say so: it begins with
    ``prefix.mask``.

    Args:
        model: Reads and writes. Within the block what ``prefix`` hides from a layer is kept from
            that layer.
        prefix: What its run begins with.
        edit: At every step the model reads ``edit(all that was cached)``, which is not kept: the
            next step's edit begins with what the model itself made, so that edits do not add up.

    Yields:
        The cache. It grows with the run; ``prefix`` stays as it is.

    Raises:
        CacheLayoutError: the prefix is not shaped as the model's; or, from the call: there are no
            live tokens, or other rows of them than of the prefix, the mask does not span prefix
            and live tokens or shows its padding or hides its tokens, positions do not go on from
            the prefix's, the cache has grown under another prompt, the model's table changes at
            that length, or its attention counts padding as tokens.
        IncompatibleModels: it is another model's cache.
        UnsupportedModel: tokens are hidden from a layer whose attention cannot hide them.
    """
    check_fits(model, prefix)
    if prefix.hidden is not None:
        require_blindable(model)
    cache = write(prefix, masked=True)
    mark = uuid4().hex
    cache.graft = mark  # type: ignore[attr-defined]  # copies of the cache carry it along
    # How far each row's positions are ahead of its tokens.
    shift = (next_positions(prefix) - prefix.mask.sum(dim=1))[:, None]
    module: Any = model.module
    inner = module.base_model

    within: list[ExitStack] = []
    """What a forward that runs now has to undo."""

    def ours(held: Any) -> TypeGuard[DynamicCache]:
        return getattr(held, "graft", None) == mark

    def look(part: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        call = named_arguments(part, given, named)
        held = call.get(cache_keyword(part.forward), call.get("past_key_values"))
        if not ours(held):
            return None
        ids, embeddings = call.get("input_ids"), call.get("inputs_embeds")
        live = embeddings if ids is None else ids
        if live is None or live.shape[1] == 0:
            raise _no_live_tokens()
        mask = _mask(prefix, held, live, call.get("attention_mask"))
        counted, padding = _count(held, live, mask)
        positions = counted + shift.to(counted)
        cached = held.get_seq_length()
        _require_same((counted, positions), call.get("position_ids"), padding, cached)
        if ids is not None and ids.shape[1] > 1 and call.get("attention_mask") is None:
            check_padding(model, ids)
        ends = positions[:, -1] + 1
        start, end = span(
            positions.masked_fill(padding, torch.iinfo(torch.long).max).min(dim=1).values, ends
        )
        check_room(model, end)
        check_tables(model, prefix, start, end)
        check_one_table(model, ends)
        check_gaps(model, prefix.positions, end, shown=prefix.mask)
        changed = {"position_ids": positions} if takes(part, "position_ids") else {}
        if mask is not None:
            check_columns(model, mask)
            changed["attention_mask"] = mask
        within.append(stack := ExitStack())
        stack.enter_context(
            effective(
                model,
                held,
                prefix,
                edit=edit,
                positions=lambda: _columns(prefix, cached, mask, shift),
            )
        )
        return (), call | changed

    def leave(part: nn.Module, given: tuple[Any, ...], output: Any) -> None:
        if within:
            within.pop().__exit__(*sys.exc_info())  # also called where the forward raised

    def ask(inputs: Tensor | None, named: dict[str, Any]) -> None:
        held = named.get("cache", named.get("past_key_values"))
        if not ours(held):
            return
        offered = (inputs, named.get("input_ids"), named.get("inputs_embeds"))
        live = next((each for each in offered if each is not None), None)
        _check_prompt(held, live, named.get("attention_mask"))
        width = _width(module, named)
        _check_rows(prefix, live, width)
        # Now, for generate drops a mask that shows everything.
        _require_own(prefix.mask[::width], named["attention_mask"])

    hooks = (
        inner.register_forward_pre_hook(look, with_kwargs=True),
        inner.register_forward_hook(leave, always_call=True),
    )
    try:
        with watched_generate(module, ask):
            yield cache
    finally:
        for hook in hooks:
            hook.remove()


def _columns(
    prefix: KVCache, cached: int, mask: Tensor | None, shift: Tensor
) -> Int[Tensor, "b t"]:
    """The position of each column of what is cached by now."""
    if mask is None:
        counted = torch.arange(cached, device=shift.device).expand(len(shift), -1)
    else:
        counted = (mask[:, :cached].long().cumsum(dim=1) - 1).clamp_min(0)
    later = (counted + shift.to(counted))[:, prefix.tokens :]
    return torch.cat((prefix.positions.to(later), later), dim=1)


def _check_prompt(held: DynamicCache, live: Tensor | None, mask: Tensor | None) -> None:
    """Raise CacheLayoutError unless generate is given live tokens alone, and a mask over all.

    From anything else it would guess which of the tokens the cache holds already.
    """
    if live is None or live.shape[1] == 0:
        raise _no_live_tokens()
    length, cached = live.shape[1], held.get_seq_length()
    if mask is None or mask.ndim != 2 or mask.shape[1] != cached + length:
        given = "no attention mask" if mask is None else f"a mask of shape {tuple(mask.shape)}"
        raise CacheLayoutError(
            f"{length} tokens and {given}, where the cache holds {cached} tokens: which of them "
            "are live is not said",
            hint="graft anew for each prompt, and give live tokens alone with a mask over prefix "
            f"and live tokens: attention_mask=torch.ones(batch, {cached} + live.shape[1])",
        )


def _width(module: Any, named: dict[str, Any]) -> int:
    """How many rows generate makes of one prompt."""
    config = named.get("generation_config") or module.generation_config
    asked = (
        named.get(name) or getattr(config, name, None) or 1
        for name in ("num_beams", "num_return_sequences")
    )
    return max(asked)


def _check_rows(prefix: KVCache, live: Tensor | None, width: int) -> None:
    """Raise CacheLayoutError unless every row that generate makes has its own prompt's prefix."""
    prompts = 0 if live is None else len(live)
    if prefix.batch != prompts * width:
        raise CacheLayoutError(
            f"a prefix of batch {prefix.batch} under {prompts} prompts of {width} beams or answers",
            hint=f"share one sequence's prefix with cache.expand({prompts * width}), or give each "
            f"prompt {width} rows of its own: stack([cache.expand({width}), …])",
        )
    hidden = [gone for gone in prefix.hidden or () if gone is not None]
    # Every block: an edit may have set two rows apart in one layer's values alone.
    held = (*prefix.keys, *prefix.values, *hidden, prefix.mask, prefix.positions)
    if width > 1 and not all(
        torch.equal(block, block[::width].repeat_interleave(width, dim=0)) for block in held
    ):
        raise CacheLayoutError(
            f"the {width} beams or answers of one prompt stand on different prefixes",
            hint=f"rows of one prompt stand together: stack([cache.expand({width}), …])",
        )


def _no_live_tokens() -> CacheLayoutError:
    return CacheLayoutError(
        "there are no live tokens after the prefix, and a cache holds no logits",
        hint="keep the last prompt token out of the prefix",
    )


def _mask(
    prefix: KVCache, held: DynamicCache, live: Tensor, given: Any
) -> Int[Tensor, "b t"] | None:
    """The mask to run with, which hides the prefix's padding; None where nothing is hidden.

    Raises:
        CacheLayoutError: mask or batch do not go with the cache.
    """
    cached, (rows, length) = held.get_seq_length(), live.shape[:2]
    layers: Any = held.layers
    if len(layers[0].keys) != rows:
        raise CacheLayoutError(
            f"{rows} rows of live tokens on a prefix of batch {len(layers[0].keys)}",
            hint=f"share one sequence's prefix with cache.expand({rows})",
        )
    own = prefix.mask.to(live.device)
    if given is None and prefix.padding is not None:
        return torch.cat((own, own.new_ones(rows, cached - prefix.tokens + length)), dim=1)
    if not isinstance(given, Tensor) or given.ndim != 2:
        if prefix.padding is not None:
            raise CacheLayoutError(
                f"rows padded by {prefix.padding.tolist()} columns, and a mask that does not say "
                "token by token what is hidden",
                hint="give a mask of shape (batch, prefix and live tokens)",
            )
        return None
    if given.shape != (rows, cached + length):
        raise CacheLayoutError(
            f"an attention mask of shape {tuple(given.shape)}, where the cache holds "
            f"{_held(cached, prefix)} and {length} live ones follow",
            hint=f"a mask spans prefix and live tokens: torch.ones({rows}, {cached} + {length})",
        )
    _require_own(own, given)
    return given.long()


def _require_own(own: Int[Tensor, "b t"], given: Tensor) -> None:
    """Raise CacheLayoutError unless a mask begins with the prefix's own."""
    begins, own = given[:, : own.shape[1]], own.to(given.device)
    if bool((begins == own).all()):
        return
    shows = bool((begins > own).any())
    raise CacheLayoutError(
        f"the attention mask {'shows padding' if shows else 'hides tokens'} of the prefix",
        hint="begin it with prefix.mask: torch.cat((prefix.mask, live_mask), dim=1)"
        if shows
        else "cut the prefix instead, or edit its cache",
    )


def _count(
    held: DynamicCache, live: Tensor, mask: Tensor | None
) -> tuple[Int[Tensor, "b s"], Bool[Tensor, "b s"]]:
    """Where live tokens stand, as if each prefix began at 0, and which of them are padding."""
    cached, (rows, length) = held.get_seq_length(), live.shape[:2]
    if mask is None:
        counted = torch.arange(cached, cached + length, device=live.device).expand(rows, -1)
        return counted, torch.zeros_like(counted, dtype=torch.bool)
    seen = mask.long().cumsum(dim=1)[:, -length:]
    return (seen - 1).clamp_min(0), mask[:, -length:] == 0


def _require_same(
    right: tuple[Tensor, Tensor], given: Tensor | None, padding: Tensor, cached: int
) -> None:
    """Raise CacheLayoutError where a caller numbers live tokens in another way."""
    # generate counts from the cache's length; who knows where a moved prefix ends may say so. What
    # it says of padding does not matter.
    if given is None or any(bool(((given == each) | padding).all()) for each in right):
        return
    raise CacheLayoutError(
        f"live tokens at positions {given.flatten().tolist()[:4]}…, where the cache holds {cached} "
        f"tokens and they go on at {right[0].flatten().tolist()[:4]}…",
        hint="leave position_ids out, give a mask over prefix and live tokens, and graft anew for "
        "each prompt",
    )


def _held(cached: int, prefix: KVCache) -> str:
    served = " (more than the prefix: it has served a prompt already)"
    return f"{cached} tokens{served if cached > prefix.tokens else ''}"
