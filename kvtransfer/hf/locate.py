"""Turn what a person calls a model into what transformers can load.

A model is named by a folder, a ``.gguf`` file, a zoo alias, or a hub id.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtransfer.errors import ModelNotFound
from kvtransfer.hf.materialise import materialise, require_gguf
from kvtransfer.zoo import ZOO

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class Location:
    """The first argument, and the keywords, of any ``from_pretrained``."""

    name: str
    """What the user called it."""
    path: str
    gguf_file: str | None = None
    on_hub: bool = False

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords for ``from_pretrained``."""
        return {} if self.gguf_file is None else {"gguf_file": self.gguf_file}


def locate(name: str) -> Location:
    """Find the model that ``name`` stands for, building a zoo model on its first use.

    Raises:
        ModelNotFound: nothing by that name can exist.
    """
    path = Path(name).expanduser()
    try:
        path.exists()
    except OSError as error:  # no path can be as long as that
        raise ModelNotFound(f"no model at {name[:200]!r}: {error.strerror}") from error
    if name in ZOO and not path.is_dir():
        return Location(name, str(materialise(name)))
    if path.is_dir():
        if (path / "config.json").is_file():
            return Location(name, str(path))
        raise ModelNotFound(
            f"{name} is a folder without config.json",
            hint="name a folder that save_pretrained wrote, or a .gguf file",
        )
    if path.suffix.lower() == ".gguf":
        if path.is_file():
            require_gguf(path)
            return Location(name, str(path.parent), gguf_file=path.name)
        raise ModelNotFound(f"no file at {name}", hint="check the path of the .gguf file")
    if path.exists():
        raise ModelNotFound(
            f"{name} is neither a model folder nor a .gguf file",
            hint=f"name a folder, a .gguf file, a hub id, or one of {', '.join(ZOO)}",
        )
    if HUB_ID.fullmatch(name):
        return Location(name, name, on_hub=True)
    raise ModelNotFound(
        f"no model at {name!r}",
        hint=f"name a folder, a .gguf file, a hub id, or one of {', '.join(ZOO)}",
    )
