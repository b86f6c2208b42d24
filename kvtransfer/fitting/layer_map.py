"""The maps of one target layer, and their tensors.

This module knows nothing of caches, or of the layers beside this one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kvtransfer.fitting import storage
from kvtransfer.fitting.affine import Map
from kvtransfer.fitting.features import KINDS, Kind
from kvtransfer.geometry.spec import ModelSpec


@dataclass(frozen=True, slots=True, eq=False)
class LayerMap:
    """What makes one target layer: the source layers it reads, and a map for each kind."""

    sources: tuple[int, ...]
    keys: Map
    values: Map
    before: tuple[int, ...] = ()
    """Source layers that are read at the token before, after the others."""

    @property
    def parameters(self) -> int:
        """Numbers in both maps."""
        return self.keys.parameters + self.values.parameters

    def nbytes(self, dtype: storage.Dtype) -> int:
        """Bytes of both maps stored in ``dtype``."""
        return storage.nbytes(self.keys, dtype) + storage.nbytes(self.values, dtype)

    def pack(self, prefix: str, dtype: storage.Dtype) -> dict[str, Tensor]:
        """The tensors of both maps, by name."""
        return storage.pack(f"{prefix}.keys", self.keys, dtype) | storage.pack(
            f"{prefix}.values", self.values, dtype
        )

    @classmethod
    def unpack(
        cls,
        prefix: str,
        tensors: Mapping[str, Tensor],
        sources: tuple[int, ...],
        before: tuple[int, ...],
        reads: storage.Reads,
        target: ModelSpec,
        layer: int,
    ) -> "LayerMap":
        """The maps to one layer of ``target``, in float32, with their shapes checked.

        Raises:
            ArtifactError: a tensor is missing or misshaped.
        """

        def one(kind: Kind) -> Map:
            return storage.unpack(
                f"{prefix}.{kind}",
                tensors,
                reads.count(kind, (*sources, *before)),
                storage.written(target, kind, layer),
                target.layers[layer].kv_heads,
            )

        return cls(sources, **{kind: one(kind) for kind in KINDS}, before=before)
