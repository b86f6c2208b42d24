"""A fitted mapping: one model's cache in, another model's cache out.

This module knows neither how maps are fitted, nor how their tensors lie on the disk, nor a model's
weights: what it has of its two ends is their specs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer import artifact
from kvtransfer.errors import ArtifactError
from kvtransfer.fitting import ends, storage
from kvtransfer.fitting.affine import Map
from kvtransfer.fitting.features import KINDS, Features, Kind, late, read_by, state_rows
from kvtransfer.fitting.layer_map import LayerMap
from kvtransfer.geometry.cache import Block, KVCache
from kvtransfer.geometry.rotation import Rotation
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.hf.part import State
from kvtransfer.hf.rotary import config_from_dict, rotary_from_config
from kvtransfer.hf.start import Start, state_width

KIND = "kv_mapping"

Rotate = Callable[[Int[Tensor, "b t"]], tuple[Rotation | None, ...]]
"""Positions to one rotation per layer, as a model's own rotary module makes them."""


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
    others read the state that enters layer ``start`` too; the first token is exact in all layers.
    None for a map that asks nothing of the target."""
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
        return sum(layer.parameters for layer in self.layers)

    @property
    def first(self) -> int:
        """The first target layer that is mapped; those before it are exact."""
        return 0 if self.start is None else self.start + 1

    def nbytes(self, dtype: storage.Dtype = "float32") -> int:
        """Bytes of the maps stored in ``dtype``, the control's left out."""
        return sum(layer.nbytes(dtype) for layer in self.layers)

    @property
    def reads(self) -> storage.Reads:
        """What the maps read, in numbers."""
        width = state_width(config_from_dict(self.target_config))
        return storage.Reads(self.source, self.features, self.start, width)

    def rounded(self, dtype: storage.Dtype) -> "KVMapping":
        """The mapping as it comes back from being stored in ``dtype``; the control stays."""
        reads = self.reads
        layers = tuple(
            LayerMap.unpack(
                "map", each.pack("map", dtype), each.sources, each.before, reads, self.target, i
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
        ends.check_cache(cache, self.source, self.target)
        ends.check_start(start, cache, self.target, self.start)
        content = cache.as_content()
        maps = self.shuffled if shuffled else self.layers
        if not maps:
            raise ArtifactError(
                "this mapping was saved without its shuffled control",
                hint="fit it again, or leave the condition 'shuffled' out",
            )
        state = None if start is None else state_rows(start.state)
        keys, values = (
            [
                _apply(getattr(m, kind), self.rows(content, m, kind, state), self._heads(i))
                for i, m in enumerate(maps, self.first)
            ]
            for kind in KINDS
        )
        return self.assembled(cache, keys, values, start)

    def assembled(
        self, cache: KVCache, keys: list[Block], values: list[Block], start: Start | None
    ) -> KVCache:
        """The target's cache out of mapped layers: what is exact put before them, keys turned.

        Args:
            cache: What was mapped.
            keys: Content keys of each mapped layer.
            values: Values of each.
            start: As in a call.
        """
        if start is not None:
            begun, first = (
                each.to(dtype=cache.dtype).as_content() for each in (start.cache, start.first)
            )
            keys, values = (
                [*exact, *map(_with_first, mapped, known[len(exact) :])]
                for exact, mapped, known in (
                    (begun.keys, keys, first.keys),
                    (begun.values, values, first.values),
                )
            )
        made = KVCache(
            keys=tuple(keys),
            values=tuple(values),
            positions=cache.positions,
            keys_are="content",
            model=self.target.identity,
            note="; ".join(filter(None, (cache.note, *self.notes))) or None,
            approximate="; ".join(
                filter(None, (cache.approximate, f"mapped from {self.source.name}"))
            ),
        )
        return made.rotated(self.rotate(cache.positions))

    def rows(
        self, content: KVCache, layer: LayerMap, kind: Kind, state: State | None = None
    ) -> Float[Tensor, "b t p"]:
        """What the maps of ``layer`` read: features of all heads of its source layers, of the
        token itself and then, of some, of the token before.

        ``state`` is the target's, as :func:`kvtransfer.fitting.features.state_rows` makes it.
        """
        kinds = read_by(self.features, kind)
        blocks = [getattr(content, each)[s] for s in layer.sources for each in kinds]
        blocks += [late(getattr(content, each)[s]) for s in layer.before for each in kinds]
        parts = [rearrange(block, "b h t d -> b t (h d)") for block in blocks]
        return torch.cat(parts if state is None else [*parts, state.to(parts[0])], dim=-1)

    def check_ends(self, source: ModelSpec, target: ModelSpec) -> None:
        """Raise IncompatibleModels unless this mapping goes from ``source`` to ``target``."""
        ends.check_ends((self.source, self.target), (source, target))

    def insisting_on(self, source: ModelSpec, target: ModelSpec) -> "KVMapping":
        """This mapping between other weights of the same shape, with a note that says so.

        For a fine-tuned or re-quantised sibling of a model that a mapping was fitted on. Nothing
        promises that it works; measure it.

        Raises:
            IncompatibleModels: layers, heads, widths or RoPE are not those of the mapping's ends.
        """
        notes = ends.insisted((self.source, self.target), (source, target))
        return replace(self, source=source, target=target, notes=self.notes + notes)

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
                tensors |= layer.pack(f"{group}.{index}", dtype)
        config = {
            "source": self.source.to_dict(),
            "target": self.target.to_dict(),
            "target_config": dict(self.target_config),
            "sources": [list(layer.sources) for layer in self.layers],
            "before": [list(layer.before) for layer in self.layers],
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
        sources = storage.checked_sources(config, source, target, first)
        before = storage.checked_before(config, source, target, first)
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
                LayerMap.unpack(f"{group}.{i}", tensors, *read, reads, target, first + i)
                for i, read in enumerate(zip(sources, before, strict=True))
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

    def _heads(self, layer: int) -> int:
        return self.target.layers[layer].kv_heads


def _with_first(mapped: Block, first: Block) -> Block:
    """A mapped layer with its first token as the target has it."""
    return torch.cat((first.to(mapped), mapped[:, :, 1:]), dim=2)


def _apply(fitted: Map, rows: Float[Tensor, "b t p"], heads: int) -> Block:
    # Maps are applied in float32 at least: a bfloat16 sum over a thousand features is no map.
    wide = torch.promote_types(rows.dtype, torch.float32)
    mapped = rearrange(fitted(rows.to(wide)), "b t (h d) -> b h t d", h=heads)
    return mapped.to(rows.dtype)
