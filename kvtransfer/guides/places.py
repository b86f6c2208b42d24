"""Where the modules of a schema stand, in a model's tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import SchemaError
from kvtransfer.guides.schema import Module, Parameter, Schema
from kvtransfer.hf.model import LanguageModel


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A stretch of a module: tokens, or the room for an argument's."""

    content: Int[Tensor, " t"] | Parameter
    start: int
    """Its first position."""
    column: int
    """How many tokens of the module's own text are before it."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A module, and the positions that are kept for it in every prompt."""

    name: str
    union: str | None
    start: int
    end: int
    """Position after its last."""
    parts: tuple[Part, ...]

    @property
    def texts(self) -> tuple[tuple[int, Int[Tensor, " t"]], ...]:
        """Its own text: where each stretch begins, and its tokens."""
        return tuple(
            (part.start, part.content)
            for part in self.parts
            if not isinstance(part.content, Parameter)
        )

    @property
    def ids(self) -> Int[Tensor, " t"]:
        """The tokens of its own text."""
        return torch.cat([torch.empty(0, dtype=torch.long), *(ids for _, ids in self.texts)])

    @property
    def positions(self) -> Int[Tensor, " t"]:
        """Of each of them."""
        ranges = (torch.arange(start, start + len(ids)) for start, ids in self.texts)
        return torch.cat([torch.empty(0, dtype=torch.long), *ranges])

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """In order."""
        return tuple(each.content for each in self.parts if isinstance(each.content, Parameter))


def lay_out(model: LanguageModel, schema: Schema) -> dict[str, Place]:
    """The place of each module, in the order of the schema.

    The first stands behind what the tokenizer puts before every text. A union takes as many
    positions as the longest of its alternatives. Texts are tokenized apart: between modules, and
    where a parameter begins or ends, no token spans the seam.

    Raises:
        SchemaError: a text has no tokens.
    """
    places: dict[str, Place] = {}
    start = len(model.opening)
    for slot in schema.slots:
        ends = []
        for module in slot.modules:
            place = _place(model, module, slot.union, start)
            places[module.name] = place
            ends.append(place.end)
        start = max(ends)
    return places


def _place(model: LanguageModel, module: Module, union: str | None, start: int) -> Place:
    parts: list[Part] = []
    position, column = start, 0
    for part in module.parts:
        if isinstance(part, Parameter):
            parts.append(Part(part, position, column))
            position += part.tokens
            continue
        ids = model.encode(part)
        if not len(ids):
            raise SchemaError(
                f"the text {part!r} of module {module.name!r} has no tokens",
                hint="leave it out of the schema",
            )
        parts.append(Part(ids, position, column))
        position, column = position + len(ids), column + len(ids)
    return Place(module.name, union, start, position, tuple(parts))
