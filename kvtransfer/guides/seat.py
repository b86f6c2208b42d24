"""What a model knows in a session, and how it takes over from another that has read on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import IncompatibleModels, TextError, WrongKind, require
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.transfer import mapped
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import behind, one_after_another
from kvtransfer.geometry.spec import same_model, same_tokens
from kvtransfer.guides.drift import Drift, RePrefill, drift_between, first_deviation, scored_at_most
from kvtransfer.hf.fits import check_ids
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.reader import Reader

How = Literal["new", "whole", "prefill"]
"""How a model takes over. ``new``: it keeps the cache that it had when it was last current, and
only the tokens since are mapped and put behind it. ``whole``: the current model's entire cache is
mapped. ``prefill``: it reads all of the history itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """What a model that took over went on from, in tokens; they sum to the history's length."""

    source: str
    target: str
    how: How
    kept: int
    """As the target had them from its last time."""
    mapped: int
    """Of the source's cache."""
    read: int
    """By the target now: the last one, or all."""
    drift: Drift | None = None
    """As the policy measured it, before it decided."""
    deviation: float | None = None
    """The same."""


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """What a model knew when it was last current. A value, so that nothing is ever half done."""

    cache: KVCache
    logits: Float[Tensor, " v"]
    """After the last token."""
    carried: int = 0
    """How often mapped tokens were added since all of it was read by one model."""


def taken_over(
    mapping: KVMapping,
    source: Seat,
    before: Seat | None,
    target: LanguageModel,
    ids: Int[Tensor, " t"],
) -> Seat:
    """What ``target`` knows of ``ids`` when it goes on from ``source``.

    Args:
        mapping: From the source's model to ``target``.
        source: Knows all of ``ids``.
        before: What the target keeps: it knows the first of them, not all; None for nothing.
        target: Takes over, and reads the last token itself.
        ids: The history.
    """
    kept, last = (0 if before is None else before.cache.tokens), len(ids) - 1
    parts = [] if before is None else [before.cache]
    if kept < last:
        parts.append(_mapped(mapping, source.cache.prefix(last), target, ids, kept))
    carried = (before or source).carried + (kept < last)
    return read_on(target, _joined(parts), ids[last:], carried=carried)


def read_on(
    model: LanguageModel, cache: KVCache | None, ids: Int[Tensor, " t"], *, carried: int = 0
) -> Seat:
    """What ``model`` knows once it has read ``ids`` on top of ``cache``."""
    return read_through(model, cache, ids, carried=carried, last=True)[0]


def read_through(
    model: LanguageModel,
    cache: KVCache | None,
    ids: Int[Tensor, " t"],
    *,
    carried: int = 0,
    last: bool = False,
) -> tuple[Seat, Float[Tensor, "_t v"]]:
    """The same, and the logits after each of ``ids``, or after the last of them alone."""
    reader = Reader.over(model, cache)
    with torch.no_grad():
        logits = reader(ids[None], last=last)[0]
    return Seat(reader.held(), logits[-1].clone(), carried), logits


def _mapped(
    mapping: KVMapping, cache: KVCache, target: LanguageModel, ids: Int[Tensor, " t"], kept: int
) -> KVCache:
    """The target's cache of all tokens in ``cache`` but the first ``kept``."""
    row = ids[None, : cache.tokens]
    if mapping.start is not None or kept == 0:
        return behind(mapped(mapping, cache, target, row), kept)
    # The token before goes along: some maps read it, too.
    return behind(mapped(mapping, behind(cache, kept - 1), target, row[:, kept - 1 :]), 1)


def _joined(parts: Sequence[KVCache]) -> KVCache | None:
    """Caches one after another; what is said of them is said once, however often they crossed."""
    if not parts:
        return None
    said = {
        of: "; ".join(
            dict.fromkeys(
                reason
                for part in parts
                for reason in (getattr(part, of) or "").split("; ")
                if reason
            )
        )
        or None
        for of in ("approximate", "note")
    }
    return replace(one_after_another(parts), approximate=said["approximate"], note=said["note"])


def policed(
    policy: RePrefill,
    model: LanguageModel,
    seat: Seat,
    ids: Int[Tensor, " t"],
    switch: Switch,
    *,
    layers: int,
) -> tuple[Seat, Switch]:
    """What ``policy`` makes of a cache that was carried to ``model``, and of the record of it.

    Args:
        policy: Looks, and decides.
        model: Took over.
        seat: What it knows of ``ids``.
        ids: The history.
        switch: How it came to that.
        layers: How many of the first layers are looked at, where ``deviation`` is asked for.
    """
    own = drift = off = None
    if policy.kl is not None and len(ids) >= 3:
        own = read_on(model, None, ids)
        tokens = scored_at_most(len(ids), policy.tokens)
        drift = drift_between(model, ids, seat.cache, own.cache, tokens=tokens)
    if policy.deviation is not None:
        off = first_deviation(model, ids, seat.cache, layers=layers)
    switch = replace(switch, drift=drift, deviation=off)
    if not policy.due(drift=drift, deviation=off, carried=seat.carried):
        return seat, switch
    exact = own or read_on(model, None, ids)
    return exact, replace(switch, kept=0, mapped=0, read=len(ids))


def fed(
    text: str | Int[Tensor, " t"] | Sequence[int], models: Iterable[LanguageModel], *, first: bool
) -> Int[Tensor, " t"]:
    """The ids of what is fed, which all of ``models`` know.

    Args:
        text: Text, or ids.
        models: They have one tokenizer.
        first: Whether nothing was fed before: then a text gets the tokenizer's opening.

    Raises:
        TextError: there is none.
        CacheLayoutError: they are no row of ids, or unknown to a model.
        WrongKind: it is neither text nor ids.
    """
    models = tuple(models)
    if isinstance(text, str):
        ids = models[0].encode(text)
        ids = models[0].opened(ids) if first and len(ids) else ids
    elif isinstance(text, Tensor):
        ids = text.detach().cpu()
    elif isinstance(text, (list, tuple)) and all(type(each) is int for each in text):
        ids = torch.tensor(text, dtype=torch.long)
    else:
        raise WrongKind(
            "what is fed", text, "a text or ids", hint="a string, or a tensor or list of ids"
        )
    if ids.numel() == 0:
        raise TextError("there is nothing to read: no token", hint="feed a text, or ids")
    for model in models:
        check_ids(model, ids[None])
    return ids.long()


def require_one_vocabulary(models: Mapping[str, LanguageModel]) -> None:
    """Raise IncompatibleModels unless all models cut and begin text alike."""
    (first, one), *others = models.items()
    for name, other in others:
        if not same_tokens(one.spec, other.spec) or not torch.equal(one.opening, other.opening):
            raise IncompatibleModels(
                f"{first} ({one.spec.name}) and {name} ({other.spec.name}) cut or begin text "
                "otherwise, and a session's tokens are all its models'",
                hint="transfer(mapping, source, target, ids) aligns the tokens of a single prefix",
            )


def by_direction(
    models: Mapping[str, LanguageModel], mappings: Iterable[KVMapping]
) -> dict[tuple[str, str], KVMapping]:
    """Each mapping by the names of the models that it goes between.

    Raises:
        IncompatibleModels: it goes between others.
        WrongKind: it is none.
    """
    hint = "[KVMapping.from_pretrained(name), …]"
    if isinstance(mappings, KVMapping) or not isinstance(mappings, Iterable):
        raise WrongKind("what holds the mappings", mappings, "a list", hint=hint)
    found: dict[tuple[str, str], KVMapping] = {}
    for number, mapping in enumerate(mappings, 1):
        require(f"mapping {number}", mapping, KVMapping, "a KVMapping", hint=hint)
        ends = [
            (source, target)
            for source, one in models.items()
            for target, other in models.items()
            if source != target
            and same_model(str(mapping.source.identity), str(one.spec.identity))
            and same_model(str(mapping.target.identity), str(other.spec.identity))
        ]
        if not ends:
            known = ", ".join(
                f"{name} ({model.spec.name}, {model.spec.identity})"
                for name, model in models.items()
            )
            raise IncompatibleModels(
                f"mapping {number} goes {mapping.source.name} → {mapping.target.name} "
                f"({mapping.source.identity} → {mapping.target.identity}), and this session has "
                f"{known}",
                hint="give the mappings between these models, or fit them: kvtransfer fit SOURCE "
                "TARGET --out DIR",
            )
        found |= dict.fromkeys(ends, mapping)
    return found
