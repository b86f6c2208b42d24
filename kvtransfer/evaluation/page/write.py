"""Where a page is put, looked at before any work is done for it."""

import tempfile
from pathlib import Path

from kvtransfer.evaluation.inside import Inside
from kvtransfer.evaluation.page.page import render
from kvtransfer.evaluation.page.place import check_place, unwritable
from kvtransfer.evaluation.report import EvalReport


def write_page(report: EvalReport, path: str | Path, *, inside: Inside | None = None) -> None:
    """Write the page to ``path``, whole or not at all; a file that was there is replaced.

    Args:
        report: What was measured.
        path: Ends in .html.
        inside: What :func:`kvtransfer.evaluation.inside.look_inside` saw; None leaves it out.

    Raises:
        ArtifactError: the place cannot be written.
        ValueError: the path ends in something else.
    """
    path = Path(path)
    check_place(path)
    text = render(report, inside)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".report-") as folder:
            fresh = Path(folder) / path.name
            fresh.write_text(text, encoding="utf-8")
            fresh.replace(path)
    except OSError as error:
        raise unwritable(path, error) from error
