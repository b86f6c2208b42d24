"""What a source has read of a text that is given in the target's tokens.

Where both tokenizers cut text alike, the source reads the ids as they are. Else it reads the same
text in its own tokens, and each of the target's gets the keys and values of the source's token that
had read as far; but the first gets those of the first.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import SeamError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.spec import same_tokens
from kvtransfer.hf.fits import check_ids
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill
from kvtransfer.hf.spans import paired_ids


def read_aligned(source: LanguageModel, target: LanguageModel, ids: Int[Tensor, "b t"]) -> KVCache:
    """The source's cache of what the target spells as ``ids``, with one token for each of them.

    Where the tokenizers agree, this is ``prefill(source, ids)``. Else its keys are content keys, in
    float32: a token that stands for another stands at another's position.

    Raises:
        CacheLayoutError: there is nothing to read, or more than the source has positions for.
        SeamError: the ids of a row are not those of any text.
        UnsupportedModel: a tokenizer does not say which characters its tokens stand for.
    """
    if same_tokens(source.spec, target.spec) or ids.shape[-1] == 0:  # nothing, prefill refuses
        return prefill(source, ids)
    check_ids(target, ids)
    rows = [_read_row(source, target, row) for row in ids]  # they differ in length over there
    return replace(
        rows[0],
        keys=tuple(map(torch.cat, zip(*(row.keys for row in rows), strict=True))),
        values=tuple(map(torch.cat, zip(*(row.values for row in rows), strict=True))),
        positions=torch.cat([row.positions for row in rows]),
    )


class Alignable:
    """Those of some sequences of the target's ids that the source can read too, in order.

    Tokens that were cut out of a text may begin or end within a character, or be joined otherwise
    when they stand alone; then no text has exactly these. Where tokenizers agree, all can be read.

    Args:
        source: Is to read them.
        target: Whose ids they are.
        sequences: Ids.
        hidden: Leading tokens of each that the source is to read; None for all of them.
    """

    def __init__(
        self,
        source: LanguageModel,
        target: LanguageModel,
        sequences: Iterable[Int[Tensor, " t"]],
        *,
        hidden: int | None = None,
    ) -> None:
        self._source, self._target = source, target
        self._sequences, self._hidden = sequences, hidden
        self.left_out = 0
        """Sequences that were passed over so far."""

    def __iter__(self) -> Iterator[Int[Tensor, " t"]]:
        """Raises SeamError, of the last of them, where there were some and none can be read."""
        read, reason = 0, None
        for ids in self._sequences:
            if error := _obstacle(self._source, self._target, ids[: self._hidden]):
                self.left_out += 1
                reason = error
                continue
            read += 1
            yield ids
        if reason is not None and not read:
            raise reason


def alignable_start(
    source: LanguageModel, target: LanguageModel, ids: Int[Tensor, " t"], *, at_most: int
) -> int:
    """How many of the first ``at_most`` of ``ids`` the source can read too, cut at its latest.

    Raises:
        SeamError: no start of them can be read.
    """
    first = None
    for length in range(at_most, 0, -1):
        error = _obstacle(source, target, ids[:length])
        if error is None:
            return length
        first = first or error
    raise first or ValueError(f"a start of at most {at_most} tokens")


def _obstacle(
    source: LanguageModel, target: LanguageModel, ids: Int[Tensor, " t"]
) -> SeamError | None:
    """Why :func:`read_aligned` cannot read these; None if it can."""
    if not same_tokens(source.spec, target.spec):
        try:
            paired_ids(source, target, ids)
        except SeamError as error:
            return error
    return None


def _read_row(source: LanguageModel, target: LanguageModel, ids: Int[Tensor, " t"]) -> KVCache:
    theirs, index = paired_ids(source, target, ids)
    opening = source.opening
    if not torch.equal(theirs[: len(opening)], opening):  # the target's text may begin bare
        theirs, index = torch.cat((opening, theirs)), index + len(opening)
    # Whatever token stands first, most models make a sink of it, with keys like no other's.
    index = torch.cat((torch.zeros_like(index[:1]), index[1:]))
    read = prefill(source, theirs[None]).to(dtype=torch.float32).content()
    positions = torch.arange(len(ids), device=read.positions.device)
    return read.take(index[None].to(read.positions.device), positions[None])
