"""A map that is no line: two hidden layers over normed features, beside a line."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from kvtransfer.errors import ArtifactError


@dataclass(frozen=True, slots=True, eq=False)
class Mlp:
    """y = direct(z) + outer(relu(middle(relu(inner(z))))) of z = (x − mean) / scale.

    Each hidden layer has a bias, and so has y. A network of zeros in ``outer`` is the affine map.
    """

    mean: Float[Tensor, " p"]
    scale: Float[Tensor, " p"]
    direct: Float[Tensor, "p q"]
    inner: Float[Tensor, "p m"]
    inner_bias: Float[Tensor, " m"]
    middle: Float[Tensor, "m m"]
    middle_bias: Float[Tensor, " m"]
    outer: Float[Tensor, "m q"]
    bias: Float[Tensor, " q"]

    def __call__(self, x: Float[Tensor, "*n p"]) -> Float[Tensor, "*n q"]:
        """Map rows, in their own dtype."""
        normed = (x - self.mean.to(x)) / self.scale.to(x)
        bent = self.hidden(normed) @ self.outer.to(x)
        return normed @ self.direct.to(x) + bent + self.bias.to(x)

    def hidden(self, normed: Float[Tensor, "*n p"]) -> Float[Tensor, "*n m"]:
        """What the second hidden layer makes of normed rows."""
        first = torch.relu(normed @ self.inner.to(normed) + self.inner_bias.to(normed))
        return torch.relu(first @ self.middle.to(normed) + self.middle_bias.to(normed))

    def float(self) -> "Mlp":
        """The same map in single precision."""
        return Mlp(**{each.name: getattr(self, each.name).float() for each in fields(self)})

    @property
    def parameters(self) -> int:
        """How many numbers it has."""
        return sum(getattr(self, field.name).numel() for field in fields(self))

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], p: int, q: int) -> "Mlp":
        """Built from tensors by name, refused unless they fit together.

        Raises:
            ArtifactError: they do not.
        """
        m = tensors["inner"].shape[-1] if tensors["inner"].ndim else 0
        wanted = {
            "mean": (p,),
            "scale": (p,),
            "direct": (p, q),
            "inner": (p, m),
            "inner_bias": (m,),
            "middle": (m, m),
            "middle_bias": (m,),
            "outer": (m, q),
            "bias": (q,),
        }
        for name, shape in wanted.items():
            if tuple(tensors[name].shape) != shape:
                raise ArtifactError(
                    f"{name} of a network has shape {tuple(tensors[name].shape)}, the specs ask "
                    f"for {shape}",
                    hint="the file belongs to another mapping; copy or make it again",
                )
        return cls(**{name: tensors[name] for name in wanted})
