"""Call a model's forward, whatever it names its cache and whichever arguments it takes."""

import inspect
from typing import Any

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
    """The output of ``module`` on ``ids`` at ``positions``, on top of ``cache``, which grows.

    Gradients are the caller's to switch off.
    """
    arguments: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask,
        "use_cache": True,
        cache_keyword(module.forward): cache,
    }
    optional = {"position_ids": positions} | more
    # GPT-2 and its like number their positions themselves, or keep all logits.
    arguments |= {name: value for name, value in optional.items() if takes(module, name)}
    return module(**arguments)


def takes(module: nn.Module, argument: str) -> bool:
    """Whether ``module`` has an argument of that name, or hands it on to a base model that has."""
    parameters = inspect.signature(module.forward).parameters
    if argument in parameters:
        return True
    base = getattr(module, "base_model", module)
    hands_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return hands_on and base is not module and takes(base, argument)


def named_arguments(
    module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """All arguments of a call by their names, also those that were given by position."""
    signature = inspect.signature(module.forward)
    bound = signature.bind_partial(*given, **named).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    return bound


def cache_keyword(forward: Any) -> str:
    """``cache``, or what older versions of transformers call it: ``past_key_values``."""
    parameters = inspect.signature(forward).parameters
    return "past_key_values" if "past_key_values" in parameters else "cache"
