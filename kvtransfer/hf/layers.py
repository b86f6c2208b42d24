"""From a transformers config to what each decoder layer keeps of a token."""

from collections.abc import Mapping
from typing import Any

from kvtransfer.geometry.spec import Kind, LayerSpec, PositionScheme, RotationSpec
from kvtransfer.hf.architectures import ALIBI, LEARNED, NOPE, STATE_ONLY, pairing_of

KINDS: Mapping[str, Kind] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "indexed_attention": "indexed",
    "minimax_m3_sparse": "indexed",
    "compressed_sparse_attention": "latent",
    "heavily_compressed_attention": "latent",
    "linear_attention": "linear",
    "mamba": "linear",
    "mamba2": "linear",
    "recurrent": "linear",
    "conv": "linear",
    "hybrid": "hybrid",
    "hybrid_sliding": "hybrid",
    "moe": "none",
    "mlp": "none",
}
"""What transformers' ``layer_types`` keep. A word that is not here is refused by name."""


MOST_LAYERS = 10_000
"""A config that says more is broken."""


def layer_specs(config: Any) -> tuple[LayerSpec, ...]:
    """What each layer with a cache of its own keeps.

    Layers at the end that read the keys and values of an earlier one (Gemma 3n, Gemma 4) keep
    nothing and are left out, as transformers leaves them out of its caches.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: the config is no decoder's.
    """
    count = _whole(config.num_hidden_layers, "num_hidden_layers")
    if count > MOST_LAYERS:
        raise ValueError(f"num_hidden_layers is {count}, and no model has {MOST_LAYERS}")
    words = _words(config, count)
    each = getattr(config, "per_layer_config", None) or [config] * count
    layers = [_layer(*pair, i) for i, pair in enumerate(zip(each, words, strict=True))]
    while len(layers) > 1 and layers[-1].kind == "shared":
        layers.pop()
    return tuple(layers)


def positions_of(config: Any, layers: tuple[LayerSpec, ...]) -> PositionScheme:
    """Where the model puts a token's position."""
    if config.model_type in LEARNED:
        return "learned"
    if _has_alibi(config):
        return "alibi"
    if any(layer.rotation is not None for layer in layers):
        return "rotary"
    known = _is_nope(config) or getattr(config, "no_rope_layers", None)
    return "none" if known or not any(layer.has_kv for layer in layers) else "unknown"


def rotary_words(config: Any, count: int) -> list[str]:
    """The word by which the model's rotary module knows each of its first ``count`` layers."""
    return list(getattr(config, "layer_types", None) or ["full_attention"] * count)[:count]


def _layer(config: Any, word: str, index: int) -> LayerSpec:
    kind = _kind(word)
    if kind in ("linear", "none", "shared"):
        return LayerSpec(kind=kind, kv_heads=0, key_dim=0, value_dim=0)
    heads = _whole(config.num_attention_heads, "num_attention_heads")
    width = _whole(getattr(config, "head_dim", None) or config.hidden_size // heads, "head_dim")
    if rank := getattr(config, "kv_lora_rank", None):  # DeepSeek: keys and values share one latent
        turned = _whole(config.qk_rope_head_dim, "qk_rope_head_dim")
        return LayerSpec(
            kind="latent",
            kv_heads=1,
            key_dim=_whole(rank, "kv_lora_rank"),
            value_dim=turned,
            rotation=_rotation(config, word, turned, partial=1.0),
        )
    return LayerSpec(
        kind=kind,
        kv_heads=_kv_heads(config, heads),
        key_dim=width,
        value_dim=_whole(_declared(config, "v_head_dim") or width, "v_head_dim"),
        window=_window(config, kind),
        rotation=None if _without_rope(config, index, word) else _rotation(config, word, width),
    )


def _words(config: Any, count: int) -> list[str]:
    if config.model_type in STATE_ONLY:
        return ["recurrent"] * count
    words = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if words is None:
        sliding = getattr(config, "sliding_window", None)
        slides = sliding and getattr(config, "use_sliding_window", True)
        words = ["sliding_attention" if slides else "full_attention"] * count
    if len(words) != count:
        raise ValueError(f"{len(words)} layer types for {count} layers")
    reads = getattr(config, "kv_sharing_modes", None) or ["own"] * count
    return ["shared" if mode == "reuse" else word for word, mode in zip(words, reads, strict=True)]


def _kind(word: str) -> Kind:
    if word == "shared":
        return "shared"
    if word not in KINDS:
        raise ValueError(f"layer type {word!r} is not known")
    return KINDS[word]


def _window(config: Any, kind: Kind) -> int | None:
    if kind == "sliding":
        return _whole(config.sliding_window, "sliding_window")
    return (
        _whole(config.attention_chunk_size, "attention_chunk_size") if kind == "chunked" else None
    )


def _kv_heads(config: Any, heads: int) -> int:
    if getattr(config, "multi_query", False) and not getattr(
        config, "new_decoder_architecture", False
    ):
        return 1
    return _whole(_declared(config, "num_key_value_heads") or heads, "num_key_value_heads")


def _declared(config: Any, name: str) -> Any:
    """A config's value, where its class has such a field: a stray one says nothing."""
    return getattr(config, name, None) if hasattr(type(config), name) else None


def _has_alibi(config: Any) -> bool:
    return config.model_type in ALIBI or bool(getattr(config, "alibi", False))


def _is_nope(config: Any) -> bool:
    """Whether no layer knows positions, by the architecture or by the config's word."""
    unset = config.model_type == "granitemoehybrid" and config.position_embedding_type != "rope"
    return unset or config.model_type in NOPE


def _without_rope(config: Any, index: int, word: str) -> bool:
    """NoPE layers: SmolLM3 and Llama 4 list theirs, Cohere 2's are its full-attention layers."""
    if config.model_type in LEARNED or _has_alibi(config) or _is_nope(config):
        return True
    listed = getattr(config, "no_rope_layers", None)
    if listed:
        return not listed[index]
    return bool(config.model_type == "cohere2" and word == "full_attention")


def _rotation(
    config: Any, word: str, width: int, partial: float | None = None
) -> RotationSpec | None:
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if word in parameters:  # Gemma 3, OLMo 3 and others nest by layer type
        parameters = dict(parameters[word] or {})
    if not parameters and _declared(config, "rotary_dim"):  # GPT-J and CodeGen
        parameters = {"rope_theta": 10_000.0}
        partial = config.rotary_dim / width
    if not parameters:
        return None
    named = parameters.pop("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    if partial is None:
        partial = 1.0 if named is None else float(named)
    type_ = str(parameters.pop("rope_type", None) or "default")
    if type_ == "proportional":  # its table is as wide as the head, and stands still beyond a point
        parameters["partial_rotary_factor"], partial = partial, 1.0
    theta = parameters.pop("rope_theta", None)
    # A model's table has a frequency for every second dim, so an odd number of them rounds up.
    rotary_dim = 2 * ((int(width * partial) + 1) // 2)
    if rotary_dim == 0:
        return None
    return RotationSpec(
        type=type_,
        theta=None if theta is None else float(theta),
        rotary_dim=rotary_dim,
        pairing=pairing_of(config.model_type),
        scaling=tuple(
            (key, _frozen(value)) for key, value in sorted(parameters.items()) if key != "type"
        ),
        fixed_up_to=_fixed_up_to(config, type_, parameters),
    )


def _frozen(value: Any) -> Any:
    """The same value as something that can be compared and hashed."""
    if isinstance(value, Mapping):
        return tuple((str(key), _frozen(each)) for key, each in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _fixed_up_to(config: Any, type_: str, parameters: Mapping[str, Any]) -> int | None:
    """The length at which the model changes its table."""
    if type_ == "longrope":
        original = parameters["original_max_position_embeddings"]
        return _whole(original, "original_max_position_embeddings")
    if "dynamic" in type_:
        return _whole(config.max_position_embeddings, "max_position_embeddings")
    return None


def _whole(value: Any, name: str) -> int:
    """A positive integer, which JSON does not promise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}, not a positive integer")
    return value
