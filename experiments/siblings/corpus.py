"""The rows of tokens that the sibling is healed on, and the order they come in."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from experiments.siblings import facts
from experiments.siblings.openings import START
from kvtransfer.fitting.texts import builtin

SHARES = {"builtin": 0.45, "sampled": 0.45, "facts": 0.1}
"""How much of the healing is documentation, sampled prose, and made-up facts."""

FACT_ROWS = 400


def packed(tokenizer: Any, documents: Iterable[str], length: int) -> Iterator[Tensor]:
    """Documents end to end, the start token before each, cut into full rows."""
    waiting: list[int] = []
    for document in documents:
        waiting += tokenizer(START + document, add_special_tokens=False)["input_ids"]
        while len(waiting) >= length:
            yield torch.tensor(waiting[:length])
            waiting = waiting[length:]


def rows(tokenizer: Any, samples: Path, length: int, seed: int) -> dict[str, Tensor]:
    """All rows by kind: ``(n, length)`` each."""
    documents = list(builtin("fit"))
    Random(seed).shuffle(documents)
    made_up = packed(tokenizer, facts.documents(seed), length)
    sampled = load_file(samples)["tokens"].long()
    return {
        "builtin": torch.stack(list(packed(tokenizer, documents, length))),
        "sampled": sampled.reshape(-1, length),
        "facts": torch.stack(list(islice(made_up, FACT_ROWS))),
    }


def order(counts: dict[str, int], seed: int) -> Iterator[tuple[str, int]]:
    """Which row comes next, without end: kinds by their share, each kind in rounds of its own."""
    random = Random(seed)
    left: dict[str, list[int]] = {kind: [] for kind in counts}
    while True:
        (kind,) = random.choices(list(SHARES), list(SHARES.values()))
        left[kind] = left[kind] or random.sample(range(counts[kind]), k=counts[kind])
        yield kind, left[kind].pop()
