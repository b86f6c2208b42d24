"""May this prefix and these tokens go together under this model?"""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, IncompatibleModels, require
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import require_cache
from kvtransfer.geometry.spec import ModelSpec, same_model
from kvtransfer.hf.model import LanguageModel, require_model


def check_fits(model: LanguageModel, prefix: KVCache) -> None:
    """Raise unless ``prefix`` can be read by ``model``.

    Raises:
        CacheLayoutError: its layers, heads, widths, dtype or device are not the model's, or
            something wrote to it in place.
        IncompatibleModels: it belongs to another model, or does not say to which.
        WrongKind: it is no KVCache, or the model no LanguageModel.
    """
    require_model(model)
    require_cache(prefix)
    spec = model.spec
    model.require_as_wrapped()
    prefix.require_unchanged()
    if (device := prefix.keys[0].device) != model.device:
        raise CacheLayoutError(
            f"this cache is on {device}, {spec.name} on {model.device}",
            hint="move it: cache.to(device=…)",
        )
    check_finite(prefix)
    if prefix.model is not None and not same_model(prefix.model, str(spec.identity)):
        alike = prefix.model.partition("/")[0] == spec.weights
        raise IncompatibleModels(
            f"this cache is for the model with fingerprint {prefix.model}, and {spec.name} has "
            f"{spec.identity}",
            hint="the weights are the same and the config computes otherwise: read the text with "
            "this model"
            if alike
            else "map it first: mapping(cache)",
        )
    check_shapes(spec, prefix)
    if prefix.dtype != model.dtype:
        raise CacheLayoutError(
            f"this cache is {prefix.dtype}, {spec.name} runs in {model.dtype}",
            hint="cast it: cache.to(dtype=…)",
        )
    if prefix.model is None:
        raise IncompatibleModels(
            f"this cache does not say which model can read it, and one of {spec.name}'s shape need "
            "not be its own",
            hint="adopt(model, cache, ids) looks whether it is this model's cache of those tokens",
        )
    _check_rotations(model, prefix)


def _check_rotations(model: LanguageModel, prefix: KVCache) -> None:
    """The same weights under another RoPE (YaRN switched on, say) turn their keys otherwise."""
    if prefix.rotations is None or prefix.tokens == 0:
        return
    tables = model.rotary(prefix.positions)
    seen: set[tuple[int, int]] = set()  # layers share their tables: each pair is compared once
    for index, (made, now) in enumerate(zip(prefix.rotations, tables, strict=True)):
        if (pair := (id(made), id(now))) in seen:
            continue
        seen.add(pair)
        turn = model.spec.layers[index].rotation
        if turn is not None and turn.fixed_up_to is not None:
            continue  # its table depends on the length: check_tables looks at that
        if made is None and now is None:
            continue
        if made is None or now is None or not made.agrees(now):
            raise CacheLayoutError(
                f"the keys of layer {index} were turned otherwise than {model.spec.name} turns "
                f"them ({turn or 'no rotation'})",
                hint="the same weights under another RoPE are another model: read the text with "
                "it, or take the rotation out and put the other in",
            )


def check_finite(cache: KVCache) -> None:
    """Raise CacheLayoutError for a block with a number that is none."""
    for index, (keys, values) in enumerate(cache):
        for kind, block in (("keys", keys), ("values", values)):
            # The extremes are NaN where one number is, and six times as quick as isfinite().
            if block.numel() and not all(bool(end.isfinite()) for end in block.aminmax()):
                raise CacheLayoutError(
                    f"the {kind} of layer {index} are not all finite",
                    hint="numbers overflowed, or were read in another dtype than they were made in",
                )


def check_shapes(spec: ModelSpec, prefix: KVCache) -> None:
    """Raise CacheLayoutError unless layers, heads and widths are those of ``spec``."""
    if len(prefix) != len(spec.layers):
        raise CacheLayoutError(
            f"this cache has {len(prefix)} layers, {spec.name} has {len(spec.layers)}",
            hint="a cache of another model needs a mapping",
        )
    for index, ((keys, values), layer) in enumerate(zip(prefix, spec.layers, strict=True)):
        found = (keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])
        wanted = (layer.kv_heads, layer.key_dim, layer.kv_heads, layer.value_dim)
        if found != wanted:
            raise CacheLayoutError(
                f"layer {index}: {found[0]} heads × {found[1]} key dims and {found[2]} × "
                f"{found[3]} value dims in the cache, {wanted[0]} × {wanted[1]} and {wanted[2]} × "
                f"{wanted[3]} in {spec.name}",
                hint="blocks are (batch, kv_heads, tokens, head_dim)",
            )


def check_room(model: LanguageModel, length: int) -> None:
    """Raise CacheLayoutError if ``length`` tokens are more than the model has positions for."""
    if model.max_positions is not None and length > model.max_positions:
        raise CacheLayoutError(
            f"{length} tokens, and {model.spec.name} reads at most {model.max_positions}",
            hint="shorten the prefix, the chunk or the text after it",
        )


def check_tables(model: LanguageModel, prefix: KVCache | None, start: int, end: int) -> None:
    """Raise CacheLayoutError if new keys would be turned by another table than the cached ones.

    Dynamic and longrope choose their table by the length of the text. Cached keys keep the one of
    their time, so beyond the switch-over a cache and the tokens after it no longer agree.

    Args:
        model: Reads on.
        prefix: What the cache began with, if anything.
        start: Position of the first new token; 0 where nothing is cached.
        end: Position after the last one.
    """
    index, turn = next(
        (
            (i, layer.rotation)
            for i, layer in enumerate(model.spec.layers)
            if layer.rotation is not None and layer.rotation.fixed_up_to is not None
        ),
        (0, None),
    )
    if turn is None or turn.fixed_up_to is None or start == 0:
        return
    stays = end <= turn.fixed_up_to or (turn.type == "longrope" and start > turn.fixed_up_to)
    if prefix is not None and prefix.rotations is not None and prefix.tokens:
        # The tables themselves are the better witness: a long text's cache may have been cut.
        last = torch.full_like(prefix.positions[:, :1], end - 1)
        now = model.rotary(torch.cat((prefix.positions, last), dim=1))[index]
        made = prefix.rotations[index]
        stays = made is not None and now is not None and made.agrees(now.prefix(prefix.tokens))
    if not stays:
        raise CacheLayoutError(
            f"the cached keys were turned by another table than {model.spec.name} has for a text "
            f"of {end} tokens: its RoPE ({turn.type}) changes beyond {turn.fixed_up_to}",
            hint=f"keep prefix and text within {turn.fixed_up_to} tokens, or read all in one go; "
            "a prefix that was cut from a longer text has that text's table",
        )


def check_ids(model: LanguageModel, ids: Tensor) -> None:
    """Raise CacheLayoutError unless ``ids`` are token ids of ``model``, as (batch, tokens).

    Raises:
        WrongKind: they are no tensor, or the model is none.
    """
    require_model(model)
    hint = "model.encode(text)[None] is one of a text, torch.tensor(rows) of lists"
    require("ids", ids, Tensor, "a tensor", hint=hint)
    embeddings: Any = model.module.get_input_embeddings()
    size = int(embeddings.num_embeddings)
    if ids.ndim != 2 or ids.is_floating_point():
        raise CacheLayoutError(
            f"ids are {ids.dtype} of shape {tuple(ids.shape)}",
            hint="token ids are whole numbers of shape (batch, tokens): add [None] to one sequence",
        )
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise CacheLayoutError(
            f"ids from {int(ids.min())} to {int(ids.max())}, and {model.spec.name} knows {size}",
            hint="use the model's own tokenizer",
        )


def check_padding(
    model: LanguageModel, ids: Int[Tensor, "b t"], mask: Int[Tensor, "b t"] | None = None
) -> None:
    """Raise CacheLayoutError for a batch whose rows were padded to one length.

    Padding has keys and values like any token, and nothing in a cache tells them apart. Without
    a mask, rows betray it that begin or end with different runs of the padding token (of more than
    one, where that token has another meaning).
    """
    if mask is not None:
        lengths = mask.sum(dim=1).tolist()
        if mask.shape != ids.shape or any(length != ids.shape[1] for length in lengths):
            raise CacheLayoutError(
                f"a mask that lets {lengths} tokens through, over rows of {ids.shape[1]} tokens",
                hint="a padded batch has no common prefix; read its rows one at a time",
            )
        return  # the mask says it all
    pad = model.tokenizer.pad_token_id
    if pad is None or len(ids) < 2:
        return
    padded = ids == pad
    left = padded.long().cumprod(dim=1).sum(dim=1)
    right = padded.flip(1).long().cumprod(dim=1).sum(dim=1)
    # Where the token that ends a text (or begins one) doubles as padding, a single one is none yet.
    special = (model.tokenizer.eos_token_id, model.tokenizer.bos_token_id)
    slack = 1 if pad in special else 0
    for side, runs in (("begin", left), ("end", right)):
        if bool((runs != runs[0]).any()) and int(runs.max()) > slack:
            raise CacheLayoutError(
                f"the rows of this batch {side} with {runs.tolist()} padding tokens",
                hint="rows of different lengths have no common prefix; read them one at a time",
            )
