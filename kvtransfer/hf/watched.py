"""Look at the calls of a model's ``generate``, for as long as a block lasts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Look = Callable[[Tensor | None, dict[str, Any]], None]
"""Takes what was given by position, and what by name; raises to prevent the call."""


@contextmanager
def watched_generate(module: Any, look: Look) -> Iterator[None]:
    """Within the block ``look`` sees every call of ``module.generate`` first.

    Blocks may be left in any order, as generators that each hold one open are.
    """
    ours = _Watched(look, module.generate, module.__dict__.get("generate"))
    module.generate = ours
    try:
        yield
    finally:
        ours.open = False
        top = module.__dict__.get("generate")
        while isinstance(top, _Watched) and not top.open:
            top = top.beneath
        if top is None:
            module.__dict__.pop("generate", None)  # the class's own shows again
        else:
            module.generate = top


@dataclass(slots=True, eq=False)
class _Watched:
    """In the place of ``generate``."""

    look: Look
    plain: Callable[..., Any]
    beneath: Any
    """What stood in the module's own dictionary before."""
    open: bool = True

    def __call__(self, inputs: Tensor | None = None, *given: Any, **named: Any) -> Any:
        if self.open:
            self.look(inputs, named)
        return self.plain(inputs, *given, **named)
