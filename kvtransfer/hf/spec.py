"""Read a model's spec from its config and tokenizer. No weights."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from kvtransfer.errors import ModelNotFound, UnsupportedModel
from kvtransfer.geometry.spec import (
    Kind,
    LayerSpec,
    ModelSpec,
    Pairing,
    PositionScheme,
    RotationSpec,
)
from kvtransfer.hf.hub import unreachable
from kvtransfer.hf.locate import Location, locate

KINDS: Mapping[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "mamba": "linear",
    "mamba2": "linear",
    "recurrent": "linear",
    "conv": "linear",
    "moe": "none",
    "mlp": "none",
}
"""What transformers' ``layer_types`` keep. A word that is not here is refused by name."""

STATE_ONLY = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"})
"""Architectures without any attention layer."""

LEARNED = frozenset({"gpt2", "opt", "gpt_bigcode", "gpt_neo", "biogpt", "xglm", "openai-gpt"})
"""Architectures whose positions are added to the embedding, and so sit inside K and V."""

ALIBI = frozenset({"bloom", "mpt"})
"""Architectures that add positions to the attention scores; their keys carry none."""

INTERLEAVED = frozenset({"cohere", "cohere2", "glm", "glm4", "gptj", "llama4_text", "helium"})
"""Architectures that rotate dims 2i and 2i + 1 together."""

# fmt: off
HALF = frozenset({
    "arcee", "falcon", "gemma", "gemma2", "gemma3_text", "gpt_neox", "gpt_oss", "granite",
    "granitemoe", "llama", "ministral", "ministral3", "mistral", "mixtral", "nemotron", "olmo",
    "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
})
# fmt: on
"""Architectures that rotate dims i and i + r/2 together. One in neither set is ``unknown``."""


def read_spec(name: str) -> ModelSpec:
    """The spec of the model that ``name`` stands for, from its config and tokenizer alone.

    Raises:
        ModelNotFound: there is no such model, or no network to fetch its config with.
        UnsupportedModel: its config describes something else than a decoder.
    """
    location = locate(name)
    config = load_config(location)
    return spec_of(config, name=name, tokenizer=_try_tokenizer(location))


def load_config(location: Location) -> PreTrainedConfig:
    """The config at ``location``; a cached hub config needs no network.

    Raises:
        ModelNotFound: there is none, it cannot be fetched, or this transformers cannot read it.
    """
    for local in _attempts(location):
        try:
            return cast(
                PreTrainedConfig,
                AutoConfig.from_pretrained(
                    location.path, local_files_only=local, **location.keywords
                ),
            )
        except Exception as error:  # configs validate themselves, each with errors of its own
            last = error
    raise ModelNotFound(
        f"no config for {location.name}: {first_line(last)}",
        hint="check the name; a hub id needs the network or an earlier download"
        if location.on_hub
        else "its config.json is broken, or needs another version of transformers",
    ) from last


def load_tokenizer(location: Location) -> PreTrainedTokenizerBase:
    """The tokenizer at ``location``.

    Raises:
        ModelNotFound: there is none.
    """
    for local in _attempts(location):
        try:
            return cast(
                PreTrainedTokenizerBase,
                AutoTokenizer.from_pretrained(
                    location.path, local_files_only=local, **location.keywords
                ),
            )
        # The tokenizers library raises bare Exceptions for broken files.
        except Exception as error:
            last = error
    raise ModelNotFound(
        f"no tokenizer for {location.name}: {first_line(last)}",
        hint="save the tokenizer beside the model",
    ) from last


def _attempts(location: Location) -> Iterator[bool]:
    """Whether to look at local files only: first so, and then not, where that can help."""
    yield True
    if location.on_hub and not unreachable():
        yield False


def spec_of(
    config: PreTrainedConfig, *, name: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> ModelSpec:
    """The spec that a config describes.

    Raises:
        UnsupportedModel: the config is an encoder's, an encoder-decoder's, or lacks what a
            decoder needs.
    """
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name} ({config.model_type}) is an encoder-decoder",
            hint="kvtransfer reads decoder-only models: their cache is a prefix",
        )
    text = config.get_text_config(decoder=True)
    try:
        layers = _layers(text)
        return ModelSpec(
            name=name,
            architecture=text.model_type,
            layers=layers,
            dtype=str(config.dtype or text.dtype or "float32").removeprefix("torch."),
            positions=_positions(text, layers),
            tokenizer=None if tokenizer is None else tokenizer_digest(tokenizer),
        )
    except (AttributeError, TypeError, ValueError, ZeroDivisionError, KeyError) as error:
        raise UnsupportedModel(
            f"{name} ({config.model_type}): its config does not describe a decoder's cache: "
            f"{first_line(error)}",
            hint="kvtransfer reads decoder-only language models",
        ) from error


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of everything that decides which ids a text becomes (specials aside)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        described: Any = sorted(tokenizer.get_vocab().items())
    else:
        whole = json.loads(backend.to_str())
        described = [whole[key] for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")]
    text = json.dumps(described, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _try_tokenizer(location: Location) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(location)
    except ModelNotFound:
        return None  # a config without a tokenizer can still be compared, but for that topic


def _layers(config: Any) -> tuple[LayerSpec, ...]:
    count: int = config.num_hidden_layers
    if config.model_type in STATE_ONLY:
        empty = LayerSpec(kind="linear", kv_heads=0, key_dim=0, value_dim=0)
        return (empty,) * count
    heads: int = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        kv_heads = 1
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "kv_lora_rank", None):  # DeepSeek: keys and values share one latent
        latent = LayerSpec(
            kind="latent",
            kv_heads=1,
            key_dim=config.kv_lora_rank,
            value_dim=config.qk_rope_head_dim,
            rotation=_rotation(config, "full_attention", config.qk_rope_head_dim),
        )
        return (latent,) * count
    words = _layer_words(config, count)
    return tuple(
        LayerSpec(
            kind=kind,
            kv_heads=kv_heads,
            key_dim=width,
            value_dim=width,
            window=_window(config, kind),
            rotation=None if _without_rope(config, index, word) else _rotation(config, word, width),
        )
        if (kind := _kind(word)) in ("full", "sliding", "chunked")
        else LayerSpec(kind=kind, kv_heads=0, key_dim=0, value_dim=0)
        for index, word in enumerate(words)
    )


def _layer_words(config: Any, count: int) -> list[str]:
    words = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if words:
        if len(words) != count:
            raise ValueError(f"{len(words)} layer types for {count} layers")
        return list(words)
    sliding = getattr(config, "sliding_window", None)
    if sliding and getattr(config, "use_sliding_window", True):
        return ["sliding_attention"] * count
    return ["full_attention"] * count


def _kind(word: str) -> Kind:
    if word not in KINDS:
        raise ValueError(f"layer type {word!r} is not known")
    return KINDS[word]


def _window(config: Any, kind: Kind) -> int | None:
    if kind == "sliding":
        return int(config.sliding_window)
    return int(config.attention_chunk_size) if kind == "chunked" else None


def _without_rope(config: Any, index: int, word: str) -> bool:
    """NoPE layers: SmolLM3 and Llama 4 list theirs, Cohere 2's are its full-attention layers."""
    if config.model_type in LEARNED | ALIBI or getattr(config, "alibi", False):
        return True
    listed = getattr(config, "no_rope_layers", None)
    if listed:
        return not listed[index]
    return bool(config.model_type == "cohere2" and word == "full_attention")


def _rotation(config: Any, word: str, width: int) -> RotationSpec:
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    parameters = dict(parameters.get(word, parameters))  # Gemma 3 and OLMo 3 nest by layer type
    if not parameters:
        raise ValueError("no rope parameters")
    partial = parameters.pop("partial_rotary_factor", None)
    if partial is None:
        partial = getattr(config, "partial_rotary_factor", None) or 1.0
    theta = parameters.pop("rope_theta", None)
    return RotationSpec(
        type=str(parameters.pop("rope_type", "default")),
        theta=None if theta is None else float(theta),
        rotary_dim=int(width * partial),
        pairing=pairing_of(config.model_type),
        scaling=tuple(
            (key, tuple(value) if isinstance(value, list) else value)
            for key, value in sorted(parameters.items())
            if key != "type"
        ),
    )


def pairing_of(architecture: str) -> Pairing:
    """Which dims an architecture rotates together, where we know."""
    if architecture in INTERLEAVED:
        return "interleaved"
    return "half" if architecture in HALF else "unknown"


def _positions(config: Any, layers: tuple[LayerSpec, ...]) -> PositionScheme:
    if config.model_type in LEARNED:
        return "learned"
    if config.model_type in ALIBI or getattr(config, "alibi", False):
        return "alibi"
    return "rotary" if any(layer.rotation is not None for layer in layers) else "none"


def first_line(error: BaseException) -> str:
    """What an error says, without the advice below it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # "Class validation error for …:" says what is wrong on the line after it.
    return f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and lines[1:] else lines[0]
