"""Undo and redo rotary position embeddings on cached keys.

Axes, here and everywhere: ``b`` batch, ``h`` KV head, ``t`` token, ``d`` head
width, ``r`` the number of rotated pairs of it (2r < d under partial rotary).
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvtransfer.geometry.spec import Pairing


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The cos and sin that a model's own rotary module emitted for some positions.

    Taking them from the model instead of rebuilding them from theta is what makes Llama-3,
    YaRN and partial rotary right without a line of code about any of them (RoPE: Su et al.,
    arXiv:2104.09864).
    """

    cos: Float[Tensor, "b t r"]
    sin: Float[Tensor, "b t r"]
    pairing: Pairing = "half"

    def __post_init__(self) -> None:
        if self.pairing == "unknown":
            raise ValueError("a rotation needs to know which dims pair: half or interleaved")

    def apply(self, keys: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
        """Content keys to cached keys; the result has the dtype of ``keys``."""
        return self._turn(keys, self.cos, self.sin)

    def undo(self, keys: Float[Tensor, "b h t d"]) -> Float[Tensor, "b h t d"]:
        """Cached keys to content keys: the exact inverse of :meth:`apply`."""
        # YaRN and longrope fold an attention temperature into cos and sin, so they turn *and
        # stretch*; dividing by cos² + sin² takes the stretch back out.
        stretch = self.cos.square() + self.sin.square()
        return self._turn(keys, self.cos / stretch, -self.sin / stretch)

    def agrees(self, other: "Rotation") -> bool:
        """Whether both turn every token alike, up to float rounding."""
        return (
            self.pairing == other.pairing
            and self.cos.shape == other.cos.shape
            and torch.allclose(self.cos, other.cos, atol=1e-5)
            and torch.allclose(self.sin, other.sin, atol=1e-5)
        )

    def prefix(self, tokens: int) -> "Rotation":
        """The rotation of the first ``tokens`` tokens."""
        return replace(self, cos=self.cos[:, :tokens], sin=self.sin[:, :tokens])

    def to(self, device: torch.device | str) -> "Rotation":
        """The same rotation on another device."""
        return replace(self, cos=self.cos.to(device), sin=self.sin.to(device))

    def expand(self, batch: int) -> "Rotation":
        """One row of positions, shared by ``batch`` sequences."""
        return replace(self, cos=self.cos.expand(batch, -1, -1), sin=self.sin.expand(batch, -1, -1))

    def _turn(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # one rotation for all heads
        width = 2 * cos.shape[-1]
        turned, rest = (
            keys[..., :width].to(torch.promote_types(keys.dtype, cos.dtype)),
            keys[..., width:],
        )
        if self.pairing == "half":
            left, right = turned.chunk(2, dim=-1)
            pairs = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        else:
            left, right = turned[..., 0::2], turned[..., 1::2]
            pairs = torch.stack((left * cos - right * sin, right * cos + left * sin), dim=-1)
            pairs = pairs.flatten(-2)
        return torch.cat((pairs.to(keys.dtype), rest), dim=-1)
