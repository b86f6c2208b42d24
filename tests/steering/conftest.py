"""A tiny model, and a vector that was read off it."""

from collections.abc import Callable

import pytest

from kvtransfer.hf.model import LanguageModel
from kvtransfer.steering.extract import extract
from kvtransfer.steering.vector import CacheVector

PAIRS = [
    (f"The {noun} is very good indeed, and the", f"The {noun} is bad, and the")
    for noun in ("boat", "tide", "harbour", "list", "file", "string", "number", "house")
]
"""Of different lengths, with one last token."""


@pytest.fixture(scope="session")
def model(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama", seed=1)


@pytest.fixture(scope="session")
def other(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama", seed=2)


@pytest.fixture(scope="session")
def vector(model: LanguageModel) -> CacheVector:
    return extract(model, PAIRS).vector
