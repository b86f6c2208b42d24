"""Low-rank adapters: beside a frozen weight W, a trained B @ A; merged, W + B @ A.

Names are those of the adapter file: ``layers.<index>.<module>.A`` and ``.B``.
"""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank one beside it."""

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float) -> None:
        """Adapt ``linear`` by a product of the given rank, multiplied by ``scale``."""
        super().__init__()
        self.linear, self.scale = linear, scale
        # B starts at zero: an adapted model is at first the model itself.
        self.A = nn.Parameter(torch.empty(rank, linear.in_features))
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank))
        nn.init.kaiming_uniform_(self.A, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Both layers' sum. A and B are kept in float32, and used in the dtype of ``x``."""
        low = F.linear(x, self.A.to(x.dtype))
        whole: Tensor = self.linear(x)
        return whole + F.linear(low, (self.scale * self.B).to(x.dtype))


def attach(
    model: PreTrainedModel, *, rank: int, scale: float, only: Collection[str] = ()
) -> dict[str, Adapted]:
    """Freeze the model, put adapters on linear layers of its decoder, and name them.

    On all of them, or on those with one of the names in ``only``.
    """
    model.requires_grad_(False)
    adapters = {}
    for name, linear in list(model.model.named_modules()):
        parent, _, child = name.rpartition(".")
        if isinstance(linear, nn.Linear) and (not only or child in only):
            adapters[name] = Adapted(linear, rank=rank, scale=scale)
            setattr(model.model.get_submodule(parent), child, adapters[name])
    return adapters


def tensors(adapters: dict[str, Adapted]) -> dict[str, Tensor]:
    """What the adapter file holds: bfloat16, the scale folded into B."""
    held = {}
    for name, adapter in adapters.items():
        held[f"{name}.A"] = adapter.A.detach().bfloat16()
        held[f"{name}.B"] = (adapter.scale * adapter.B.detach()).bfloat16()
    return held


@torch.no_grad()
def merge(model: PreTrainedModel, held: dict[str, Tensor]) -> None:
    """Add B @ A to the weights they were trained beside."""
    for name in {key.rpartition(".")[0] for key in held}:
        weight = model.model.get_submodule(name).weight
        change = held[f"{name}.B"].float() @ held[f"{name}.A"].float()
        weight.copy_((weight.float() + change).to(weight.dtype))
