"""The cells of a notebook: run in order by a kernel of their own, and what they print."""

import warnings
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

VARIES = "varies"
"""The tag of a cell whose numbers change with the versions of Python, which brings the text that is
read, and of transformers."""


def executed(notebook: Path, folder: Path) -> Any:
    """The notebook after a run in ``folder``, with what it printed.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    found: Any = nbformat.read(notebook, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(
        found, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # event loops and sockets, which are the client's affair
        client.execute()
    for cell in found.cells:
        cell.metadata.pop("execution", None)  # when it ran
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return found


def printed(notebook: Any) -> list[tuple[list[str], str]]:
    """Per code cell its tags, and the text that it printed."""
    return [
        (cell.metadata.get("tags", []), "".join(each.get("text", "") for each in cell.outputs))
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]
