"""How a mapping lies on the disk: names of tensors, int8 columns, the card, and what ships."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvtransfer.errors import ArtifactError
from kvtransfer.fitting.affine import Affine, LowRank, Map
from kvtransfer.fitting.features import GROUPS, Features, Kind, read_by, widths
from kvtransfer.geometry.spec import ModelSpec

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


def pack(prefix: str, fitted: Map, dtype: Dtype) -> dict[str, Tensor]:
    """The tensors of one map, by name."""
    matrices = (
        {"weight": fitted.weight}
        if isinstance(fitted, Affine)
        else {"down": fitted.down, "up": fitted.up}
    )
    tensors = {f"{prefix}.bias": fitted.bias.float()}
    for name, matrix in matrices.items():
        if dtype != "int8":
            tensors[f"{prefix}.{name}"] = matrix.to(getattr(torch, dtype))
            continue
        scale = matrix.abs().amax(0).clamp_min(1e-30) / 127
        tensors[f"{prefix}.{name}"] = (matrix / scale).round().to(torch.int8)
        tensors[f"{prefix}.{name}.scale"] = scale.float()
    return tensors


def unpack(
    prefix: str,
    kind: Kind,
    tensors: Mapping[str, Tensor],
    source: ModelSpec,
    target: ModelSpec,
    layer: int,
    sources: tuple[int, ...],
    features: Features,
) -> Map:
    """One map, in float32, with its shape checked against both specs.

    Raises:
        ArtifactError: a tensor is missing or misshaped.
    """
    p = sum(widths(source, each)[s] for s in sources for each in read_by(features, kind))
    q = widths(target, kind)[layer]
    bias = _take(tensors, f"{prefix}.bias", (q,))
    if f"{prefix}.weight" in tensors:
        return Affine(_take(tensors, f"{prefix}.weight", (p, q)), bias)
    down = _take(tensors, f"{prefix}.down", (p, None))
    return LowRank(down, _take(tensors, f"{prefix}.up", (down.shape[1], q)), bias)


def checked_sources(
    listed: Any, source: ModelSpec, target: ModelSpec
) -> tuple[tuple[int, ...], ...]:
    """The layer table of a config, refused unless it names layers that exist.

    Raises:
        ArtifactError: it does not.
    """
    good = (
        isinstance(listed, list)
        and len(listed) == len(target.layers)
        and all(
            isinstance(each, list)
            and each
            and all(isinstance(s, int) and 0 <= s < len(source.layers) for s in each)
            for each in listed
        )
    )
    if not good:
        raise ArtifactError(
            f"config.json's 'sources' is no table of {len(target.layers)} target layers over "
            f"{len(source.layers)} source layers: {str(listed)[:80]}",
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


def card(config: Mapping[str, Any]) -> str:
    """The README of a saved mapping."""
    source, target = config["source"], config["target"]
    quality, settings = config["quality"], config["settings"]
    lines = [
        f"# {source['name']} → {target['name']}",
        "",
        f"A linear mapping that takes the KV cache of `{source['name']}` "
        f"({len(source['layers'])} layers) to one that `{target['name']}` "
        f"({len(target['layers'])} layers) can read. One direction only.",
        "",
        "```python",
        "from kvtransfer import KVMapping",
        "",
        'mapping = KVMapping.from_pretrained("this folder")',
        "target_cache = mapping(source_cache)",
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


def _take(tensors: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...]) -> Tensor:
    if name not in tensors:
        raise ArtifactError(f"the mapping lacks the tensor {name}", hint="copy or make it again")
    tensor = tensors[name]
    wanted = tuple(
        found if size is None else size
        for size, found in zip(shape, (*tensor.shape, *shape), strict=False)
    )
    if tuple(tensor.shape) != wanted:
        raise ArtifactError(
            f"{name} has shape {tuple(tensor.shape)}, the specs ask for {wanted}",
            hint="the file belongs to another mapping; copy or make it again",
        )
    if tensor.dtype == torch.int8 and tensor.ndim == 2:
        return tensor.float() * _take(tensors, f"{name}.scale", (tensor.shape[1],))
    if not tensor.is_floating_point():
        raise ArtifactError(
            f"{name} is {tensor.dtype}; maps are stored in float32, bfloat16 or int8",
            hint="the file was edited; copy or make it again",
        )
    return tensor.float()
