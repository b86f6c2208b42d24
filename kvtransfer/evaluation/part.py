"""What an evaluation may measure beside text and guides: tasks, sessions, other protocols."""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Part(Protocol):
    """One more thing that was measured; true where it speaks for the mapping."""

    def __bool__(self) -> bool:
        """Whether what it found is good."""

    def __rich__(self) -> Any:
        """The table."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""

    def sentence(self) -> str:
        """What was found, in a clause without a capital or a full stop; empty for nothing."""


__all__ = ["Part"]
