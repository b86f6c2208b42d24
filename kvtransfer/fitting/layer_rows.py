"""What each source layer alone explains of each target layer, from a few thousand kept rows.

A capture's sums relate every feature to every other, gigabytes of them. A picture needs one layer
beside one layer, for which rows are enough, and smaller.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import TextError
from kvtransfer.fitting.chunks import batches, chunks
from kvtransfer.fitting.columns import Columns
from kvtransfer.fitting.features import KINDS, Kind, rows_of
from kvtransfer.fitting.layers import rank
from kvtransfer.fitting.moments import Moments
from kvtransfer.hf.aligned import Alignable, read_aligned
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill

HOLDOUT = 4
"""One chunk in this many is held out: of so few, an eighth would be hardly any."""


@dataclass(frozen=True, slots=True, eq=False)
class PairedRows:
    """The same tokens in both models, of one kind, in single precision."""

    x: Float[Tensor, "n p"]
    y: Float[Tensor, "n q"]

    def select(self, x: Int[Tensor, " p_"], y: Int[Tensor, " q_"]) -> Moments:
        """Moments of some features only."""
        return Moments.of(self.x[:, x].double(), self.y[:, y].double())


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PairedSample:
    """Rows of both kinds."""

    keys: PairedRows
    values: PairedRows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RankedLayers:
    """Held-out R² of every target layer from every source layer alone, and what it rests on."""

    scores: Float[Tensor, "target source"]
    rows: int
    """Tokens that the single-layer maps were fitted on."""
    heldout: int
    """Tokens that they are judged on."""


def rank_from_text(
    source: LanguageModel,
    target: LanguageModel,
    texts: Iterable[str],
    *,
    tokens: int = 2048,
    chunk: int = 256,
    progress: Callable[[int], None] = lambda tokens: None,
) -> RankedLayers:
    """Let both models read a little text, and rank layers as
    :func:`kvtransfer.fitting.layers.rank_layers` does.

    Args:
        source: Makes the cache.
        target: Reads it.
        texts: Documents.
        tokens: Rows for the single-layer maps; a third as many more are held out.
        chunk: Tokens that are read at once, from position 0.
        progress: Told the number of tokens after each batch.

    Raises:
        SeamError: the tokenizers differ, and no text has the ids that are to be read.
        TextError: the text is shorter than two chunks.
    """
    sequences = Alignable(
        source, target, chunks(texts, target.encode, length=chunk, opening=target.opening)
    )
    kept: dict[str, dict[Kind, list[tuple[Tensor, Tensor]]]] = {
        part: {kind: [] for kind in KINDS} for part in ("fit", "heldout")
    }
    for part, ids in batches(sequences, tokens=tokens, batch=4, holdout=HOLDOUT):
        read, wanted = (
            cache.to(dtype=torch.float32).as_content().to(device="cpu")
            for cache in (read_aligned(source, target, ids), prefill(target, ids))
        )
        for kind in KINDS:
            kept[part][kind].append((rows_of(read, kind), rows_of(wanted, kind)))
        progress(ids.numel())
    if not kept["fit"]["keys"] or not kept["heldout"]["keys"]:
        raise TextError(
            f"the text holds fewer than two chunks of {chunk} tokens, and one is to be held out",
            hint="give more text",
        )
    fit, heldout = (
        PairedSample(
            **{
                kind: PairedRows(*map(torch.cat, zip(*kept[part][kind], strict=True)))
                for kind in KINDS
            }
        )
        for part in ("fit", "heldout")
    )
    return RankedLayers(
        scores=rank(fit, heldout, Columns(source.spec, target.spec)),
        rows=len(fit.keys.x),
        heldout=len(heldout.keys.x),
    )
