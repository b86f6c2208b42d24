"""--vector v=DIR: steering vectors that an edit on the command line may name."""

from typing import Annotated

import typer

Vectors = Annotated[
    list[str] | None,
    typer.Option("--vector", help="A steering vector for edits to name: v=DIR, for Steer(v,1.0)."),
]


def named_vectors(given: list[str] | None) -> dict[str, object]:
    """What each --vector names.

    Raises:
        ValueError: one gives no name, or a name twice.
        ArtifactError: there is no vector in its folder.
    """
    from kvtransfer.steering.vector import CacheVector

    found: dict[str, object] = {}
    for each in given or ():
        name, _, folder = each.partition("=")
        if not folder or not name.isidentifier() or name in found:
            raise ValueError(f"--vector is a new name and a folder, such as v=DIR, not {each!r}")
        found[name] = CacheVector.from_pretrained(folder)
    return found
