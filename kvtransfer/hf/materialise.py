"""Build the zoo's models once, as ordinary safetensors folders in the user's cache directory."""

import contextlib
import hashlib
import io
import json
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from kvtransfer.errors import ModelNotFound
from kvtransfer.zoo import ZOO, PackagedGGUF, Shipped, Sibling, cache_folder

LAYOUT = 1
"""Raised whenever the folders below are built otherwise, so that old ones are not taken."""


def materialise(alias: str) -> Path:
    """The folder of a zoo model; built on first use, in about half a minute.

    Raises:
        ModelNotFound: the parts that the model is made of are missing.
    """
    recipe = ZOO[alias]
    if isinstance(recipe, Shipped):
        return recipe.folder
    folder = cache_folder() / f"{alias}-{_digest(recipe)}"
    if not (folder / "config.json").is_file():
        print(f"building {alias} in {folder} (once)", file=sys.stderr)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{alias}-") as name:
            fresh = Path(name) / "fresh"
            if isinstance(recipe, PackagedGGUF):
                _dequantise(recipe, fresh)
            else:
                _heal(recipe, fresh)
            # Two processes may build at once; whoever is second throws its equal copy away.
            if not folder.exists():
                fresh.rename(folder)
    return folder


def require_gguf(path: Path) -> None:
    """Raise where transformers could not read a ``.gguf`` file.

    Raises:
        ModelNotFound: a package that it needs for that is not installed.
    """
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise ModelNotFound(
                f"{path.name} is read with {package}, which is not installed",
                hint="pip install 'gguf>=0.17' 'accelerate>=1.1'",
            )


def _digest(recipe: PackagedGGUF | Sibling) -> str:
    """Changes with every part that the built folder depends on."""
    parts = [str(LAYOUT)]
    if isinstance(recipe, PackagedGGUF):
        parts += [recipe.requirement, recipe.file, str(recipe.path().stat().st_size)]
    else:
        base = ZOO[recipe.base]
        assert isinstance(base, PackagedGGUF)  # a fact about our own table
        parts += [_digest(base)]
        for name in ("recipe.json", "adapter.safetensors"):
            path = recipe.folder / name
            if not path.is_file():
                raise ModelNotFound(f"{recipe.folder} lacks {name}", hint="reinstall kvtransfer")
            parts += [hashlib.sha256(path.read_bytes()).hexdigest()]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:8]


def _dequantise(recipe: PackagedGGUF, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = recipe.path()
    require_gguf(gguf)
    # The converter draws its progress bar past every setting that would silence it.
    with contextlib.redirect_stderr(io.StringIO()):
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    # Every weight is plain float32 by now, yet transformers goes on calling the model quantised,
    # and refuses to save it until these two marks are gone.
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if recipe.pre_tokenizer_digits:
        from tokenizers import pre_tokenizers

        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _heal(recipe: Sibling, folder: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    base = materialise(recipe.base)
    dropped = set(json.loads((recipe.folder / "recipe.json").read_text())["drop_layers"])
    adapter = load_file(recipe.folder / "adapter.safetensors")
    full = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = AutoConfig.from_pretrained(base)
    kept = [i for i in range(config.num_hidden_layers) if i not in dropped]
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in kept]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {
        name: tensor
        for name, tensor in full.state_dict().items()
        if not name.startswith("model.layers.")
    }
    for new, old in enumerate(kept):
        prefix = f"model.layers.{old}."
        for name, tensor in full.state_dict().items():
            if name.startswith(prefix):
                weights[f"model.layers.{new}.{name.removeprefix(prefix)}"] = tensor.clone()
    for name in (name.removesuffix(".A") for name in adapter if name.endswith(".A")):
        down, up = adapter[f"{name}.A"].double(), adapter[f"{name}.B"].double()
        # In double precision every machine rounds to the same float32, and so to the same
        # fingerprint, in whatever order it sums.
        weight = weights[f"model.{name}.weight"]
        weight.copy_(weight.double() + up @ down)
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    for path in base.iterdir():  # the tokenizer and the chat template are the base's own
        if not path.name.startswith("model") and path.name != "config.json":
            shutil.copyfile(path, folder / path.name)
