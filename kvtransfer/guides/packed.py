"""One guide that was prepared once: its tokens, and the cache of them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import ArtifactError, CacheLayoutError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides.graft import Graft
from kvtransfer.guides.maker import Maker
from kvtransfer.hf.fits import check_shapes
from kvtransfer.hf.model import DTYPES, LanguageModel

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prepared:
    """What was prepared: the ids, and keys and values of each."""

    ids: Int[Tensor, " t"]
    cache: KVCache
    """Of one sequence, with cached keys and no tables."""

    def tensors(self) -> dict[str, Tensor]:
        """As they are saved.

        Raises:
            CacheLayoutError: a layer does not see all tokens, which no pack can say.
        """
        self.cache.require_plain("saved in a pack")
        named = {"ids": self.ids, "positions": self.cache.positions[0]}
        for layer, (keys, values) in enumerate(self.cache):
            named |= {f"keys.{layer}": keys, f"values.{layer}": values}
        return named

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], maker: Maker) -> "Prepared":
        """The inverse of :meth:`tensors`.

        Raises:
            ArtifactError: one is missing, or of another shape or dtype than the model's.
        """
        try:
            layers = range(len(maker.spec.layers))
            ids, positions = tensors["ids"], tensors["positions"]
            keys, values = (
                tuple(tensors[f"{kind}.{layer}"] for layer in layers) for kind in ("keys", "values")
            )
            if ids.shape != positions.shape or ids.is_floating_point():
                raise ValueError(f"{tuple(ids.shape)} ids at {tuple(positions.shape)} positions")
            held = KVCache(keys=keys, values=values, positions=positions[None], keys_are="cached")
            check_shapes(maker.spec, held)
            if held.dtype != DTYPES[maker.spec.dtype]:
                raise ValueError(f"{held.dtype}, where config.json says {maker.spec.dtype}")
        except (KeyError, ValueError, RuntimeError, CacheLayoutError) as error:
            raise ArtifactError(
                f"a guide's file is not of {maker.spec.name}: {' '.join(str(error).split())}",
                hint="the pack was put together from several; make it again",
            ) from error
        return cls(ids=ids, cache=held)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Told:
    """What is said of a guide in words."""

    text: str
    made: Mapping[str, Any]
    """How: ``{"how": "own"}``, or ``"mapped"`` with the source and the mapping's settings;
    ``chat`` where the guide is a system message, and the cache is of what the chat template puts
    before the user's words."""

    def head(self) -> dict[str, str]:
        """As it is saved."""
        return {"text": self.text, "made": json.dumps(dict(self.made), ensure_ascii=False)}

    @classmethod
    def of(cls, head: Mapping[str, str]) -> "Told":
        """The inverse of :meth:`head`.

        Raises:
            ArtifactError: something is missing, or not as we write it.
        """
        try:
            made = json.loads(head["made"])
            if made["how"] == "mapped":
                made["source"]
            elif made["how"] != "own":
                raise ValueError(f"made {made['how']!r}")
            return cls(text=head["text"], made=made)
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"the head of a guide's file is malformed: {type(error).__name__}: {error}",
                hint="the file was edited or written by another version; make the pack again",
            ) from error


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedGuide:
    """A guide of a pack. What is said of it, and its numbers, are read when first asked for."""

    name: str
    tokens: int
    maker: Maker
    _tell: Callable[[], Told]
    _read: Callable[[], Prepared]

    @classmethod
    def given(
        cls, name: str, told: Told, prepared: Prepared, *, tokens: int, maker: Maker
    ) -> "PackedGuide":
        """A guide that was just made."""
        return cls(
            name=name, tokens=tokens, maker=maker, _tell=lambda: told, _read=lambda: prepared
        )

    @classmethod
    def read(
        cls,
        name: str,
        *,
        tokens: int,
        maker: Maker,
        tell: Callable[[], Told],
        read: Callable[[], Prepared],
    ) -> "PackedGuide":
        """A guide that ``tell`` and ``read`` give, each called once at most."""
        return cls(name=name, tokens=tokens, maker=maker, _tell=_Once(tell), _read=_Once(read))

    @property
    def text(self) -> str:
        """What the guide says.

        Raises:
            ArtifactError: the file is missing or malformed.
        """
        return self._tell().text

    @property
    def made(self) -> Mapping[str, Any]:
        """How it was made; see :class:`Told`.

        Raises:
            ArtifactError: the file is missing or malformed.
        """
        return self._tell().made

    def tensors(self) -> dict[str, Tensor]:
        """As they are saved."""
        return self.prepared.tensors()

    def head(self) -> dict[str, str]:
        """What is saved beside them."""
        return self._tell().head()

    def __repr__(self) -> str:
        return f"PackedGuide({self.name!r}, {self.tokens} tokens, {self.described})"

    @property
    def described(self) -> str:
        """How it was made, in words."""
        return described(self.made, self.maker.spec.name)

    @property
    def prepared(self) -> Prepared:
        """Ids and cache, mapped into memory.

        Raises:
            ArtifactError: the file is missing, truncated or changed, or of another model.
        """
        return self._read()

    @property
    def ids(self) -> Int[Tensor, " t"]:
        """The exact token ids, an opening (a begin of sequence) that the tokenizer puts first with
        them."""
        return self.prepared.ids

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, from the shapes alone."""
        spec = self.maker.spec
        return self.tokens * spec.numbers_per_token * DTYPES[spec.dtype].itemsize

    def restore(self, model: LanguageModel, *, cast: bool = False) -> KVCache:
        """The cache, ready to be read by ``model``. No forward pass, and on the CPU no copy.

        Its numbers are the guide's file, mapped into memory. A file that is truncated is refused
        here; if it is truncated later, while the cache is in use, the operating system ends the
        process (SIGBUS). No save of ours does that, not even one to the same folder. Where others
        may, go on with a copy: ``cache.map(torch.clone)``.

        Args:
            model: Is to read it.
            cast: Allow a model of another dtype; the cache is rounded to it, and says so.

        Raises:
            IncompatibleModels: the pack is for another model.
            CacheLayoutError: it is in another dtype, or its numbers were written to in place.
            ArtifactError: the file is missing, truncated or changed.
        """
        self.maker.check(model, cast=cast)
        held = self.prepared.cache
        held.require_unchanged()
        moved = held.to(device=model.device)
        note = None
        if moved.dtype != model.dtype:
            note = f"cast from {self.maker.spec.dtype} to {model.spec.dtype}"
            moved = moved.to(dtype=model.dtype)
        return replace(
            moved,
            rotations=model.rotary(moved.positions),
            model=model.spec.identity,
            note=note,
            approximate=self.made.get("approximate"),
        )

    def graft(self, model: LanguageModel, *, batch: int = 1, cast: bool = False) -> Graft:
        """The guide under ``model``, for transformers' ``generate`` or for the evaluator.

        Raises: as :meth:`restore`.
        """
        if batch < 1:
            raise ValueError(f"a batch of {batch}")
        prefix = self.restore(model, cast=cast)
        return Graft(
            model,
            self.text,
            self.ids,
            prefix.expand(batch) if batch > 1 else prefix,
            chat=bool(self.made.get("chat")),
        )

    def plain(self) -> KVCache:
        """The cache with the tables that turned its keys, as a mapping reads it.

        The tables come from the config that the pack carries; no weights are needed.
        """
        held = self.prepared.cache
        held.require_unchanged()
        return replace(
            held,
            rotations=self.maker.rotary()(held.positions),
            model=self.maker.spec.identity,
            approximate=self.made.get("approximate"),
        )


def described(made: Mapping[str, Any], reader: str) -> str:
    """How a guide was made, in words."""
    how = (
        f"own, by {reader}" if made["how"] == "own" else f"mapped from {made['source']} to {reader}"
    )
    return f"{how}, as system message" if made.get("chat") else how


class _Once(Generic[T]):
    """A function that is called once; functools' cache takes long to wrap a hundred of them."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._found: list[T] = []

    def __call__(self) -> T:
        if not self._found:
            self._found.append(self._call())
        return self._found[0]


def whole(ids: Tensor, cache: KVCache) -> Prepared:
    """What is kept of a model's cache of ``ids`` (one sequence): on the CPU, without its tables."""
    kept = cache.to(device="cpu")
    return Prepared(
        ids=ids.cpu(),
        cache=replace(kept, rotations=None, positions=kept.positions.to(torch.long)),
    )
