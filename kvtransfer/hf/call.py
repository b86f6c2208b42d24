"""Call a model's forward, whatever it names its cache and whichever arguments it takes."""

import inspect
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import Cache


def call(
    module: nn.Module,
    ids: Int[Tensor, "b s"],
    cache: Cache,
    positions: Int[Tensor, "b s"],
    mask: Int[Tensor, "b t"],
    **more: Any,
) -> Any:
    """The output of ``module`` on ``ids`` at ``positions``, on top of ``cache``, which grows."""
    arguments: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask,
        "use_cache": True,
        cache_keyword(module.forward): cache,
    }
    optional = {"position_ids": positions} | more
    # GPT-2 and its like number their positions themselves, or keep all logits.
    arguments |= {name: value for name, value in optional.items() if takes(module, name)}
    with torch.no_grad():
        return module(**arguments)


def takes(module: nn.Module, argument: str) -> bool:
    """Whether ``module`` has an argument of that name; one swallowed by ``**kwargs`` is none."""
    return argument in inspect.signature(module.forward).parameters


def cache_keyword(forward: Any) -> str:
    """``cache``, or what older versions of transformers call it: ``past_key_values``."""
    parameters = inspect.signature(forward).parameters
    return "past_key_values" if "past_key_values" in parameters else "cache"
