"""Measure the full model, the sibling without its layers, and the healed sibling.

    python -m experiments.siblings.measure MODEL ADAPTER_FOLDER --wikitext FILE

Text: nats per token over the first windows. Facts: how many questions about a guide the model
answers, greedily. The result goes into the folder's ``recipe.json``.
"""

import argparse
import json
from collections.abc import Collection
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from experiments.siblings import corpus, facts, lora, sibling
from experiments.siblings.openings import START
from kvtransfer.fitting.texts import builtin

WINDOW, WINDOWS, GUIDES = 512, 64, 60
GUIDE_SEED = 90210
"""Not a seed of the healing: these guides were never trained on."""


@torch.inference_mode()
def nll(model: PreTrainedModel, windows: Tensor) -> float:
    """Mean nats per token, the first token of each window being given."""
    total = 0.0
    for window in windows:
        logits = model(window[None], use_cache=False).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
    return total / (windows.shape[0] * (windows.shape[1] - 1))


def recalled(model: Any, tokenizer: Any) -> float:
    """Share of answers that stand in the line which the model writes.

    One question is shown with its answer: without it, a model untrained on the form replies in
    sentences, or not at all, and would be marked down for its style.
    """
    random, right = Random(GUIDE_SEED), 0
    for _ in range(GUIDES):
        paragraph, (shown, asked, *_) = facts.guide(random, shortest=8)
        prompt = (
            f"{START}{paragraph}\n\nQuestion: {shown.question}\nAnswer: {shown.answer}\n\n"
            f"Question: {asked.question}\nAnswer:"
        )
        given = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
        written = model.generate(**given, max_new_tokens=16, do_sample=False)
        reply: str = tokenizer.decode(written[0, given["input_ids"].shape[1] :])
        right += asked.answer in reply.strip().partition("\n")[0]
    return right / GUIDES


def main() -> None:
    """Measure all three and add what was found to the recipe."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--wikitext", type=Path, required=True)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    wikitext = tokenizer(args.wikitext.read_text(encoding="utf-8"), add_special_tokens=False)
    heldout = corpus.packed(tokenizer, builtin("heldout"), WINDOW)
    texts = {
        "wikitext2": torch.tensor(wikitext["input_ids"])[: WINDOW * WINDOWS].view(WINDOWS, WINDOW),
        "builtin_heldout": torch.stack(list(islice(heldout, WINDOWS))),
    }

    def measured(without: Collection[int], held: dict[str, Tensor]) -> dict[str, float]:
        model = sibling.load(args.model, torch.float32, without=without)
        lora.merge(model, held)
        found = {name: round(nll(model, windows), 4) for name, windows in texts.items()}
        return {**found, "facts": round(recalled(model, tokenizer), 4)}

    path = args.adapter / "recipe.json"
    recipe = json.loads(path.read_text(encoding="utf-8"))
    dropped = recipe["drop_layers"]
    arms = {
        "full": measured((), {}),
        "dropped": measured(dropped, {}),
        "healed": measured(dropped, load_file(args.adapter / "adapter.safetensors")),
    }
    recipe["nll"] = {text: {arm: arms[arm][text] for arm in arms} for text in texts}
    recipe["facts_recalled"] = {arm: arms[arm]["facts"] for arm in arms}
    path.write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(arms, indent=2))


if __name__ == "__main__":
    main()
