"""Put caches together, as values: one after another in one row, or as rows of one batch."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvtransfer.errors import CacheLayoutError, WrongKind, require
from kvtransfer.geometry.cache import KVCache, once_each
from kvtransfer.geometry.hidden import each, filled, plain
from kvtransfer.geometry.rotation import Rotation

Rotations = tuple[Rotation | None, ...]


def one_after_another(pieces: Iterable[KVCache]) -> KVCache:
    """The tokens of all pieces in one cache, in that order, at the positions that they have.

    Nothing is turned, and nothing is said of what the pieces did not see of each other.

    Raises:
        CacheLayoutError: there is none, or they differ in model, layers, heads, widths, dtype,
            device, batch or kind of keys.
    """
    pieces = several(pieces, "piece")
    first = _alike(pieces, "piece")
    for number, piece in enumerate(pieces, 1):
        piece.require_plain("put one after another")
        if piece.batch != first.batch:
            raise CacheLayoutError(
                f"piece 1 is of batch {first.batch}, piece {number} of batch {piece.batch}",
                hint="share one sequence's cache among several with cache.expand(n)",
            )
    return replace(
        first,
        keys=_joined([piece.keys for piece in pieces], dim=2),
        values=_joined([piece.values for piece in pieces], dim=2),
        positions=torch.cat([piece.positions for piece in pieces], dim=1),
        rotations=_joined_rotations([piece.rotations for piece in pieces], dim=1),
    )


def stack(caches: Iterable[KVCache]) -> KVCache:
    """The rows of all caches as one batch: different prefixes for different prompts.

    Shorter ones are padded at the left, with columns that hold nothing. ``score`` and ``grafted``
    hide those, and number the live tokens of each row from where its own prefix ends; ``mask`` of
    the result is the prefix's part of an attention mask. Beams and several answers need a row each:
    ``stack([one.expand(3), other.expand(3)])``.

    Raises:
        CacheLayoutError: there is none, or they differ in model, layers, heads, widths, dtype,
            device or kind of keys.
        WrongKind: they are no caches.
    """
    caches = several(caches, "cache")
    first = _alike(caches, "cache")
    length = max(cache.tokens for cache in caches)
    padding = torch.cat([length - cache.mask.sum(dim=1) for cache in caches])
    turned = next((cache.rotations for cache in caches if cache.tokens), first.rotations)
    wide = [_padded(cache, length - cache.tokens, turned) for cache in caches]
    hidden = None
    if any(cache.hidden is not None for cache in caches):
        hidden = plain(_joined([filled(cache.hidden, cache.keys) for cache in wide], dim=0))
    reasons = [cache.approximate for cache in caches]
    if len(set(reasons)) > 1:
        reasons = [each and f"cache {number}: {each}" for number, each in enumerate(reasons, 1)]
    return replace(
        first,
        keys=_joined([cache.keys for cache in wide], dim=0),
        values=_joined([cache.values for cache in wide], dim=0),
        positions=torch.cat([cache.positions for cache in wide]),
        rotations=_joined_rotations([cache.rotations for cache in wide], dim=0),
        padding=padding if bool(padding.any()) else None,
        hidden=hidden,
        approximate="; ".join(dict.fromkeys(filter(None, reasons))) or None,
        note=", ".join(dict.fromkeys(cache.note for cache in caches if cache.note)) or None,
    )


def indent(cache: KVCache, columns: int, *, rotations: Rotations | None = None) -> KVCache:
    """The same cache with ``columns`` more at its left, which no layer sees.

    So two prefixes of unequal length end at one column. The new columns stand at the positions
    before the cache's, which must be free: read it there, with
    :func:`~kvtransfer.hf.run.read_at`, or move it (:func:`~kvtransfer.hf.relocate.relocate`).

    Args:
        cache: A prefix.
        columns: How many more.
        rotations: What turns keys at all positions, the new ones too; not known if not given.

    Raises:
        CacheLayoutError: the cache begins before position ``columns``, or its rows are padded.
    """
    cache.require_unchanged()
    cache.require_unpadded("indented")
    if columns == 0:
        return cache
    starts = cache.positions[:, :1]
    if columns < 0 or cache.tokens == 0 or bool((starts < columns).any()):
        raise CacheLayoutError(
            f"{columns} columns before a cache that begins at position "
            f"{int(starts.min()) if cache.tokens else 0}",
            hint="read the prefix at later positions, or relocate it",
        )
    wide = _padded(replace(cache, rotations=None), columns, None)
    before = starts - torch.arange(columns, 0, -1, device=starts.device)
    gone = tuple(
        each_head.index_fill(2, torch.arange(columns, device=each_head.device), True)
        for each_head in filled(wide.hidden, wide.keys)
    )
    positions = torch.cat((before, cache.positions), dim=1)
    return replace(wide, positions=positions, rotations=rotations, hidden=gone)


def _padded(cache: KVCache, columns: int, like: Rotations | None) -> KVCache:
    """Empty columns at the left, at position 0, turned as ``like`` would turn them."""
    if columns == 0:
        return cache
    rotations = cache.rotations
    if rotations is not None and like is not None:
        still = once_each(like, lambda table: _still(table, columns, rows=cache.batch))
        rotations = _joined_rotations([still, rotations], dim=1)
    return replace(
        cache,
        keys=tuple(pad(block, (0, 0, columns, 0)) for block in cache.keys),
        values=tuple(pad(block, (0, 0, columns, 0)) for block in cache.values),
        positions=pad(cache.positions, (columns, 0)),
        rotations=rotations,
        padding=None,
        hidden=each(cache.hidden, lambda gone: pad(gone, (columns, 0))),
    )


def _still(table: Rotation, columns: int, *, rows: int) -> Rotation:
    """The table of position 0: no turn, but the stretch of any other position."""
    size = rows, columns, table.cos.shape[2]
    if table.cos.shape[1] == 0:  # nobody has any tokens
        return replace(table, cos=table.cos.new_ones(size), sin=table.sin.new_zeros(size))
    stretch = (table.cos[:1, -1:].square() + table.sin[:1, -1:].square()).sqrt()
    return replace(table, cos=stretch.expand(size), sin=table.sin.new_zeros(size))


def behind(cache: KVCache, tokens: int) -> KVCache:
    """The cache without its first ``tokens`` tokens, behind which the others were read."""
    cache.require_unchanged()
    cache.require_plain("cut")
    return replace(
        cache,
        keys=tuple(block[:, :, tokens:] for block in cache.keys),
        values=tuple(block[:, :, tokens:] for block in cache.values),
        positions=cache.positions[:, tokens:],
        rotations=None
        if cache.rotations is None
        else once_each(
            cache.rotations,
            lambda table: replace(table, cos=table.cos[:, tokens:], sin=table.sin[:, tokens:]),
        ),
    )


def require_cache(cache: object, what: str = "cache") -> None:
    """Raise WrongKind unless ``cache`` is a KVCache."""
    hint = "prefill(model, ids) makes one, adopt(model, cache, ids) one of a cache of transformers"
    require(what, cache, KVCache, "a KVCache", hint=hint)


def several(caches: object, word: str) -> tuple[KVCache, ...]:
    """Caches that a list holds or a generator gives.

    Raises:
        WrongKind: something else is there. One cache alone gives its layers, which are no caches.
    """
    if isinstance(caches, KVCache) or not isinstance(caches, Iterable):
        raise WrongKind(f"what holds the {word}s", caches, "a list", hint="[one, other], or [one]")
    found = tuple(caches)
    for number, cache in enumerate(found, 1):
        require_cache(cache, f"{word} {number}")
    return found


def _alike(caches: Sequence[KVCache], word: str) -> KVCache:
    """The first of ``caches``, once the others are seen to be of its kind."""
    if not caches:
        raise CacheLayoutError(f"no {word}s to put together", hint="give at least one cache")
    for cache in caches:
        cache.require_unchanged()
    first = _traits(caches[0])
    for number, cache in enumerate(caches, 1):
        for trait, found in _traits(cache).items():
            if found != first[trait]:
                raise CacheLayoutError(
                    f"{word} 1 and {word} {number} differ in {trait}: {first[trait]} and {found}",
                    hint="only caches that one model reads in one dtype can be put together",
                )
    return caches[0]


def _traits(cache: KVCache) -> dict[str, object]:
    return {
        "model": cache.model,
        "dtype": cache.dtype,
        "device": str(cache.keys[0].device),
        "kind of keys": cache.keys_are,
        "layers": len(cache),
        "heads and widths": [
            (keys.shape[1], keys.shape[3], values.shape[3]) for keys, values in cache
        ],
    }


def _joined(blocks: Sequence[tuple[Tensor, ...]], *, dim: int) -> tuple[Tensor, ...]:
    return tuple(torch.cat(layer, dim=dim) for layer in zip(*blocks, strict=True))


def _joined_rotations(rotations: Sequence[Rotations | None], *, dim: int) -> Rotations | None:
    """Tables end to end; None as soon as one is not known. Layers go on sharing theirs."""
    known = [each for each in rotations if each is not None]
    if len(known) < len(rotations):
        return None
    made: dict[tuple[int, ...], Rotation | None] = {}
    found = []
    for layer in zip(*known, strict=True):
        which = tuple(map(id, layer))
        if which not in made:
            made[which] = _end_to_end(layer, dim=dim)
        found.append(made[which])
    return tuple(found)


def _end_to_end(tables: Sequence[Rotation | None], *, dim: int) -> Rotation | None:
    turning = [table for table in tables if table is not None]
    if len(turning) < len(tables):
        return None
    return replace(
        turning[0],
        cos=torch.cat([table.cos for table in turning], dim=dim),
        sin=torch.cat([table.sin for table in turning], dim=dim),
    )
