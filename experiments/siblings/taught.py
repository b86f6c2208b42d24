"""A fine-tuned sibling as a model to load: the base with its adapter merged.

    python -m experiments.siblings.taught [NAME]            measures it
    python -m experiments.siblings.taught NAME --out DIR    writes it as a model's folder

Measured is what base and sibling make of plain text and of telegrams, in nats a token; it is
written to the adapter's recipe.
"""

import argparse
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

from safetensors.torch import load_file

from experiments.siblings import lora, telegram
from experiments.siblings.openings import START
from kvtransfer import LanguageModel, load, score, wrap
from kvtransfer.fitting.texts import builtin
from kvtransfer.measures.agreement import nll

HERE = Path(__file__).parent
NAMES = ("telegram", "telegram-gentle")
"""The siblings: folders here."""
SEED = 4711
"""Not the seed of the teaching."""
TELEGRAMS, PLAIN = 16, 12


def taught(name: str, dtype: str) -> LanguageModel:
    """A sibling, in that dtype: its weights are rounded, and its RoPE's frequencies are not."""
    base = load("smollm2-135m", dtype=dtype)
    lora.merge(base.module, load_file(HERE / name / "adapter.safetensors"))
    return wrap(
        base.module,
        base.tokenizer,
        replace(base.spec, name=f"smollm2-{name}"),
    )


def quality(model: LanguageModel) -> dict[str, float]:
    """Mean nats a token of held-out telegrams after their text, and of held-out plain text."""
    how = telegram.Teaching()
    asked = telegram.samples(model.tokenizer, how, "heldout", SEED)
    sent = []
    for ids, begins in islice(asked, TELEGRAMS):
        logits = score(model, ids[None, :-1])[0, begins - 1 :]
        sent.append(float(nll(logits, ids[begins:]).mean()))
    plain = []
    long = (text for text in builtin("heldout") if len(text) > 600)
    for text in islice(long, PLAIN):
        ids = model.encode(START + text)[:160]
        plain.append(float(nll(score(model, ids[None, :-1])[0], ids[1:]).mean()))
    return {"telegrams": sum(sent) / len(sent), "plain": sum(plain) / len(plain)}


def main() -> None:
    """Measure base and sibling, or write the sibling."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", choices=NAMES, default=NAMES[0])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    name = asked.name
    if asked.out is not None:
        sibling = taught(name, "bfloat16")
        sibling.module.save_pretrained(asked.out)
        sibling.tokenizer.save_pretrained(asked.out)
        return
    found = {
        who: {key: round(value, 4) for key, value in quality(model).items()}
        for who, model in (
            ("base", load("smollm2-135m", dtype="bfloat16")),
            ("taught", taught(name, "bfloat16")),
        )
    }
    path = HERE / name / "recipe.json"
    recipe = json.loads(path.read_text(encoding="utf-8")) | {"nll_heldout": found}
    path.write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
