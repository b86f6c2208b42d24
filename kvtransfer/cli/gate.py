"""--gate: what a mapping must reach, or be said not to."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvtransfer.fitting.gate import Gate
    from kvtransfer.hf.model import LanguageModel

GateOption = Annotated[
    str | None,
    typer.Option(
        help="What a mapping must reach, or 'below the gate' is said: a number for the usual "
        "measure, MEASURE=NUMBER (kl, cosine-gain, cosine, r2-keys, r2-values, probe), or 'none'."
    ),
]


def named_gate(given: str | None, mapping: str | None) -> "Gate | None":
    """What --gate asks for; the usual gate where nothing is asked.

    Raises:
        ValueError: it is no gate, or there is no mapping that it could judge.
    """
    from kvtransfer.fitting.gate import Gate

    gate = Gate() if given is None else Gate.parse(given)
    if given is not None and gate is not None and mapping is None:
        raise ValueError(f"--gate {given} judges a mapping, and there is no --mapping")
    return gate


def probed(
    gate: "Gate | None",
    source: "LanguageModel",
    target: "LanguageModel",
    texts: Iterable[str] | None,
) -> tuple[Callable[[], float] | None, Iterable[str] | None]:
    """What probes this pair on ``texts``, where the gate looks at that, and the texts as given."""
    if gate is None or gate.measure != "probe" or texts is None:
        return None, texts
    from kvtransfer.fitting.probe import probe

    kept = list(texts)
    return lambda: probe(source, target, kept).score.value, kept
