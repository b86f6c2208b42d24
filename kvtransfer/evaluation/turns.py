"""Measure sessions: two models take turns at one text, on caches that go back and forth."""

from collections.abc import Callable, Iterable
from itertools import islice

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import IncompatibleModels, KVTransferError, TextError
from kvtransfer.evaluation.turns_report import ARMS, METRICS, Turns
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.guides.drift import TOKENS, RePrefill
from kvtransfer.guides.seat import How
from kvtransfer.guides.session import Session
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score
from kvtransfer.measures.agreement import kl, nll, top1_agreement

NAMES = ("source", "target")
"""Who reads the first turn and the odd ones, and who the even ones."""

HOWS: dict[str, How] = {"whole": "whole", "new": "new", "bound": "whole"}
"""How each arm's models take over."""

Found = dict[str, dict[str, list[float]]]


def evaluate_turns(
    source: LanguageModel,
    target: LanguageModel,
    mapping: KVMapping | None,
    back: KVMapping | None,
    *,
    texts: Iterable[str],
    turns: int = 10,
    tokens: int = 64,
    bound: float = 0.1,
    items: int = 32,
    progress: Callable[[], None] = lambda: None,
) -> Turns:
    """Let two models read held-out text turn by turn, and look at each turn how far the reader is
    from itself on a cache of its own.

    The source reads the first turn, the target the second, and so on. A turn is scored as it is
    read: on what was carried of all turns before it. Arms: ``whole`` and ``new`` as
    :data:`kvtransfer.guides.seat.How` has them; ``bound`` is ``whole``, and whoever's drift over
    the last tokens before a turn is beyond ``bound`` reads the history itself, and goes on so;
    ``own`` is the reader's own cache; ``none`` no history at all.

    Args:
        source: Reads first.
        target: Reads second.
        mapping: From source to target.
        back: From target to source.
        texts: Held-out documents, cut into sessions.
        turns: Of a session.
        tokens: Of a turn.
        bound: In nats a token.
        items: Sessions at most.
        progress: Called after each.

    Raises:
        IncompatibleModels: a direction has no mapping, or a mapping is for another pair, or the
            models cut text into other tokens.
        CacheLayoutError: a session is longer than a model has positions for.
        TextError: there is no text, or it is shorter than one session.
    """
    if items < 1:
        raise ValueError(f"{items=}: at least 1 is needed")
    policy = check_sizes(turns, tokens, bound)
    models = dict(zip(NAMES, (source, target), strict=True))
    mappings = both_ways(source, target, mapping, back)
    Session(models, mappings)  # refuses what it would refuse later, before anything is read
    cut = chunks(texts, source.encode, length=turns * tokens, opening=source.opening)
    found: list[Found] = []
    for ids in islice(cut, items):
        found.append(_session(models, mappings, ids.split(tokens), policy))
        progress()
    if not found:
        raise TextError("there is no text to evaluate on", hint="give a text with prose in it")
    return Turns(
        source=source.spec.name,
        target=target.spec.name,
        turns=turns,
        tokens=tokens,
        bound=bound,
        columns={
            arm: {
                metric: np.array([each[arm][metric] for each in found])
                for metric in found[0][arm]
                if all(metric in each[arm] for each in found)
            }
            for arm in ARMS
        },
    )


def check_sizes(turns: int, tokens: int, bound: float) -> RePrefill:
    """The policy of the arm ``bound``, once there is something to measure.

    Raises:
        ValueError: a size or the bound measures nothing.
    """
    # A drift needs a token in the cache, one that is read, and one to predict.
    if turns < 2 or tokens < 3:
        raise ValueError(f"{turns} turns of {tokens} tokens: at least 2 turns of 3 are needed")
    return RePrefill(kl=bound)


def both_ways(
    source: LanguageModel,
    target: LanguageModel,
    mapping: KVMapping | None,
    back: KVMapping | None,
) -> tuple[KVMapping, KVMapping]:
    """The mappings, once they are seen to be one for each direction.

    Raises:
        IncompatibleModels: one is missing, or for another pair.
    """
    for found, option, one, other in (
        (mapping, "--mapping", source, target),
        (back, "--back", target, source),
    ):
        if found is None:
            names = one.spec.name, other.spec.name
            raise IncompatibleModels(
                f"models that take turns need a mapping each way, and none leads from {names[0]} "
                f"to {names[1]}",
                hint=f"fit it: kvtransfer fit {names[0]} {names[1]} --out DIR, then {option} DIR",
            )
        found.check_ends(one.spec, other.spec)
    assert mapping is not None
    assert back is not None
    return mapping, back


def _session(
    models: dict[str, LanguageModel],
    mappings: tuple[KVMapping, KVMapping],
    stretches: tuple[Int[Tensor, " t"], ...],
    policy: RePrefill,
) -> Found:
    """All arms of one text, one number a turn from the second on."""
    found: Found = {arm: {} for arm in ARMS}
    carried = {arm: Session(models, mappings) for arm in HOWS}
    alone = {name: Session({name: model}) for name, model in models.items()}
    for session in (*carried.values(), *alone.values()):
        session.feed(stretches[0])
    for turn, ids in enumerate(stretches[1:], 1):
        name = NAMES[turn % 2]
        for arm, session in carried.items():
            session.switch_to(name, how=HOWS[arm])
            if arm != "bound":  # which may be another cache before it is scored
                _look(found[arm], session)
        again = policy.due(
            drift=carried["bound"].drift(tokens=TOKENS, own=alone[name].cache),
            deviation=None,
            carried=0,
        )
        if again:
            carried["bound"].switch_to(name, how="prefill")
        found["bound"].setdefault("re_prefilled", []).append(float(again))
        before = stretches[turn - 1][-1:]
        read = {each: session.feed_scored(ids) for each, session in alone.items()}
        own = read.pop(name)
        logits = {
            "own": own,
            **{arm: session.feed_scored(ids) for arm, session in carried.items()},
            "none": _without(models[name], torch.cat((before, ids[:-1]))),
        }
        for arm, theirs in logits.items():
            wanted = ids.to(theirs.device)
            apart = kl(own, theirs).mean().clamp_min(0)  # of equal caches it is rounding
            agreement = top1_agreement(own, theirs).float().mean()
            values = nll(theirs, wanted).mean(), apart, agreement
            for metric, value in zip(METRICS, values, strict=True):
                found[arm].setdefault(metric, []).append(float(value))
    return found


def _look(found: dict[str, list[float]], session: Session) -> None:
    """Keep the session's deviation, where its model's first layers can be looked at."""
    try:
        off = session.deviation()
    except KVTransferError:
        found.pop("deviation", None)
    else:
        found.setdefault("deviation", []).append(off)


def _without(model: LanguageModel, live: Int[Tensor, " t"]) -> Float[Tensor, "t v"]:
    """The logits after each of ``live`` with nothing before it but what opens every text."""
    opening = model.opening
    return score(model, live[None], prefill(model, opening[None]) if len(opening) else None)[0]
