"""A mapping made ready to be applied often: its maps side by side, in the dtype of the products.

Per target layer one matrix product makes keys and values where both are read from the same
features; each source layer's rows are laid out once, however many maps read them. In bfloat16 a
product is many times as quick where the machine has units for it, and half the bytes are read; with
int8 weights a quarter, which are widened layer by layer as they are used.

This module knows nothing of how maps are fitted, or of models.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int8
from torch import Tensor

from kvtransfer.fitting import ends
from kvtransfer.fitting.affine import Affine, Corrected, Map
from kvtransfer.fitting.features import GROUPS, Kind, flat, late, state_rows
from kvtransfer.fitting.layer_map import LayerMap
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.network import Mlp
from kvtransfer.fitting.storage import to_int8
from kvtransfer.geometry.cache import Block, KVCache
from kvtransfer.hf.start import Start

Weights = Literal["float32", "bfloat16", "int8"]
"""What the maps are held in. Products are computed in float32 or, for the others, bfloat16."""

COMPUTED_IN: Mapping[Weights, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.bfloat16}
)

Read = tuple[Kind, int, bool]
"""A block of features: its kind, its source layer, and whether of the token before."""


@dataclass(frozen=True, slots=True, eq=False)
class Int8Matrix:
    """A matrix in integers of one byte, with a scale a column and a row."""

    whole: Int8[Tensor, "p q"]
    columns: Float[Tensor, "1 q"]
    """What each column is to be multiplied by, and each row."""
    rows: Float[Tensor, "p 1"]

    @classmethod
    def of(cls, weight: Float[Tensor, "p q"]) -> "Int8Matrix":
        """Rounded to the nearest."""
        return cls(*to_int8(weight))

    def wide(self, dtype: torch.dtype) -> Float[Tensor, "p q"]:
        """The matrix in ``dtype``, but for the scales of its columns."""
        return self.whole.to(dtype) * self.rows.to(dtype)

    @property
    def nbytes(self) -> int:
        """As it is held."""
        return self.whole.nbytes + self.columns.nbytes + self.rows.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The maps of one target layer that read the same features, as one matrix."""

    kinds: tuple[Kind, ...]
    """What it makes, side by side."""
    reads: tuple[Read, ...]
    weight: Float[Tensor, "p q"] | tuple[Int8Matrix, ...]
    """One matrix; or one a kind: what hardly matters to keys would, on one scale with values', be
    lost to these."""
    bias: Float[Tensor, " q"]
    widths: tuple[int, ...]
    """Columns of each kind."""

    def __call__(self, rows: Float[Tensor, "n p"]) -> tuple[Float[Tensor, "n _q"], ...]:
        """One block of rows a kind, in float32."""
        if isinstance(self.weight, Tensor):
            made = (rows @ self.weight).float()
        else:
            wide = torch.cat([each.wide(rows.dtype) for each in self.weight], dim=1)
            made = (rows @ wide).float()
            made *= torch.cat([each.columns for each in self.weight], dim=1)
        return tuple((made + self.bias).split(self.widths, dim=1))

    @property
    def nbytes(self) -> int:
        """What is read of memory to apply it."""
        held = (self.weight,) if isinstance(self.weight, Tensor) else self.weight
        return sum(each.nbytes for each in held) + self.bias.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class PreparedMapping:
    """A mapping whose maps lie as they are used. Call it as the mapping itself.

    A low-rank map, one of heads apart and a network have other products than one matrix; they are
    widened to one where they are linear, and a mapping with networks cannot be prepared.
    """

    mapping: KVMapping
    weights: Weights
    products: tuple[tuple[Product, ...], ...]
    """Of each mapped target layer."""

    @classmethod
    def of(
        cls,
        mapping: KVMapping,
        weights: Weights = "float32",
        *,
        device: torch.device | str = "cpu",
    ) -> "PreparedMapping":
        """Lay out the maps of ``mapping``.

        Raises:
            ValueError: there are no such weights, or a map is no matrix.
        """
        if weights not in COMPUTED_IN:
            raise ValueError(f"weights are {', '.join(COMPUTED_IN)}, not {weights!r}")
        return cls(
            mapping,
            weights,
            tuple(
                tuple(_products(mapping, layer, weights, torch.device(device)))
                for layer in mapping.layers
            ),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all maps as they are held."""
        return sum(product.nbytes for layer in self.products for product in layer)

    @property
    def start(self) -> int | None:
        """As of the mapping."""
        return self.mapping.start

    def __call__(self, cache: KVCache, *, start: Start | None = None) -> KVCache:
        """The target's cache of the tokens that ``cache`` holds, in the dtype of ``cache``.

        Args:
            cache: As for :class:`KVMapping`, on the device of the maps.
            start: As for it.

        Raises:
            IncompatibleModels, CacheLayoutError: as for it.
        """
        keys, values = zip(*self.layers(cache, start=start), strict=True)
        return self.mapping.assembled(cache, list(keys), list(values), start)

    def layers(
        self, cache: KVCache, *, start: Start | None = None
    ) -> Iterator[tuple[Block, Block]]:
        """Content keys and values of each mapped target layer, in order, as they are made.

        Raises:
            IncompatibleModels, CacheLayoutError: as for a call.
        """
        mapping = self.mapping
        ends.check_cache(cache, mapping.source, mapping.target)
        ends.check_start(start, cache, mapping.target, mapping.start)
        rows = _Rows(cache.as_content(), COMPUTED_IN[self.weights])
        state = None if start is None else state_rows(start.state).flatten(0, 1).to(rows.dtype)
        for index, products in enumerate(self.products, mapping.first):
            heads, made = mapping.target.layers[index].kv_heads, dict[Kind, Block]()
            for product in products:
                for kind, block in zip(
                    product.kinds, product(rows.side_by_side(product.reads, state)), strict=True
                ):
                    made[kind] = rearrange(
                        block, "(b t) (h d) -> b h t d", b=cache.batch, h=heads
                    ).to(cache.dtype)
            yield made["keys"], made["values"]


class _Rows:
    """Features of a cache, a block a source layer, each laid out when it is first read."""

    def __init__(self, content: KVCache, dtype: torch.dtype) -> None:
        self._content, self.dtype = content, dtype
        self._laid: dict[Read, Tensor] = {}

    def side_by_side(
        self, reads: tuple[Read, ...], state: Float[Tensor, "n _e"] | None
    ) -> Float[Tensor, "n p"]:
        """What one product reads; ``state`` last, where there is one."""
        parts = [self._block(read) for read in reads]
        return torch.cat(parts if state is None else [*parts, state], dim=1)

    def _block(self, read: Read) -> Tensor:
        if read not in self._laid:
            kind, layer, before = read
            block: Block = getattr(self._content, kind)[layer]
            self._laid[read] = flat(late(block) if before else block).to(self.dtype)
        return self._laid[read]


def _products(
    mapping: KVMapping, layer: LayerMap, weights: Weights, device: torch.device
) -> Iterator[Product]:
    count = mapping.reads.count
    for group in GROUPS[mapping.features]:
        reads = (
            *((kind, s, False) for s in layer.sources for kind in group),
            *((kind, s, True) for s in layer.before for kind in group),
        )
        counts = (count(kind, (*layer.sources, *layer.before)) for kind in group)
        found = [_matrix(getattr(layer, kind), p) for kind, p in zip(group, counts, strict=True)]
        parts = [each.weight.float().to(device) for each in found]
        yield Product(
            kinds=group,
            reads=reads,
            weight=(
                tuple(map(Int8Matrix.of, parts))
                if weights == "int8"
                else torch.cat(parts, dim=1).to(COMPUTED_IN[weights])
            ),
            bias=torch.cat([each.bias for each in found]).float().to(device),
            widths=tuple(part.shape[1] for part in parts),
        )


def _matrix(fitted: Map, p: int) -> Affine:
    """One map as a matrix over all ``p`` features that its layer reads."""
    if isinstance(fitted, Corrected):
        base, more = _matrix(fitted.base, p), fitted.correction.whole(p)
        return Affine(base.weight + more.weight, base.bias + more.bias)
    if isinstance(fitted, Mlp):
        raise ValueError("a network is no matrix, so this mapping is applied as it is")
    return fitted.whole(p)
