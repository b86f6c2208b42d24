"""The specs of well-known models, read from their configs, and the verdict on every pair of them.

The rule behind the grid, which was written from the table's facts and not by running ``compare``:

- a model against itself can reuse its cache,
- two models that keep keys and values per token in every layer need a map,
- any other pair is blocked; so is a model against itself whose layers keep something else
  (latents, a state, nothing), for such a cache cannot be read at all.

Positions do not enter: where they cannot be taken out of the keys, a map carries them along. Nor do
tokenizers: where they differ, tokens are aligned by characters, as the report says.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from transformers import AutoConfig

from kvtransfer.geometry.compat import CompatReport, Verdict, compare
from kvtransfer.geometry.spec import LayerSpec, ModelSpec
from kvtransfer.hf.spec import spec_of
from tests.hf.models import MODELS, Known

GRID = """
Llama-2-7B                     =mmmmmmmmmmmmmm.mmmmmmmmmmmmmmmmmmmmmmmm.....
Llama-3-8B                     m=mmmmmmmmmmmmm.mmmmmmmmmmmmmmmmmmmmmmmm.....
Llama-3.1-8B                   mm=mmmmmmmmmmmm.mmmmmmmmmmmmmmmmmmmmmmmm.....
Llama-3.2-1B                   mmm=mmmmmmmmmmm.mmmmmmmmmmmmmmmmmmmmmmmm.....
Llama-3.2-3B                   mmmm=mmmmmmmmmm.mmmmmmmmmmmmmmmmmmmmmmmm.....
Llama-4-Scout-17B-16E-Instruct mmmmm=mmmmmmmmm.mmmmmmmmmmmmmmmmmmmmmmmm.....
SmolLM3-3B                     mmmmmm=mmmmmmmm.mmmmmmmmmmmmmmmmmmmmmmmm.....
SmolLM2-135M                   mmmmmmm=mmmmmmm.mmmmmmmmmmmmmmmmmmmmmmmm.....
SmolLM2-1.7B                   mmmmmmmm=mmmmmm.mmmmmmmmmmmmmmmmmmmmmmmm.....
Qwen2-0.5B                     mmmmmmmmm=mmmmm.mmmmmmmmmmmmmmmmmmmmmmmm.....
Qwen2.5-1.5B                   mmmmmmmmmm=mmmm.mmmmmmmmmmmmmmmmmmmmmmmm.....
Qwen2.5-7B                     mmmmmmmmmmm=mmm.mmmmmmmmmmmmmmmmmmmmmmmm.....
Qwen3-0.6B                     mmmmmmmmmmmm=mm.mmmmmmmmmmmmmmmmmmmmmmmm.....
Qwen3-8B                       mmmmmmmmmmmmm=m.mmmmmmmmmmmmmmmmmmmmmmmm.....
Qwen3-30B-A3B                  mmmmmmmmmmmmmm=.mmmmmmmmmmmmmmmmmmmmmmmm.....
Qwen3-Next-80B-A3B-Instruct    .............................................
Mistral-7B-v0.1                mmmmmmmmmmmmmmm.=mmmmmmmmmmmmmmmmmmmmmmm.....
Mistral-7B-v0.3                mmmmmmmmmmmmmmm.m=mmmmmmmmmmmmmmmmmmmmmm.....
Mixtral-8x7B-v0.1              mmmmmmmmmmmmmmm.mm=mmmmmmmmmmmmmmmmmmmmm.....
Ministral-3-3B                 mmmmmmmmmmmmmmm.mmm=mmmmmmmmmmmmmmmmmmmm.....
Gemma-2-2B                     mmmmmmmmmmmmmmm.mmmm=mmmmmmmmmmmmmmmmmmm.....
Gemma-3-270m                   mmmmmmmmmmmmmmm.mmmmm=mmmmmmmmmmmmmmmmmm.....
Gemma-3-4B                     mmmmmmmmmmmmmmm.mmmmmm=mmmmmmmmmmmmmmmmm.....
Phi-3-mini-4k-instruct         mmmmmmmmmmmmmmm.mmmmmmm=mmmmmmmmmmmmmmmm.....
Phi-3-mini-128k-instruct       mmmmmmmmmmmmmmm.mmmmmmmm=mmmmmmmmmmmmmmm.....
Phi-4                          mmmmmmmmmmmmmmm.mmmmmmmmm=mmmmmmmmmmmmmm.....
Phi-4-mini-instruct            mmmmmmmmmmmmmmm.mmmmmmmmmm=mmmmmmmmmmmmm.....
OLMo-2-0425-1B                 mmmmmmmmmmmmmmm.mmmmmmmmmmm=mmmmmmmmmmmm.....
Olmo-3-1025-7B                 mmmmmmmmmmmmmmm.mmmmmmmmmmmm=mmmmmmmmmmm.....
GPT-OSS-20B                    mmmmmmmmmmmmmmm.mmmmmmmmmmmmm=mmmmmmmmmm.....
Granite-3.1-2B                 mmmmmmmmmmmmmmm.mmmmmmmmmmmmmm=mmmmmmmmm.....
Command-R7B                    mmmmmmmmmmmmmmm.mmmmmmmmmmmmmmm=mmmmmmmm.....
GLM-4-9B                       mmmmmmmmmmmmmmm.mmmmmmmmmmmmmmmm=mmmmmmm.....
StableLM-2-1.6B                mmmmmmmmmmmmmmm.mmmmmmmmmmmmmmmmm=mmmmmm.....
Pythia-160M                    mmmmmmmmmmmmmmm.mmmmmmmmmmmmmmmmmm=mmmmm.....
Pythia-1B                      mmmmmmmmmmmmmmm.mmmmmmmmmmmmmmmmmmm=mmmm.....
Falcon-7B                      mmmmmmmmmmmmmmm.mmmmmmmmmmmmmmmmmmmm=mmm.....
Bloom-560m                     mmmmmmmmmmmmmmm.mmmmmmmmmmmmmmmmmmmmm=mm.....
GPT-2                          mmmmmmmmmmmmmmm.mmmmmmmmmmmmmmmmmmmmmm=m.....
OPT-125m                       mmmmmmmmmmmmmmm.mmmmmmmmmmmmmmmmmmmmmmm=.....
DeepSeek-V2-Lite               .............................................
DeepSeek-V3                    .............................................
Nemotron-H-8B-Base-8K          .............................................
Granite-4.0-H-350M             .............................................
Mamba-2.8B                     .............................................
"""
"""``=`` reuse, ``m`` map, ``.`` blocked: a line for each source, a letter for each target."""

LETTERS = {"reuse": "=", "map": "m", "blocked": "."}


@cache
def spec(known: str) -> ModelSpec:
    """What we read from its config, as if its tokenizer and weights had been seen too."""
    model = next(each for each in MODELS if each.name == known)
    config = AutoConfig.for_model(model.architecture, **model.config)
    return replace(spec_of(config, name=model.name), tokenizer=model.tokenizer, weights=model.name)


def facts(spec: ModelSpec) -> dict[str, str]:
    """The spec in the words of the table."""
    keeping = [layer for layer in spec.layers if layer.kind not in ("linear", "none")]
    return {
        "architecture": spec.architecture,
        "layers": tally(kind(layer) for layer in spec.layers),
        "heads": ", ".join(dict.fromkeys(heads(layer) for layer in keeping)),
        "positions": spec.positions,
        "rope": tally(rope(layer) for layer in keeping),
    }


def tally(words: Iterable[str]) -> str:
    return ", ".join(f"{word} × {count}" for word, count in Counter(words).items())


def kind(layer: LayerSpec) -> str:
    return layer.kind if layer.window is None else f"{layer.kind} {layer.window}"


def heads(layer: LayerSpec) -> str:
    width = layer.key_dim if layer.kind != "latent" else f"{layer.key_dim} + {layer.value_dim}"
    return f"{layer.kv_heads} × {width}"


def rope(layer: LayerSpec) -> str:
    turn = layer.rotation
    if turn is None:
        return "none"
    factor = dict(turn.scaling).get("factor")
    stretch = "" if factor is None else f" ×{factor:g}"
    return f"{turn.type}{stretch} θ={turn.theta:.0f} {turn.pairing} {turn.rotary_dim}d"


@pytest.mark.parametrize("known", MODELS, ids=[known.name for known in MODELS])
def test_the_spec_of_a_model_is_what_its_card_says(known: Known) -> None:
    assert facts(spec(known.name)) == {
        "architecture": known.architecture,
        "layers": known.layers,
        "heads": known.heads,
        "positions": known.positions,
        "rope": known.rope,
    }


@cache
def reports() -> dict[tuple[str, str], CompatReport]:
    names = [known.name for known in MODELS]
    return {
        (source, target): compare(spec(source), spec(target))
        for source, target in product(names, names)
    }


def test_every_pair_of_models_gets_the_verdict_that_the_rule_gives_it() -> None:
    rows = dict(line.split() for line in GRID.strip().splitlines())
    assert list(rows) == [known.name for known in MODELS]
    expected = {
        (source, target): letter
        for source, letters in rows.items()
        for target, letter in zip(rows, letters, strict=True)
    }

    wrong = [
        f"{source} → {target}: {LETTERS[report.verdict]} and not {expected[source, target]}"
        for (source, target), report in reports().items()
        if LETTERS[report.verdict] != expected[source, target]
    ]

    assert not wrong, "\n".join(wrong)


def test_tokens_are_aligned_between_families_of_tokenizers_and_only_there() -> None:
    family = {known.name: known.tokenizer for known in MODELS}
    wrong = [
        f"{source} → {target}: {finding.verdict}"
        for (source, target), report in reports().items()
        for finding in report.findings
        if finding.topic == "tokenizer"
        and finding.verdict
        != (Verdict.SAME if family[source] == family[target] else Verdict.MAPPED)
    ]

    assert not wrong, "\n".join(wrong)


def test_whatever_blocks_a_pair_says_why() -> None:
    silent = [
        f"{source} → {target}: {finding.topic}"
        for (source, target), report in reports().items()
        for finding in report.findings
        if finding.verdict is Verdict.BLOCKED and not finding.why
    ]

    assert not silent, "\n".join(silent)
