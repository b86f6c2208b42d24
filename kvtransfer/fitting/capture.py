"""Both models read the same text; only the moments of what they cached are kept."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import TextError
from kvtransfer.fitting.features import (
    GROUPS,
    KINDS,
    Features,
    Kind,
    gathered,
    gathered_size,
    rows_of,
    size,
    state_rows,
)
from kvtransfer.fitting.looked import Looked
from kvtransfer.fitting.moments import Accumulator, Moments
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.hf.aligned import read_aligned
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.start import prefill_with_states, width


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Moments of the same tokens for content keys and for values, all layers at once.

    Features lie layer by layer, within a layer head by head. Where each kind is read from both,
    the source's keys of all layers come first and their values follow. Features of the token
    before come next, and the target's states, where there are any, last.
    """

    keys: Moments
    values: Moments

    @property
    def rows(self) -> int:
        """Tokens seen."""
        return self.keys.n


@dataclass(frozen=True, slots=True, eq=False)
class First:
    """First tokens of chunks: few, so they are kept as they are, in single precision."""

    x: Float[Tensor, "n p"]
    y: Float[Tensor, "n q"]

    def moments(self, x: Int[Tensor, " p_"], y: Int[Tensor, " q_"]) -> Moments:
        """Of some features only."""
        return Moments.of(self.x[:, x].double(), self.y[:, y].double())


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Everything that later choices of layers, strength, solver and rank are made from."""

    fit: Sample
    """Target features stand twice: as they are, and (the ``shuffled`` control) permuted, the second
    time in one batch of CONTROL_EVERY only."""
    heldout: Sample
    seconds: dict[str, float]
    """Wall time of ``source_forward``, ``target_forward`` and ``statistics``."""
    features: Features = "same"
    first: Mapping[Kind, First] = field(default_factory=dict)
    """First tokens of the fit's first chunks, by kind, row by row."""
    before: tuple[int, ...] = ()
    """Source layers whose features of the token before were gathered too, in this order."""
    starts: tuple[int, ...] = ()
    """Target layers whose incoming states were gathered as features, in this order."""
    state_width: int = 0
    """Numbers in one of these states."""
    weighted: Sample | None = None
    """The fit's, with rows weighted by the attention that the target pays them."""
    sees: tuple[Float[Tensor, "_h _d _d"] | None, ...] = ()
    """Per target layer and KV head, the second moment of the queries as they meet content keys."""
    windows: tuple[Int[Tensor, " _t"], ...] = ()
    """The first held-out chunks, on which maps can be tried."""
    left_out: int = 0
    """Chunks that could not be read, as the source has another tokenizer and no text their ids."""


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
    before: Sequence[int] = (),
    starts: Sequence[int] = (),
    attention: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Capture:
    """Stream ``chunks`` through both models until ``tokens`` rows are gathered for the fit.

    One chunk in ``holdout`` goes to the held-out sample instead. Memory does not depend on the
    number of tokens.

    Args:
        source: Makes the cache.
        target: Is to read it.
        chunks: Sequences of one length of the target's tokens, each read from position 0.
        tokens: Rows wanted for the fit; fewer are taken where the text ends.
        batch: Chunks read at once.
        holdout: One chunk in this many is held out.
        seed: Of the permutation behind the ``shuffled`` control.
        products: In what dtype a batch's rows are multiplied; see :class:`Accumulator`.
        features: What the target's keys (and its values) are to be read from.
        before: Source layers whose features of the token before are to be features too.
        starts: Target layers whose incoming states are to be features too.
        attention: Whether to gather what the ``attention`` solver needs: weighted rows, for half
            the statistics again, and the queries' second moments.
        progress: Told the number of tokens after each batch.

    Raises:
        TextError: there are fewer than two chunks, so nothing could be held out.
    """
    meter = _Meter()
    groups = GROUPS[features]
    state_width = width(target) if starts else 0
    sizes = [
        [
            gathered_size(source.spec, group, before, len(starts) * state_width),
            sum(size(target.spec, kind) for kind in group),
        ]
        for group in groups
    ]
    sums = {
        "fit": [Accumulator(p, 2 * q, products=products) for p, q in sizes],
        "heldout": [Accumulator(p, q, products=products) for p, q in sizes],
    }
    if attention:
        sums["weighted"] = [Accumulator(p, q, products=products) for p, q in sizes]
    firsts: dict[Kind, list[tuple[Tensor, Tensor]]] = {kind: [] for kind in KINDS}
    looked = Looked(target)
    random = torch.Generator().manual_seed(seed)
    fitted = 0
    windows: list[Tensor] = []
    for part, ids in batches(chunks, tokens=tokens, batch=batch, holdout=holdout):
        with meter("source_forward"):
            read = read_aligned(source, target, ids)
        watched = looked if attention and part == "fit" else nullcontext()
        with meter("target_forward"), watched:
            wanted, states = prefill_with_states(target, ids, starts)
        if part == "heldout" and len(windows) < WINDOWS:
            windows += ids[: WINDOWS - len(windows)].unbind()
        with meter("statistics"):
            given = [state_rows(states[start]).flatten(0, 1).cpu() for start in starts]
            read, wanted = (
                cache.to(dtype=torch.float32).as_content().to(device="cpu")
                for cache in (read, wanted)
            )
            permuted = part == "fit" and fitted % CONTROL_EVERY == 0
            fitted += part == "fit"
            order = torch.randperm(ids.numel(), generator=random)
            for group, accumulator, weighted in zip(
                groups, sums[part], sums.get("weighted", sums[part]), strict=True
            ):
                x = gathered(read, group, before, given)
                own = [rows_of(wanted, kind) for kind in group]
                if part == "fit" and len(firsts[group[0]]) * batch < FIRSTS:
                    at = torch.arange(0, ids.numel(), ids.shape[1])
                    first = x[at]
                    for kind, rows in zip(group, own, strict=True):
                        firsts[kind].append((first, rows[at]))
                y = torch.cat(own, dim=1)
                if attention and part == "fit":
                    weighted.add(x, y, weight=looked.weight)
                if permuted:
                    y = torch.cat((y, y[order]), dim=1)
                accumulator.add(x, y)
        progress(ids.numel())
    with meter("statistics"):
        samples = {
            # Popped, so that one part's sums are gone before the next one's are sorted out.
            part: _sample(
                [each.moments() for each in sums.pop(part)],
                target.spec,
                twins=2 if part == "fit" else 1,
            )
            for part in list(sums)
        }
    fit, heldout = samples["fit"], samples["heldout"]
    if not fit.rows or not heldout.rows:
        raise TextError(
            f"the text fills {fit.rows} tokens of chunks, and none is left to hold out",
            hint="give more text, or ask for shorter chunks",
        )
    return Capture(
        fit=fit,
        heldout=heldout,
        seconds=dict(meter.seconds),
        features=features,
        first={kind: First(*map(torch.cat, zip(*firsts[kind], strict=True))) for kind in KINDS},
        before=tuple(before),
        starts=tuple(starts),
        state_width=state_width,
        weighted=samples.get("weighted"),
        sees=looked.sees() if attention else (),
        windows=tuple(windows),
    )


FIRSTS = 256
"""First tokens that are kept: about as many as there are dims in a head, or more."""

WINDOWS = 12
"""Held-out chunks that are kept as they are."""

CONTROL_EVERY = 4
"""One batch of rows in this many is paired with permuted targets. Rows that are not add nothing to
the control but their own scatter, which only brings it nearer to the mean, where it is hardest to
beat; permuting all would take two fifths of the time of the statistics."""


def _sample(moments: list[Moments], target: ModelSpec, twins: int) -> Sample:
    """One set of moments a kind; gathered together, they share what is the source's."""
    if len(moments) == len(KINDS):
        keys, values = moments
        return Sample(keys=keys, values=values)
    (both,) = moments
    split = size(target, "keys")
    columns = torch.arange(twins * (split + size(target, "values"))).view(twins, -1)
    return Sample(
        keys=both.targets(columns[:, :split].flatten()),
        values=both.targets(columns[:, split:].flatten()),
    )


def batches(
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
