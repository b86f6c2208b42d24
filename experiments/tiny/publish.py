"""Write a trained model's folder, measure what was written, and say so on its card."""

import json
import platform
from dataclasses import asdict
from pathlib import Path

import tokenizers
import torch
import transformers
from measure import Estimate, heldout_nll, recall, repeat_nll
from recipes import Recipe
from rows import MIXTURE, Corpus
from transformers import LlamaForCausalLM

QUESTIONS, SEQUENCES = 1000, 200


def publish(recipe: Recipe, model: LlamaForCausalLM, heldout: Corpus, out: Path) -> None:
    """Round to bfloat16, write, read back in float32, measure, and write the card."""
    model.to(torch.bfloat16).save_pretrained(out)  # type: ignore[arg-type]
    heldout.tokenizer.save_pretrained(out)
    _portable(out)
    written = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    measured = measure(written, heldout, length=recipe.context)
    results = Path(__file__).parent / "results"
    log = (results / f"{recipe.name}.log.jsonl").read_text().splitlines()
    seconds = json.loads(log[-1])["seconds"]
    report = {
        "model": recipe.name,
        "parameters": written.num_parameters(),
        "recipe": asdict(recipe),
        "mixture": {make.__name__: share for make, share in MIXTURE},
        "seconds": seconds,
        "measured": {name: asdict(estimate) for name, estimate in measured.items()},
        "provenance": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    (results / f"{recipe.name}.json").write_text(json.dumps(report, indent=2) + "\n")
    card = _card(recipe, written.num_parameters(), measured, seconds)
    (out / "README.md").write_text(card, encoding="utf-8")


def measure(model: LlamaForCausalLM, heldout: Corpus, *, length: int) -> dict[str, Estimate]:
    """Everything the card reports; no seed here is a training seed."""
    model.eval()
    facts, twice = "fresh facts", "fresh sequences"
    return {
        "heldout_nll": heldout_nll(model, heldout, length=length),
        "recall": recall(model, heldout, seed=facts, n=QUESTIONS),
        "recall_without_facts": recall(model, heldout, seed=facts, n=QUESTIONS, stated=False),
        "repeat_nll": repeat_nll(model, heldout, seed=twice, n=SEQUENCES),
        "repeat_nll_without_first": repeat_nll(
            model, heldout, seed=twice, n=SEQUENCES, first=False
        ),
    }


def _portable(out: Path) -> None:
    """Name the tokenizer's class as every transformers release knows it; let anyone read."""
    path = out / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (out / "model.safetensors").chmod(0o644)  # it is written for its owner alone


def _card(recipe: Recipe, parameters: int, measured: dict[str, Estimate], seconds: float) -> str:
    partner = {"tiny-4l": "tiny-6l", "tiny-6l": "tiny-4l"}[recipe.name]
    mixture = ", ".join(f"{share:.0%} {make.__name__}" for make, share in MIXTURE)
    learnt = measured["recall"].low > measured["recall_without_facts"].high
    verdict = "answers from the facts it was given" if learnt else "did not learn to recall"
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# {recipe.name}

A Llama of {parameters:,} parameters, trained from scratch on one CPU core ({seconds / 60:.0f}
minutes, other work on the core included), so that tests and demonstrations of cache transfer have
a trained model to run on. It is of no other use. Its partner `{partner}` has another seed, depth,
width and RoPE base; the two share the text, the tokenizer and the shape of a KV head, and nothing
else.

| | |
|---|---|
| layers | {recipe.layers} |
| hidden width, MLP width | {recipe.hidden}, {recipe.intermediate} |
| query heads, KV heads, head width | {recipe.heads}, {recipe.kv_heads}, {recipe.head_dim} |
| RoPE base | {recipe.rope_theta:,.0f} |
| positions | {recipe.positions}, trained to {recipe.context} |
| embeddings | tied |
| weights | bfloat16 |

## Measured

With the weights as they are here, run in float32; 95 % intervals. n counts windows of
{recipe.context} tokens, questions, and sequences.

| | |
|---|---|
| held-out prose, nats per token | {measured["heldout_nll"]} |
| made-up facts answered exactly, greedy | {measured["recall"]} |
| the same questions without the facts | {measured["recall_without_facts"]} |
| random sequence said a second time, nats per token | {measured["repeat_nll"]} |
| the same with another sequence said first | {measured["repeat_nll_without_first"]} |

The model {verdict}: compare the rows with and without.

The questions come from the templates and word lists of training, their facts from a fresh seed.
The held-out prose is `builtin("heldout")` of `kvtransfer.fitting.texts`, one document in ten, never
trained on.

## Made

    python experiments/tiny/train.py {recipe.name} --out kvtransfer/zoo_assets/{recipe.name}

| | |
|---|---|
| seed | {recipe.seed} |
| rows | {mixture} |
| steps, tokens a step | {recipe.steps:,}, {recipe.tokens:,} |
| context | {recipe.short_context}, in the last {1 - recipe.short_share:.0%} of steps \
{recipe.context} |
| AdamW | peak rate {recipe.learning_rate:g}, {recipe.warmup} steps up, cosine down to \
{recipe.floor:.0%}, betas {recipe.betas}, weight decay {recipe.weight_decay}, clip {recipe.clip:g} |
| arithmetic | bfloat16 autocast over float32 weights |

Prose rows are the language reference and the standard library's docstrings (PSF licence) as Python
{platform.python_version()} carries them. The weights are under Apache-2.0.
"""
