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
) -> Iterator[Int[Tensor, " t"]]:
    """Tokenize documents, join them end to end, and cut them every ``length`` tokens.

    Args:
        texts: Documents.
        encode: Text to ids.
        length: Tokens in a chunk.
        separator: An id put between documents, such as the end of sequence.

    Raises:
        TextError: all of the text is shorter than one chunk.
    """
    if length < 2:
        raise ValueError(f"a chunk needs at least 2 tokens, got {length}")
    held, seen = torch.empty(0, dtype=torch.long), 0
    between = torch.tensor([] if separator is None else [separator], dtype=torch.long)
    for text in texts:
        ids = encode(text)
        if seen and len(ids):
            ids = torch.cat((between, ids))
        seen += len(ids)
        held = torch.cat((held, ids))
        whole = len(held) // length * length
        yield from held[:whole].split(length) if whole else ()
        held = held[whole:]
    if seen < length:
        raise TextError(
            f"the text holds {seen} tokens, fewer than one chunk of {length}",
            hint=f"give more text, or ask for chunks of at most {seen} tokens",
        )
