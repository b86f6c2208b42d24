"""What may be asked of a run of tasks."""

from collections.abc import Mapping
from typing import Any

from kvtransfer.errors import TaskError

NEUTRAL: Mapping[str, float] = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
}
"""Options of ``generate`` that look at the prompt, which is hidden, or make rows of one, with what
leaves them out."""


def require_blind(options: Mapping[str, Any], defaults: Any) -> None:
    """Raise TaskError for an option that would look at the prompt, or make rows of one.

    Args:
        options: What a task asks of ``generate``.
        defaults: The model's generation config, which decides where it asks nothing.
    """
    for name, neutral in NEUTRAL.items():
        asked = options.get(name, getattr(defaults, name, None))
        if asked is not None and asked != neutral:
            raise TaskError(
                f"{name} is {asked}, and prompts that lie hidden are written after one at a time "
                "and not looked at again",
                hint=f"--gen_kwargs {name}={neutral:g}",
            )


def checked_batch_size(given: int | str | None) -> int | str:
    """A batch size as lm-eval reads it.

    Raises:
        ValueError: it is neither a positive number nor auto.
    """
    text = str(given or 1)
    if text.partition(":")[0] == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"a batch size is a positive number or auto, not {given!r}")
    return int(text)
