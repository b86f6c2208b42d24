"""Texts to equal token sequences."""

from collections.abc import Callable, Iterable, Iterator

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
