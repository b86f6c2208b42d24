"""What must be known about a model to reason about its cache. No weights, no torch.

A spec can be compared, stored and tested without loading anything.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from kvtransfer.errors import ArtifactError

Kind = Literal[
    "full", "sliding", "chunked", "latent", "indexed", "linear", "hybrid", "shared", "none"
]
"""How a layer remembers: all tokens, a window, a chunk, a compressed latent, keys of a second kind
beside its own, a state, a state beside keys and values, through another layer, not at all."""

KEEPS: Mapping[Kind, str] = MappingProxyType(
    {
        "full": "keys and values of every token",
        "sliding": "keys and values of the tokens in its window",
        "chunked": "keys and values of the tokens in its chunk",
        "latent": "one compressed latent per token, from which keys and values are made anew",
        "indexed": "a second kind of keys beside its own",
        "linear": "a state, and nothing per token",
        "hybrid": "a state beside its keys and values",
        "shared": "nothing of its own: it reads the keys and values of an earlier layer",
        "none": "nothing",
    }
)
"""What a layer of each kind keeps, in words."""

Pairing = Literal["half", "interleaved", "unknown"]
"""Which dims rotate together: i with i + r/2, or 2i with 2i + 1."""

PositionScheme = Literal["rotary", "learned", "alibi", "none", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationSpec:
    """How one layer's keys are turned by their position (RoPE)."""

    type: str
    """The config's ``rope_type``: default, linear, dynamic, yarn, longrope, llama3, …"""
    theta: float | None
    rotary_dim: int
    """Leading dims of a key that are turned; the rest pass through (partial rotary)."""
    pairing: Pairing
    scaling: tuple[tuple[str, Any], ...] = ()
    """The remaining rope parameters of the config, sorted by name."""
    fixed_up_to: int | None = None
    """Length up to which one table serves; beyond it the table depends on the length (dynamic,
    longrope). None where it never does."""

    def __post_init__(self) -> None:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise ValueError(f"{self.rotary_dim} rotated dims do not make pairs")

    def __str__(self) -> str:
        extras = "".join(f" {name}={value}" for name, value in self.scaling if value is not None)
        theta = "" if self.theta is None else f" θ={self.theta:g}"
        return f"{self.type}{theta}{extras} {self.pairing} {self.rotary_dim}d"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What one decoder layer keeps of each token."""

    kind: Kind
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    """Tokens that a sliding or chunked layer can see."""
    rotation: RotationSpec | None = None
    """None where keys carry no position (NoPE, ALiBi, learned positions)."""

    @property
    def has_kv(self) -> bool:
        """Whether the layer keeps one key and one value per token and head."""
        return self.kind in ("full", "sliding", "chunked")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The part of a model's identity that its KV cache depends on."""

    name: str
    architecture: str
    """The config's ``model_type``."""
    layers: tuple[LayerSpec, ...]
    dtype: str
    positions: PositionScheme
    tokenizer: str | None = None
    """Digest of the tokenizer: two models with equal digests split text alike. Where it has two
    parts, joined by a plus, the first is of ordinary text and the second of the added tokens."""
    settings: str | None = None
    """Digest of everything else in the config that decides what the weights compute."""
    weights: str | None = None
    """Fingerprint of the weights, where they were seen."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError(f"{self.name}: a model needs at least one layer")
        for index, layer in enumerate(self.layers):
            if layer.has_kv and min(layer.kv_heads, layer.key_dim, layer.value_dim) < 1:
                raise ValueError(f"{self.name}: layer {index} has an empty head: {layer}")
            turned = layer.rotation.rotary_dim if layer.rotation and layer.has_kv else 0
            if turned > layer.key_dim:
                raise ValueError(
                    f"{self.name}: layer {index} rotates {turned} of {layer.key_dim} key dims"
                )

    @property
    def numbers_per_token(self) -> int:
        """How many numbers the cache holds for one token, over all layers."""
        return sum(
            layer.kv_heads * (layer.key_dim + layer.value_dim)
            for layer in self.layers
            if layer.has_kv
        )

    @property
    def identity(self) -> str | None:
        """Weights and, where known, settings: what a cache says of the model that can read it."""
        if self.weights is None or self.settings is None:
            return self.weights
        return f"{self.weights}/{self.settings}"

    def seen_with(self, *, weights: str, dtype: str) -> "ModelSpec":
        """The same spec, once the model is loaded."""
        return replace(self, weights=weights, dtype=dtype)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "ModelSpec":
        """The inverse of :meth:`to_dict`.

        Raises:
            ArtifactError: a field is missing, unknown or of the wrong kind.
        """
        try:
            described = data["layers"]
            if bad := [each["kind"] for each in described if each["kind"] not in get_args(Kind)]:
                raise ValueError(f"unknown layer kind {bad[0]!r}")
            layers = tuple(
                LayerSpec(**(dict(each) | {"rotation": _rotation(each["rotation"])}))
                for each in described
            )
            return cls(**(dict(data) | {"layers": layers}))
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"a saved model spec is malformed: {type(error).__name__}: {error}",
                hint="the file was edited or written by another version; make it anew",
            ) from error


def same_model(one: str, other: str) -> bool:
    """Whether two identities can be one model's: settings count where both name them."""
    (weights, _, settings), (others, _, other_settings) = one.partition("/"), other.partition("/")
    return weights == others and (not settings or not other_settings or settings == other_settings)


def same_tokens(one: ModelSpec, other: ModelSpec) -> bool:
    """Whether ordinary text becomes the same ids for both. Tokenizers nobody saw count as alike."""
    if one.tokenizer is None or other.tokenizer is None:
        return True
    return one.tokenizer.partition("+")[0] == other.tokenizer.partition("+")[0]


def _rotation(data: Mapping[str, Any] | None) -> RotationSpec | None:
    if data is None:
        return None
    scaling = tuple((name, _frozen(value)) for name, value in data["scaling"])
    return RotationSpec(**(dict(data) | {"scaling": scaling}))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
