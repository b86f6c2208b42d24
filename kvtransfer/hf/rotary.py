"""The rotations that a model's own rotary module emits. Nothing is rebuilt from theta."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from kvtransfer.errors import ArtifactError, UnsupportedModel
from kvtransfer.geometry.rotation import Rotation
from kvtransfer.geometry.spec import ModelSpec, RotationSpec
from kvtransfer.hf.architectures import BACKWARDS
from kvtransfer.hf.layers import rotary_words

SINE_FIRST = frozenset({"CodeGenRotaryEmbedding", "GPTJRotaryEmbedding"})
"""Rotary modules that answer (sin, cos)."""


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Positions to one rotation per layer; layers of one kind share theirs."""

    module: nn.Module | None
    """The model's ``rotary_emb``; None for a model without RoPE."""
    layers: tuple[tuple[str, RotationSpec] | None, ...]
    """Per layer, the word by which the module knows it, and what its config says of it."""
    backwards: bool = False
    """Whether the model turns its keys the other way than its tables say."""

    def __call__(self, positions: Int[Tensor, "b t"]) -> tuple[Rotation | None, ...]:
        """The rotation of each layer at ``positions``; None for a layer without RoPE.

        Where the table depends on the length (dynamic, longrope), it is the one for the largest of
        ``positions``, whatever the module was asked for before.

        Raises:
            UnsupportedModel: it is not known which dims rotate together, or the module answers in
                a way that nobody here has seen.
        """
        made: dict[tuple[str, RotationSpec], Rotation] = {}
        for layer in self.layers:
            if layer is not None and layer not in made:
                made[layer] = self._emit(positions, *layer)
        return tuple(None if layer is None else made[layer] for layer in self.layers)

    def _emit(self, positions: Tensor, word: str, spec: RotationSpec) -> Rotation:
        if self.module is None or spec.pairing == "unknown":
            raise UnsupportedModel(
                f"no rotation convention is known for this model's layers ({spec})",
                hint="kvtransfer must know which dims rotate together to undo a rotation",
            )
        if spec.fixed_up_to is not None:
            self._ask(torch.zeros_like(positions[:1, :1]), word)  # a dynamic table shrinks again
        cos, sin = self._ask(positions, word)
        if self.backwards:
            sin = -sin
        return Rotation(
            _per_pair(cos, spec.rotary_dim), _per_pair(sin, spec.rotary_dim), spec.pairing
        )

    def _ask(self, positions: Tensor, word: str) -> tuple[Tensor, Tensor]:
        """The module's cosines and sines."""
        assert self.module is not None
        # The module casts its tables to the dtype of what it is given: ask for full precision.
        like = torch.zeros(1, dtype=torch.float32, device=positions.device)
        keywords = (
            {"layer_type": word}
            if "layer_type" in inspect.signature(self.module.forward).parameters
            else {}
        )
        with torch.no_grad():
            answer = self.module(like, positions, **keywords)
        if isinstance(answer, Tensor) and answer.is_complex():  # Llama 4
            return answer.real, answer.imag
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise UnsupportedModel(
                f"{type(self.module).__name__} answers with {type(answer).__name__}, not with "
                "cosines and sines",
                hint="this architecture lays its rotation out in a way that kvtransfer does not "
                "know",
            )
        cos, sin = answer
        # GPT-J and CodeGen give the sine first.
        return (sin, cos) if type(self.module).__name__ in SINE_FIRST else (cos, sin)


def _per_pair(table: Tensor, rotary_dim: int) -> Tensor:
    """One number per rotated pair, from a table that may say each of them twice."""
    pairs = rotary_dim // 2
    if table.shape[-1] == pairs:
        return table
    if table.shape[-1] == rotary_dim:
        if torch.equal(table[..., :pairs], table[..., pairs:]):
            return table[..., :pairs].contiguous()
        if torch.equal(table[..., 0::2], table[..., 1::2]):
            return table[..., 0::2].contiguous()
    raise UnsupportedModel(
        f"the rotary module emits {table.shape[-1]} numbers a token where the config asks for "
        f"{rotary_dim} rotated dims",
        hint="this architecture lays its rotation out in a way that kvtransfer does not know",
    )


def rotary_of(model: PreTrainedModel, spec: ModelSpec) -> Rotary:
    """The rotations of a loaded model, from its own module.

    Raises:
        UnsupportedModel: the spec has rotated layers and the model no single rotary module.
    """
    config = model.config.get_text_config(decoder=True)
    return _rotary(_find(model), config, spec)


def rotary_from_config(config: PreTrainedConfig, spec: ModelSpec) -> Rotary:
    """The same without weights: the architecture names the module, the config fills it.

    Raises:
        UnsupportedModel: as :func:`rotary_of`.
    """
    with torch.device("meta"):
        found = _find(AutoModelForCausalLM.from_config(config))
    text = config.get_text_config(decoder=True)
    return _rotary(None if found is None else type(found)(config=text), text, spec)


def _rotary(module: nn.Module | None, config: Any, spec: ModelSpec) -> Rotary:
    if module is None and any(layer.rotation is not None for layer in spec.layers):
        raise UnsupportedModel(
            f"{spec.name} ({spec.architecture}) has RoPE but no rotary module to ask for it",
            hint="architectures that rotate inside their attention are not supported",
        )
    words = rotary_words(config, len(spec.layers))
    return Rotary(
        module,
        tuple(
            None if layer.rotation is None else (word, layer.rotation)
            for word, layer in zip(words, spec.layers, strict=True)
        ),
        backwards=spec.architecture in BACKWARDS,
    )


def _find(model: nn.Module) -> nn.Module | None:
    decoders = (
        part
        for name, part in model.named_modules()
        if name.endswith("rotary_emb") and "vision" not in name and "visual" not in name
    )
    return next(decoders, None)


def config_from_dict(described: Any) -> PreTrainedConfig:
    """A config from the plain data that ``config.to_dict()`` gave.

    Raises:
        ArtifactError: this transformers cannot make sense of it.
    """
    try:
        return AutoConfig.for_model(**described)
    except Exception as error:  # configs validate themselves, each with errors of its own
        raise ArtifactError(
            f"a saved model config cannot be read: {' '.join(str(error).split())}",
            hint="use the transformers version that wrote it, or make the artifact again",
        ) from error
