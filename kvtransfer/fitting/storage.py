"""How a mapping lies on the disk: names of tensors, int8 columns, the card, and what ships."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from kvtransfer.errors import ArtifactError
from kvtransfer.fitting.affine import Affine, Corrected, LowRank, Map, PerHead
from kvtransfer.fitting.features import GROUPS, Features, Kind, read_by, widths
from kvtransfer.fitting.network import Mlp
from kvtransfer.geometry.spec import ModelSpec, same_tokens

Dtype = Literal["float32", "bfloat16", "int8"]

PACKAGE = Path(__file__).parent.parent
SHIPPED = (PACKAGE / "shipped_mappings", PACKAGE.parent / "mappings")
"""Where shipped mappings lie: in an installed wheel, and in a source checkout."""


def find(name: str | Path) -> Path:
    """The folder of a mapping: a path, or the name of a shipped one.

    Raises:
        ArtifactError: there is none.
    """
    path = Path(name).expanduser()
    with suppress(OSError):  # no path can be as long as some names
        if path.is_dir():
            return path
        if path.name == str(name):
            for root in SHIPPED:
                if (root / path / "config.json").is_file():
                    return root / path
    shipped = sorted(p.parent.name for root in SHIPPED for p in root.glob("*/config.json"))
    raise ArtifactError(
        f"no mapping at {name}",
        hint=f"fit one with `kvtransfer fit`, or name one that ships: {', '.join(shipped)}",
    )


@dataclass(frozen=True, slots=True)
class Reads:
    """What the maps of a mapping read, in numbers."""

    source: ModelSpec
    features: Features
    start: int | None
    state_width: int

    def count(self, kind: Kind, sources: tuple[int, ...]) -> int:
        """Features of one map."""
        state = 0 if self.start is None else self.state_width
        kinds = read_by(self.features, kind)
        return state + sum(widths(self.source, each)[s] for s in sources for each in kinds)


def written(target: ModelSpec, kind: Kind, layer: int) -> int:
    """Numbers that the map of one target layer writes."""
    return widths(target, kind)[layer]


def pack(prefix: str, fitted: Map, dtype: Dtype) -> dict[str, Tensor]:
    """The tensors of one map, by name."""
    if isinstance(fitted, Corrected):
        return pack(f"{prefix}.base", fitted.base, dtype) | pack(
            f"{prefix}.correction", fitted.correction, dtype
        )
    tensors = {}
    for field in fields(fitted):
        tensor: Tensor = getattr(fitted, field.name)
        name = f"{prefix}.{field.name}"
        if not tensor.is_floating_point():
            tensors[name] = tensor.to(torch.int32)
        elif tensor.ndim == 1:
            tensors[name] = tensor.float()
        elif dtype != "int8":
            tensors[name] = tensor.to(getattr(torch, dtype))
        else:
            tensors[name], scale, rows = to_int8(tensor)
            tensors[f"{name}.scale"] = scale.squeeze(-2).float()
            tensors[f"{name}.rows"] = rows.squeeze(-1).float()
    return tensors


def to_int8(
    tensor: Float[Tensor, "*h p q"],
) -> tuple[Int8[Tensor, "*h p q"], Float[Tensor, "*h 1 q"], Float[Tensor, "*h p 1"]]:
    """A matrix as integers, and what its columns and its rows are to be multiplied by."""
    # A feature that hardly varies has large weights; on one scale with those of one that varies
    # much, the latter's rounding would drown what the former says.
    rows = tensor.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    scale = (tensor / rows).abs().amax(-2, keepdim=True).clamp_min(1e-30) / 127
    return (tensor / rows / scale).round().to(torch.int8), scale, rows


def unpack(prefix: str, tensors: Mapping[str, Tensor], p: int, q: int, heads: int) -> Map:
    """One map of p features to q outputs, in float32, with its shape checked.

    Raises:
        ArtifactError: a tensor is missing or misshaped.
    """
    if f"{prefix}.correction.bias" in tensors:
        base, correction = (
            unpack(f"{prefix}.{part}", tensors, p, q, heads) for part in ("base", "correction")
        )
        if isinstance(base, Corrected) or not isinstance(correction, LowRank):
            raise ArtifactError(
                f"{prefix} corrects a {type(base).__name__} by a {type(correction).__name__}; a "
                "correction is of low rank, and there is one",
                hint="the file was edited; copy or make it again",
            )
        return Corrected(base, correction)
    bias = _take(tensors, f"{prefix}.bias", (q,))
    if f"{prefix}.reads" in tensors:
        reads = _take_indices(tensors, f"{prefix}.reads", heads, p)
        shape = (heads, reads.shape[1], q // heads)
        return PerHead(reads, _take(tensors, f"{prefix}.weight", shape), bias)
    if f"{prefix}.inner" in tensors:
        return Mlp.from_tensors(
            {field.name: _take(tensors, f"{prefix}.{field.name}", None) for field in fields(Mlp)},
            p,
            q,
        )
    if f"{prefix}.weight" in tensors:
        return Affine(_take(tensors, f"{prefix}.weight", (p, q)), bias)
    down = _take(tensors, f"{prefix}.down", (p, None))
    return LowRank(down, _take(tensors, f"{prefix}.up", (down.shape[1], q)), bias)


def nbytes(fitted: Map, dtype: Dtype) -> int:
    """Bytes of the tensors of one map, stored in ``dtype``."""
    return sum(each.numel() * each.element_size() for each in pack("", fitted, dtype).values())


def checked_sources(
    config: Mapping[str, Any], source: ModelSpec, target: ModelSpec, first: int = 0
) -> tuple[tuple[int, ...], ...]:
    """The source layers of each target layer from ``first`` on, refused unless they exist.

    Raises:
        ArtifactError: they do not.
    """
    return _checked_layers("sources", config["sources"], source, target, first, least=1)


def checked_before(
    config: Mapping[str, Any], source: ModelSpec, target: ModelSpec, first: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Likewise those read at the token before; a config without them was written before there were.

    Raises:
        ArtifactError: they do not exist.
    """
    none: list[list[int]] = [[] for _ in target.layers[first:]]
    return _checked_layers("before", config.get("before", none), source, target, first, least=0)


def _checked_layers(
    name: str, listed: Any, source: ModelSpec, target: ModelSpec, first: int, *, least: int
) -> tuple[tuple[int, ...], ...]:
    good = (
        isinstance(listed, list)
        and len(listed) == len(target.layers) - first
        and all(
            isinstance(each, list)
            and len(each) >= least
            and all(type(s) is int and 0 <= s < len(source.layers) for s in each)
            for each in listed
        )
    )
    if not good:
        raise ArtifactError(
            f"config.json's {name!r} is no table of {len(target.layers) - first} target layers "
            f"over {len(source.layers)} source layers: {str(listed)[:80]}",
            hint="the file was edited; make the mapping again",
        )
    return tuple(tuple(each) for each in listed)


def checked_features(config: Mapping[str, Any]) -> Features:
    """What the maps of a config read; one that does not say it was written before there was more.

    Raises:
        ArtifactError: it names something else.
    """
    named = config.get("features", "same")
    for features in GROUPS:
        if features == named:
            return features
    raise ArtifactError(
        f"config.json's 'features' is {str(named)[:40]!r}, not one of {', '.join(GROUPS)}",
        hint="the file was edited, or written by a later version",
    )


def checked_start(config: Mapping[str, Any], target: ModelSpec) -> int | None:
    """How many target layers a mapping begins with; one that does not say has none.

    Raises:
        ArtifactError: the target has no such layer.
    """
    named = config.get("start")
    if named is None:
        return None
    if isinstance(named, int) and not isinstance(named, bool) and 0 <= named < len(target.layers):
        return named
    raise ArtifactError(
        f"config.json's 'start' is {str(named)[:40]!r}, and the target has "
        f"{len(target.layers)} layers",
        hint="the file was edited, or written by a later version",
    )


def card(config: Mapping[str, Any]) -> str:
    """The README of a saved mapping."""
    source, target = config["source"], config["target"]
    quality, settings = config["quality"], config["settings"]
    kind = "trained" if settings.get("solver") == "mlp" else "linear"
    # What the target must read too, or in other tokens, is more than a cache can give.
    plain = config.get("start") is None and same_tokens(
        ModelSpec.from_dict(source), ModelSpec.from_dict(target)
    )
    lines = [
        f"# {source['name']} → {target['name']}",
        "",
        f"A {kind} mapping that takes the KV cache of `{source['name']}` "
        f"({len(source['layers'])} layers) to one that `{target['name']}` "
        f"({len(target['layers'])} layers) can read. One direction only.",
        "",
        "```python",
        "from kvtransfer import KVMapping",
        *([] if plain else ["from kvtransfer.fitting.transfer import transfer"]),
        "",
        'mapping = KVMapping.from_pretrained("this folder")',
        "target_cache = mapping(source_cache)"
        if plain
        else "target_cache = transfer(mapping, source, target, ids)  # the target's ids",
        "```",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in settings.items()),
        *(f"| {name} | {value} |" for name, value in quality.items()),
        f"| source weights | `{source['weights']}` |",
        f"| target weights | `{target['weights']}` |",
        f"| made by | `{config['provenance'].get('command', '')}` |",
        f"| commit | {config['provenance'].get('commit', '')} |",
        "",
        "R² is held out, and predicts no behaviour: run `kvtransfer eval` before you rely on it.",
        "",
    ]
    return "\n".join(lines)


def _take(tensors: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...] | None) -> Tensor:
    """A tensor in float32; its shape is the caller's to check where none is given."""
    if name not in tensors:
        raise ArtifactError(f"the mapping lacks the tensor {name}", hint="copy or make it again")
    tensor = tensors[name]
    asked = (None,) * tensor.ndim if shape is None else shape
    wanted = tuple(
        found if size is None else size
        for size, found in zip(asked, (*tensor.shape, *asked), strict=False)
    )
    if tuple(tensor.shape) != wanted:
        raise ArtifactError(
            f"{name} has shape {tuple(tensor.shape)}, the specs ask for {wanted}",
            hint="the file belongs to another mapping; copy or make it again",
        )
    if tensor.dtype == torch.int8 and tensor.ndim > 1:
        scale = _take(tensors, f"{name}.scale", (*tensor.shape[:-2], tensor.shape[-1]))
        wide = tensor.float() * scale.unsqueeze(-2)
        if f"{name}.rows" not in tensors:  # as mappings were written before there was such a scale
            return wide
        return wide * _take(tensors, f"{name}.rows", tuple(tensor.shape[:-1])).unsqueeze(-1)
    if not tensor.is_floating_point():
        raise ArtifactError(
            f"{name} is {tensor.dtype}; maps are stored in float32, bfloat16 or int8",
            hint="the file was edited; copy or make it again",
        )
    return tensor.float()


def _take_indices(tensors: Mapping[str, Tensor], name: str, heads: int, p: int) -> Tensor:
    """Which of p features each head reads."""
    found = tensors[name]
    good = found.dtype == torch.int32 and found.ndim == 2 and len(found) == heads
    if not good or bool(((found < 0) | (found >= p)).any()):
        raise ArtifactError(
            f"{name} is {found.dtype} of shape {tuple(found.shape)}, and {heads} heads choose "
            f"among {p} features",
            hint="the file was edited; copy or make it again",
        )
    return found.long()
