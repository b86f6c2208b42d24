"""The arms of an evaluation: the same live tokens, each time on another prefix.

To add one, write a function from :class:`Pair` and the hidden ids to an :class:`Arm`, and name it
in CONDITIONS.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import IncompatibleModels, KVTransferError, SteeringError
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.transfer import mapped as mapped_by
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.spec import same_tokens
from kvtransfer.guides.concat import concat
from kvtransfer.guides.pack import GuidePack
from kvtransfer.guides.recompute import recompute
from kvtransfer.hf.aligned import read_aligned
from kvtransfer.hf.fits import check_fits
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill
from kvtransfer.steering.edit import Intervention
from kvtransfer.steering.interventions import Ablate, ForgetRotation


@dataclass(frozen=True, slots=True, eq=False)
class Arm:
    """Who reads the live tokens, and on what."""

    reader: LanguageModel
    prefix: KVCache | None
    exact: int = 0
    """How many of the prefix's first tokens are as the reader makes them, whatever the rest is."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """Two models, a mapping between them, and how each of them reads one hidden prefix."""

    source: LanguageModel
    target: LanguageModel
    mapping: KVMapping | None
    """None where only what needs none is measured."""
    rivals: Mapping[str, KVMapping] = field(default_factory=dict)
    """Other mappings between the same models, each measured as a condition of that name."""
    repairs: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """By name of the condition, another one and the share of its prefix that is read again."""
    packs: Mapping[str, GuidePack] = field(default_factory=dict)
    """By name of the condition, a pack of the target's whose caches of the guides are used."""
    edits: Mapping[str, tuple[str, Intervention]] = field(default_factory=dict)
    """By name of the condition, another condition and the edit of its prefix."""

    def __post_init__(self) -> None:
        if self.mapping is not None:
            self.mapping.check_ends(self.source.spec, self.target.spec)
        for name, rival in self.rivals.items():
            try:
                rival.check_ends(self.source.spec, self.target.spec)
            except IncompatibleModels as error:
                raise IncompatibleModels(f"{name}: {error.message}", hint=error.hint) from error
        for each in (self.rivals, self.packs):
            if taken := sorted(set(each) & {*CONDITIONS, *self.repairs}):
                raise ValueError(f"{', '.join(taken)} is a condition; find another name for it")
        if both := sorted(set(self.rivals) & set(self.packs)):
            raise ValueError(f"{', '.join(both)} is a mapping and a pack; rename one of them")


@dataclass(frozen=True, eq=False)
class Reading:
    """One hidden prefix as both models read it; made once, used by every condition.

    Each model reads it when its cache is first asked for.
    """

    pair: Pair
    ids: Int[Tensor, "1 t"]
    made: dict[str, Arm] = field(default_factory=dict)
    """Arms that others may begin with: each is made once."""

    @classmethod
    def of(cls, pair: Pair, hidden: Int[Tensor, " t"]) -> "Reading":
        """Let both models read it. Its ids are the target's, and begin with its opening."""
        reading = cls(pair, hidden[None])
        # Now: what cannot be read at all is no condition's fault, and none is left out for it.
        _ = reading.source, reading.own
        return reading

    @cached_property
    def source(self) -> KVCache:
        """With a token for each of ``ids``, also where the source has another tokenizer."""
        return read_aligned(self.pair.source, self.pair.target, self.ids)

    @cached_property
    def own(self) -> KVCache:
        """The target's."""
        return prefill(self.pair.target, self.ids)

    def arm(self, name: str) -> Arm:
        """Of one condition; a KVTransferError says why it cannot be had."""
        if name not in self.made:
            self.made[name] = conditions_of(self.pair)[name](self)
        return self.made[name]

    def fit_target(self, cache: KVCache) -> KVCache:
        """A cache in the dtype, and on the device, of the target."""
        return cache.to(dtype=self.pair.target.dtype, device=self.pair.target.device)

    def mapped(self, *, by: KVMapping | None = None, shuffled: bool = False) -> KVCache:
        """The source's cache under the pair's mapping, or under another."""
        mapping = by or self.pair.mapping
        if mapping is None:
            raise IncompatibleModels("no mapping was given", hint="fit one: kvtransfer fit")
        return mapped_by(mapping, self.source, self.pair.target, self.ids, shuffled=shuffled)


Condition = Callable[[Reading], Arm]


def none(reading: Reading) -> Arm:
    """No prefix but what the target expects before any text: the floor."""
    target = reading.pair.target
    opening = target.opening
    return Arm(target, prefill(target, opening[None]) if len(opening) else None)


def own(reading: Reading) -> Arm:
    """The target's own cache of the prefix: the ceiling."""
    return Arm(reading.pair.target, reading.own)


def mapped(reading: Reading) -> Arm:
    """The source's cache, mapped: the experiment."""
    return Arm(reading.pair.target, reading.mapped())


def source(reading: Reading) -> Arm:
    """The source alone, on its own cache: what a user has without the target."""
    _require_same_tokens(reading.pair)
    return Arm(reading.pair.source, reading.source)


def raw(reading: Reading) -> Arm:
    """The source's cache as it is, where the target's shapes allow it.

    Where the depths differ, each target layer gets the source layer at the same relative depth.
    """
    _require_same_tokens(reading.pair)
    pair, cache = reading.pair, reading.fit_target(reading.source)
    depth, wanted = len(cache), len(pair.target.spec.layers)
    nearest = [round(t * (depth - 1) / max(1, wanted - 1)) for t in range(wanted)]
    unmapped = replace(
        cache,
        keys=tuple(cache.keys[s] for s in nearest),
        values=tuple(cache.values[s] for s in nearest),
        rotations=None,
        model=pair.target.spec.identity,
        approximate=f"{pair.source.spec.name} read it",
    )
    check_fits(pair.target, unmapped)
    return Arm(pair.target, unmapped)


def _require_same_tokens(pair: Pair) -> None:
    if not same_tokens(pair.source.spec, pair.target.spec):
        raise IncompatibleModels(
            f"{pair.source.spec.name} reads other tokens than {pair.target.spec.name}, so neither "
            "its cache as it is nor its numbers a token compare",
            hint="leave this condition out",
        )


def apart(reading: Reading) -> Arm:
    """The target's own cache of both halves of the prefix, read apart and put together.

    The second half never saw the first: what reusing a chunk behind other text costs.
    """
    target, half = reading.pair.target, reading.ids.shape[1] // 2
    first, second = reading.ids[:, :half], reading.ids[:, half:]
    opened = torch.cat((target.opening[None], second), dim=1)
    pieces = [prefill(target, first), prefill(target, opened)]
    return Arm(target, concat(target, pieces), exact=half)


def zeroed(reading: Reading) -> Arm:
    """Keys and values of zero: as long as the prefix, and empty."""
    return Arm(reading.pair.target, Ablate()(reading.own))


def unrotated(reading: Reading) -> Arm:
    """Mapped, but with the target's rotation forgotten."""
    return Arm(reading.pair.target, ForgetRotation()(reading.mapped()))


def shuffled(reading: Reading) -> Arm:
    """Mapped by the same fit on permuted rows, which knows the average token and nothing else."""
    return Arm(reading.pair.target, reading.mapped(shuffled=True))


CONDITIONS: Mapping[str, Condition] = MappingProxyType(
    {
        "none": none,
        "own": own,
        "mapped": mapped,
        "source": source,
        "raw": raw,
        "zeroed": zeroed,
        "unrotated": unrotated,
        "shuffled": shuffled,
        "apart": apart,
    }
)
"""Every condition, in the order of the tables. ``none`` and ``own`` are always measured: all else
is read against them."""

USUAL = tuple(name for name in CONDITIONS if name != "apart")
"""What is measured where nobody says what."""

REPAIRABLE = ("mapped", "raw", "apart")
"""Whose prefixes the target may read again in part."""

MAPPED = ("mapped", "unrotated", "shuffled")
"""What cannot be had without a mapping."""

CONTROLS = ("none", "raw", "zeroed", "unrotated", "shuffled")
"""What ``mapped`` must beat before anyone believes it."""


def in_order(conditions: Iterable[str]) -> tuple[str, ...]:
    """Those conditions, ``none`` and ``own`` with them, in the order of the tables.

    Raises:
        ValueError: there is no condition of a name.
    """
    asked = set(conditions)
    if unknown := sorted(asked - set(CONDITIONS)):
        raise ValueError(f"no condition {', '.join(unknown)}; there are {', '.join(CONDITIONS)}")
    return tuple(name for name in CONDITIONS if name in asked | {"none", "own"})


def arms(reading: Reading, names: tuple[str, ...]) -> tuple[dict[str, Arm], dict[str, str]]:
    """The arms of the named conditions, and why the others cannot be had for this pair."""
    pair = reading.pair
    made: dict[str, Arm] = {}
    missing: dict[str, str] = {}
    for name in names:
        if name in pair.edits and pair.edits[name][0] in pair.packs:
            continue  # a pack holds guides, and is edited where they are asked about
        try:
            made[name] = reading.arm(name)
        except SteeringError:
            raise  # what was asked for is not there, whichever the pair
        except KVTransferError as error:
            missing[name] = error.message
    return made, missing


def conditions_of(pair: Pair) -> dict[str, Condition]:
    """By name, every condition that can be asked for with these models and mappings."""
    return {
        **CONDITIONS,
        **{name: _by(rival) for name, rival in pair.rivals.items()},
        **{name: _edited(base, edit) for name, (base, edit) in pair.edits.items()},
        **{name: _repaired(base, share) for name, (base, share) in pair.repairs.items()},
    }


def _by(rival: KVMapping) -> Condition:
    return lambda reading: Arm(reading.pair.target, reading.mapped(by=rival))


def _edited(base: str, edit: Intervention) -> Condition:
    def make(reading: Reading) -> Arm:
        plain = reading.arm(base)
        if plain.prefix is None:
            raise SteeringError(
                f"{base} has no prefix to edit", hint="edit own, mapped or raw, say"
            )
        return Arm(plain.reader, edit(plain.prefix))

    return make


def _repaired(base: str, share: float) -> Condition:
    def make(reading: Reading) -> Arm:
        target, plain = reading.pair.target, reading.arm(base)
        assert plain.prefix is not None  # REPAIRABLE ones have one
        again = recompute(target, reading.ids, plain.prefix, share, after=plain.exact)
        return Arm(target, again)

    return make
