"""A look inside a pair for the page: what attention meets, and which layer knows of which.

It costs as much as a few text items, so only a page asks for it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import tee

from jaxtyping import Float
from torch import Tensor

from kvtransfer.errors import KVTransferError
from kvtransfer.fitting.diagnose import diagnose
from kvtransfer.fitting.diagnosis import Diagnosis
from kvtransfer.fitting.layer_rows import rank_from_text
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.hf.model import LanguageModel

WINDOWS = 4
"""Windows of text through which attention is looked at."""

ROWS = 2_048
"""Tokens on which single-layer maps are fitted: 32 for each dim of a head of 64."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerMatrix:
    """How much of each target layer each source layer explains alone, held out."""

    scores: Float[Tensor, "target source"]
    chosen: tuple[tuple[int, ...], ...]
    """The source layers that the mapping reads for each target layer; none for one that the
    target runs."""
    rows: int
    heldout: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Inside:
    """What there was to see, and why the rest could not be had."""

    diagnosis: Diagnosis | None = None
    layers: LayerMatrix | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    """``diagnosis`` or ``layers``, with the reason."""


def look_inside(
    mapping: KVMapping,
    source: LanguageModel,
    target: LanguageModel,
    texts: Iterable[str],
    *,
    prefix: int = 256,
    continuation: int = 64,
    progress: Callable[[str, int], None] = lambda stage, done: None,
) -> Inside:
    """Diagnose a mapping on a little text, and rank the source's layers for each of the target's.

    What cannot be had is left out with its reason: a page with a hole is better than none.

    Args:
        mapping: From ``source`` to ``target``.
        source: Makes the cache.
        target: Reads it.
        texts: Documents that the mapping was not fitted on.
        prefix: Hidden tokens of a window.
        continuation: Tokens of a window whose queries look back, and no more than 64 are taken.
        progress: Told ``diagnose`` and windows, or ``layers`` and tokens.
    """
    diagnosis = layers = None
    missing = {}
    first, second = tee(texts)
    try:
        diagnosis = diagnose(
            mapping,
            source,
            target,
            first,
            prefix=prefix,
            continuation=min(continuation, 64),
            items=WINDOWS,
            progress=lambda n: progress("diagnose", n),
        )
    except KVTransferError as error:
        missing["diagnosis"] = error.message
    try:
        ranked = rank_from_text(
            source,
            target,
            second,
            tokens=ROWS,
            chunk=min(256, prefix + continuation),
            progress=lambda n: progress("layers", n),
        )
        unmapped = len(target.spec.layers) - len(mapping.layers)
        layers = LayerMatrix(
            scores=ranked.scores,
            chosen=((),) * unmapped + tuple((*m.sources, *m.before) for m in mapping.layers),
            rows=ranked.rows,
            heldout=ranked.heldout,
        )
    except KVTransferError as error:
        missing["layers"] = error.message
    return Inside(diagnosis=diagnosis, layers=layers, missing=missing)
