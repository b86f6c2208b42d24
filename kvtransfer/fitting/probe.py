"""Before any fit: can one model's cache be mapped to another's, told from a thousand tokens?

Both models read a few windows. For each window, a ridge map of all source layers is fitted to the
other windows in its dual form (rows are far fewer than features), and what it makes of the window's
first half is read by the target's own queries in the second. The score is the share of the error in
what attention returns that is taken away, of the error of average tokens. A ridge on permuted rows
whose strength is chosen as carefully shrinks to just these averages.

A target that its own prefix does not help cannot be helped by a mapped one, whatever the score: so
what the prefix is worth is measured too.

This module knows nothing of the mapping that a fit on more text would choose: its score is below
that mapping's, and ranks pairs.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import DeviceError, TextError, UnsupportedModel
from kvtransfer.fitting.dual import Rows, average, leave_out
from kvtransfer.fitting.features import KINDS
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.probe_report import ProbeReport
from kvtransfer.fitting.texts import builtin
from kvtransfer.fitting.transfer import mapped
from kvtransfer.geometry.cache import Block, KVCache
from kvtransfer.geometry.compat import compare
from kvtransfer.hf.aligned import Alignable, read_aligned
from kvtransfer.hf.attention import attention_outputs
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score
from kvtransfer.measures.agreement import nll
from kvtransfer.measures.intervals import SEED, Column, interval, mean
from kvtransfer.report import Estimate, Provenance

WINDOWS = 8
"""Windows at least: fewer give no interval worth the name."""

LONGEST = 128
"""Tokens in a window at most. More text makes more windows."""

SHORTEST = 16

MOST = 4_096
"""Tokens at most: memory grows with their square, time with their cube."""

PIECE = 16
"""Tokens that are scored without what stands before them. A text's past is worth most to the tokens
that follow it at once; pieces make many of these, where one cut a window would make few."""


def probe(
    source: LanguageModel,
    target: LanguageModel,
    texts: Iterable[str],
    *,
    mapping: KVMapping | None = None,
    tokens: int = 1_024,
    progress: Callable[[int], None] = lambda tokens: None,
) -> ProbeReport:
    """Say whether ``source``'s cache can be mapped to ``target``, or how far a mapping is good.

    Args:
        source: Makes the cache.
        target: Reads it.
        texts: Documents, of the kind that is to be transferred; no more is read than is needed.
        mapping: Judge this one on ``texts``, and on builtin prose beside it, and fit nothing.
        tokens: Tokens to read; fewer are read where the text ends.
        progress: Told the number of tokens after each window.

    Raises:
        IncompatibleModels: no map between these two caches can exist, or the mapping is for
            another pair.
        TextError: there are fewer than 128 tokens.
        UnsupportedModel: nothing of the target's attention can be seen.
        DeviceError: numbers overflowed.
    """
    require_tokens(tokens)
    compare(source.spec, target.spec).raise_if_blocked()
    if mapping is not None:
        mapping.check_ends(source.spec, target.spec)
    windows = _windows(texts, source, target, tokens)
    found = _probe(source, target, windows, mapping, progress)
    reference = None
    if mapping is not None:
        prose = _windows(builtin("heldout"), source, target, windows.numel())
        same = torch.equal(prose, windows)
        reference = (found if same else _probe(source, target, prose, mapping, progress)).score
    return ProbeReport(
        source=source.spec.name,
        target=target.spec.name,
        judged="pair" if mapping is None else "mapping",
        score=found.score,
        layers=found.layers,
        reference=reference,
        prefix_worth=mean(found.worth),
        nll=mean(found.nll),
        chance=found.chance,
        tokens=windows.numel(),
        length=windows.shape[1],
        notes=() if mapping is None else mapping.notes,
        provenance=Provenance.here(seed=SEED),
    )


def require_tokens(tokens: int) -> None:
    """Raise ValueError for a number of tokens that is too small or too large for a probe."""
    least = WINDOWS * SHORTEST
    if not least <= tokens <= MOST:
        raise ValueError(f"a probe reads {least} to {MOST} tokens, got {tokens}")


def _windows(
    texts: Iterable[str], source: LanguageModel, target: LanguageModel, tokens: int
) -> Int[Tensor, "w t"]:
    """The first ``tokens`` tokens in at least WINDOWS windows of one length.

    Windows that the source cannot read, having another tokenizer, are left out.
    """
    ids = torch.empty(0, dtype=torch.long)
    for text in texts:
        ids = torch.cat((ids, target.encode(text)))[:tokens]
        if len(ids) == tokens:
            break
    if len(ids) < (least := WINDOWS * SHORTEST):
        raise TextError(
            f"the text holds {len(ids)} tokens, and a probe needs {least}",
            hint="give more text of this kind",
        )
    length = min(LONGEST, len(ids) // WINDOWS)
    windows = ids[: len(ids) // length * length].view(-1, length)
    readable = list(Alignable(source, target, windows))
    if len(readable) < WINDOWS:
        raise TextError(
            f"{source.spec.name} can read {len(readable)} of {len(windows)} windows, as tokens of "
            f"{target.spec.name} were cut within characters; a probe needs {WINDOWS}",
            hint="give more text, or ask for more tokens (--tokens)",
        )
    return torch.stack(readable)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Found:
    """One row a window."""

    errors: Float[np.ndarray[Any, Any], "w l"]
    """Of attention's output with mapped keys and values, squared, by target layer."""
    blank: Float[np.ndarray[Any, Any], "w l"]
    """The same with average tokens."""
    worth: Column
    nll: Column
    chance: float

    @property
    def layers(self) -> tuple[float, ...]:
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = 1 - self.errors.mean(0) / self.blank.mean(0)
        return tuple(np.where(np.isfinite(shares), shares, np.nan).tolist())

    @property
    def score(self) -> Estimate:
        seen = ~np.isnan(self.layers)
        if not seen.any():
            raise UnsupportedModel(
                "no layer of the target goes through transformers' attention interface, or none "
                "tells one prefix from another",
                hint="fit a mapping and evaluate it: kvtransfer fit, kvtransfer eval",
            )
        depth = int(seen.sum())

        def share(*columns: Column) -> Any:
            pairs = zip(columns[:depth], columns[depth:], strict=True)
            return np.mean([1 - lost.mean(-1) / all_.mean(-1) for lost, all_ in pairs], axis=0)

        return interval(share, *self.errors[:, seen].T, *self.blank[:, seen].T)


def _probe(
    source: LanguageModel,
    target: LanguageModel,
    windows: Int[Tensor, "w t"],
    mapping: KVMapping | None,
    progress: Callable[[int], None],
) -> _Found:
    windows = torch.cat((target.opening.expand(len(windows), -1), windows), dim=1)
    sources = [read_aligned(source, target, ids[None]) for ids in windows]
    owns = [prefill(target, ids[None]) for ids in windows]
    wanted = _rows(owns)
    blank = [average(rows) for rows in wanted]
    made = [] if mapping is not None else leave_out(_rows(sources), wanted)
    hidden = windows.shape[1] // 2 - 1
    columns, chance = [], math.nan
    for window, ids in enumerate(windows):
        own, prefix = owns[window].prefix(hidden), ids[None, :hidden]
        # Aligned tokens are of the whole window: a prefix's last may have read a little further.
        others = {
            "mapped": _as_cache(made, window, own)
            if mapping is None
            else mapped(mapping, sources[window].prefix(hidden), target, prefix),
            "blank": _as_cache(blank, window, own),
        }
        live, next_ids = ids[None, hidden:-1], ids[hidden + 1 :].to(target.device)
        logits, errors = attention_outputs(target, live, own, others, _squared)
        losses = nll(logits[0], next_ids)
        seen = [each.isfinite() for each in errors.values()]  # NaN for a layer that goes unseen
        if not torch.equal(*seen) or not bool(losses.isfinite().all()):
            raise DeviceError(
                f"{target.spec.name} returns infinite numbers in {target.spec.dtype}",
                hint="numbers overflowed; run in bfloat16 or float32 (--dtype)",
            )
        alone = _without_past(target, live[0], next_ids)
        worth = (alone - losses[: len(alone)]).mean()
        columns.append((errors["mapped"], errors["blank"], worth, losses.mean()))
        chance = math.log(logits.shape[-1])
        progress(len(ids))
    lost, whole, worths, losses_of = (
        torch.stack(column).double().cpu().numpy() for column in zip(*columns, strict=True)
    )
    return _Found(errors=lost, blank=whole, worth=worths, nll=losses_of, chance=chance)


def _squared(
    other: Float[Tensor, "b s g d"], own: Float[Tensor, "b s g d"]
) -> Float[Tensor, "b s g"]:
    return (other - own).square().sum(-1)


def _without_past(
    target: LanguageModel, live: Int[Tensor, " s"], wanted: Int[Tensor, " s"]
) -> Float[Tensor, " n"]:
    """The NLL of each next token where ``live`` is read in pieces, each as if nothing were before.

    What is left of ``live`` after whole pieces is left out.
    """
    length = min(PIECE, len(live))
    whole = len(live) // length * length
    pieces = live[:whole].view(-1, length)
    opening = target.opening
    logits = score(target, torch.cat((opening.expand(len(pieces), -1), pieces), dim=1))
    return nll(logits[:, len(opening) :].flatten(0, 1), wanted[:whole])


def _rows(caches: Sequence[KVCache]) -> list[Rows]:
    """Content keys of every layer, then values of every layer."""
    contents = [cache.to(dtype=torch.float32, device="cpu").as_content() for cache in caches]
    return [
        torch.stack([_flat(getattr(cache, kind)[layer]) for cache in contents])
        for kind in KINDS
        for layer in range(len(contents[0]))
    ]


def _flat(block: Block) -> Float[Tensor, "t p"]:
    return rearrange(block, "1 h t d -> t (h d)")


def _as_cache(rows: Sequence[Rows], window: int, own: KVCache) -> KVCache:
    """One window's rows as a prefix that stands where ``own`` does."""
    assert own.rotations is not None

    def blocks(kind: Sequence[Rows], like: Sequence[Block]) -> tuple[Block, ...]:
        return tuple(
            rearrange(each[window, : own.tokens], "t (h d) -> 1 h t d", h=block.shape[1]).to(
                device=block.device, dtype=torch.float32
            )
            for each, block in zip(kind, like, strict=True)
        )

    content = KVCache(
        keys=blocks(rows[: len(own)], own.keys),
        values=blocks(rows[len(own) :], own.values),
        positions=own.positions,
        keys_are="content",
        model=own.model,
    )
    return content.rotated(own.rotations).to(dtype=own.dtype)
