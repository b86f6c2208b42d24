"""What a gate says of a mapping that is evaluated: on the text at hand, where that allows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from kvtransfer.evaluation.report import EvalReport
from kvtransfer.evaluation.text import TextResult
from kvtransfer.fitting.gate import Gate, Judgement
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.measures.agreement import cosine_gain

HERE = "this text"


@dataclass(frozen=True, slots=True)
class Gated:
    """A gate's judgement beside the outcome. Always true: it predicted what was then measured."""

    judgement: Judgement

    def __bool__(self) -> bool:
        return True

    def sentence(self) -> str:
        """That the gate is not reached, or nothing."""
        return self.judgement.said() if self.judgement.below else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return self.judgement.to_dict()

    def __rich__(self) -> Text:
        said = self.judgement.said()
        return Text(
            f"{said[0].upper()}{said[1:]}.", style="yellow" if self.judgement.below else "dim"
        )


def gated(
    report: EvalReport,
    mapping: KVMapping,
    gate: Gate | None = Gate(),  # noqa: B008 - frozen
    *,
    probe: Callable[[], float] | None = None,
) -> EvalReport:
    """The report with what ``gate`` says under ``gate``; as it is where there is none.

    KL and cosines are those of the report's text. R² is what was recorded when the mapping was
    fitted, and so are the others where no text was read, or a control is missing.

    Args:
        report: Of an evaluation of ``mapping``.
        mapping: What was evaluated.
        gate: None for no gate.
        probe: Measures the score of a probe of this pair on this text, for a gate that looks at it.
    """
    if gate is None:
        return report
    if gate.measure == "probe" and probe is not None:
        judgement = gate.judge(probe(), on=HERE)
    elif report.text is not None and (found := _measured(gate, report.text)) is not None:
        judgement = gate.judge(found, on=HERE)
    else:
        judgement = gate.of(mapping)
    return report.with_part("gate", Gated(judgement))


def _measured(gate: Gate, text: TextResult) -> float | None:
    """What the gate looks at, of the text; None where it was not measured, or is no share."""
    if gate.measure == "kl":
        ours, none = _mean(text, "mapped", "kl_to_own"), _mean(text, "none", "kl_to_own")
        return None if ours is None or not none else 1 - ours / none
    ours, control = (_mean(text, name, "attention_cosine") for name in ("mapped", "shuffled"))
    if gate.measure == "cosine":
        return ours
    if gate.measure != "cosine-gain" or ours is None or control is None or control >= 1:
        return None
    return cosine_gain(ours, control)


def _mean(text: TextResult, condition: str, metric: str) -> float | None:
    column = text.columns.get(condition, {}).get(metric)
    return None if column is None else float(column.mean())


__all__ = ["Gated", "gated"]
