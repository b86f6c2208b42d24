"""A language model as this package uses one: weights, tokenizer, spec and rotations together."""

import io
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from kvtransfer.errors import (
    DeviceError,
    IncompatibleModels,
    ModelNotFound,
    UnsupportedModel,
    require,
)
from kvtransfer.geometry.spec import KEEPS, ModelSpec
from kvtransfer.hf.fingerprint import adapters, fingerprint
from kvtransfer.hf.hub import unreachable
from kvtransfer.hf.locate import locate
from kvtransfer.hf.probe import self_test
from kvtransfer.hf.rotary import Rotary
from kvtransfer.hf.spec import first_line, load_config, load_tokenizer, spec_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What ``--dtype`` offers."""

DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways to spread a model over the devices that there are."""


@dataclass(frozen=True, slots=True, eq=False)
class LanguageModel:
    """A decoder that is ready to read and be read."""

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec
    rotary: Rotary
    adapters: tuple[Any, ...] = ()
    """Which adapters acted when the model was wrapped; its identity is of these."""

    def require_as_wrapped(self) -> None:
        """Raise IncompatibleModels if the model computes otherwise now than when it was wrapped.

        Seen are adapters that were switched on or off, and dropout. Weights that were changed in
        place are not: wrap the model again.
        """
        if self.module.training:
            raise IncompatibleModels(
                f"{self.spec.name} is in training mode, where dropout changes every cache",
                hint="call module.eval()",
            )
        if adapters(self.module) != self.adapters:
            raise IncompatibleModels(
                f"other adapters act in {self.spec.name} than when it was wrapped",
                hint="wrap it again, and read its texts again",
            )

    def __repr__(self) -> str:
        return f"LanguageModel({self.spec.name}, {self.spec.dtype}, {self.device})"

    @property
    def device(self) -> torch.device:
        """Where the model reads its input."""
        return torch.device(self.module.device)

    @property
    def dtype(self) -> torch.dtype:
        """What its cache is made of."""
        dtype = self.module.dtype
        assert isinstance(dtype, torch.dtype)  # transformers leaves it untyped
        return dtype

    @property
    def config(self) -> dict[str, Any]:
        """Its transformers config as plain data, without the place that it was loaded from."""
        described: dict[str, Any] = self.module.config.to_dict()
        return {name: value for name, value in described.items() if name != "_name_or_path"}

    @property
    def revision(self) -> str | None:
        """The commit on the hub that it was loaded from, where it was."""
        return getattr(self.module.config, "_commit_hash", None)

    @property
    def max_positions(self) -> int | None:
        """Positions that its config allows; None where it sets no limit.

        Where RoPE is scaled by a factor, and the config does not name the original length apart,
        its figure is the one before scaling.
        """
        config = self.module.config.get_text_config(decoder=True)
        limit = getattr(config, "max_position_embeddings", None)
        if not isinstance(limit, int):
            return None
        scalings = [dict(layer.rotation.scaling) for layer in self.spec.layers if layer.rotation]
        factors = [
            1.0 if "original_max_position_embeddings" in scaling else scaling.get("factor") or 1.0
            for scaling in scalings
        ]
        return int(limit * max(1.0, *factors)) if factors else limit

    @property
    def opening(self) -> Int[Tensor, " o"]:
        """What its tokenizer puts before every text: nothing, or mostly a begin of sequence.

        Models that were trained behind one are lost without it.
        """
        return opening_of(self.tokenizer)

    def opened(self, ids: Int[Tensor, " t"]) -> Int[Tensor, " u"]:
        """``ids`` with the opening before them, unless they begin with it: templates write it."""
        opening = self.opening
        begun = torch.equal(ids[: len(opening)], opening)
        return ids if begun else torch.cat((opening, ids))

    def encode(self, text: str) -> Int[Tensor, " t"]:
        """The token ids of ``text``, with no special tokens added."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.long)

    def decode(self, ids: Int[Tensor, " t"] | Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out."""
        tokens = ids if isinstance(ids, Tensor) else list(ids)
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def require_model(model: object, what: str = "model") -> None:
    """Raise WrongKind unless ``model`` is a LanguageModel: transformers' own has to be wrapped."""
    require(
        what,
        model,
        LanguageModel,
        "a LanguageModel",
        hint="load(name) makes one, and wrap(module, tokenizer) of a model that is loaded",
    )


def opening_of(tokenizer: PreTrainedTokenizerBase) -> Int[Tensor, " o"]:
    """What a tokenizer puts before every text."""
    whole, bare = (
        tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False)
    )
    starts = range(len(whole) - len(bare) + 1)
    before = next((i for i in starts if whole[i : i + len(bare)] == bare), 0)
    return torch.tensor(whole[:before], dtype=torch.long)


def load(
    name: str,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    device_map: str | None = None,
) -> LanguageModel:
    """Load the model that ``name`` stands for: a folder, ``.gguf`` file, hub id or zoo alias.

    Args:
        name: What to load.
        dtype: One of :data:`DTYPES`; None for the dtype that the weights were saved in.
        device: A torch device.
        device_map: How to spread its layers over devices instead: one of :data:`DEVICE_MAPS`, which
            leave that to accelerate, or a device for all of them.

    Raises:
        ModelNotFound: there is no such model, or its files are broken.
        UnsupportedModel: its cache holds no keys and values per token.
        DeviceError: the device is absent or lacks the dtype, or there is no such device map, or
            no accelerate to see to it.
    """
    place = usable_device(device, dtype)
    spread = {} if device_map is None else {"device_map": _usable_map(device_map, dtype)}
    location = locate(name)
    config = load_config(location)
    tokenizer = load_tokenizer(location)
    spec = spec_of(config, name=name, tokenizer=tokenizer)
    require_kv(spec)
    wanted: Any = DTYPES[dtype] if dtype else "auto"
    # The GGUF converter draws its progress bar past every setting that would silence it.
    silence = redirect_stderr(io.StringIO()) if location.gguf_file else nullcontext()
    try:
        with silence:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                location.path,
                dtype=wanted,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # we refuse them ourselves, by name
                local_files_only=location.on_hub and unreachable(),
                **location.keywords,
                **spread,
            )
    # safetensors, torch and transformers each raise their own kinds for broken or missing files.
    except Exception as error:
        raise ModelNotFound(
            f"the weights of {name} cannot be loaded: {first_line(error)}",
            hint="the files may be missing or truncated; download or save the model again",
        ) from error
    module, found = loaded
    _require_whole(name, found)
    module = module.eval()
    return wrap(module if spread else module.to(place), tokenizer, spec)


def wrap(
    module: Any, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec | None = None
) -> LanguageModel:
    """Wrap a model that is loaded already, and measure its rotation.

    A peft model is taken with the adapters that are active now; wrap it again when they change.

    Raises:
        UnsupportedModel: its cache holds no keys and values per token, or positions do something
            else to them than its config says.
    """
    if hasattr(module, "get_base_model"):  # a peft model around a transformers one
        if module.active_peft_config.is_prompt_learning:
            raise UnsupportedModel(
                f"{module.active_peft_config.peft_type} puts tokens of its own before every text",
                hint="kvtransfer reads adapters that change weights; wrap the base model",
            )
        module = module.get_base_model()
    if spec is None:
        name = module.config.name_or_path or type(module).__name__
        spec = spec_of(module.config, name=name, tokenizer=tokenizer)
        require_kv(spec)
    dtype = str(module.dtype).removeprefix("torch.")
    if module.training:
        raise UnsupportedModel(
            f"{spec.name} is in training mode, where dropout changes every cache",
            hint="call module.eval() first",
        )
    spec, rotary = self_test(module, spec)
    return LanguageModel(
        module,
        tokenizer,
        spec.seen_with(weights=fingerprint(module), dtype=dtype),
        rotary,
        adapters(module),
    )


def _usable_map(device_map: str, dtype: str | None) -> str:
    """The device map, once it is known to be one."""
    if find_spec("accelerate") is None:
        raise DeviceError(
            f"device map {device_map!r} is seen to by accelerate, which is not installed",
            hint="pip install 'accelerate>=1.1', or name one --device",
        )
    if device_map not in DEVICE_MAPS:
        try:
            usable_device(device_map, dtype)
        except DeviceError as error:
            raise DeviceError(
                f"no device map {device_map!r}: {error.message}",
                hint=f"one of {', '.join(DEVICE_MAPS)}, or a device",
            ) from error
    return device_map


def _require_whole(name: str, found: Mapping[str, Any]) -> None:
    """Raise ModelNotFound where transformers filled a gap with random numbers."""
    hint = "config.json and the weights are of different models, or one of them is damaged"
    for key, saved, built in sorted(found["mismatched_keys"]):
        raise ModelNotFound(
            f"{key} of {name} has shape {tuple(saved)} in the file, {tuple(built)} by config.json",
            hint=hint,
        )
    if missing := sorted(found["missing_keys"]):
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ModelNotFound(f"the weights of {name} lack {missing[0]}{more}", hint=hint)


def require_kv(spec: ModelSpec) -> None:
    """Raise UnsupportedModel unless every layer keeps one key and one value per token and head."""
    for index, layer in enumerate(spec.layers):
        if not layer.has_kv:
            raise UnsupportedModel(
                f"layer {index} of {spec.name} ({spec.architecture}) is {layer.kind}: it keeps "
                f"{KEEPS[layer.kind]}",
                hint="`kvtransfer check` shows each layer's cache format",
            )


def usable_device(device: str, dtype: str | None) -> torch.device:
    """The device, once a product in ``dtype`` has been computed on it.

    Raises:
        DeviceError: there is no such device, or it lacks the dtype.
    """
    if dtype is not None and dtype not in DTYPES:
        raise DeviceError(f"no dtype {dtype!r}", hint=f"one of {', '.join(DTYPES)}")
    try:
        place = torch.device(device)
        probe = torch.ones(2, 2, dtype=DTYPES[dtype or "float32"], device=place)
        (probe @ probe).sum().item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise DeviceError(
            f"device {device!r} cannot compute in {dtype or 'float32'}: "
            f"{str(error).strip().splitlines()[0]}",
            hint="choose another --device or --dtype; cpu with float32 always works",
        ) from error
    return place
