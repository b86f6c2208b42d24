"""What a tiny model learnt: prose it has not seen, facts of the moment, sequences said twice.

An answer counts where every one of its tokens, and the full stop, is the most likely one given
those before it. That is what greedy decoding would have written, without decoding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from random import Random
from statistics import fmean, stdev

import torch
from passages import passage
from rows import Corpus, encode, random_tokens
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM

Z = 1.96
REPEAT, GAP = 48, 32
"""Tokens of a random sequence, and of the prose between its two copies."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval over ``n`` independent items."""

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, items: Sequence[float]) -> "Estimate":
        """A mean, by the normal approximation."""
        mean, half = fmean(items), Z * stdev(items) / sqrt(len(items))
        return cls(mean, mean - half, mean + half, len(items))

    @classmethod
    def share(cls, hits: Sequence[bool]) -> "Estimate":
        """A proportion, by Wilson's interval, which stays inside 0 and 1."""
        n, p = len(hits), fmean(hits)
        middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z * sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
        return cls(p, max(0.0, middle - half), min(1.0, middle + half), n)

    def __str__(self) -> str:
        """As a card prints it."""
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f}, n={self.n})"


def heldout_nll(
    model: LlamaForCausalLM, corpus: Corpus, *, length: int, limit: int | None = None
) -> Estimate:
    """Nats per token over windows of ``length`` tokens, the first ``limit`` of the stream."""
    starts = range(0, len(corpus.stream) - length + 1, length)[:limit]
    windows = [list(corpus.stream[start : start + length]) for start in starts]
    return Estimate.of([float(nll.mean()) for nll, _ in _scores(model, windows)])


def recall(
    model: LlamaForCausalLM, corpus: Corpus, *, seed: str, n: int, stated: bool = True
) -> Estimate:
    """Share of made-up facts answered exactly; not ``stated``, the questions stand alone."""
    rng = Random(seed)
    asked = [passage(rng, corpus.documents, questions=1) for _ in range(n)]
    encoded = [encode(p if stated else p.unstated(), corpus.tokenizer) for p in asked]
    scores = _scores(model, [list(ids) for ids, _ in encoded])
    return Estimate.share(
        [
            bool(right[torch.tensor(inside[1:])].all())
            for (_, right), (_, inside) in zip(scores, encoded, strict=True)
        ]
    )


def repeat_nll(
    model: LlamaForCausalLM, corpus: Corpus, *, seed: str, n: int, first: bool = True
) -> Estimate:
    """Nats per token of a random sequence said again, its first token left out.

    Without the ``first`` copy, another random sequence stands in its place.
    """
    rng, rows = Random(seed), []
    for _ in range(n):
        said, other = random_tokens(rng, corpus, REPEAT), random_tokens(rng, corpus, REPEAT)
        rows.append((said if first else other) + corpus.window(rng, GAP) + said)
    return Estimate.of([float(nll[1 - REPEAT :].mean()) for nll, _ in _scores(model, rows)])


@torch.no_grad()
def _scores(
    model: LlamaForCausalLM, rows: Sequence[list[int]], *, size: int = 16
) -> Iterator[tuple[Tensor, Tensor]]:
    """Per row, of every token but the first: its NLL, and whether it was the most likely one."""
    for first in range(0, len(rows), size):
        group = rows[first : first + size]
        longest = max(map(len, group))
        # Padding on the right is out of sight of a causal model, so it needs no mask.
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in group])
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        nll = cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        right = logits.argmax(-1) == ids[:, 1:]
        for row, row_nll, row_right in zip(group, nll, right, strict=True):
            yield row_nll[: len(row) - 1], row_right[: len(row) - 1]
