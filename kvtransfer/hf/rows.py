"""Rows of different lengths in one batch: where each goes on, and what each may see.

Columns of a batch are places in a cache. Padding at the left of a prefix, or between a prefix and
its live tokens, is hidden by the mask; positions are counted without it, row by row.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.architectures import COUNTS_COLUMNS
from kvtransfer.hf.model import LanguageModel


def next_positions(prefix: KVCache | None, rows: int = 1) -> Int[Tensor, " b"]:
    """The position of the first token after each row of ``prefix``; 0 without one."""
    if prefix is None or prefix.tokens == 0:
        return torch.zeros(rows if prefix is None else prefix.batch, dtype=torch.long)
    ends = prefix.positions.max(dim=1).values + 1
    return torch.where(prefix.mask.any(dim=1), ends, 0)


def span(starts: Int[Tensor, " b"], ends: Int[Tensor, " b"]) -> tuple[int, int]:
    """Where the live tokens of a batch begin at the earliest behind a prefix, and end at last."""
    behind = starts[starts > 0]
    return (int(behind.min()) if len(behind) else 0), int(ends.max())


def check_live(ids: Int[Tensor, "b s"], mask: Int[Tensor, "_b _s"]) -> None:
    """Raise CacheLayoutError unless ``mask`` hides tokens at the left of each row, and not all."""
    if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        raise CacheLayoutError(
            f"a mask of {mask.dtype} and shape {tuple(mask.shape)} over live tokens of shape "
            f"{tuple(ids.shape)}",
            hint="0 for padding and 1 for tokens, over the live tokens alone",
        )
    shown = mask.long()
    if bool((shown.diff(dim=1) < 0).any()) or not bool(shown[:, -1:].all()):
        raise CacheLayoutError(
            "the mask hides live tokens that are not at the left of their row",
            hint="pad prompts at the left: tokenizer.padding_side = 'left'",
        )


def check_columns(model: LanguageModel, mask: Int[Tensor, "b t"]) -> None:
    """Raise CacheLayoutError where the model counts hidden columns within a row as tokens.

    A window or a chunk is so many columns of the cache, hidden ones too. Padding at the left of a
    row does not matter to that, padding between its prefix and its live tokens does, unless the
    whole row lies within the window.
    """
    mask = mask.long()
    holes = ((mask.cummax(dim=1).values - mask) > 0).any(dim=1)  # hidden behind what is shown
    if not bool(holes.any()):
        return
    widths = mask.shape[1] - mask.argmax(dim=1)  # from the first token that is shown
    widest = int(widths[holes].max())
    narrow = next(
        (
            f"layer {index} sees {layer.window} columns, of {widest}"
            for index, layer in enumerate(model.spec.layers)
            if layer.window is not None and layer.window < widest
        ),
        None,
    )
    if model.spec.architecture in COUNTS_COLUMNS:
        narrow = "its attention counts columns"
    if narrow is not None:
        raise CacheLayoutError(
            f"padding stands between a prefix and its live tokens, and {model.spec.name} "
            f"({model.spec.architecture}) counts it: {narrow}",
            hint="batch prompts of one length on prefixes of any, or run prompts one at a time",
        )


def check_gaps(
    model: LanguageModel,
    positions: Int[Tensor, "b t"],
    end: int,
    *,
    shown: Int[Tensor, "b t"] | None = None,
) -> None:
    """Raise CacheLayoutError where positions that nothing stands at would have to count.

    Windows, chunks and ALiBi count columns of the cache, rotations and embeddings positions. Where
    the two differ, a layer sees more than its model ever saw, unless all lies within its window.

    Args:
        model: Reads them.
        positions: Of the tokens of each row, in order.
        end: Position after the last token that reads them.
        shown: Which of them are tokens; all if not given.
    """
    always = model.spec.positions == "alibi" or model.spec.architecture in COUNTS_COLUMNS
    windows = any(layer.window is not None for layer in model.spec.layers)
    if positions.shape[1] == 0 or not (windows or always):
        return
    shown = torch.ones_like(positions) if shown is None else shown.to(positions)
    apart = (positions.diff(dim=1) != 1) & (shown[:, 1:] * shown[:, :-1] == 1)
    first = positions.masked_fill(shown == 0, end).min(dim=1).values
    gaps = apart.any(dim=1)
    reach = end - int(first[gaps].min()) if bool(gaps.any()) else 0
    counts = "its attention counts columns" if always and reach else None
    for index, layer in enumerate(model.spec.layers):
        # A chunk ends where it ends, so that a row must also begin at 0.
        moved = layer.kind == "chunked" and bool((first > 0).any())
        needed = end if moved else reach
        if layer.window is not None and layer.window < needed:
            counts = f"layer {index} sees {layer.window} columns, of {needed} positions"
            break
    if counts is not None:
        raise CacheLayoutError(
            f"some positions before {end} are empty, and {model.spec.name} "
            f"({model.spec.architecture}) does not count them: {counts}",
            hint="leave no gap: a schema without unions and parameters, whose modules are all used",
        )


def check_one_table(model: LanguageModel, ends: Int[Tensor, " b"]) -> None:
    """Raise CacheLayoutError where the longest row would change the table of shorter ones.

    Dynamic and longrope choose one table for a whole batch, by its largest position.
    """
    shortest, longest = int(ends.min()), int(ends.max())
    if shortest == longest:
        return
    for layer in model.spec.layers:
        limit = layer.rotation.fixed_up_to if layer.rotation else None
        if layer.rotation is None or limit is None or longest <= limit:
            continue
        if layer.rotation.type != "longrope" or shortest <= limit:
            raise CacheLayoutError(
                f"rows of this batch end at {shortest} to {longest}, and beyond {limit} the RoPE "
                f"of {model.spec.name} ({layer.rotation.type}) takes one table for all of them, by "
                "the longest",
                hint="run rows of different lengths one at a time",
            )
