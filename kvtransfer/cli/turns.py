"""kvtransfer eval --turns: two models that take turns at a text."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvtransfer.cli.measures import Asked
from kvtransfer.cli.texts import HeldOut

if TYPE_CHECKING:
    from kvtransfer.evaluation.part import Part
    from kvtransfer.fitting.mapping import KVMapping

Turns = Annotated[
    int | None,
    typer.Option(help="Let SOURCE and TARGET take so many turns at a text; needs --back."),
]
Back = Annotated[str | None, typer.Option(help="With --turns: the mapping from TARGET to SOURCE.")]
TurnTokens = Annotated[int | None, typer.Option(help="Tokens of a turn: 64.")]
Bound = Annotated[
    float | None,
    typer.Option(help="With --turns: drift (KL, nats a token) beyond which to re-prefill: 0.1."),
]

TOKENS, BOUND = 64, 0.1


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
        tokens: int | None,
        bound: float | None,
        text: HeldOut,
        back: str | None,
    ) -> "TurnMeasure | None":
        """What the options ask for.

        Raises:
            ArtifactError: there is no mapping at ``back``.
            TextError: the text is missing.
            ValueError: the options do not go together, or a size measures nothing.
        """
        if turns is None:
            if (tokens, bound, back) != (None, None, None):
                raise ValueError("--back, --turn-tokens and --bound are about --turns")
            return None
        tokens, bound = TOKENS if tokens is None else tokens, BOUND if bound is None else bound
        if text.name == "none":
            raise ValueError("--turns are taken at a text, and --text none leaves none")
        from kvtransfer.evaluation.turns import check_sizes
        from kvtransfer.fitting.mapping import KVMapping

        check_sizes(turns, tokens, bound)
        fitted = None if back is None else KVMapping.from_pretrained(back)
        return cls(turns, tokens, bound, text(), fitted)

    def steps(self, items: int) -> int:
        """One a session."""
        return items

    def check(self, asked: Asked) -> None:
        """Refuse mappings that do not go both ways."""
        from kvtransfer.evaluation.turns import both_ways

        both_ways(asked.source, asked.target, asked.mapping, self._back(asked))

    def _back(self, asked: Asked) -> "KVMapping | None":
        if self.back is not None and asked.insist:
            return self.back.insisting_on(asked.target.spec, asked.source.spec)
        return self.back

    def part(self, asked: Asked, progress: Callable[[], None]) -> "Part":
        """Let them read."""
        from kvtransfer.evaluation.turns import evaluate_turns

        return evaluate_turns(
            asked.source,
            asked.target,
            asked.mapping,
            self._back(asked),
            texts=self.texts,
            turns=self.turns,
            tokens=self.tokens,
            bound=self.bound,
            items=asked.items,
            progress=progress,
        )
