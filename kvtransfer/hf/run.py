"""Run a model on a prefix: prefill one, score tokens after one, generate after one."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from kvtransfer.errors import CacheLayoutError, IncompatibleModels
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.cache import read, write
from kvtransfer.hf.call import call
from kvtransfer.hf.model import LanguageModel


def prefill(model: LanguageModel, ids: Int[Tensor, "b t"]) -> KVCache:
    """The cache that ``model`` makes of ``ids``, read at positions 0 to t − 1.

    Raises:
        CacheLayoutError: there is nothing to read, or more than the model has positions for.
    """
    if ids.shape[1] == 0:
        raise CacheLayoutError("an empty prefix has no cache", hint="give at least one token")
    _check_length(model, ids.shape[1])
    ids = ids.to(model.device)
    positions = torch.arange(ids.shape[1], device=model.device).expand(ids.shape[0], -1)
    # Asked before the forward: a dynamic table remembers longer texts read earlier, and asking
    # for this length sets it back.
    rotations = model.rotary(positions)
    cache = DynamicCache()  # plain layers: they keep every token, also where the model has windows
    decoder = model.module.base_model  # the language-model head would be computed for nothing
    call(decoder, ids, cache, positions, torch.ones_like(ids))
    return read(cache, positions, rotations=rotations, model=model.spec.weights)


def score(
    model: LanguageModel, ids: Int[Tensor, "b s"], prefix: KVCache | None = None
) -> Float[Tensor, "b s v"]:
    """Next-token logits after each of ``ids``, read on top of ``prefix``.

    The prefix stays as it is, and may be used again.

    Raises:
        CacheLayoutError: there is nothing to read, or the prefix is shaped for another model.
        IncompatibleModels: the prefix is known to belong to another model.
    """
    if prefix is not None and prefix.batch != len(ids):
        raise CacheLayoutError(
            f"a prefix of batch {prefix.batch} under live tokens of batch {len(ids)}",
            hint="share one prefix among several prompts with cache.expand(n)",
        )
    return _read_on(model, ids, _fresh(model, prefix), _next_position(prefix))


def generate(
    model: LanguageModel,
    ids: Int[Tensor, " s"],
    prefix: KVCache | None = None,
    *,
    max_new_tokens: int,
) -> Iterator[int]:
    """Yield greedy tokens after ``prefix`` and ``ids``, up to the end of sequence.

    Raises:
        CacheLayoutError, IncompatibleModels: as :func:`score`.
    """
    cache, position = _fresh(model, prefix), _next_position(prefix)
    stops = _end_tokens(model)
    step = ids[None]
    for _ in range(max_new_tokens):
        token = int(_read_on(model, step, cache, position, last=True)[0, -1].argmax())
        if token in stops:
            return
        yield token
        position += step.shape[1]
        step = torch.tensor([[token]])


def check_fits(model: LanguageModel, prefix: KVCache) -> None:
    """Raise unless ``prefix`` can be read by ``model``.

    Raises:
        CacheLayoutError: its layers, heads, widths or dtype are not the model's.
        IncompatibleModels: it is known to belong to another model.
    """
    spec = model.spec
    if prefix.model is not None and prefix.model != spec.weights:
        raise IncompatibleModels(
            f"this cache is for the model with fingerprint {prefix.model}, and {spec.name} has "
            f"{spec.weights}",
            hint="map it first: mapping(cache)",
        )
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
    if prefix.dtype != model.dtype:
        raise CacheLayoutError(
            f"this cache is {prefix.dtype}, {spec.name} runs in {model.dtype}",
            hint="cast it: cache.to(dtype=…)",
        )


def _fresh(model: LanguageModel, prefix: KVCache | None) -> DynamicCache:
    if prefix is None:
        return DynamicCache()
    check_fits(model, prefix)
    return write(prefix)


def _next_position(prefix: KVCache | None) -> int:
    if prefix is None or prefix.tokens == 0:
        return 0
    ends = prefix.positions.max(dim=1).values
    if bool((ends != ends[0]).any()):
        raise CacheLayoutError(
            f"the rows of this prefix end at different positions: {ends.tolist()}",
            hint="run prompts on prefixes of different lengths one at a time",
        )
    return int(ends[0]) + 1


def _read_on(
    model: LanguageModel, ids: Tensor, cache: DynamicCache, start: int, *, last: bool = False
) -> Tensor:
    if ids.shape[1] == 0:
        raise CacheLayoutError(
            "there are no live tokens after the prefix, and a cache holds no logits",
            hint="keep the last prompt token out of the prefix",
        )
    _check_length(model, start + ids.shape[1])
    ids = ids.to(model.device)
    positions = torch.arange(start, start + ids.shape[1], device=model.device)
    # A mask of the whole length, always: without one, transformers takes positions that do not
    # start at 0 for packed sequences, and cuts the prefix off.
    mask = torch.ones(ids.shape[0], cache.get_seq_length() + ids.shape[1], dtype=torch.long)
    output = call(
        model.module,
        ids,
        cache,
        positions.expand(ids.shape[0], -1),
        mask.to(model.device),
        logits_to_keep=1 if last else 0,
    )
    logits = output.logits
    assert isinstance(logits, Tensor)  # transformers leaves it untyped
    return logits


def _check_length(model: LanguageModel, length: int) -> None:
    if model.max_positions is not None and length > model.max_positions:
        raise CacheLayoutError(
            f"{length} tokens, and {model.spec.name} reads at most {model.max_positions}",
            hint="shorten the prefix, the chunk or the text after it",
        )


def _end_tokens(model: LanguageModel) -> frozenset[int]:
    config = getattr(model.module, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    return frozenset({*ends, model.tokenizer.eos_token_id} - {None})
