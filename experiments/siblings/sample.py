"""Sample prose from the full model, so that its sibling is healed on more than documentation.

    python -m experiments.siblings.sample MODEL samples.safetensors

Rows are full from end to end: where a document ends, the row goes on with another opening, as
packed pre-training rows do.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from experiments.siblings.openings import START, openings


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the prose is drawn."""

    seed: int = 17
    batches: int = 1
    rows: int = 192
    tokens: int = 512
    """Tokens in a row."""
    temperatures: tuple[float, float] = (0.8, 1.0)
    """A row's temperature is spread evenly between these."""
    top_p: float = 0.95
    top_k: int = 256
    """Cut before top-p, which then sorts 256 numbers and not the vocabulary."""


class Script:
    """What each row must say next, where it is not free to choose."""

    def __init__(self, rows: int, source: Iterator[list[int]]) -> None:
        """Give each of ``rows`` rows its first opening from ``source``."""
        self.source = source
        self.pending = [next(source) for _ in range(rows)]

    def over(self, drawn: list[int], ends: set[int]) -> list[int]:
        """The tokens to take: openings first, else what was drawn; an end queues an opening."""
        taken = []
        for row, token in enumerate(drawn):
            if self.pending[row]:
                token = self.pending[row][0]
                self.pending[row] = self.pending[row][1:]
            elif token in ends:
                self.pending[row] = next(self.source)
            taken.append(token)
        return taken


def draw(logits: Tensor, temperatures: Tensor, how: Sampling, generator: torch.Generator) -> Tensor:
    """One token a row, by top-p among the ``top_k`` best."""
    best, ids = logits.float().topk(how.top_k)
    chances = (best / temperatures).softmax(-1)
    # What came before a token decides whether it stays, so the best always does.
    chances = chances.masked_fill(chances.cumsum(-1) - chances >= how.top_p, 0)
    return ids.gather(1, chances.multinomial(1, generator=generator))[:, 0]


@torch.inference_mode()
def sample(
    model: PreTrainedModel, script: Script, ends: set[int], how: Sampling, seed: int
) -> Tensor:
    """One batch of rows."""
    generator = torch.Generator().manual_seed(seed)
    temperatures = torch.linspace(*how.temperatures, how.rows)[:, None]
    cache = DynamicCache()
    rows = [script.over([0] * how.rows, ends)]
    while len(rows) < how.tokens:
        out = model(torch.tensor(rows[-1])[:, None], cache=cache)
        drawn = draw(out.logits[:, -1], temperatures, how, generator)
        rows.append(script.over(drawn.tolist(), ends))
    return torch.tensor(rows, dtype=torch.int32).T.contiguous()


def main() -> None:
    """Sample every batch and write one tensor, ``tokens``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batches", type=int, default=Sampling().batches)
    args = parser.parse_args()

    how = Sampling(batches=args.batches)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(START)}
    source = openings(tokenizer, how.seed)
    batches: list[Tensor] = []
    for number in range(how.batches):
        began = time.perf_counter()
        script = Script(how.rows, source)
        batches.append(sample(model, script, ends, how, how.seed + number))
        print(f"batch {number}: {time.perf_counter() - began:.0f} s", flush=True)
        # Written after every batch: an interrupted run leaves what it has.
        described = {name: str(value) for name, value in asdict(how).items()}
        save_file({"tokens": torch.cat(batches)}, args.out, metadata=described)


if __name__ == "__main__":
    main()
