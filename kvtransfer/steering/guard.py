"""When an answer counts as broken, and when an effect counts as there."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from kvtransfer.errors import SteeringError
from kvtransfer.steering.edit import require_finite

Effect = Callable[[str], float]
"""How much a text has of what is steered towards."""


@dataclass(frozen=True, slots=True)
class Matches:
    """Matches of a regular expression in 100 words of a text."""

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise SteeringError(
                f"{self.pattern!r} is no regular expression: {error}",
                hint=r"escape what is meant literally: '\d+\.' is a number and a full stop",
            ) from error

    def __call__(self, text: str) -> float:
        """Of one text; 0 of none."""
        words = len(text.split())
        return 100 * sum(1 for _ in re.finditer(self.pattern, text)) / words if words else 0.0

    def __str__(self) -> str:
        return f"/{self.pattern}/ per 100 words"


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What a steered answer may cost, against the answer to the same prompt without steering.

    Small models repeat themselves and are now and then unlikely without anybody's doing, so the
    bounds are on what steering adds.
    """

    repetition: float = 0.25
    """A larger rise of the share of repeated 3-grams breaks a text: a quarter of it is then a loop
    that was not there."""
    nll: float = 1.5
    """A larger rise of its NLL under the unsteered model, in nats a token, breaks it too. Another
    style costs up to about one; word salad costs three and more."""
    broken: float = 0.25
    """Share of the prompts whose answers may be broken at a strength that is still useful."""
    effect: float = 0.0
    """The effect must rise by more than this, and surely so: where there are several prompts, with
    all of its 95 % interval."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require_finite(name, value)

    def breaks(self, *, repetition: float, nll: float | None) -> str | None:
        """Why a text is broken; None where it is not.

        Args:
            repetition: Rise of its repetition.
            nll: Rise of its NLL; None where nothing was written.
        """
        if nll is None:
            return "says nothing"
        if repetition > self.repetition:
            return "repeats itself"
        return "is unlikely" if nll > self.nll else None

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return asdict(self)
