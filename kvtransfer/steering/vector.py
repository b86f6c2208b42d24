"""A steering vector: what to add to a token's keys and values, in every layer, as a value.

It knows which model's caches it is for, and not what it steers towards.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvtransfer import artifact
from kvtransfer.errors import ArtifactError, IncompatibleModels, SteeringError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.spec import ModelSpec, same_model
from kvtransfer.hf.repository import snapshot, upload
from kvtransfer.steering.card import card

KIND = "cache_vector"
MAKER = "kvtransfer steer extract … --out DIR"

Direction = Float[Tensor, "_h _d"]
"""One layer's: of every KV head, a number a dim."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class CacheVector:
    """What one layer after another adds to the keys and values of a token.

    Keys are content keys: whoever adds them turns them to the token's position first. Vectors of
    one model add, subtract and scale like any others: ``formal - 0.5 * curt``.
    """

    keys: tuple[Direction, ...]
    values: tuple[Direction, ...]
    spec: ModelSpec
    """The model that can read what this was added to."""
    at: int = -1
    """The token of a prompt that it was read off, from the end: -1 is the last."""
    made: Mapping[str, Any]
    """How it was made, in plain data: from how many pairs, or out of which vectors."""
    provenance: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    """What everybody who uses it should know: that its pairs hardly differ, say."""

    def __post_init__(self) -> None:
        if self.at >= 0:
            raise ValueError(f"at counts from a prompt's end: -1 is its last token, not {self.at}")
        check_directions(self.keys, self.values, self.spec)

    def __repr__(self) -> str:
        return (
            f"CacheVector({self.spec.name}, {len(self.keys)} layers, token {self.at}, "
            f"|keys| {self.norms[0]:.3g}, |values| {self.norms[1]:.3g})"
        )

    def __str__(self) -> str:
        return f"CacheVector({self.spec.name})"

    @property
    def identity(self) -> str | None:
        """The model's: weights and settings (:attr:`ModelSpec.identity`)."""
        return self.spec.identity

    @property
    def norms(self) -> tuple[float, float]:
        """Length of the keys and of the values, over all layers."""
        keys, values = (
            torch.cat([block.double().flatten() for block in blocks]).norm().item()
            for blocks in (self.keys, self.values)
        )
        return keys, values

    def __add__(self, other: "CacheVector") -> "CacheVector":
        return self._with(other, "+", torch.add)

    def __sub__(self, other: "CacheVector") -> "CacheVector":
        return self._with(other, "-", torch.sub)

    def __neg__(self) -> "CacheVector":
        return self._map(torch.neg, made={"how": "-", "of": [dict(self.made)]})

    def __mul__(self, factor: float) -> "CacheVector":
        return self._map(
            lambda block: block * factor,
            made={"how": "*", "factor": float(factor), "of": [dict(self.made)]},
        )

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> "CacheVector":
        return self._map(
            lambda block: block / divisor,
            made={"how": "/", "divisor": float(divisor), "of": [dict(self.made)]},
        )

    def random(self, seed: int) -> "CacheVector":
        """A control: a random direction, in every layer as long as this one's keys and values."""
        source = torch.Generator().manual_seed(seed)
        made = {"how": "random", "seed": seed}
        drawn = self._map(
            lambda block: torch.randn(block.shape, generator=source).to(block), made=made
        )
        return drawn.as_long_as(self)

    def as_long_as(self, other: "CacheVector") -> "CacheVector":
        """This direction, in every layer as long as the keys and the values of ``other``.

        Raises:
            IncompatibleModels: the other is another model's.
        """
        made = {"how": "as long as", "of": [dict(self.made), dict(other.made)]}
        return replace(self._with(other, "", _as_long), made=made)

    def check(self, cache: KVCache) -> None:
        """Raise unless this can be added to ``cache``.

        Raises:
            IncompatibleModels: the cache is known to be another model's.
            SteeringError: its layers, heads or widths are not those of the vector.
        """
        if cache.model is not None and self.identity is not None:
            self._require_same(cache.model, "a cache for the model with fingerprint")
        found = [(k.shape[1], k.shape[3], v.shape[1], v.shape[3]) for k, v in cache]
        for index, (have, want) in enumerate(zip(found, self._widths(), strict=False)):
            if have != want:
                raise SteeringError(
                    f"layer {index}: the cache has {_heads(have)}, the vector {_heads(want)}",
                    hint="a vector steers caches of the model that it was read off",
                )
        if len(found) != len(self.keys):
            raise SteeringError(
                f"the cache has {len(found)} layers, the vector {len(self.keys)}",
                hint="a vector steers caches of the model that it was read off",
            )

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the vector as a folder of config, safetensors and card.

        Raises:
            ArtifactError: the place cannot be written, or holds something else.
        """
        place = Path(folder).expanduser()
        refuse_foreign(place)
        tensors = {
            f"{kind}.{index}": block.float()
            for kind, blocks in (("keys", self.keys), ("values", self.values))
            for index, block in enumerate(blocks)
        }
        config = {
            "model": self.spec.to_dict(),
            "at": self.at,
            "made": dict(self.made),
            "notes": list(self.notes),
            "provenance": dict(self.provenance),
        }
        told = card(config, self.norms)
        artifact.save(place, kind=KIND, config=config, tensors=tensors, card=told)

    @classmethod
    def from_pretrained(cls, name: str | Path, *, revision: str | None = None) -> "CacheVector":
        """Load a vector from a folder, or from a repository on the hub.

        Raises:
            ArtifactError: it is missing, malformed, changed, not finite, or of other shapes than
                the model that it says it is for.
        """
        folder = Path(name).expanduser()
        if not folder.is_dir():
            folder = snapshot(str(name), revision=revision, what="steering vector")
        config, tensors = artifact.load(folder, kind=KIND, maker=MAKER)
        where = folder / artifact.CONFIG
        artifact.require(config, ("model", "at", "made", "notes", "provenance"), where)
        for field, kind in {"at": int, "made": dict, "notes": list, "provenance": dict}.items():
            if type(config[field]) is not kind or (field == "at" and config[field] >= 0):
                raise ArtifactError(
                    f"{where} has {field} {repr(config[field])[:40]}",
                    hint="the file was edited; copy or make the vector again",
                )
        spec = ModelSpec.from_dict(config["model"])
        wanted = {f"{kind}.{i}" for kind in ("keys", "values") for i in range(len(spec.layers))}
        if differing := sorted(wanted ^ tensors.keys()):
            raise ArtifactError(
                f"{folder / artifact.TENSORS} has {len(tensors)} tensors, {spec.name} needs "
                f"{len(wanted)}: {differing[0]} is on one side only",
                hint="copy or make the vector again",
            )
        try:
            return cls(
                keys=tuple(tensors[f"keys.{i}"].float() for i in range(len(spec.layers))),
                values=tuple(tensors[f"values.{i}"].float() for i in range(len(spec.layers))),
                spec=spec,
                at=config["at"],
                made=config["made"],
                provenance=config["provenance"],
                notes=tuple(map(str, config["notes"])),
            )
        except SteeringError as error:
            raise ArtifactError(
                f"{folder}: {error.message}", hint="copy or make the vector again"
            ) from error

    def push_to_hub(self, name: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the vector to a repository on the hub, which is made where there is none.

        Returns:
            The address of the commit.

        Raises:
            ArtifactError: the hub cannot be reached, or refuses.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(Path(folder) / "vector")
            return upload(Path(folder) / "vector", name, private=private, token=token)

    def _widths(self) -> list[tuple[int, int, int, int]]:
        return [(*k.shape, *v.shape) for k, v in zip(self.keys, self.values, strict=True)]

    def _require_same(self, identity: str, what: str) -> None:
        if not same_model(identity, str(self.identity)):
            raise IncompatibleModels(
                f"{what} {identity}, and this vector is for {self.spec.name}, with {self.identity}",
                hint="read the pairs with that model: kvtransfer steer extract MODEL PAIRS",
            )

    def _with(
        self, other: "CacheVector", how: str, fn: Callable[[Tensor, Tensor], Tensor]
    ) -> "CacheVector":
        if not isinstance(other, CacheVector):
            return NotImplemented
        self._require_same(str(other.identity), f"a vector for {other.spec.name}, with fingerprint")
        if self.at != other.at:
            raise SteeringError(
                f"one vector was read off token {self.at} of its prompts, the other off {other.at}",
                hint="extract both at the same token",
            )
        return replace(
            self,
            keys=tuple(map(fn, self.keys, other.keys)),
            values=tuple(map(fn, self.values, other.values)),
            made={"how": how, "of": [dict(self.made), dict(other.made)]},
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
        )

    def _map(self, fn: Callable[[Tensor], Tensor], *, made: Mapping[str, Any]) -> "CacheVector":
        return replace(
            self, keys=tuple(map(fn, self.keys)), values=tuple(map(fn, self.values)), made=made
        )


def refuse_foreign(folder: Path) -> None:
    """Raise ArtifactError if saving to ``folder`` would destroy something else than a vector."""
    artifact.refuse_foreign(folder)
    if (folder / artifact.CONFIG).exists():
        try:
            artifact.read_config(folder, kind=KIND)
        except ArtifactError as error:
            raise ArtifactError(
                f"{folder} exists and holds no steering vector that this version knows",
                hint="name a new or empty folder",
            ) from error


def check_directions(
    keys: tuple[Direction, ...], values: tuple[Direction, ...], spec: ModelSpec
) -> None:
    """Raise SteeringError unless keys and values are shaped as those of ``spec``, and finite."""
    if not len(keys) == len(values) == len(spec.layers):
        raise SteeringError(
            f"a vector with keys of {len(keys)} layers and values of {len(values)}, for "
            f"{spec.name}, which has {len(spec.layers)}",
            hint="one block a layer",
        )
    for index, (k, v, layer) in enumerate(zip(keys, values, spec.layers, strict=True)):
        have = (*k.shape, *v.shape)
        want = (layer.kv_heads, layer.key_dim, layer.kv_heads, layer.value_dim)
        if have != want:
            raise SteeringError(
                f"layer {index}: the vector has {_heads(have)}, {spec.name} {_heads(want)}",
                hint="blocks are (kv_heads, head_dim)",
            )
        if not all(bool(torch.isfinite(block).all()) for block in (k, v)):
            raise SteeringError(
                f"layer {index}: the vector is not finite there",
                hint="it was divided by 0, or scaled by a number that is none",
            )


def _as_long(block: Direction, other: Direction) -> Direction:
    long: Tensor = other.norm() / block.norm().clamp_min(1e-30)
    return block * long


def _heads(widths: tuple[int, ...]) -> str:
    return f"keys of {widths[0]} × {widths[1]} and values of {widths[2]} × {widths[3]}"
