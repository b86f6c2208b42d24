"""Read a model's spec from its config and tokenizer. No weights."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any, cast

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from kvtransfer.errors import ModelNotFound, UnsupportedModel
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.hf.architectures import is_encoder, is_language_model
from kvtransfer.hf.hub import unreachable
from kvtransfer.hf.layers import layer_specs, positions_of
from kvtransfer.hf.locate import Location, locate

# fmt: off
NO_SETTINGS = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype", "embd_pdrop",
    "eos_token_id", "hidden_dropout", "id2label", "initializer_range", "label2id",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
    "quantization_config", "resid_pdrop", "return_dict", "torch_dtype",
    "transformers_version", "use_cache",
})
# fmt: on
"""What a config says that has no part in what a trained model computes, or is compared apart."""


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
    try:
        return _decoder_spec(config, name, tokenizer)
    except UnsupportedModel:
        raise
    # Configs are other people's objects, and broken ones raise whatever they please.
    except Exception as error:
        raise UnsupportedModel(
            f"{name} ({config.model_type}): its config does not describe a decoder's cache: "
            f"{first_line(error)}",
            hint="kvtransfer reads decoder-only language models",
        ) from error


def _decoder_spec(
    config: PreTrainedConfig, name: str, tokenizer: PreTrainedTokenizerBase | None
) -> ModelSpec:
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name} ({config.model_type}) is an encoder-decoder",
            hint="kvtransfer reads decoder-only models: their cache is a prefix",
        )
    if is_encoder(config.model_type) or _sees_ahead(config):
        raise UnsupportedModel(
            f"{name} ({config.model_type}) is an encoder: its tokens see those that come later",
            hint="kvtransfer reads decoder-only models: their cache is a prefix",
        )
    text = config.get_text_config(decoder=True)
    if not is_language_model(config) and not is_language_model(text):
        raise ValueError(f"transformers has no causal language model of type {text.model_type}")
    layers = layer_specs(text)
    return ModelSpec(
        name=name,
        architecture=text.model_type,
        layers=layers,
        dtype=str(config.dtype or text.dtype or "float32").removeprefix("torch."),
        positions=positions_of(text, layers),
        tokenizer=None if tokenizer is None else tokenizer_digest(tokenizer),
        settings=_settings_digest(text),
    )


def _sees_ahead(config: PreTrainedConfig) -> bool:
    """Gemma's embedding models are decoders whose attention was opened to both sides."""
    opened = getattr(config.get_text_config(decoder=True), "use_bidirectional_attention", None)
    return opened is True or opened == "all"


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Two digests joined by a plus: of what cuts ordinary text into ids, and of added tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        ordinary: Any = sorted(tokenizer.get_vocab().items())
        added: Any = sorted(map(str, tokenizer.added_tokens_decoder.items()))
    else:
        whole = json.loads(backend.to_str())
        ordinary = [whole[key] for key in ("normalizer", "pre_tokenizer", "model")]
        added = whole["added_tokens"]
    return f"{_digest(ordinary)[:12]}+{_digest(added)[:8]}"


def _settings_digest(config: PreTrainedConfig) -> str:
    # Only what differs from the architecture's defaults: a later transformers knows more settings.
    try:
        defaults = type(config)().to_dict()
    except Exception:  # some configs cannot be made of nothing
        defaults = {}
    described = {
        name: _plain(value)
        for name, value in config.to_dict().items()
        if name not in NO_SETTINGS and (name not in defaults or defaults[name] != value)
    }
    return _digest(described | {"model_type": config.model_type})[:12]


def _plain(value: Any) -> Any:
    """Something that JSON writes alike wherever a config came from: a GGUF file rounds floats."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else str(value)


def _digest(described: Any) -> str:
    text = json.dumps(described, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _try_tokenizer(location: Location) -> PreTrainedTokenizerBase | None:
    try:
        return load_tokenizer(location)
    except ModelNotFound:
        return None  # a config without a tokenizer can still be compared, but for that topic


def first_line(error: BaseException) -> str:
    """What an error says, without the advice below it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # "Class validation error for …:" says what is wrong on the line after it.
    return f"{lines[0]} {lines[1].strip()}" if lines[0].endswith(":") and lines[1:] else lines[0]
