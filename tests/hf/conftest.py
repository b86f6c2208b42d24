"""A tiny model, and a copy of it in a folder, to be broken."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtransfer.hf.model import LanguageModel


@pytest.fixture(scope="session")
def model(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama", num_hidden_layers=2)


@pytest.fixture(scope="session")
def pristine(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    model.module.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "tiny"))
