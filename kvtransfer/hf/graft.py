"""Hand a prefix to transformers' own ``forward`` and ``generate``, and watch their calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvtransfer.errors import CacheLayoutError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.cache import write
from kvtransfer.hf.call import cache_keyword, takes
from kvtransfer.hf.fits import check_fits, check_room, check_tables, next_position
from kvtransfer.hf.model import LanguageModel


@contextmanager
def grafted(model: LanguageModel, prefix: KVCache) -> Iterator[DynamicCache]:
    """A cache that holds ``prefix``, for one run of ``model.module`` or its ``generate``.

    >>> with grafted(model, prefix) as cache:
    ...     mask = torch.ones(1, prefix.tokens + live.shape[1], dtype=torch.long)
    ...     out = model.module.generate(live, cache=cache, attention_mask=mask)

    Within the block every call that uses the cache is looked at first, because transformers takes
    a mask of the wrong length, or none, without a word, and drops live tokens or hides the prefix.
    Positions go on from the prefix's last, also where that is not its length.

    Yields:
        The cache. It grows with the run; ``prefix`` stays as it is.

    Raises:
        CacheLayoutError: the prefix is not shaped as the model's; or, from the call: there are no
            live tokens, the mask does not span prefix and live tokens, the cache has grown under
            another prompt, or the model's table changes at that length.
        IncompatibleModels: it is another model's cache.
    """
    check_fits(model, prefix)
    cache = write(prefix)
    shift = next_position(prefix) - prefix.tokens

    def look(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        keyword = cache_keyword(module.forward)
        if named.get(keyword, named.get("past_key_values")) is not cache:
            return None
        ids = named.get("input_ids", given[0] if given else None)
        live = named.get("inputs_embeds") if ids is None else ids
        if live is None:
            raise _no_live_tokens()
        length = live.shape[1]
        held = cache.get_seq_length()
        _check_call(prefix, length, held, named.get("attention_mask"), named.get("position_ids"))
        start = held + shift
        check_room(model, start + length)
        check_tables(model, prefix, start, start + length)
        if shift and takes(module, "position_ids"):
            asked = named.get("position_ids")
            if asked is None:
                asked = torch.arange(held, held + length, device=live.device)[None]
            named["position_ids"] = asked + shift
        return given, named

    module: Any = model.module
    inner = module.generate

    def generate(inputs: Tensor | None = None, *given: Any, **named: Any) -> Any:
        if named.get("cache", named.get("past_key_values")) is cache:
            ids = named.get("input_ids", inputs)
            _check_prompt(cache.get_seq_length(), ids, named.get("attention_mask"))
        return inner(inputs, *given, **named)

    hook = module.register_forward_pre_hook(look, with_kwargs=True)
    module.generate = generate
    try:
        yield cache
    finally:
        hook.remove()
        del module.generate  # the class's own shows again


def _check_prompt(held: int, ids: Tensor | None, mask: Tensor | None) -> None:
    """Raise CacheLayoutError unless generate is given live tokens alone, and a mask over all.

    From anything else it would guess which of the tokens the cache holds already.
    """
    if ids is None or ids.shape[1] == 0:
        raise _no_live_tokens()
    if mask is None or mask.shape[1] != held + ids.shape[1]:
        given = "no attention mask" if mask is None else f"a mask over {mask.shape[1]} tokens"
        raise CacheLayoutError(
            f"{ids.shape[1]} tokens and {given}, where the cache holds {held} tokens: which of "
            "them are live is not said",
            hint="graft anew for each prompt, and give live tokens alone with a mask over prefix "
            f"and live tokens: attention_mask=torch.ones(batch, {held} + live.shape[1])",
        )


def _no_live_tokens() -> CacheLayoutError:
    return CacheLayoutError(
        "there are no live tokens after the prefix, and a cache holds no logits",
        hint="keep the last prompt token out of the prefix",
    )


def _check_call(
    prefix: KVCache, length: int, held: int, mask: Tensor | None, positions: Tensor | None
) -> None:
    """Raise CacheLayoutError unless live tokens, mask and positions go on from what is held."""
    if length == 0:
        raise _no_live_tokens()
    fault = None
    if mask is not None and mask.ndim == 2 and mask.shape[1] != held + length:
        fault = f"an attention mask over {mask.shape[1]} tokens"
    elif positions is not None and (mask is None or bool(mask.all())):
        # generate leaves a mask of ones out, but has numbered the tokens by its length.
        first, last = int(positions.min()), int(positions.max())
        if (first, last) != (held, held + length - 1):
            fault = f"live tokens at positions {first} to {last}"
    if fault is not None:
        grown = " (more than the prefix: it has served a prompt already)"
        raise CacheLayoutError(
            f"{fault}, where the cache holds {held} tokens"
            f"{grown if held > prefix.tokens else ''} and {length} live ones follow",
            hint="graft anew for each prompt, and give live tokens alone with a mask over prefix "
            f"and live tokens: attention_mask=torch.ones(batch, {prefix.tokens} + live.shape[1])",
        )
