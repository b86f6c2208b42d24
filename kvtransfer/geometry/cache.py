"""A KV cache as a plain immutable value, with no model attached."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, RotationError
from kvtransfer.geometry import hidden as columns
from kvtransfer.geometry.hidden import Hidden
from kvtransfer.geometry.layout import check_layout
from kvtransfer.geometry.rotation import Rotation

Block = Float[Tensor, "_b _h _t _d"]
"""One layer's keys or values. Heads and width may differ from layer to layer, and those of keys
from those of values; that batch and length agree, a cache checks itself."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KVCache:
    """Keys and values of every layer; ``cache[i]`` is layer i's (keys, values).

    Cached keys carry the rotation of their positions, content keys do not. A cache that was read
    out of a model also carries the tables that turned its keys, so that it can always be turned
    back, whatever the model's RoPE.
    """

    keys: tuple[Block, ...]
    values: tuple[Block, ...]
    positions: Int[Tensor, "_b _t"]
    """Absolute position of each token."""
    keys_are: Literal["cached", "content"]
    rotations: tuple[Rotation | None, ...] | None = None
    """Per layer, what turned the keys; None for a layer without RoPE, or (whole) if unknown."""
    model: str | None = None
    """Identity of the model that can read this cache (:attr:`ModelSpec.identity`), where known."""
    note: str | None = None
    """What a reader of results should know of these numbers: that they were dequantised, say."""
    approximate: str | None = None
    """Why this is not exactly what the model would make of these tokens in that place; None where
    it is, as far as anybody has said."""
    padding: Int[Tensor, " _b"] | None = None
    """How many columns at the left of each row hold nothing, where rows of different lengths are
    one batch (:func:`kvtransfer.geometry.join.stack`); None where none do."""
    hidden: Hidden | None = None
    """Per layer, which columns attention does not see at all, as if they were not there; None where
    it sees every token."""
    _written: tuple[int, ...] = field(init=False, repr=False)
    """How often each block had been written to when this value was made."""

    def __post_init__(self) -> None:
        check_layout(self.keys, self.values, self.positions, self.rotations, self.padding)
        if self.hidden is not None:
            columns.check(self.hidden, self.keys)
        written = tuple(map(_times_written, (*self.keys, *self.values)))
        object.__setattr__(self, "_written", written)

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.keys)

    def __getitem__(self, layer: int) -> tuple[Block, Block]:
        return self.keys[layer], self.values[layer]

    def __iter__(self) -> Iterator[tuple[Block, Block]]:
        return iter(zip(self.keys, self.values, strict=True))

    def __repr__(self) -> str:
        batch, heads, tokens, width = self.keys[0].shape
        return (
            f"KVCache({len(self)} layers × {heads} heads × {tokens} tokens × {width}, "
            f"batch {batch}, {self.dtype}, {self.keys_are} keys"
            f"{'' if self.padding is None else f', padded by {self.padding.tolist()}'}"
            f"{f', {columns.described(self.hidden)}' if self.hidden else ''}"
            f"{f', {self.note}' if self.note else ''}"
            f"{f', approximate: {self.approximate}' if self.approximate else ''})"
        )

    @property
    def tokens(self) -> int:
        """Length of the cached prefix."""
        return self.positions.shape[1]

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.positions.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every block."""
        return self.keys[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(block.numel() * block.element_size() for block in (*self.keys, *self.values))

    @property
    def mask(self) -> Int[Tensor, "b t"]:
        """The attention mask of these tokens: 0 for padding, 1 for all others."""
        columns = torch.arange(self.tokens, device=self.positions.device).expand(self.batch, -1)
        if self.padding is None:
            return torch.ones_like(columns)
        return (columns >= self.padding.to(columns)[:, None]).long()

    def require_unpadded(self, purpose: str) -> None:
        """Raise CacheLayoutError if rows of different lengths were stacked to this batch."""
        if self.padding is not None:
            raise CacheLayoutError(
                f"rows padded by {self.padding.tolist()} columns cannot be {purpose} together",
                hint="do it to each cache first, and stack(caches) last",
            )

    def require_plain(self, purpose: str) -> None:
        """Raise CacheLayoutError unless every layer sees every column."""
        self.require_unpadded(purpose)
        if self.hidden is not None:
            raise CacheLayoutError(
                f"a cache with {columns.described(self.hidden)} cannot be {purpose}",
                hint="do it first, and hide tokens last",
            )

    def require_unchanged(self) -> None:
        """Raise CacheLayoutError if a block was written to in place since this value was made.

        A cache is a value: what shares its memory, and writes there, makes it another text's.
        """
        for index, (now, then) in enumerate(
            zip(map(_times_written, (*self.keys, *self.values)), self._written, strict=True)
        ):
            if now != then:
                kind, layer = divmod(index, len(self.keys))
                raise CacheLayoutError(
                    f"the {('keys', 'values')[kind]} of layer {layer} were written to in place "
                    f"{now - then} times since this cache was made",
                    hint="clone the tensors before you change them, and make a cache of the clones",
                )

    def content(self) -> "KVCache":
        """The same cache with the rotation taken out of its keys.

        Raises:
            RotationError: the keys are content already, or nobody recorded what turned them.
            CacheLayoutError: a block was written to in place.
        """
        self.require_unchanged()
        if self.keys_are == "content":
            raise RotationError(
                "these keys carry no rotation: they are content keys already",
                hint="call content() once, on a cache as a model made it",
            )
        if self.rotations is None:
            raise RotationError(
                "these cached keys carry no record of the rotation that turned them",
                hint="make it with prefill(model, ids), or name rotations when you read it",
            )
        keys = tuple(
            block if rotation is None else rotation.undo(block)
            for block, rotation in zip(self.keys, self.rotations, strict=True)
        )
        return replace(self, keys=keys, keys_are="content", rotations=None)

    def as_content(self) -> "KVCache":
        """As :meth:`content`; a cache whose keys are content already, as it is."""
        return self if self.keys_are == "content" else self.content()

    def rotated(self, rotations: tuple[Rotation | None, ...]) -> "KVCache":
        """The same cache with its content keys turned to their positions.

        Args:
            rotations: Per layer, of those positions: ``model.rotary(cache.positions)``.

        Raises:
            RotationError: the keys are turned already.
            CacheLayoutError: a block was written to in place.
        """
        self.require_unchanged()
        if self.keys_are == "cached":
            raise RotationError(
                "these keys are rotated already; rotating them twice would misplace every token",
                hint="call content() first",
            )
        keys = tuple(
            block if rotation is None else rotation.apply(block)
            for block, rotation in zip(self.keys, rotations, strict=True)
        )
        return replace(self, keys=keys, keys_are="cached", rotations=rotations)

    def prefix(self, tokens: int) -> "KVCache":
        """The same cache, as it was after its first ``tokens`` tokens."""
        if not 0 <= tokens <= self.tokens:
            raise CacheLayoutError(
                f"a prefix of {tokens} tokens of a cache that holds {self.tokens}",
                hint="a cache can only be cut shorter",
            )
        if tokens < self.tokens:
            self.require_unpadded("cut")
        self.require_unchanged()
        rotations = self.rotations
        if rotations is not None:
            rotations = once_each(rotations, lambda rotation: rotation.prefix(tokens))
        return replace(
            self,
            keys=tuple(block[:, :, :tokens] for block in self.keys),
            values=tuple(block[:, :, :tokens] for block in self.values),
            positions=self.positions[:, :tokens],
            rotations=rotations,
            hidden=columns.each(self.hidden, lambda gone: gone[..., :tokens]),
        )

    def take(self, index: Int[Tensor, "b t"], positions: Int[Tensor, "b t"]) -> "KVCache":
        """The tokens at ``index``, some perhaps twice, as if they stood at ``positions``.

        Exact for the first tokens, in their order, all moved by as much. Any others were read after
        tokens that are gone now, or at other distances, and the result says so.

        Raises:
            RotationError: the keys are turned to the positions that they have.
            CacheLayoutError: there is no token or no sequence by such a number, or a block was
                written to in place.
        """
        self.require_unchanged()
        if self.keys_are == "cached":
            raise RotationError(
                "cached keys are turned to the positions they have, and cannot stand at others",
                hint="call content() first",
            )
        self.require_unpadded("taken from")
        if len(index) != self.batch or bool(((index < 0) | (index >= self.tokens)).any()):
            numbers = f"{int(index.min())} to {int(index.max())}" if index.numel() else "none"
            raise CacheLayoutError(
                f"tokens {numbers} of {len(index)} sequences, in a cache of {self.tokens} tokens "
                f"and {self.batch} sequences",
                hint="index is (batch, tokens), each counted from 0",
            )
        where = index.to(self.keys[0].device)[:, None, :, None]
        approximate = self.approximate
        if not self._begins_with(index, positions):
            approximate = approximate or "its tokens were read in another place"
        return replace(
            self,
            approximate=approximate,
            keys=tuple(torch.take_along_dim(block, where, dim=2) for block in self.keys),
            values=tuple(torch.take_along_dim(block, where, dim=2) for block in self.values),
            positions=positions,
            hidden=columns.each(
                self.hidden, lambda gone: torch.take_along_dim(gone, where[..., 0], dim=2)
            ),
        )

    def _begins_with(self, index: Int[Tensor, "b t"], positions: Int[Tensor, "b t"]) -> bool:
        """Whether these are this cache's first tokens, as far from one another as they were."""
        first = torch.arange(index.shape[1], device=index.device).expand_as(index)
        if not torch.equal(
            index, first
        ):  # more tokens than there are are not the first ones either
            return False
        moved = positions - self.positions[:, : index.shape[1]].to(positions)
        return bool((moved == moved[:, :1]).all())

    def expand(self, batch: int) -> "KVCache":
        """One sequence's cache, shared by ``batch`` sequences without copying."""
        if self.batch != 1:
            raise CacheLayoutError(
                f"only a batch of 1 can be expanded, not one of {self.batch}",
                hint="expand one sequence's cache before you stack it",
            )
        self.require_unchanged()
        rotations = self.rotations
        if rotations is not None:
            rotations = once_each(rotations, lambda rotation: rotation.expand(batch))
        return replace(
            self,
            keys=tuple(block.expand(batch, -1, -1, -1) for block in self.keys),
            values=tuple(block.expand(batch, -1, -1, -1) for block in self.values),
            positions=self.positions.expand(batch, -1),
            rotations=rotations,
            padding=None if self.padding is None else self.padding.expand(batch),
            hidden=columns.each(self.hidden, lambda gone: gone.expand(batch, -1, -1)),
        )

    def to(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> "KVCache":
        """The same cache in another dtype or on another device."""
        moved = self.map(lambda block: block.to(dtype=dtype, device=device))
        if device is None:
            return moved
        rotations = self.rotations
        if rotations is not None:
            rotations = once_each(rotations, lambda rotation: rotation.to(device))
        return replace(
            moved,
            positions=self.positions.to(device),
            rotations=rotations,
            padding=None if self.padding is None else self.padding.to(device),
            hidden=columns.each(self.hidden, lambda gone: gone.to(device)),
        )

    def map(self, fn: Callable[[Tensor], Tensor]) -> "KVCache":
        """Apply ``fn``, which keeps batch and length, to every block, keys and values alike."""
        self.require_unchanged()
        return replace(
            self,
            keys=tuple(fn(block) for block in self.keys),
            values=tuple(fn(block) for block in self.values),
        )


def _times_written(block: Tensor) -> int:
    """PyTorch's count of in-place writes to a tensor's memory; inference tensors keep none."""
    return 0 if block.is_inference() else block._version


def once_each(
    rotations: tuple[Rotation | None, ...], fn: Callable[[Rotation], Rotation]
) -> tuple[Rotation | None, ...]:
    """Change each distinct table once: layers share them, and should go on sharing."""
    done = {id(rotation): fn(rotation) for rotation in rotations if rotation is not None}
    return tuple(None if rotation is None else done[id(rotation)] for rotation in rotations)
