"""Kill a capture at random moments, let it go on, and say whether it came to the same.

    python -m tests.fitting.kills FOLDER KILLS SEED

Each attempt is a process that is killed with SIGKILL; what survives is what it wrote to FOLDER.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvtransfer.fitting.capture import Capture, capture
from kvtransfer.fitting.checkpoint import remove
from kvtransfer.fitting.pairs import PairMoments
from kvtransfer.fitting.workspace import Workspace
from kvtransfer.hf.model import LanguageModel, wrap

CHUNKS = list(torch.randint(3, 400, (120, 24), generator=torch.Generator().manual_seed(0)))
"""Thirty batches, one held out of eight."""


def main(folder: Path, kills: int, seed: int) -> dict[str, object]:
    """Run it through once; then kill it, and again, until it was killed so often in all."""
    torch.set_num_threads(1)
    models = tuple(AutoModelForCausalLM.from_pretrained(folder / n).eval() for n in "st")
    tokenizer = AutoTokenizer.from_pretrained(folder / "s")
    source, target = (wrap(model, tokenizer) for model in models)
    began = time.monotonic()
    whole = tensors(take(source, target, folder / "warm"))
    seconds = time.monotonic() - began
    drawn = random.Random(seed)
    left: list[list[str]] = []
    ends: list[bool] = []
    while len(left) < kills or not ends:
        child = os.fork()
        if child == 0:
            save_file(tensors(take(source, target, folder / "checkpoint")), folder / "end")
            os._exit(0)
        # Within the first batches as often as near the end: each goes on where the last one was.
        wait = drawn.uniform(0, seconds / 2) if len(left) < kills else float("inf")
        deadline = time.monotonic() + wait
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.002)
        if ended[0]:
            assert ended[1] == 0, f"ended by itself with {ended[1]}"
            found = load_file(folder / "end")
            same = found.keys() == whole.keys()
            ends.append(same and all(torch.equal(found[name], whole[name]) for name in whole))
            remove(folder / "checkpoint")
            continue
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left.append(sorted(each.name for each in (folder / "checkpoint").glob("*")))
    return {"kills": len(left), "left": left, "equal": ends}


def take(source: LanguageModel, target: LanguageModel, checkpoint: Path) -> Capture:
    """One capture, which saves its state after every third batch."""
    workspace = Workspace(checkpoint=checkpoint, every=3)
    return capture(
        source, target, CHUNKS, tokens=10_000, attention=True, features="both",
        before=(1,), starts=(1,), band=1, workspace=workspace,
    )  # fmt: skip


def tensors(found: Capture) -> dict[str, Tensor]:
    """All that was gathered, by name."""
    held = {"windows": torch.stack(found.windows)}
    for part in ("fit", "heldout", "weighted"):
        sample = getattr(found, part)
        for kind in ("keys", "values") if sample is not None else ():
            moments = getattr(sample, kind)
            assert isinstance(moments, PairMoments)
            for name in ("mean_x", "mean_y", "yy", "gram", "cross", "twin"):
                tensor = getattr(moments, name)
                if tensor is not None:
                    held[f"{part}.{kind}.{name}"] = tensor.clone()
            held[f"{part}.{kind}.n"] = torch.tensor(moments.n)
    for kind, first in found.first.items():
        held |= {f"first.{kind}.x": first.x.clone(), f"first.{kind}.y": first.y.clone()}
    for layer, metric in enumerate(found.sees):
        if metric is not None:
            held[f"sees.{layer}"] = metric.clone()
    return held


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
