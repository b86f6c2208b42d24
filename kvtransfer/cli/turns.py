"""kvtransfer eval --turns: two models that take turns at a text."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvtransfer.cli.measures import Asked

if TYPE_CHECKING:
    from kvtransfer.evaluation.part import Part
    from kvtransfer.fitting.mapping import KVMapping

Turns = Annotated[
    int | None,
    typer.Option(help="Let SOURCE and TARGET take so many turns at a text; needs --back."),
]
Back = Annotated[str | None, typer.Option(help="With --turns: the mapping from TARGET to SOURCE.")]
TurnTokens = Annotated[int, typer.Option(help="Tokens of a turn.")]
Bound = Annotated[
    float, typer.Option(help="With --turns: drift (KL, nats a token) beyond which to re-prefill.")
]


@dataclass(frozen=True, slots=True, eq=False)
class TurnMeasure:
    """So many turns, at a text, with a mapping for the way back."""

    turns: int
    tokens: int
    bound: float
    texts: Iterable[str]
    back: "KVMapping | None"
    key: Literal["turns"] = "turns"

    @classmethod
    def asked(
        cls,
        turns: int | None,
        *,
        tokens: int,
        bound: float,
        text: str | None,
        back: str | None,
    ) -> "TurnMeasure | None":
        """What the options ask for.

        Raises:
            ArtifactError: there is no mapping at ``back``.
            TextError: the text is missing.
            ValueError: the options do not go together.
        """
        if turns is None:
            if back is not None:
                raise ValueError("--back is the other direction of --turns")
            return None
        if text == "none":
            raise ValueError("--turns are taken at a text, and --text none leaves none")
        from kvtransfer.fitting.mapping import KVMapping
        from kvtransfer.fitting.texts import held_out

        fitted = None if back is None else KVMapping.from_pretrained(back)
        return cls(turns, tokens, bound, held_out(text), fitted)

    def steps(self, items: int) -> int:
        """One a session."""
        return items

    def part(self, asked: Asked, progress: Callable[[], None]) -> "Part":
        """Let them read."""
        from kvtransfer.evaluation.turns import evaluate_turns

        back = self.back
        if back is not None and asked.insist:
            back = back.insisting_on(asked.target.spec, asked.source.spec)
        return evaluate_turns(
            asked.source,
            asked.target,
            asked.mapping,
            back,
            texts=self.texts,
            turns=self.turns,
            tokens=self.tokens,
            bound=self.bound,
            items=asked.items,
            progress=progress,
        )
