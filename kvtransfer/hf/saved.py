"""The whole identity of a saved model, its weights' fingerprint too, without loading the weights.

For those who let something else than transformers run a model, and have only its folder.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvtransfer.errors import ModelNotFound, UnsupportedModel
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.hf.fingerprint import counted, fingerprint_of
from kvtransfer.hf.locate import locate
from kvtransfer.hf.model import require_kv
from kvtransfer.hf.spec import first_line, load_config, load_tokenizer, spec_of

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HINT = "download or save the model again"


def saved_spec(name: str, *, dtype: str, revision: str | None = None) -> ModelSpec:
    """What ``load(name, dtype=dtype).spec`` is, where its config leaves nothing to be measured.

    Of every tensor a few numbers are read; files are mapped into memory, so that this takes no more
    for weights of many gigabytes than their number asks for.

    Args:
        name: A folder that ``save_pretrained`` wrote, a zoo alias, or the id of a model on the hub
            that was downloaded.
        dtype: That it is to run in.
        revision: Of the model on the hub.

    Raises:
        ModelNotFound: there is no such folder, or its files are broken or lack a weight.
        UnsupportedModel: its cache holds no keys and values per token, or its weights are saved
            under other names than transformers' model gives them, or in another form than
            safetensors.
    """
    location = locate(name)
    if location.gguf_file is not None:
        raise UnsupportedModel(
            f"{name} is no folder of safetensors, from which a fingerprint could be had",
            hint="load it once, and save it as a folder with save_pretrained",
        )
    if location.on_hub:
        location = replace(location, path=_downloaded(name, revision), on_hub=False)
    folder = Path(location.path)
    config = load_config(location)
    spec = spec_of(config, name=name, tokenizer=load_tokenizer(location))
    require_kv(spec)
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config)
    wanted = {each: tuple(numbers.shape) for each, numbers in counted(shape)}
    return spec.seen_with(weights=fingerprint_of(_saved(folder, wanted)), dtype=dtype)


def _downloaded(name: str, revision: str | None) -> str:
    """Where a model of the hub lies on this machine."""
    try:
        return snapshot_download(name, revision=revision, local_files_only=True)
    except Exception as error:  # the client and what it stands on raise a dozen kinds
        raise ModelNotFound(
            f"{name} was not downloaded: {first_line(error)}", hint="download it first"
        ) from error


def _saved(folder: Path, wanted: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """The named tensors of a folder, mapped into memory."""
    files = _files(folder)
    if missing := sorted(wanted.keys() - files.keys()):
        raise UnsupportedModel(
            f"{folder} has no weight {missing[0]} by that name",
            hint="transformers renames or joins the weights of this architecture as it loads them; "
            "save it again with transformers' save_pretrained, or the files are not complete",
        )
    try:
        for path in sorted({files[name] for name in wanted}):
            with safe_open(path, framework="pt") as file:
                for name in (each for each in wanted if files[each] == path):
                    numbers = file.get_tensor(name)
                    if tuple(numbers.shape) != wanted[name]:
                        raise ModelNotFound(
                            f"{name} has shape {tuple(numbers.shape)} in {path}, {wanted[name]} by "
                            "config.json",
                            hint="config.json and the weights are of different models",
                        )
                    yield name, numbers
    except (SafetensorError, OSError) as error:
        raise ModelNotFound(
            f"the weights in {folder} cannot be read: {first_line(error)}", hint=HINT
        ) from error


def _files(folder: Path) -> dict[str, Path]:
    """In which file each tensor of a folder lies.

    Raises:
        UnsupportedModel: there are no safetensors.
        ModelNotFound: they are broken.
    """
    try:
        if (folder / INDEX).is_file():
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            return {str(name): folder / str(file) for name, file in index["weight_map"].items()}
        if (folder / WHOLE).is_file():
            with safe_open(folder / WHOLE, framework="pt") as file:
                return dict.fromkeys(file.keys(), folder / WHOLE)
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelNotFound(
            f"the weights in {folder} cannot be read: {first_line(error)}", hint=HINT
        ) from error
    raise UnsupportedModel(
        f"{folder} has neither {WHOLE} nor {INDEX}",
        hint="save the model as safetensors: save_pretrained writes them",
    )
