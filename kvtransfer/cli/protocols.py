"""kvtransfer eval --protocol: which text is scored, how much of it, and after what."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvtransfer.cli.measures import Asked
from kvtransfer.cli.texts import HeldOut

if TYPE_CHECKING:
    from kvtransfer.evaluation.conditions import Pair
    from kvtransfer.evaluation.part import Part
    from kvtransfer.fitting.mapping import KVMapping

Name = Literal["chunks", "lengths", "domains"]

Protocol = Annotated[
    Name | None,
    typer.Option(
        help="chunks: the paper's, one text in chunks of 2,048 tokens, the second 1,024 scored. "
        "lengths: the same tokens after prefixes of several lengths. domains: several texts "
        "(--domain) by several mappings (--rival)."
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        help="With --protocol lengths: tokens of a prefix, such as 64,512,4096; powers of two from "
        "64 to 4,096, as far as the models read, if not given."
    ),
]
Domains = Annotated[
    list[str] | None,
    typer.Option(
        "--domain",
        help="With --protocol domains: a held-out text, NAME=TEXT, with TEXT as of --text. May be "
        "given several times.",
    ),
]
Rivals = Annotated[
    list[str] | None,
    typer.Option(
        "--rival",
        help="Another mapping for the pair, measured as condition NAME: NAME=MAPPING. May be given "
        "several times.",
    ),
]
Prefix = Annotated[
    int | None,
    typer.Option(help="Tokens of each text item that are hidden: 256; 1,024 under chunks."),
]
Continuation = Annotated[
    int | None, typer.Option(help="Tokens that are scored after it: 256; 1,024 under chunks.")
]

SIZE, CHUNK_SIZE = 256, 1_024
"""Tokens of a prefix and of what is scored after it; half of the paper's chunk."""


@dataclass(frozen=True, slots=True)
class ProtocolMeasure:
    """A protocol that makes a part of the report: what it reads."""

    key: Literal["lengths", "domains"]
    texts: Mapping[str, Iterable[str]]
    """By name; one of no meaning under ``lengths``."""
    lengths: tuple[int, ...] | None

    @classmethod
    def asked(
        cls,
        protocol: Name | None,
        *,
        text: HeldOut,
        prefix: int | None,
        lengths: str | None,
        domains: list[str] | None,
    ) -> "ProtocolMeasure | None":
        """What the options ask for; None where text and guides are all.

        Raises:
            TextError: a text is missing.
            ValueError: the options do not go together.
        """
        if lengths is not None and protocol != "lengths":
            raise ValueError("--lengths is for --protocol lengths")
        if domains and protocol != "domains":
            raise ValueError("--domain is for --protocol domains")
        if protocol in ("chunks", "lengths") and text.name == "none":
            raise ValueError(f"--protocol {protocol} reads text; leave --text none out")
        if protocol not in ("lengths", "domains"):
            return None
        if protocol == "lengths":
            if prefix is not None:
                raise ValueError("with --protocol lengths, say --lengths and not --prefix")
            return cls(protocol, {"text": text()}, parsed_lengths(lengths))
        if not domains:
            raise ValueError("--protocol domains reads texts: --domain NAME=TEXT, at least one")
        if text.name is not None:
            raise ValueError("--protocol domains reads what --domain names; leave --text out")
        named_texts = named("--domain", domains)
        if list(named_texts.values()).count("-") > 1:
            raise ValueError("standard input can be read once: one --domain of it is enough")
        from kvtransfer.fitting.texts import held_out

        return cls(protocol, {name: held_out(each) for name, each in named_texts.items()}, None)

    def steps(self, items: int) -> int:
        """How often :meth:`part` tells of progress, at most."""
        from kvtransfer.evaluation.lengths import LENGTHS

        return items * len(self.texts if self.key == "domains" else self.lengths or LENGTHS)

    def check(self, asked: Asked) -> None:
        """Refuse a pair, conditions or lengths that cannot be."""
        from kvtransfer.evaluation.lengths import checked_lengths

        pair, names = _pair(asked)
        if self.key == "lengths":
            checked_lengths(self.lengths, pair, names, asked.continuation)

    def part(self, asked: Asked, progress: Callable[[], None]) -> "Part":
        """Measure what the protocol says."""
        from kvtransfer.evaluation.domains import evaluate_domains
        from kvtransfer.evaluation.lengths import evaluate_lengths

        pair, names = _pair(asked)
        if self.key == "domains":
            return evaluate_domains(
                pair,
                self.texts,
                names,
                prefix=asked.prefix,
                continuation=asked.continuation,
                items=asked.items,
                progress=progress,
            )
        return evaluate_lengths(
            pair,
            self.texts["text"],
            names,
            lengths=self.lengths,
            continuation=asked.continuation,
            items=asked.items,
            progress=progress,
        )


def _pair(asked: Asked) -> "tuple[Pair, tuple[str, ...]]":
    from kvtransfer.evaluation.rivals import PLAIN, pair_of

    return pair_of(
        asked.source,
        asked.target,
        asked.mapping,
        rivals=asked.rivals,
        conditions=PLAIN if asked.conditions is None else asked.conditions,
        bound=asked.bound,
    )


def size(given: int | None, protocol: Name | None) -> int:
    """Tokens of a prefix, or of what follows it."""
    if given is not None:
        return given
    return CHUNK_SIZE if protocol == "chunks" else SIZE


def named(option: str, given: list[str] | None) -> dict[str, str]:
    """What each NAME=VALUE names.

    Raises:
        ValueError: one gives no name or no value, or a name twice.
    """
    found: dict[str, str] = {}
    for each in given or ():
        name, _, value = each.partition("=")
        if not name.strip() or not value:
            raise ValueError(f"{option} is a name and a place, such as NAME=FOLDER, not {each!r}")
        if name in found:
            raise ValueError(f"{option} {name} is given twice; find another name for one of them")
        found[name] = value
    return found


def named_mappings(given: list[str] | None) -> "dict[str, KVMapping]":
    """What each --rival names.

    Raises:
        ArtifactError: there is no mapping in its folder.
        ValueError: as :func:`named`.
    """
    from kvtransfer.fitting.mapping import KVMapping

    places = named("--rival", given)
    for name in places:
        if "+" in name or "," in name:
            raise ValueError(f"--rival {name}: + and , stand between conditions; another name")
    return {name: KVMapping.from_pretrained(place) for name, place in places.items()}


def parsed_lengths(given: str | None) -> tuple[int, ...] | None:
    """What --lengths asks for.

    Raises:
        ValueError: it is no list of whole numbers.
    """
    if given is None:
        return None
    try:
        return tuple(int(each) for each in given.split(","))
    except ValueError:
        raise ValueError(
            f"--lengths takes numbers of tokens, such as 64,512,4096, not {given!r}"
        ) from None
