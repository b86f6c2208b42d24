"""What a position does to a model's keys, measured: the self-test of every rotation.

Tokens are read alone, each a sequence of one, once at position 0 and once at position p. With one
key the softmax is 1, so attention returns the same at both, every layer sees the same hidden
state, and K(p) = R(p) R(0)⁻¹ K(0) holds exactly, layer by layer, while V must not change. Nothing
needs to be known of the model's code for that.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvtransfer.errors import UnsupportedModel
from kvtransfer.geometry.rotation import Rotation
from kvtransfer.geometry.spec import LayerSpec, ModelSpec
from kvtransfer.hf.call import call, takes
from kvtransfer.hf.rotary import Rotary, rotary_of
from kvtransfer.hf.turns import TOLERANCE, LayerReading, Turn, error_of

TOKENS = 32
"""How many tokens are read, evenly spaced in the vocabulary."""

FARTHEST = 4096
"""The position p is below this, however long the model's context is."""


def self_test(module: PreTrainedModel, spec: ModelSpec) -> tuple[ModelSpec, Rotary]:
    """Measure the model; the spec with its gaps filled in, and rotations that have been confirmed.

    Where the config leaves open which dims rotate together, or whether a layer rotates at all,
    the measurement says it. Where the config is clear, the model must do as it says.

    Raises:
        UnsupportedModel: a layer's heads are not those of the config, or its keys or values do
            something else than the config and the rotary module say; the layer and the size of
            the disagreement are named.
    """
    measurable = spec.positions in ("rotary", "unknown", "none")
    if measurable and not takes(module.base_model, "position_ids"):
        raise UnsupportedModel(
            f"{spec.name} ({spec.architecture}) takes no position_ids, so what positions do to its "
            "keys cannot be measured",
            hint="an architecture without them can be read once its positions are known by name",
        )
    here = _read(module, spec, 0)
    _require_causal(module, spec, here)
    if not measurable:
        return spec, rotary_of(module, spec)
    position = _far(module, spec)
    readings = tuple(
        LayerReading(keys=k, values=v, keys_there=k_there, values_there=v_there)
        for (k, v), (k_there, v_there) in zip(here, _read(module, spec, position), strict=True)
    )
    tolerance = TOLERANCE.get(module.dtype, TOLERANCE[torch.bfloat16])
    turns = tuple(
        reading.turn(layer.rotation, tolerance)
        for reading, layer in zip(readings, spec.layers, strict=True)
    )
    _require_still_values(spec, readings, position, tolerance)
    spec = _filled_in(spec, turns)
    rotary = rotary_of(module, spec)
    _confirm(spec, rotary, readings, turns, position, tolerance)
    return spec, rotary


def _read(
    module: PreTrainedModel, spec: ModelSpec, position: int, *, more: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values per layer of tokens at ``position``, with ``more`` tokens after each."""
    embeddings: Any = module.get_input_embeddings()
    size = int(embeddings.num_embeddings)
    first = torch.linspace(0, size - 1, min(TOKENS, size)).long().to(module.device)
    ids = torch.stack([first.roll(i) for i in range(1 + more)], dim=1)
    positions = torch.arange(position, position + 1 + more, device=ids.device).expand_as(ids)
    cache = DynamicCache()
    try:
        with torch.no_grad():
            call(module.base_model, ids, cache, positions, torch.ones_like(ids))
    except Exception as error:  # whatever the model's code raises
        raise UnsupportedModel(
            f"{spec.name} ({spec.architecture}) cannot read a token into a cache: "
            f"{str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}",
            hint="kvtransfer reads decoder-only models that take a DynamicCache",
        ) from error
    layers: Any = cache.layers
    kept = [(layer.keys, layer.values) for layer in layers]
    if len(kept) != len(spec.layers):
        raise UnsupportedModel(
            f"{spec.name} ({spec.architecture}) keeps a cache of {len(kept)} layers; its config "
            f"describes {len(spec.layers)}",
            hint="kvtransfer reads models with one cache layer per decoder layer",
        )
    for index, (block, layer) in enumerate(zip(kept, spec.layers, strict=True)):
        _require_shapes(spec, index, block, layer, tuple(ids.shape))
    return kept


def _require_causal(
    module: PreTrainedModel, spec: ModelSpec, alone: list[tuple[Tensor, Tensor]]
) -> None:
    """Raise UnsupportedModel if a token's keys or values change when another one follows it."""
    tolerance = TOLERANCE.get(module.dtype, TOLERANCE[torch.bfloat16])
    for index, (one, followed) in enumerate(
        zip(alone, _read(module, spec, 0, more=1), strict=True)
    ):
        error = max(error_of(b[:, :, :1], a) for a, b in zip(one, followed, strict=True))
        if error > tolerance:
            raise UnsupportedModel(
                f"a token's keys and values in layer {index} of {spec.name} ({spec.architecture}) "
                f"change by {error:.2g} of the largest when another token follows it",
                hint="its attention sees tokens that come later, so a prefix has no cache of its "
                "own",
            )


def _require_shapes(
    spec: ModelSpec, index: int, block: tuple[Any, Any], layer: LayerSpec, ids: tuple[int, ...]
) -> None:
    rows, tokens = ids
    wanted = [(rows, layer.kv_heads, tokens, dim) for dim in (layer.key_dim, layer.value_dim)]
    found = [tuple(each.shape) if isinstance(each, Tensor) else None for each in block]
    if found != wanted:
        raise UnsupportedModel(
            f"layer {index} of {spec.name} ({spec.architecture}) keeps keys of shape {found[0]} "
            f"and values of shape {found[1]}; its config describes {wanted[0]} and {wanted[1]}",
            hint="kvtransfer does not know how this architecture lays out its cache",
        )


def _far(module: PreTrainedModel, spec: ModelSpec) -> int:
    """The farthest position that the model takes and at which its tables are still those of 0."""
    limit = getattr(module.config.get_text_config(decoder=True), "max_position_embeddings", None)
    limits = [limit] if isinstance(limit, int) else []
    limits += [
        layer.rotation.fixed_up_to
        for layer in spec.layers
        if layer.rotation is not None and layer.rotation.fixed_up_to is not None
    ]
    return max(0, min([FARTHEST, *limits]) - 1)


def _require_still_values(
    spec: ModelSpec, readings: tuple[LayerReading, ...], position: int, tolerance: float
) -> None:
    for index, reading in enumerate(readings):
        if (error := error_of(reading.values, reading.values_there)) > tolerance:
            raise UnsupportedModel(
                f"the values of layer {index} of {spec.name} ({spec.architecture}) change by "
                f"{error:.2g} of the largest from position 0 to {position}",
                hint="positions sit inside this model's hidden states, where no rotation takes "
                "them out",
            )


def _filled_in(spec: ModelSpec, turns: tuple[Turn, ...]) -> ModelSpec:
    """The spec with what its config left open taken from the measurement."""
    layers = []
    for index, (layer, turn) in enumerate(zip(spec.layers, turns, strict=True)):
        believed = layer.rotation
        if believed is not None and believed.pairing == "unknown":
            if turn.pairing == "unknown":
                raise UnsupportedModel(
                    f"the keys of layer {index} of {spec.name} ({spec.architecture}) do {turn}: "
                    f"the best leaves {turn.error:.2g} of the largest key",
                    hint="a norm with weights after the rotation does this; such keys cannot be "
                    "freed of their positions",
                )
            measured = (
                None
                if turn.pairing is None
                else replace(believed, pairing=turn.pairing, rotary_dim=turn.rotary_dim)
            )
            layer = replace(layer, rotation=measured)
        layers.append(layer)
    rotates = any(layer.rotation is not None for layer in layers)
    return replace(spec, layers=tuple(layers), positions="rotary" if rotates else "none")


def _confirm(
    spec: ModelSpec,
    rotary: Rotary,
    readings: tuple[LayerReading, ...],
    turns: tuple[Turn, ...],
    position: int,
    tolerance: float,
) -> None:
    """Raise UnsupportedModel unless the rotations are what the model does, in every layer."""
    device = readings[0].keys.device
    starts, ends = (rotary(torch.tensor([[p]], device=device)) for p in (0, position))
    for index, (reading, start, end) in enumerate(zip(readings, starts, ends, strict=True)):
        expected = _carried(reading.keys, start, end)
        if (error := error_of(expected, reading.keys_there)) > tolerance:
            believed = spec.layers[index].rotation
            raise UnsupportedModel(
                f"layer {index} of {spec.name} ({spec.architecture}) should turn its keys by "
                f"{believed or 'no rotation'}; measured: {turns[index]}. They disagree by "
                f"{error:.2g} of the largest key at position {position}",
                hint="this model does not do what its config and rotary module say; kvtransfer "
                "would misread it",
            )


def _carried(keys: Tensor, start: Rotation | None, end: Rotation | None) -> Tensor:
    return keys if start is None or end is None else end.apply(start.undo(keys))
