"""A guide as an adapter of peft's CARTRIDGE kind, and such an adapter as a prefix.

peft keeps a prefix as one matrix, a row a token: for each layer its cached keys of all heads, then
its values. So it fits where every layer has the same heads, as wide in keys as in values, and the
prefix stands at the start.
"""

from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvtransfer import artifact
from kvtransfer.errors import ArtifactError, CacheLayoutError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.guides.packed import PackedGuide
from kvtransfer.hf.fits import check_finite
from kvtransfer.hf.model import LanguageModel

TENSORS, MATRIX = "adapter_model.safetensors", "prompt_embeddings"


def export_cartridge(guide: PackedGuide, folder: str | Path) -> None:
    """Write a guide as an adapter that ``PeftModel.from_pretrained(model, folder)`` reads.

    Args:
        guide: Of a pack.
        folder: Where to; made where there is none.

    Raises:
        CacheLayoutError: the guide's layers do not fit into one matrix, or it begins elsewhere
            than at position 0.
        ArtifactError: peft is not installed, or the place cannot be written.
    """
    config = _config(guide)
    held = guide.prepared.cache
    if held.positions[0].tolist() != list(range(held.tokens)):
        raise CacheLayoutError(
            f"the guide {guide.name!r} stands at positions {int(held.positions.min())} to "
            f"{int(held.positions.max())}, and an adapter's prefix at 0 to {held.tokens - 1}",
            hint="export a guide that was read from the start",
        )
    pairs = torch.stack([block for pair in held for block in pair], dim=1)
    folder = Path(folder).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        raise ArtifactError(f"{folder} is not empty", hint="name a new or empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        matrix = rearrange(pairs, "1 n h t d -> t (n h d)")
        artifact.write_tensors(folder / TENSORS, {MATRIX: matrix})
    except OSError as error:
        raise artifact.unwritable(folder, error) from error


def read_cartridge(folder: str | Path, model: LanguageModel) -> KVCache:
    """The prefix that an adapter holds, to be read by ``model``.

    An adapter does not say which weights it is for, nor of what text it is, if of any: it may have
    been trained.

    Raises:
        ArtifactError: it is missing or broken.
        CacheLayoutError: it is of a model of another shape, or not finite.
    """
    path = Path(folder).expanduser() / TENSORS
    try:
        matrix = load_file(path)[MATRIX]
    except FileNotFoundError as error:
        raise ArtifactError(
            f"no adapter at {folder}: it has no {TENSORS}", hint="check the path"
        ) from error
    except KeyError as error:
        raise ArtifactError(
            f"{path} holds no {MATRIX}", hint="kvtransfer reads adapters of peft's CARTRIDGE kind"
        ) from error
    except SafetensorError as error:
        raise artifact.truncated(path, error) from error
    blocks = _blocks(matrix, model.spec).to(device=model.device, dtype=model.dtype)
    positions = torch.arange(len(matrix), device=model.device)[None]
    cache = KVCache(
        keys=tuple(blocks[:, 0::2].unbind(1)),
        values=tuple(blocks[:, 1::2].unbind(1)),
        positions=positions,
        keys_are="cached",
        rotations=model.rotary(positions),
        model=model.spec.identity,
        note="from a peft adapter",
    )
    check_finite(cache)
    return cache


def _blocks(matrix: Tensor, spec: ModelSpec) -> Float[Tensor, "1 n h t d"]:
    """The matrix as keys and values of each layer."""
    heads, width = _heads(spec)
    wanted = 2 * len(spec.layers) * heads * width
    if matrix.ndim != 2 or matrix.shape[1] != wanted or not len(matrix):
        raise CacheLayoutError(
            f"an adapter of shape {tuple(matrix.shape)}, where {spec.name} keeps {wanted} numbers "
            "a token",
            hint="it was made for another model",
        )
    blocks: Tensor = rearrange(matrix, "t (n h d) -> 1 n h t d", h=heads, d=width)
    return blocks


def _heads(spec: ModelSpec) -> tuple[int, int]:
    """KV heads and head width, which all layers share."""
    shapes = {(each.kv_heads, each.key_dim, each.value_dim) for each in spec.layers}
    heads, key_dim, value_dim = next(iter(shapes))
    if len(shapes) > 1 or key_dim != value_dim:
        raise CacheLayoutError(
            f"{spec.name} has layers of (heads, key dim, value dim) {sorted(shapes)}, and an "
            "adapter knows one number of heads and one width",
            hint="a pack holds it as it is",
        )
    return heads, key_dim


def _config(guide: PackedGuide) -> Any:
    """peft's own config of the adapter."""
    try:
        from peft import CartridgeConfig
    except ImportError as error:
        raise ArtifactError(
            "peft with CARTRIDGE adapters is not installed", hint="pip install 'peft>=0.19'"
        ) from error
    spec = guide.maker.spec
    heads, width = _heads(spec)
    return CartridgeConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=spec.name,
        inference_mode=True,
        num_virtual_tokens=guide.tokens,
        num_frozen_tokens=min(1, guide.tokens),
        num_layers=len(spec.layers),
        num_attention_heads=heads,
        token_dim=heads * width,
        num_transformer_submodules=1,
    )
