"""--text: documents that several measures read, and that are opened once."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import tee


@dataclass(slots=True)
class HeldOut:
    """What --text names, from its beginning for everyone who asks: standard input can be read only
    once."""

    name: str | None
    """As of :func:`kvtransfer.fitting.texts.held_out`; ``none`` for no text."""
    _kept: Iterator[str] | None = field(default=None, init=False)

    def __call__(self) -> Iterable[str]:
        """The documents.

        Raises:
            TextError: the text is missing.
        """
        from kvtransfer.fitting.texts import held_out

        if self._kept is None:
            self._kept = iter(held_out(self.name))
        self._kept, given = tee(self._kept)
        return given
