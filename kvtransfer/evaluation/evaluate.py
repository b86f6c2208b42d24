"""Evaluate a mapping: text, guides, or both, under every condition."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import TextError
from kvtransfer.evaluation.conditions import CONDITIONS, REPAIRABLE, USUAL, Pair, in_order
from kvtransfer.evaluation.curve import checked_shares, condition_of
from kvtransfer.evaluation.edits import edits_of
from kvtransfer.evaluation.guide_items import evaluate_guides
from kvtransfer.evaluation.report import EvalReport
from kvtransfer.evaluation.text import evaluate_text
from kvtransfer.fitting.chunks import chunks, one_stream
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.guides.guide import Guide
from kvtransfer.guides.pack import GuidePack
from kvtransfer.hf.aligned import Alignable
from kvtransfer.hf.model import LanguageModel
from kvtransfer.measures.intervals import SEED
from kvtransfer.report import Provenance

BUILTIN_GUIDES = Path(__file__).parent / "assets" / "guides.jsonl"
"""Made-up facts, codes, names and definitions, written for this project."""


def evaluate(
    source: LanguageModel,
    target: LanguageModel,
    mapping: KVMapping | None,
    *,
    texts: Iterable[str] | None = None,
    guides: Iterable[Guide] | None = None,
    conditions: Iterable[str] = USUAL,
    rivals: Mapping[str, KVMapping] | None = None,
    recompute: Iterable[float] = (),
    repair: str = "mapped",
    packs: Mapping[str, GuidePack] | None = None,
    bound: Mapping[str, Any] | None = None,
    prefix: int = 256,
    continuation: int = 256,
    items: int = 32,
    stream: bool = False,
    allow_fingerprint_mismatch: bool = False,
    progress: Callable[[str], None] = lambda part: None,
) -> EvalReport:
    """Measure what ``mapping`` is worth.

    Args:
        source: Makes the cache.
        target: Reads it.
        mapping: From the one to the other; None leaves out what needs one.
        texts: Held-out documents, cut into items; None to leave text out.
        guides: Guides with questions; None to leave them out.
        conditions: Names from CONDITIONS. ``none`` and ``own`` are always added: without floor
            and ceiling no number means anything. ``mapped+Scale(0.5)``, say, is a condition whose
            prefix is edited (:func:`kvtransfer.steering.expression.parse`).
        rivals: Other mappings between the same models, by name; each becomes a condition.
        recompute: Shares of a prefix's tokens that the target reads again; each becomes a
            condition such as ``mapped+15%``, and all together a curve.
        repair: Whose prefix: ``mapped``; ``raw``, the source's cache as it is, a fine-tuned
            sibling's, say; or ``apart``, whose second half never saw the first.
        packs: Packs that hold the guides for ``target``, by name; each becomes a condition of the
            guides.
        bound: What such edits may name: vectors, donors, interventions.
        prefix: Tokens of each text item that are hidden (the last of them is run live).
        continuation: Tokens of each text item that are scored.
        items: Text items at most.
        stream: Whether documents are joined by blank lines to one text first, as the paper's
            protocol has it, rather than put end to end.
        allow_fingerprint_mismatch: Use mappings that were fitted on other weights of these shapes;
            the report says so.
        progress: Told ``text`` or ``guides`` after each item of it.

    Raises:
        IncompatibleModels: the mapping is for another pair, or the other way round.
        SteeringError: a condition's edit is none, or names what is not there.
        TextError: there is no text, or it is shorter than one item, or there are no guides.
        SeamError: a guide and a prompt share no token boundary; or the tokenizers differ, and no
            text has the ids that are to be hidden.
    """
    rivals = dict(rivals or {})
    shares = checked_shares(recompute)
    if repair not in REPAIRABLE:
        raise ValueError(f"no prefix of {repair!r} is repaired; one of {', '.join(REPAIRABLE)}")
    repairs = {condition_of(share, repair): (repair, share) for share in shares if share}
    conditions = list(conditions)
    edits = edits_of(conditions, bound or {}, others=(*rivals, *(packs or {})))
    asked_for = [name for name in conditions if name not in edits]
    asked_for += [base for base, _ in edits.values() if base in CONDITIONS]
    asked_for += [repair] if shares else []
    names = (*in_order(asked_for), *edits, *repairs, *rivals)
    if prefix < 2 or continuation < 1 or items < 1:
        raise ValueError(f"{prefix=}, {continuation=}, {items=}: at least 2, 1 and 1 are needed")
    if texts is None and guides is None:
        raise ValueError("there is nothing to evaluate: give texts, guides, or both")
    if allow_fingerprint_mismatch:
        mapping = mapping and mapping.insisting_on(source.spec, target.spec)
        rivals = {
            name: rival.insisting_on(source.spec, target.spec) for name, rival in rivals.items()
        }
    pair = Pair(source, target, mapping, rivals, repairs, dict(packs or {}), edits)
    guides = None if guides is None else tuple(guides)
    for pack in pair.packs.values():  # before anything is read, not after
        if guides is None:
            raise ValueError("a pack is measured on its guides, and none are asked about")
        pack.maker.check(target)
        for guide in guides:
            pack[guide.name]
    text = asked = None
    passed: tuple[str, ...] = ()
    if texts is not None:
        texts = one_stream(texts) if stream else texts
        cut = chunks(texts, target.encode, length=prefix + continuation, opening=target.opening)
        readable = Alignable(source, target, cut, hidden=prefix - 1)
        whole = iter(readable)
        sequences = _at_least_one(islice(whole, items))
        if stream and next(whole, None) is not None:
            passed = (f"the text has more chunks than the first {items} that were scored",)
        if readable.left_out:
            passed += (
                f"{readable.left_out} text items were left out: no text has their hidden ids",
            )
        text = evaluate_text(
            pair, sequences, names, prefix=prefix, progress=lambda: progress("text")
        )
        text = replace(text, stream=stream)
    if guides is not None:
        if not guides:
            raise TextError("there are no guides to evaluate on", hint="give at least one guide")
        asked = evaluate_guides(pair, guides, names, progress=lambda: progress("guides"))
    return EvalReport(
        source=source.spec.name,
        target=target.spec.name,
        text=text,
        guides=asked,
        shares=shares,
        repair=repair,
        notes=(*_notes(mapping, rivals), *passed),
        provenance=Provenance.here(seed=SEED),
    )


def _at_least_one(sequences: Iterable[Int[Tensor, " t"]]) -> list[Int[Tensor, " t"]]:
    found = list(sequences)
    if not found:
        raise TextError("there is no text to evaluate on", hint="give a text with prose in it")
    return found


def bare(
    source: LanguageModel,
    target: LanguageModel,
    mapping: KVMapping | None,
    rivals: Mapping[str, KVMapping] | None = None,
) -> EvalReport:
    """A report without text and guides, for parts to be added to."""
    return EvalReport(
        source=source.spec.name,
        target=target.spec.name,
        text=None,
        guides=None,
        notes=_notes(mapping, rivals or {}),
        provenance=Provenance.here(seed=SEED),
    )


def _notes(mapping: KVMapping | None, rivals: Mapping[str, KVMapping]) -> tuple[str, ...]:
    """What a reader of any number must know of the mappings."""
    return (
        *(mapping.notes if mapping else ()),
        *(f"{name}: {note}" for name, rival in rivals.items() for note in rival.notes),
    )
