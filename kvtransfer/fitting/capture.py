"""Both models read the same tokens; only the moments of what they cached are kept."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import TextError
from kvtransfer.fitting.features import GROUPS, KINDS, Features, Kind, size
from kvtransfer.fitting.moments import Accumulator, Moments
from kvtransfer.geometry.cache import Block, KVCache
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Moments of the same tokens for content keys and for values, all layers at once.

    Features lie layer by layer, within a layer head by head. Where each kind is read from both,
    the source's keys of all layers come first and their values follow.
    """

    keys: Moments
    values: Moments

    @property
    def rows(self) -> int:
        """Tokens seen."""
        return self.keys.n


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Everything that later choices of layers, strength, solver and rank are made from."""

    fit: Sample
    """Target features stand twice: as they are, and (the ``shuffled`` control) permuted, the second
    time in one batch of CONTROL_EVERY only."""
    heldout: Sample
    seconds: dict[str, float]
    """Wall time of ``source_forward``, ``target_forward`` and ``statistics``."""


def capture(
    source: LanguageModel,
    target: LanguageModel,
    chunks: Iterable[Int[Tensor, " t"]],
    *,
    tokens: int,
    batch: int = 4,
    holdout: int = 8,
    seed: int = 0,
    products: torch.dtype = torch.float64,
    features: Features = "same",
    progress: Callable[[int], None] = lambda tokens: None,
) -> Capture:
    """Stream ``chunks`` through both models until ``tokens`` rows are gathered for the fit.

    One chunk in ``holdout`` goes to the held-out sample instead. Memory does not depend on the
    number of tokens.

    Args:
        source: Makes the cache.
        target: Is to read it. It must tokenize as the source does.
        chunks: Token sequences of one length, each read from position 0.
        tokens: Rows wanted for the fit; fewer are taken where the text ends.
        batch: Chunks read at once.
        holdout: One chunk in this many is held out.
        seed: Of the permutation behind the ``shuffled`` control.
        products: In what dtype a batch's rows are multiplied; see :class:`Accumulator`.
        features: What the target's keys (and its values) are to be read from.
        progress: Told the number of tokens after each batch.

    Raises:
        TextError: there are fewer than two chunks, so nothing could be held out.
    """
    meter = _Meter()
    groups = GROUPS[features]
    sizes = [
        [sum(size(each.spec, kind) for kind in group) for each in (source, target)]
        for group in groups
    ]
    gathered = {
        "fit": [Accumulator(p, 2 * q, products=products) for p, q in sizes],
        "heldout": [Accumulator(p, q, products=products) for p, q in sizes],
    }
    random = torch.Generator().manual_seed(seed)
    fitted = 0
    for part, ids in _batches(chunks, tokens=tokens, batch=batch, holdout=holdout):
        with meter("source_forward"):
            read = prefill(source, ids)
        with meter("target_forward"):
            wanted = prefill(target, ids)
        with meter("statistics"):
            read, wanted = (cache.to(dtype=torch.float32).content() for cache in (read, wanted))
            permuted = part == "fit" and fitted % CONTROL_EVERY == 0
            fitted += part == "fit"
            order = torch.randperm(ids.numel(), generator=random)
            for group, accumulator in zip(groups, gathered[part], strict=True):
                x, y = (
                    torch.cat([rows_of(cache, kind) for kind in group], dim=1).cpu()
                    for cache in (read, wanted)
                )
                if permuted:
                    y = torch.cat((y, y[order]), dim=1)
                accumulator.add(x, y)
        progress(ids.numel())
    with meter("statistics"):
        fit, heldout = (
            _sample([each.moments() for each in gathered[part]], target.spec, twins)
            for part, twins in (("fit", 2), ("heldout", 1))
        )
    if not fit.rows or not heldout.rows:
        raise TextError(
            f"the text fills {fit.rows} tokens of chunks, and none is left to hold out",
            hint="give more text, or ask for shorter chunks",
        )
    return Capture(fit=fit, heldout=heldout, seconds=dict(meter.seconds))


CONTROL_EVERY = 4
"""One batch of rows in this many is paired with permuted targets. Rows that are not add nothing to
the control but their own scatter, which only brings it nearer to the mean, where it is hardest to
beat; permuting all would take two fifths of the time of the statistics."""


def _sample(gathered: list[Moments], target: ModelSpec, twins: int) -> Sample:
    """One set of moments a kind; gathered together, they share what is the source's."""
    if len(gathered) == len(KINDS):
        keys, values = gathered
        return Sample(keys=keys, values=values)
    (both,) = gathered
    split = size(target, "keys")
    columns = torch.arange(twins * (split + size(target, "values"))).view(twins, -1)
    return Sample(
        keys=both.targets(columns[:, :split].flatten()),
        values=both.targets(columns[:, split:].flatten()),
    )


def rows_of(cache: KVCache, kind: Kind) -> Float[Tensor, "n p"]:
    """One row a token, the layers side by side, within a layer the heads side by side."""
    blocks = cache.keys if kind == "keys" else cache.values
    return torch.cat([flat(block) for block in blocks], dim=1)


def flat(block: Block) -> Float[Tensor, "n p"]:
    """One layer's rows."""
    return rearrange(block, "b h t d -> (b t) (h d)")


def _batches(
    chunks: Iterable[Tensor], *, tokens: int, batch: int, holdout: int
) -> Iterator[tuple[Literal["fit", "heldout"], Tensor]]:
    """Stacks of at most ``batch`` chunks, every one of them whole and of one part."""
    waiting: dict[Literal["fit", "heldout"], list[Tensor]] = {"fit": [], "heldout": []}
    taken = 0
    for number, chunk in enumerate(chunks):
        # The second chunk is the first to be held out, so that two are enough.
        part: Literal["fit", "heldout"] = "heldout" if number % holdout == 1 else "fit"
        waiting[part].append(chunk)
        taken += len(chunk) if part == "fit" else 0
        if len(waiting[part]) == batch:
            yield part, torch.stack(waiting[part])
            waiting[part] = []
        if taken >= tokens and number > 0:
            break
    for part, rest in waiting.items():
        if rest:
            yield part, torch.stack(rest)


class _Meter:
    """Adds up wall time by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start
