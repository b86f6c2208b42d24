"""A fitted mapping: one model's cache in, another model's cache out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer import artifact
from kvtransfer.errors import ArtifactError, CacheLayoutError, IncompatibleModels
from kvtransfer.fitting import storage
from kvtransfer.fitting.affine import Map
from kvtransfer.fitting.features import KINDS, Features, Kind, read_by, state_rows
from kvtransfer.geometry.cache import Block, KVCache
from kvtransfer.geometry.compat import Verdict, compare
from kvtransfer.geometry.rotation import Rotation
from kvtransfer.geometry.spec import ModelSpec, same_model, same_tokens
from kvtransfer.hf.rotary import config_from_dict, rotary_from_config
from kvtransfer.hf.start import Start, State

KIND = "kv_mapping"

SHAPES = ("layers", "kv_heads", "head_dim", "rope", "cache_format")
"""Topics on which a model must agree with a mapping's end, whatever its weights."""

Rotate = Callable[[Int[Tensor, "b t"]], tuple[Rotation | None, ...]]
"""Positions to one rotation per layer, as a model's own rotary module makes them."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerMap:
    """What makes one target layer: the source layers it reads, and a map for each kind."""

    sources: tuple[int, ...]
    keys: Map
    values: Map


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KVMapping:
    """Takes a cache of ``source`` to a cache that ``target`` can read. Directional.

    Per target layer, an affine map reads the content keys (or the values) of all heads of some
    source layers and writes those of all its own heads (Heo et al., arXiv:2608.03893, §3).
    """

    source: ModelSpec
    target: ModelSpec
    layers: tuple[LayerMap, ...]
    """One a target layer; with a start, one for each layer after it."""
    features: Features = "same"
    """What the maps read of their source layers."""
    start: int | None = None
    """Target layers that are run for real: layers 0 to ``start`` are exact, and the maps of the
    others read the state that enters layer ``start`` too. None for a map that asks nothing of the
    target."""
    rotate: Rotate
    """The target's rotations."""
    target_config: Mapping[str, Any]
    """The target's transformers config, from which a saved mapping gets its rotations back."""
    shuffled: tuple[LayerMap, ...] = ()
    """The same fit on permuted rows: a control that should not work."""
    settings: Mapping[str, Any]
    quality: Mapping[str, Any]
    provenance: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    """What every report on this mapping has to say: that somebody insisted on using it."""

    def __repr__(self) -> str:
        return (
            f"KVMapping({self.source.name} → {self.target.name}, {len(self.layers)} layers, "
            f"{self.parameters:,} parameters)"
        )

    @property
    def parameters(self) -> int:
        """Numbers in the maps, the control's left out."""
        return sum(layer.keys.parameters + layer.values.parameters for layer in self.layers)

    def nbytes(self, dtype: storage.Dtype = "float32") -> int:
        """Bytes of the maps stored in ``dtype``, the control's left out."""
        return sum(
            storage.nbytes(fitted, dtype)
            for layer in self.layers
            for fitted in (layer.keys, layer.values)
        )

    def rounded(self, dtype: storage.Dtype) -> "KVMapping":
        """The mapping as it comes back from being stored in ``dtype``; the control stays."""
        reads = storage.Reads(
            self.source,
            self.features,
            self.start,
            state_width(config_from_dict(self.target_config)),
        )

        def one(fitted: Map, kind: Kind, layer: int, sources: tuple[int, ...]) -> Map:
            return storage.unpack(
                "map",
                storage.pack("map", fitted, dtype),
                reads.count(kind, sources),
                storage.written(self.target, kind, layer),
                self._heads(layer),
            )

        layers = tuple(
            LayerMap(
                each.sources,
                keys=one(each.keys, "keys", i, each.sources),
                values=one(each.values, "values", i, each.sources),
            )
            for i, each in enumerate(self.layers, self.first)
        )
        return replace(self, layers=layers)

    def __call__(
        self, cache: KVCache, *, start: Start | None = None, shuffled: bool = False
    ) -> KVCache:
        """The target's cache of the tokens that ``cache`` holds.

        Undo the source's rotation, map, apply the target's at the same positions.

        Args:
            cache: As the source made it, or with content keys.
            start: What the target has of the same tokens after its first layers, where the
                mapping has a start; see :func:`kvtransfer.hf.start.begin`.
            shuffled: Use the control's maps; a start stays as it is.

        Raises:
            IncompatibleModels: the cache is known to be another model's.
            CacheLayoutError: it is not shaped as the source's, or the target has other tokens and
                they were not aligned; see :func:`kvtransfer.hf.aligned.read_aligned`.
        """
        self._check(cache)
        self._check_start(cache, start)
        content = cache.as_content()
        maps = self.shuffled if shuffled else self.layers
        if not maps:
            raise ArtifactError(
                "this mapping was saved without its shuffled control",
                hint="fit it again, or leave the condition 'shuffled' out",
            )
        state = None if start is None else state_rows(start.state)
        first = () if start is None else range(len(start.cache))
        begun = None if start is None else start.cache.to(dtype=content.dtype).content()
        keys, values = (
            tuple(getattr(begun, kind)[i] for i in first)
            + tuple(
                _apply(getattr(m, kind), self.rows(content, m, kind, state), self._heads(i))
                for i, m in enumerate(maps, len(first))
            )
            for kind in KINDS
        )
        mapped = KVCache(
            keys=keys,
            values=values,
            positions=cache.positions,
            keys_are="content",
            model=self.target.identity,
            note="; ".join(filter(None, (cache.note, *self.notes))) or None,
        )
        return mapped.rotated(self.rotate(cache.positions))

    def rows(
        self, content: KVCache, layer: LayerMap, kind: Kind, state: State | None = None
    ) -> Float[Tensor, "b t p"]:
        """What the maps of ``layer`` read: features of all heads of its source layers.

        ``state`` is the target's, as :func:`kvtransfer.fitting.features.state_rows` makes it.
        """
        kinds = read_by(self.features, kind)
        blocks = [getattr(content, each)[s] for s in layer.sources for each in kinds]
        parts = [rearrange(block, "b h t d -> b t (h d)") for block in blocks]
        return torch.cat(parts if state is None else [*parts, state.to(parts[0])], dim=-1)

    def check_ends(self, source: ModelSpec, target: ModelSpec) -> None:
        """Raise IncompatibleModels unless this mapping goes from ``source`` to ``target``."""
        for end, mine, given in self._ends(source, target):
            if same_model(str(mine.identity), str(given.identity)):
                continue
            reverse = self.source.weights == target.weights and (
                self.target.weights == source.weights
            )
            raise IncompatibleModels(
                f"this mapping goes {self.source.name} → {self.target.name}; asked for "
                f"{source.name} → {target.name} (the {end}'s weights are {mine.identity} in the "
                f"mapping, {given.identity} in the model)",
                hint="a mapping has one direction: fit the reverse one, or swap the models"
                if reverse
                else "fit a mapping for this pair: kvtransfer fit SOURCE TARGET --out DIR",
            )

    def insisting_on(self, source: ModelSpec, target: ModelSpec) -> "KVMapping":
        """This mapping between other weights of the same shape, with a note that says so.

        For a fine-tuned or re-quantised sibling of a model that a mapping was fitted on. Nothing
        promises that it works; measure it.

        Raises:
            IncompatibleModels: layers, heads, widths or RoPE are not those of the mapping's ends.
        """
        notes = list(self.notes)
        for end, mine, given in self._ends(source, target):
            for finding in compare(mine, given).findings:
                if finding.topic in SHAPES and finding.verdict is not Verdict.SAME:
                    raise IncompatibleModels(
                        f"the {end} of this mapping has {finding.topic} {finding.source}, "
                        f"{given.name} has {finding.target}",
                        hint="only weights may differ; fit a mapping for this pair",
                    )
            if not same_model(str(mine.identity), str(given.identity)):
                notes.append(
                    f"the {end}'s weights are {given.identity}, and the mapping was fitted on "
                    f"{mine.identity} ({mine.name}): used on request"
                )
        return replace(self, source=source, target=target, notes=tuple(notes))

    def _ends(
        self, source: ModelSpec, target: ModelSpec
    ) -> tuple[tuple[str, ModelSpec, ModelSpec], ...]:
        return (("source", self.source, source), ("target", self.target, target))

    def save_pretrained(self, folder: str | Path, *, dtype: storage.Dtype = "float32") -> None:
        """Write the mapping as a folder of config, safetensors and card.

        Args:
            folder: Where to; an older artifact there is replaced.
            dtype: How the maps are stored; ``int8`` keeps one scale a column.

        Raises:
            ArtifactError: the place cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for group, maps in (("maps", self.layers), ("shuffled", self.shuffled)):
            for index, layer in enumerate(maps):
                for kind, each in (("keys", layer.keys), ("values", layer.values)):
                    tensors |= storage.pack(f"{group}.{index}.{kind}", each, dtype)
        config = {
            "source": self.source.to_dict(),
            "target": self.target.to_dict(),
            "target_config": dict(self.target_config),
            "sources": [list(layer.sources) for layer in self.layers],
            "features": self.features,
            "start": self.start,
            "shuffled": bool(self.shuffled),
            "settings": dict(self.settings) | {"storage": dtype},
            "quality": dict(self.quality),
            "provenance": dict(self.provenance),
        }
        artifact.save(
            Path(folder), kind=KIND, config=config, tensors=tensors, card=storage.card(config)
        )

    @classmethod
    def from_pretrained(cls, name: str | Path) -> "KVMapping":
        """Load a mapping from a folder, or by the name of one that kvtransfer ships.

        Raises:
            ArtifactError: it is missing, malformed, changed, not finite, or inconsistent.
        """
        folder = storage.find(name)
        config, tensors = artifact.load(folder, kind=KIND)
        artifact.require(
            config,
            (
                "source",
                "target",
                "target_config",
                "sources",
                "shuffled",
                "settings",
                "quality",
                "provenance",
            ),
            folder / artifact.CONFIG,
        )
        source = ModelSpec.from_dict(config["source"])
        target = ModelSpec.from_dict(config["target"])
        target_config = config_from_dict(config["target_config"])
        start = storage.checked_start(config, target)
        first = 0 if start is None else start + 1
        sources = storage.checked_sources(config["sources"], source, target, first)
        features = storage.checked_features(config)
        reads = storage.Reads(source, features, start, state_width(target_config))
        groups = ("maps", "shuffled") if config["shuffled"] else ("maps",)
        depth = target_config.get_text_config(decoder=True).num_hidden_layers
        if depth != len(target.layers):
            raise ArtifactError(
                f"config.json's 'target_config' describes {depth} layers, its 'target' "
                f"{len(target.layers)}",
                hint="the file was edited; make the mapping again",
            )
        maps = {
            group: tuple(
                LayerMap(
                    sources=each,
                    **{
                        kind: storage.unpack(
                            f"{group}.{i}.{kind}",
                            tensors,
                            reads.count(kind, each),
                            storage.written(target, kind, first + i),
                            target.layers[first + i].kv_heads,
                        )
                        for kind in KINDS
                    },
                )
                for i, each in enumerate(sources)
            )
            for group in groups
        }
        return cls(
            source=source,
            target=target,
            layers=maps["maps"],
            shuffled=maps.get("shuffled", ()),
            features=features,
            start=start,
            rotate=rotary_from_config(target_config, target),
            target_config=config["target_config"],
            settings=config["settings"],
            quality=config["quality"],
            provenance=config["provenance"],
        )

    def _check_start(self, cache: KVCache, start: Start | None) -> None:
        if (start is None) != (self.start is None):
            if start is None:
                raise CacheLayoutError(
                    f"this mapping asks for what {self.target.name} has of the prefix after "
                    f"{self.start} of its layers, and that was not given",
                    hint="transfer(mapping, source, target, ids) sees to it, or give "
                    f"start=begin(target, ids, layers={self.start})",
                )
            raise CacheLayoutError(
                f"this mapping has no start, and one of {len(start.cache) - 1} layers was given",
                hint="leave start out",
            )
        if start is None:
            return
        if len(start.cache) != self.first:
            raise CacheLayoutError(
                f"this mapping starts with {self.start} layers, and one of "
                f"{len(start.cache) - 1} was given",
                hint=f"begin(target, ids, layers={self.start})",
            )
        if not same_model(str(start.cache.model), str(self.target.identity)):
            raise IncompatibleModels(
                f"the start is of a model with fingerprint {start.cache.model}; the mapping goes "
                f"to {self.target.name} ({self.target.identity})",
                hint="begin with the mapping's own target",
            )
        if start.cache.positions.shape != cache.positions.shape or bool(
            (start.cache.positions != cache.positions.to(start.cache.positions)).any()
        ):
            raise CacheLayoutError(
                f"the start holds {start.cache.tokens} tokens at other positions than the "
                f"cache's {cache.tokens}",
                hint="begin with the same ids as the source read",
            )

    @property
    def first(self) -> int:
        """The first target layer that is mapped; those before it are exact."""
        return 0 if self.start is None else self.start + 1

    def _heads(self, layer: int) -> int:
        return self.target.layers[layer].kv_heads

    def _check(self, cache: KVCache) -> None:
        cache.require_unchanged()
        if cache.model is not None and not same_model(cache.model, str(self.source.identity)):
            raise IncompatibleModels(
                f"this cache was made by a model with fingerprint {cache.model}; the mapping "
                f"reads caches of {self.source.name} ({self.source.identity})",
                hint="use the mapping for the model that made the cache",
            )
        found = [(*keys.shape[1::2], *values.shape[1::2]) for keys, values in cache]
        wanted = [
            (layer.kv_heads, layer.key_dim, layer.kv_heads, layer.value_dim)
            for layer in self.source.layers
        ]
        if found != wanted:
            raise CacheLayoutError(
                f"this cache has {len(found)} layers of (key heads, key dim, value heads, "
                f"value dim) {sorted(set(found))}, "
                f"{self.source.name} has {len(wanted)} of {sorted(set(wanted))}",
                hint="a mapping reads the cache of its own source model only",
            )
        if cache.model is None:
            raise IncompatibleModels(
                f"this cache does not say which model made it; the mapping reads caches of "
                f"{self.source.name} ({self.source.weights})",
                hint="adopt(model, cache, ids) looks whether it is that model's",
            )
        # What was aligned has content keys: cached ones would stand at positions not their own.
        if cache.keys_are == "cached" and not same_tokens(self.source, self.target):
            raise CacheLayoutError(
                f"this cache has a token for each of {self.source.name}'s, and {self.target.name} "
                "cuts text into others",
                hint="transfer(mapping, source, target, ids) aligns them, with the target's ids",
            )


def state_width(config: Any) -> int:
    """Numbers in a row of the residual stream of the model that a config describes."""
    return int(config.get_text_config(decoder=True).hidden_size)


def _apply(fitted: Map, rows: Float[Tensor, "b t p"], heads: int) -> Block:
    # Maps are applied in float32 at least: a bfloat16 sum over a thousand features is no map.
    wide = torch.promote_types(rows.dtype, torch.float32)
    mapped = rearrange(fitted(rows.to(wide)), "b t (h d) -> b h t d", h=heads)
    return mapped.to(rows.dtype)
