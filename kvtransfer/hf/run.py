"""Run a model on a prefix: prefill one, score tokens after one, generate after one."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from kvtransfer.errors import CacheLayoutError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import require_cache
from kvtransfer.hf.cache import read, write
from kvtransfer.hf.call import call
from kvtransfer.hf.edited import Edit
from kvtransfer.hf.fits import check_ids, check_padding, check_room
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.reader import Reader
from kvtransfer.hf.rows import check_live


def prefill(model: LanguageModel, ids: Int[Tensor, "b t"]) -> KVCache:
    """The cache that ``model`` makes of ``ids``, read at positions 0 to t − 1.

    Raises:
        CacheLayoutError: there is nothing to read, or more than the model has positions for, or
            the rows were padded to one length.
    """
    check_ids(model, ids)
    if ids.shape[1] == 0:
        raise CacheLayoutError("an empty prefix has no cache", hint="give at least one token")
    check_room(model, ids.shape[1])
    check_padding(model, ids)
    positions = torch.arange(ids.shape[1], device=model.device).expand(ids.shape[0], -1)
    return read_at(model, ids, positions)


def read_at(
    model: LanguageModel,
    ids: Int[Tensor, "b t"],
    positions: Int[Tensor, "b t"],
    *,
    behind: KVCache | None = None,
) -> KVCache:
    """The cache that ``model`` makes of ``ids`` as if they stood at ``positions``.

    Args:
        model: Reads them.
        ids: The tokens.
        positions: Of each of them, with gaps or without.
        behind: What they see before them, wherever it stands; the result begins with it, bit for
            bit. Nothing if not given.
    """
    model.require_as_wrapped()
    held = None if behind is None else write(behind)
    if behind is not None:
        positions = torch.cat((behind.positions, positions.to(behind.positions)), dim=1)
    # Asked before the forward: a dynamic table remembers longer texts read earlier, and asking
    # for this length sets it back.
    rotations = model.rotary(positions)
    cache = fill(model, ids, positions[:, -ids.shape[1] :], cache=held)
    return read(cache, positions, rotations=rotations, model=model.spec.identity)


def fill(
    model: LanguageModel,
    ids: Int[Tensor, "b t"],
    positions: Int[Tensor, "b t"],
    *,
    cache: DynamicCache | None = None,
) -> DynamicCache:
    """Run the model on ``ids``, for the sake of what it keeps of them, behind ``cache``.

    A fresh cache has plain layers: they keep every token, also where the model has windows.
    """
    cache = DynamicCache() if cache is None else cache
    ids = ids.to(model.device)
    mask = ids.new_ones(len(ids), cache.get_seq_length() + ids.shape[1])
    decoder = model.module.base_model  # the language-model head would be computed for nothing
    with torch.no_grad():
        call(decoder, ids, cache, positions.to(model.device), mask)
    return cache


def score(
    model: LanguageModel,
    ids: Int[Tensor, "b s"],
    prefix: KVCache | None = None,
    *,
    mask: Int[Tensor, "_b _s"] | None = None,
) -> Float[Tensor, "b s v"]:
    """Next-token logits after each of ``ids``, read on top of ``prefix``.

    The prefix stays as it is, and may be used again.

    Args:
        model: Reads.
        ids: Live tokens, a row a prompt.
        prefix: As many rows: one prefix for all (``cache.expand(n)``), or different ones
            (``stack(caches)``).
        mask: Over the live tokens: 0 for padding at the left of shorter prompts. What is returned
            there means nothing.

    Raises:
        CacheLayoutError: there is nothing to read, the prefix is shaped for another model, its
            keys were turned by another table than the model has for the whole length, or rows are
            padded where the model's attention counts padding as tokens.
        IncompatibleModels: the prefix belongs to another model, or does not say to which.
    """
    with torch.no_grad():
        return logits_on(model, ids, prefix, mask=mask)


def logits_on(
    model: LanguageModel,
    ids: Int[Tensor, "b s"],
    prefix: KVCache | None = None,
    *,
    mask: Int[Tensor, "_b _s"] | None = None,
) -> Float[Tensor, "b s v"]:
    """As :func:`score`, and differentiable in the prefix's keys and values."""
    check_ids(model, ids)
    if prefix is not None:
        require_cache(prefix, "prefix")
    if prefix is not None and prefix.batch != len(ids):
        raise CacheLayoutError(
            f"a prefix of batch {prefix.batch} under live tokens of batch {len(ids)}",
            hint="share one prefix among several prompts with cache.expand(n), or give each its "
            "own with stack(caches)",
        )
    if mask is None:
        check_padding(model, ids)
    else:
        check_live(ids, mask)
    return Reader.over(model, prefix, rows=len(ids))(ids, mask)


def generate(
    model: LanguageModel,
    ids: Int[Tensor, " s"],
    prefix: KVCache | None = None,
    *,
    max_new_tokens: int,
    edit: Edit | None = None,
) -> Iterator[int]:
    """Yield greedy tokens after ``prefix`` and ``ids``, up to the end of sequence.

    Args:
        model: Reads and writes.
        ids: Live tokens.
        prefix: What they are read on.
        max_new_tokens: At most.
        edit: What the model reads, at every step, in place of all that was cached; see
            :meth:`Reader.over`.

    Raises:
        CacheLayoutError, IncompatibleModels: as :func:`score`.
    """
    if prefix is not None:
        require_cache(prefix, "prefix")
    if prefix is not None and prefix.batch != 1:
        raise CacheLayoutError(
            f"a prefix of batch {prefix.batch} under one prompt",
            hint="generate after one sequence at a time",
        )
    check_ids(model, ids[None])
    read_on = Reader.over(model, prefix, edit=edit)
    stops = end_tokens(model)
    step = ids[None]
    for _ in range(max_new_tokens):
        with torch.no_grad():
            token = int(read_on(step, last=True)[0, -1].argmax())
        if token in stops:
            return
        yield token
        step = torch.tensor([[token]])


def end_tokens(model: LanguageModel) -> frozenset[int]:
    """The ids that end a text of ``model``."""
    config = getattr(model.module, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    ends = [ends] if isinstance(ends, int) else list(ends or [])
    return frozenset({*ends, model.tokenizer.eos_token_id} - {None})
