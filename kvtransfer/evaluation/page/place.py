"""Whether a page can be written to a place: asked before any model is loaded.

This module loads no torch, and no more of the package than its errors.
"""

import tempfile
from pathlib import Path

from kvtransfer.errors import ArtifactError

SUFFIXES = (".html", ".htm")


def check_place(path: Path) -> None:
    """Refuse what cannot be written.

    Raises:
        ArtifactError: its folder is missing, is no folder or cannot be written to, or it is a
            folder itself.
        ValueError: the path ends in something else than .html.
    """
    try:
        if path.is_dir():
            inside = path / "report.html"
            raise ArtifactError(f"{path} is a folder", hint=f"name a file in it: {inside}")
        if path.suffix.lower() not in SUFFIXES:
            raise ValueError(f"a report ends in .html, not in {path.suffix or path.name!r}")
        if path.exists() and not path.is_file():
            raise ArtifactError(f"{path} is no file", hint="choose another --report")
        if not path.parent.exists():
            raise ArtifactError(
                f"{path} cannot be written: there is no folder {path.parent}",
                hint=f"make it first: mkdir -p {path.parent}",
            )
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> ArtifactError:
    """What to say when it fails."""
    return ArtifactError(
        f"{path} cannot be written: {error.strerror or error}", hint="choose another --report"
    )
