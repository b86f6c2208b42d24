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
from kvtransfer.fitting.pairs import PairMoments
from kvtransfer.fitting.workspace import Workspace
from kvtransfer.hf.model import LanguageModel, wrap

CHUNKS = list(torch.randint(3, 400, (120, 24), generator=torch.Generator().manual_seed(0)))
"""Thirty batches, one held out of eight."""


def main(folder: Path, kills: int, seed: int) -> dict[str, object]:
    """Run it through once, then kill it until it was killed so often, then let it end."""
    torch.set_num_threads(1)
    models = tuple(AutoModelForCausalLM.from_pretrained(folder / n).eval() for n in "st")
    tokenizer = AutoTokenizer.from_pretrained(folder / "s")
    source, target = (wrap(model, tokenizer) for model in models)
    began = time.monotonic()
    whole = tensors(take(source, target, None))
    seconds = time.monotonic() - began
    drawn, killed, resumed = random.Random(seed), 0, []
    while True:
        child = os.fork()
        if child == 0:
            save_file(tensors(take(source, target, folder / "checkpoint")), folder / "end")
            os._exit(0)
        last = killed == kills
        deadline = time.monotonic() + (1e9 if last else drawn.uniform(0, 1.5 * seconds / kills))
        while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.002)
        if ended[0]:
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed += 1
        resumed.append([each.name for each in (folder / "checkpoint").glob("state-*")])
    found = load_file(folder / "end")
    return {
        "kills": killed,
        "left": resumed,
        "equal": found.keys() == whole.keys()
        and all(torch.equal(found[name], whole[name]) for name in whole),
        "ended": ended[1],
    }


def take(source: LanguageModel, target: LanguageModel, checkpoint: Path | None) -> Capture:
    """One capture, which saves its state after every batch."""
    workspace = Workspace(checkpoint=checkpoint, every=1)
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
