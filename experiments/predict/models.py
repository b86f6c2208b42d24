"""The models of the study, by name: trained ones, and what can be done to them.

All are made from SmolLM2-135M and the tiny models, and from adapters that this repository holds;
nothing is trained here.
"""

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from experiments.siblings import sibling, taught
from kvtransfer import LanguageModel, load, wrap
from kvtransfer.hf.materialise import materialise
from kvtransfer.hf.spec import spec_of
from tests.theorems.twins import attentions, twin_of

SMOLLM2 = "smollm2-135m"
SEED = 20_261_201

HALF_AGAIN = (4, 7, 10, 12, 14, 16, 17, 20, 23, 26)
"""Ten layers, the six that the healed sibling lacks among them."""

EVERY_SECOND = tuple(range(3, 28, 2))


@cache
def base(alias: str) -> LanguageModel:
    """A model of the zoo, in bfloat16."""
    return load(alias, dtype="bfloat16")


def named(name: str, module: Any, like: LanguageModel) -> LanguageModel:
    """A changed module under a name of its own."""
    spec = spec_of(module.config, name=name, tokenizer=like.tokenizer)
    return wrap(module.eval(), like.tokenizer, spec)


def shortened(name: str, without: Collection[int]) -> LanguageModel:
    """SmolLM2 without some layers, and with nothing to heal the lack."""
    module = sibling.load(materialise(SMOLLM2), torch.bfloat16, without=without)
    return named(name, module, base(SMOLLM2))


def untrained(name: str, alias: str) -> LanguageModel:
    """Random weights in the shape of ``alias``."""
    torch.manual_seed(SEED)
    like = base(alias)
    module = AutoModelForCausalLM.from_config(like.module.config, dtype=torch.bfloat16)
    return named(name, module, like)


@torch.no_grad()
def noised(name: str, alias: str, share: float) -> LanguageModel:
    """Every matrix of the layers with noise of ``share`` of its own spread added."""
    random = torch.Generator().manual_seed(SEED)
    like = base(alias)
    module = deepcopy(like.module)
    for part, weight in module.named_parameters():
        if weight.dim() == 2 and ".layers." in part:
            noise = torch.randn(weight.shape, generator=random)
            weight.add_((share * weight.float().std() * noise).to(weight))
    return named(name, module, like)


@torch.no_grad()
def broken(name: str, alias: str) -> LanguageModel:
    """Every layer's KV heads in each other's places, while the queries stay: a broken model."""
    like = base(alias)
    module = deepcopy(like.module)
    for attention in attentions(module, like.spec.layers):
        for heads in (attention.keys, attention.values):
            heads.weight.copy_(heads.weight.roll(1, dims=0).clone())
    return named(name, module, like)


def twin(name: str, alias: str) -> LanguageModel:
    """The same function from another cache: every KV head in a random basis."""
    module = twin_of(load(alias, dtype="float32")).module
    for weight in module.parameters():  # and not the frequencies of RoPE, which stay as they are
        weight.data = weight.data.bfloat16()
    return named(name, module, base(alias))


MODELS: Mapping[str, Callable[[], LanguageModel]] = {
    SMOLLM2: lambda: base(SMOLLM2),
    "24l": lambda: base("smollm2-24l"),
    "24l-unhealed": lambda: shortened("24l-unhealed", sibling.DROPPED),
    "20l": lambda: shortened("20l", HALF_AGAIN),
    "17l": lambda: shortened("17l", EVERY_SECOND),
    "telegram": lambda: taught.taught("telegram", "bfloat16"),
    "untrained": lambda: untrained("untrained", SMOLLM2),
    "noised": lambda: noised("noised", SMOLLM2, 0.3),
    "noised-less": lambda: noised("noised-less", SMOLLM2, 0.15),
    "tiny-4l": lambda: base("tiny-4l"),
    "tiny-6l": lambda: base("tiny-6l"),
    "tiny-untrained": lambda: untrained("tiny-untrained", "tiny-6l"),
    "tiny-noised": lambda: noised("tiny-noised", "tiny-6l", 0.5),
    "tiny-noised-more": lambda: noised("tiny-noised-more", "tiny-6l", 1.5),
    "tiny-noised-most": lambda: noised("tiny-noised-most", "tiny-6l", 3.0),
    "tiny-broken": lambda: broken("tiny-broken", "tiny-6l"),
    "tiny-twin": lambda: twin("tiny-twin", "tiny-6l"),
}
"""What a direction goes from, and to. The shortened ones are SmolLM2, and so are those with no
other base in their name."""
