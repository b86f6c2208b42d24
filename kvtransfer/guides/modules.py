"""Prompt modules: each read once, at the place that a schema gives it, and put together per prompt.

After Prompt Cache (Gim et al., arXiv:2311.04934). A module has the same positions in every prompt,
so its keys never have to be turned again. It is read behind what the tokenizer puts before every
text, and behind nothing else: it does not see the modules before it, so that a prompt of several is
an approximation. What a schema has and a prompt leaves out, leaves its positions empty.

The places of parameters are empty, too, when a module is read. A prompt's arguments are read at
those positions in a forward pass of only their tokens, and see all that stands before them; text
behind them in their module never saw them. (Prompt Cache reads filler tokens at those places, and
text behind them sees the filler.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, SchemaError, require
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import behind, one_after_another
from kvtransfer.guides.places import Place, lay_out
from kvtransfer.guides.prompt import NONE, Arguments, Prompt
from kvtransfer.guides.schema import Parameter, Schema
from kvtransfer.hf.fits import check_fits, check_room
from kvtransfer.hf.model import LanguageModel, require_model
from kvtransfer.hf.rows import check_gaps
from kvtransfer.hf.run import read_at


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Modules:
    """The modules of a schema, as one model read them.

    >>> trip = Modules.build(model, read_schema("trip.json"))
    >>> prefix = trip.assemble("persona", "rome", "plan", arguments={"plan": {"days": "four"}})
    >>> score(model, live, prefix)
    """

    model: LanguageModel
    schema: Schema
    opening: KVCache | None
    """Of what the tokenizer puts before every text."""
    places: Mapping[str, Place]
    caches: Mapping[str, KVCache]
    """Of each module's own text, its places left empty; none where it has no text."""

    @classmethod
    def build(
        cls,
        model: LanguageModel,
        schema: Schema,
        *,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> "Modules":
        """Read every module once.

        Args:
            model: Reads them, and prompts that are made of them.
            schema: Says where each stands.
            progress: Told the number of tokens after each module.

        Raises:
            SchemaError: a text has no tokens.
            CacheLayoutError: all modules together are longer than the model's positions, or than
                one table of its RoPE serves, or a module would be read behind a gap that the
                model's attention does not count.
        """
        require_model(model)
        require(
            "schema",
            schema,
            Schema,
            "a Schema",
            hint="read_schema(path) reads one, Schema.from_dict(data) makes one of plain data",
        )
        model.require_as_wrapped()
        places = lay_out(model, schema)
        _check_length(model, max(place.end for place in places.values()))
        ids = model.opening
        opening = None
        if len(ids):
            opening = read_at(model, ids[None], torch.arange(len(ids))[None])
        caches = {}
        for name, place in places.items():
            if len(place.ids):
                caches[name] = _read(model, place.ids, place.positions, opening, f"module {name!r}")
                caches[name] = behind(caches[name], len(ids))
            progress(len(place.ids))
        return cls(model=model, schema=schema, opening=opening, places=places, caches=caches)

    def assemble(self, *names: str, arguments: Arguments = NONE) -> KVCache:
        """The prefix of a prompt that has these modules, whatever order they are named in.

        Live tokens go on at the position after its last token.

        Args:
            names: Of modules, at most one of each union.
            arguments: For every parameter of these modules, the text to fill it with.

        Raises:
            SchemaError: there is no such module, two are alternatives of one union, or an argument
                is missing, unknown, or too long.
            CacheLayoutError: the model's attention does not count the positions that stay empty.
        """
        prompt = Prompt.of(self.model, self.places, names, arguments)
        pieces = [] if self.opening is None else [self.opening]
        for place in prompt.places:
            for part in place.parts:
                ids = prompt.tokens(place, part)
                if not isinstance(part.content, Parameter):
                    upto = self.caches[place.name].prefix(part.column + len(ids))
                    pieces.append(behind(upto, part.column))
                elif len(ids):
                    before = one_after_another(pieces) if pieces else None
                    positions = torch.arange(part.start, part.start + len(ids))
                    what = f"argument {part.content.name!r} of module {place.name!r}"
                    pieces = [_read(self.model, ids, positions, before, what)]
        if not pieces:
            raise SchemaError(
                f"a prompt of {', '.join(names)} has no tokens",
                hint="fill a parameter, or name a module with text of its own",
            )
        made = one_after_another(pieces)
        check_fits(self.model, made)
        positions = made.positions[0]
        check_gaps(self.model, positions[None], int(positions.max()) + 1)
        return replace(made, approximate="; ".join(prompt.shortcomings(positions)) or None)

    def ids(self, *names: str, arguments: Arguments = NONE) -> Int[Tensor, " t"]:
        """The tokens of :meth:`assemble`'s prefix, in order.

        Raises:
            SchemaError: as there.
        """
        prompt = Prompt.of(self.model, self.places, names, arguments)
        return torch.cat((self.model.opening, prompt.ids))

    def __rich__(self) -> Table:
        table = Table(
            "module", "union", "positions", "tokens", "parameters", title=self.schema.name
        )
        for name, place in self.places.items():
            table.add_row(
                escape(name),
                escape(place.union or "–"),
                f"{place.start} to {place.end - 1}",
                str(len(place.ids)),
                escape(
                    ", ".join(f"{each.name} (≤ {each.tokens})" for each in place.parameters) or "–"
                ),
            )
        return table


def _read(
    model: LanguageModel,
    ids: Int[Tensor, " t"],
    positions: Int[Tensor, " t"],
    before: KVCache | None,
    what: str,
) -> KVCache:
    """``before``, and behind it these tokens, at these positions."""
    stand = positions if before is None else torch.cat((before.positions[0].cpu(), positions))
    try:
        check_gaps(model, stand[None], int(positions[-1]) + 1)
    except CacheLayoutError as error:
        raise CacheLayoutError(f"{what}: {error.message}", hint=error.hint) from error
    return read_at(model, ids[None], positions[None].to(model.device), behind=before)


def _check_length(model: LanguageModel, end: int) -> None:
    """Raise CacheLayoutError unless all positions of a schema are of one kind."""
    check_room(model, end)
    for layer in model.spec.layers:
        limit = layer.rotation.fixed_up_to if layer.rotation else None
        if layer.rotation is not None and limit is not None and end > limit:
            raise CacheLayoutError(
                f"the schema has {end} positions, and beyond {limit} the RoPE of "
                f"{model.spec.name} ({layer.rotation.type}) has another table",
                hint=f"keep it within {limit}",
            )
