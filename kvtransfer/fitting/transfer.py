"""From ids to the target's cache of them: whoever has to read them, reads them."""

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.prepared import PreparedMapping
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.aligned import read_aligned
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.start import Start, begin


def transfer(
    mapping: KVMapping,
    source: LanguageModel,
    target: LanguageModel,
    ids: Int[Tensor, "b t"],
    *,
    shuffled: bool = False,
) -> KVCache:
    """The target's cache of ``ids``, which the source has read, and of the target no more than the
    layers that the mapping starts with.

    Args:
        mapping: From ``source`` to ``target``.
        source: Reads all of ``ids``.
        target: Reads them with its first layers, where the mapping has a start.
        ids: The prefix, in the target's tokens.
        shuffled: Use the control's maps.

    Raises:
        IncompatibleModels: the mapping is for another pair.
        CacheLayoutError: there is nothing to read.
        SeamError: the source has another tokenizer, and no text has these ids.
    """
    mapping.check_ends(source.spec, target.spec)
    return mapped(mapping, read_aligned(source, target, ids), target, ids, shuffled=shuffled)


def mapped(
    mapping: KVMapping | PreparedMapping,
    cache: KVCache,
    target: LanguageModel,
    ids: Int[Tensor, "b t"],
    *,
    start: Start | None = None,
    shuffled: bool = False,
) -> KVCache:
    """As :func:`transfer`, from what the source (and the target's start) has read already.

    Maps are computed in float32, or as they were prepared, which the control's never are; the
    result has the target's dtype and device.

    Raises:
        ValueError: the control's maps are asked of a prepared mapping.
    """
    if mapping.start is not None and start is None:
        start = begin(target, ids, layers=mapping.start)
    wide = cache.to(dtype=torch.float32, device=target.device)
    begun = start if mapping.start is not None else None
    if isinstance(mapping, PreparedMapping):
        if shuffled:
            raise ValueError("a prepared mapping has no control; ask the mapping that it is of")
        return mapping(wide, start=begun).to(dtype=target.dtype)
    made = mapping(wide, start=begun, shuffled=shuffled)
    return made.to(dtype=target.dtype)
