"""Calibration text in the manner of guides: prose sampled from the target, and invented facts.

    python -m experiments.pairs.texts BASE samples.safetensors

``samples.safetensors`` is what experiments/siblings/sample.py wrote. Writes prose.jsonl and
facts.jsonl to the working folder. Neither holds a sentence of the guides that mappings are judged
by.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from transformers import AutoTokenizer

from experiments.siblings.facts import documents

SHORTEST = 200
"""Characters; what is shorter was cut off by the length of a sample."""
FACTS, SEED = 900, 2026


def main(base: str, samples: str) -> None:
    """Write both files."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = load_file(samples)["tokens"].tolist()
    write(Path("prose.jsonl"), (text for row in rows for text in sampled(tokenizer, row)))
    write(Path("facts.jsonl"), islice(documents(SEED), FACTS))


def sampled(tokenizer: Any, row: list[int]) -> Iterator[str]:
    """The documents of one sample, which the end-of-text token separates."""
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for is_end, ids in groupby(row, lambda token: token == end):
        text = tokenizer.decode(list(ids), skip_special_tokens=True).strip()
        if not is_end and len(text) >= SHORTEST:
            yield text


def write(path: Path, texts: Iterable[str]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


if __name__ == "__main__":
    main(*sys.argv[1:])
