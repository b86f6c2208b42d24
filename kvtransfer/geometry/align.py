"""Which token of one tokenization stands for which token of another. Knows characters, no models.

A tokenization is known by its spans: per token where its characters start and end in the text,
half-open. Pieces of one character share that character's end.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, SeamError

Spans = Int[Tensor, "_t 2"]
"""Character offsets (start, end) per token; ends never fall, and the last is the text's length."""


def align(source: Spans, target: Spans) -> Int[Tensor, " t"]:
    """The source token that stands for each target token: one that has read as far, if there is.

    That is the source token that ends where the target token ends. Where several end there (the
    bytes of one emoji), the last goes with the target's last, the one before with the one before,
    as far as the source has any: so a tokenization is aligned with itself token by token. Where
    none ends there, it is the first that ends later, and so covers the end.

    Such a covering token has read a few characters that the target token has not: a cache aligned
    by it is causal to within one source token. Between SmolLM2 and Gemma 3 that concerns 6 to 11
    of a hundred target tokens of English prose, by 1 to 4 characters on average.

    Raises:
        CacheLayoutError: the ends of one tokenization fall, or a token starts after its end.
        SeamError: the two do not end together, so they are not of one text.
    """
    for name, spans in (("source", source), ("target", target)):
        _require_order(name, spans)
    ends, wanted = source[:, 1].contiguous(), target[:, 1].contiguous()
    if ends[-1:].tolist() != wanted[-1:].tolist():
        found = [
            f"{each[-1].item()} characters" if len(each) else "no tokens" for each in (ends, wanted)
        ]
        raise SeamError(
            f"the source's tokens span {found[0]}, the target's {found[1]}",
            hint="align two tokenizations of the same text",
        )
    first = torch.searchsorted(ends, wanted)
    last = torch.searchsorted(ends, wanted, right=True) - 1
    order = torch.arange(len(wanted), device=wanted.device)
    to_follow = torch.searchsorted(wanted, wanted, right=True) - 1 - order
    # Where no source token ends there, last is first − 1, and the maximum is first.
    return torch.maximum(last - to_follow, first)


def _require_order(name: str, spans: Spans) -> None:
    starts, ends = spans[:, 0], spans[:, 1]
    wrong = starts > ends
    wrong[1:] |= ends[1:] < ends[:-1]
    if wrong.any():
        token = int(wrong.nonzero()[0])
        before = f" after one that ends at {int(ends[token - 1])}" if token else ""
        raise CacheLayoutError(
            f"token {token} of the {name} spans characters {tuple(spans[token].tolist())}{before}",
            hint="spans are (start, end) character offsets, in the order of the text",
        )
