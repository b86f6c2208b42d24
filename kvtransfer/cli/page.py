"""What --report does: a look inside the pair, and the page."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kvtransfer.cli.console import bars

if TYPE_CHECKING:
    from kvtransfer.evaluation.report import EvalReport
    from kvtransfer.fitting.mapping import KVMapping
    from kvtransfer.hf.model import LanguageModel


def put_page(
    path: Path,
    report: "EvalReport",
    mapping: "KVMapping | None",
    source: "LanguageModel",
    target: "LanguageModel",
    texts: Iterable[str] | None,
    *,
    prefix: int = 256,
    live: int = 256,
) -> None:
    """Look inside, where there is a mapping, and write the page.

    Args:
        path: Where to.
        report: What was measured.
        mapping: Between the models; without one there is nothing to look inside.
        source: Makes the cache.
        target: Reads it.
        texts: What to look at; None for the prose that Python carries.
        prefix: Tokens of a window that are hidden.
        live: Tokens after it.
    """
    from kvtransfer.evaluation.inside import ROWS, WINDOWS, look_inside
    from kvtransfer.evaluation.page.write import write_page
    from kvtransfer.fitting.texts import builtin

    inside = None
    if mapping is not None:
        with bars(diagnose=WINDOWS, layers=ROWS * 4 // 3) as advance:
            inside = look_inside(
                mapping,
                source,
                target,
                builtin("heldout") if texts is None else texts,
                prefix=prefix,
                continuation=live,
                progress=advance,
            )
    write_page(report, path, inside=inside)
