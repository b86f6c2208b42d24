"""Texts to equal token sequences, and stacks of them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import TextError


def chunks(
    texts: Iterable[str],
    encode: Callable[[str], Int[Tensor, " t"]],
    *,
    length: int,
    separator: int | None = None,
    opening: Int[Tensor, " o"] | None = None,
) -> Iterator[Int[Tensor, " t"]]:
    """Tokenize documents, join them end to end, and cut them into ``length`` tokens each.

    Args:
        texts: Documents.
        encode: Text to ids.
        length: Tokens in a chunk, its opening included.
        separator: An id put between documents, such as the end of sequence.
        opening: Ids put before each chunk; see :attr:`LanguageModel.opening`.

    Raises:
        TextError: all of the text is shorter than one chunk.
    """
    held, seen = torch.empty(0, dtype=torch.long), 0
    begin = held if opening is None else opening
    room = length - len(begin)
    if min(length - 1, room) < 1:
        raise ValueError(f"a chunk needs at least {max(2, len(begin) + 1)} tokens, got {length}")
    between = torch.tensor([] if separator is None else [separator], dtype=torch.long)
    for text in texts:
        ids = encode(text)
        if seen and len(ids):
            ids = torch.cat((between, ids))
        seen += len(ids)
        held = torch.cat((held, ids))
        whole = len(held) // room * room
        for part in held[:whole].split(room) if whole else ():
            yield torch.cat((begin, part))
        held = held[whole:]
    if seen < room:
        raise TextError(
            f"the text holds {seen} tokens, fewer than one chunk of {length}",
            hint=f"give more text, or ask for chunks of at most {seen + len(begin)} tokens",
        )


def one_stream(texts: Iterable[str]) -> Iterator[str]:
    """The documents with a blank line before each but the first, so that cut end to end they are
    one text, as WikiText is mostly read. Each is still tokenized on its own."""
    for number, text in enumerate(texts):
        yield f"\n\n{text}" if number else text


def batches(
    chunks: Iterable[Tensor], *, tokens: int, batch: int, holdout: int
) -> Iterator[tuple[Literal["fit", "heldout"], Tensor]]:
    """Stacks of at most ``batch`` chunks, every one of them whole and of one part."""
    waiting: dict[Literal["fit", "heldout"], list[Tensor]] = {"fit": [], "heldout": []}
    taken = 0
    for number, chunk in enumerate(chunks):
        # The second chunk is the first to be held out, so that two are enough.
        part: Literal["fit", "heldout"] = "heldout" if number % holdout == 1 else "fit"
        waiting[part].append(chunk)
        taken += len(chunk) if part == "fit" else 0
        if len(waiting[part]) == batch:
            yield part, torch.stack(waiting[part])
            waiting[part] = []
        if taken >= tokens and number > 0:
            break
    for part, rest in waiting.items():
        if rest:
            yield part, torch.stack(rest)
