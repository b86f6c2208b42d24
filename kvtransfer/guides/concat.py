"""Put the caches of texts that were read apart one after another.

Each text was read as if it stood first. Moved behind the others, its keys are turned to their new
positions. That is exact in layer 0, where keys and values are of a token alone; in every layer
above, they are of a token and what it saw, and it did not see what stands before its text now. So
the result says that it is approximate, and why.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, KVTransferError, RotationError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import behind, one_after_another, several
from kvtransfer.hf.fits import check_fits
from kvtransfer.hf.model import LanguageModel, require_model
from kvtransfer.hf.relocate import follow, relocate
from kvtransfer.hf.run import read_at

NEAR = 0.5
"""A first token whose values are nearer than this to the opening's, in units of the distance of an
ordinary token, is the opening. An exact one is at 0, a mapped or dequantised one near by."""


def concat(model: LanguageModel, pieces: Iterable[KVCache]) -> KVCache:
    """The caches of several texts as one prefix, in the order given.

    The first piece stays as it is, bit for bit, and so does a piece alone. What the tokenizer puts
    before every text (a begin of sequence) is left out of the later pieces, which is said in
    ``approximate`` of the result; whether it is there, the values of layer 0 tell.

    Args:
        model: Made the pieces, or can read them.
        pieces: One cache a text, each read at the start of a sequence.

    Raises:
        CacheLayoutError: there are no pieces, or they differ in batch or dtype, or end beyond the
            model's positions; the piece is named.
        IncompatibleModels: a piece is another model's.
        RotationError: the model's keys cannot be moved, or its table changes with the length.
        WrongKind: the pieces are no caches.
    """
    require_model(model)
    pieces = several(pieces, "piece")
    if not pieces:
        raise CacheLayoutError("no pieces to put together", hint="give at least one cache")
    for number, piece in enumerate(pieces, 1):
        with _naming(number, len(pieces)):
            check_fits(model, piece)
    numbered = [(number, piece) for number, piece in enumerate(pieces, 1) if piece.tokens]
    if len(numbered) < 2:
        return numbered[0][1] if numbered else pieces[0]

    opening = _opening(model)
    placed = [numbered[0][1]]
    reasons = [placed[0].approximate]
    for number, piece in numbered[1:]:
        with _naming(number, len(pieces)):
            opens = _opens_with(piece, opening)
            start = int(placed[-1].positions.max()) + 1
            # Only where every position is filled is a place in the cache a position.
            move = follow if _filled(placed) else relocate
            placed.append(move(model, behind(piece, opens), start))
        if opens:
            reasons.append(f"what opens every text was left out of piece {number}")
        if piece.approximate:
            reasons.append(f"piece {number}: {piece.approximate}")
    joint = one_after_another(placed)
    _require_one_table(model, joint)
    later = [number for number, _ in numbered[1:]]
    unseen = (
        f"the second of {len(pieces)} pieces never saw what stands before it"
        if later == [2]
        else f"pieces {', '.join(map(str, later))} of {len(pieces)} never saw what stands before "
        "them"
    )
    notes = dict.fromkeys(piece.note for piece in placed if piece.note)
    return replace(
        joint,
        approximate="; ".join(filter(None, (unseen, *reasons))),
        note=", ".join(notes) or None,
    )


@contextmanager
def _naming(number: int, count: int) -> Iterator[None]:
    """Say of an error which piece it is about."""
    try:
        yield
    except KVTransferError as error:
        raise type(error)(f"piece {number} of {count}: {error.message}", hint=error.hint) from error


def _filled(pieces: Iterable[KVCache]) -> bool:
    """Whether the pieces stand at positions 0, 1, 2, … without a gap."""
    positions = torch.cat([piece.positions for piece in pieces], dim=1)
    counted = torch.arange(positions.shape[1], device=positions.device)
    return bool((positions == counted).all())


def _opening(model: LanguageModel) -> Float[Tensor, "1 h o d"] | None:
    """The values, in layer 0, of what the tokenizer puts before every text."""
    ids = model.opening
    if len(ids) == 0:
        return None
    return read_at(model, ids[None], torch.arange(len(ids), device=model.device)[None]).values[0]


def _opens_with(piece: KVCache, opening: Float[Tensor, "1 h o d"] | None) -> int:
    """How many tokens at the front of ``piece`` are what opens every text.

    A cache does not hold ids. Its values of layer 0 are of each token alone, so they tell.

    Raises:
        CacheLayoutError: only some of its rows begin so.
    """
    if opening is None or piece.tokens < opening.shape[2]:
        return 0
    wanted, length = opening.float(), opening.shape[2]
    found = piece.values[0].float().to(wanted.device)
    near = (found[:, :, :length] - wanted).flatten(1).norm(dim=1)
    others = found[:, :, length:] - wanted[:, :, -1:]
    typical = (
        others.norm(dim=(1, 3)).median(dim=1).values * length**0.5
        if others.shape[2]
        else wanted.norm().expand(len(found))
    )
    opens = near < NEAR * typical
    if bool(opens.any()) and not bool(opens.all()):
        raise CacheLayoutError(
            f"some rows begin with what opens every text, others do not: {opens.tolist()}",
            hint="read all rows with it, or none",
        )
    return length if bool(opens.all()) else 0


def _require_one_table(model: LanguageModel, joint: KVCache) -> None:
    """Raise RotationError where a table that depends on the length is not the whole length's."""
    if joint.rotations is None:
        return
    tables = model.rotary(joint.positions)
    for layer, (made, now) in enumerate(zip(joint.rotations, tables, strict=True)):
        if made is not None and now is not None and not made.agrees(now):
            turn = model.spec.layers[layer].rotation
            raise RotationError(
                f"together the pieces hold {joint.tokens} tokens, and the keys of layer {layer} "
                f"were turned by another table than {model.spec.name} has for that length ({turn})",
                hint="keep them within the length up to which one table serves, or read the text "
                "in one go",
            )
