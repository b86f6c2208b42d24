"""A prompt made of modules: which of them, what fills their parameters, and what it is not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import SchemaError, require
from kvtransfer.guides.places import Part, Place
from kvtransfer.guides.schema import Parameter
from kvtransfer.hf.model import LanguageModel

Arguments = Mapping[str, Mapping[str, str]]
"""Per module, the text of each parameter."""

NONE: Arguments = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Modules in the order of their schema, every parameter filled."""

    places: tuple[Place, ...]
    filled: Mapping[tuple[str, str], Int[Tensor, " t"]]
    """The argument of each module and parameter."""

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        places: Mapping[str, Place],
        names: Sequence[str],
        arguments: Arguments,
    ) -> "Prompt":
        """Choose and fill.

        Raises:
            SchemaError: there is no such module, two are alternatives of one union, or an argument
                is missing, unknown, or too long.
        """
        _check_names(places, names)
        chosen = tuple(place for name, place in places.items() if name in names)
        _check_arguments({place.name: place for place in chosen}, arguments)
        return cls(
            chosen,
            {
                (place.name, parameter.name): _fill(
                    model, place, parameter, arguments.get(place.name, {})
                )
                for place in chosen
                for parameter in place.parameters
            },
        )

    def tokens(self, place: Place, part: Part) -> Int[Tensor, " t"]:
        """The tokens of a part, an argument's too."""
        if isinstance(part.content, Parameter):
            return self.filled[place.name, part.content.name]
        return part.content

    @property
    def ids(self) -> Int[Tensor, " t"]:
        """All tokens, in order, without what opens every text."""
        parts = [self.tokens(place, part) for place in self.places for part in place.parts]
        return torch.cat([torch.empty(0, dtype=torch.long), *parts])

    def shortcomings(self, positions: Int[Tensor, " t"]) -> Iterator[str]:
        """Why its cache is not what the model would make of all its tokens in that place.

        Args:
            positions: Of all its tokens, what opens every text included.
        """
        unseen = [place.name for place in self.places[1:] if len(place.ids)]
        if unseen:
            yield f"{', '.join(unseen)} never saw what stands before"
        for place in self.places:
            shown = [len(self.tokens(place, part)) for part in place.parts]
            kinds = [isinstance(part.content, Parameter) for part in place.parts]
            first = next((i for i, arg in enumerate(kinds) if arg and shown[i]), len(kinds))
            if not all(kinds[first:]):
                yield f"text of {place.name} was read without the arguments before it"
        empty = int(positions.max() - positions.min()) + 1 - len(positions)
        if empty:
            yield f"{empty} positions before its end are empty"


def _check_names(places: Mapping[str, Place], names: Sequence[str]) -> None:
    """Raise SchemaError unless these modules can stand in one prompt."""
    known = f"the modules are {', '.join(places)}"
    if not names:
        raise SchemaError("a prompt of no modules", hint=known)
    taken: dict[str, str] = {}
    for name in names:
        require("a module", name, str, "a name", hint="name each: assemble('persona', 'rome')")
        if name not in places:
            raise SchemaError(f"there is no module {name!r} in this schema", hint=known)
        if (times := names.count(name)) > 1:
            raise SchemaError(
                f"module {name!r} is named {times} times",
                hint="a module has one place, and stands there once",
            )
        union = places[name].union
        if union is not None and union in taken:
            raise SchemaError(
                f"{taken[union]!r} and {name!r} are alternatives of the union {union!r}, and stand "
                "at one place",
                hint="name one of them",
            )
        if union is not None:
            taken[union] = name


def _check_arguments(chosen: Mapping[str, Place], arguments: Arguments) -> None:
    """Raise SchemaError for an argument that nothing takes."""
    form = "arguments={'plan': {'days': '4'}}: of each module, the text of each parameter"
    require("arguments", arguments, Mapping, "a dict", hint=form)
    for module, given in arguments.items():
        require(f"what is given for module {module!r}", given, Mapping, "a dict", hint=form)
        if module not in chosen:
            raise SchemaError(
                f"arguments for module {module!r}, which is not in the prompt",
                hint=f"in it are {', '.join(chosen)}",
            )
        known = [each.name for each in chosen[module].parameters]
        for name in given:
            if name not in known:
                raise SchemaError(
                    f"module {module!r} has no parameter {name!r}",
                    hint=f"its parameters are {', '.join(known) or 'none'}",
                )


def _fill(
    model: LanguageModel, place: Place, parameter: Parameter, given: Mapping[str, str]
) -> Int[Tensor, " t"]:
    """The tokens of one argument."""
    if parameter.name not in given:
        raise SchemaError(
            f"module {place.name!r} has a parameter {parameter.name!r}, and no argument for it",
            hint=f"arguments={{{place.name!r}: {{{parameter.name!r}: '…'}}}}; '' leaves it empty",
        )
    text = given[parameter.name]
    require(
        f"the argument for {parameter.name!r} of module {place.name!r}",
        text,
        str,
        "a text",
        hint="put it into quotes, or str(…) around it",
    )
    ids = model.encode(text)
    if len(ids) > parameter.tokens:
        raise SchemaError(
            f"the argument for {parameter.name!r} of module {place.name!r} has {len(ids)} tokens, "
            f"and there is room for {parameter.tokens}: {text!r}",
            hint="shorten it, or give the parameter more tokens in the schema",
        )
    return ids
