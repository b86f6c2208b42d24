"""Both models read batches, and sums grow. Mutable, and spent by a capture.

What has come together after any batch can be saved as tensors and plain data, and gone on from.
"""

import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.fitting.band import Band
from kvtransfer.fitting.features import (
    GROUPS,
    KINDS,
    Features,
    Kind,
    gathered,
    rows_of,
    size,
    state_rows,
)
from kvtransfer.fitting.layout import Layout, moments_bytes
from kvtransfer.fitting.looked import Looked
from kvtransfer.fitting.pairs import PairMoments
from kvtransfer.fitting.sums import Sums
from kvtransfer.fitting.trim import give_back
from kvtransfer.fitting.workspace import Workspace
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.aligned import read_aligned
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.start import prefill_with_states
from kvtransfer.hf.start import width as state_width

FIRSTS = 256
"""First tokens that are kept: about as many as there are dims in a head, or more."""

WINDOWS = 12
"""Held-out chunks that are kept as they are."""

CONTROL_EVERY = 4
"""One batch of rows in this many is paired with permuted targets. Rows that are not add nothing to
the control but their own scatter, which only brings it nearer to the mean, where it is hardest to
beat; permuting all would take two fifths of the time of the statistics."""

Part = Literal["fit", "heldout"]

PARTS: tuple[Part, ...] = ("fit", "heldout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """All that the moments of a text depend on, but for the text and the models."""

    tokens: int
    batch: int = 4
    holdout: int = 8
    seed: int = 0
    products: torch.dtype = torch.float64
    features: Features = "same"
    before: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    attention: bool = False
    band: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        lists = {"before": list(self.before), "starts": list(self.starts)}
        return asdict(self) | lists | {"products": str(self.products).removeprefix("torch.")}


class Gathering:
    """Both models' caches of the same text, as sums that grow batch by batch.

    Args:
        source: Makes the cache.
        target: Is to read it.
        wanted: What is to be gathered.
        workspace: Where it is to lie.

    Raises:
        ValueError: two passes were asked for features that are gathered together.
        KVTransferError: there is no room for the moments.
    """

    def __init__(
        self, source: LanguageModel, target: LanguageModel, wanted: Wanted, workspace: Workspace
    ) -> None:
        self.groups = GROUPS[wanted.features]
        if workspace.passes > len(self.groups):
            raise ValueError(
                f"{workspace.passes} passes, and features {wanted.features!r} are gathered "
                "together: one pass, or features 'same'"
            )
        self._source, self._target = source, target
        self._wanted, self._workspace = wanted, workspace
        band = Band(wanted.band, len(source.spec.layers), len(target.spec.layers))
        self.state_width = state_width(target) if wanted.starts else 0
        states = [self.state_width] * len(wanted.starts)
        self._layouts = [
            Layout.of(source.spec, target.spec, group, band, before=wanted.before, states=states)
            for group in self.groups
        ]
        sizes = moments_bytes(
            source.spec,
            target.spec,
            features=wanted.features,
            before=wanted.before,
            states=states,
            band=wanted.band,
            attention=wanted.attention,
        )
        self.nbytes = {name: each["held"] for name, each in sizes.items()}
        workspace.require_room(sum(self.nbytes.values()))
        self._sums: dict[tuple[str, int], Sums] = {}
        self._firsts: dict[Kind, list[tuple[Tensor, Tensor]]] = {kind: [] for kind in KINDS}
        self._looks: list[Looked] = []
        self.windows: list[Tensor] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self.begin(0)

    def begin(self, turn: int) -> None:
        """Begin the text, for the first time (0) or the second (1)."""
        for sums in self._sums.values():
            sums.settle()
        self.turn, self.batches, self._fitted = turn, 0, 0
        self._digest = hashlib.sha256()
        # Each turn draws the same, so that two of them gather what one would.
        self._random = torch.Generator().manual_seed(self._wanted.seed)
        self._looks.append(Looked(self._target))
        parts = (*PARTS, "weighted") if self._wanted.attention else PARTS
        for number in self._turns_groups():
            for part in parts:
                self._sums[part, number] = Sums(
                    self._layouts[number],
                    twins=part == "fit",
                    products=self._wanted.products,
                    allocate=self._workspace.allocate,
                    near=self._workspace.near(self._target.device),
                )

    def pass_over(self, part: Part, ids: Int[Tensor, "b t"]) -> None:
        """Count a batch, and mix its ids into the digest of all that was read this turn."""
        self.batches += 1
        head = f"{part} {tuple(ids.shape)} "
        self._digest.update(head.encode() + ids.numpy(force=True).tobytes())

    @property
    def digest(self) -> str:
        """Of the ids that were read this turn, batch by batch."""
        return self._digest.hexdigest()

    def take(self, part: Part, ids: Int[Tensor, "b t"]) -> None:
        """Read one batch, and add it in."""
        wanted, looked = self._wanted, self._looks[-1]
        self.pass_over(part, ids)
        attentive = wanted.attention and part == "fit"
        with self._meter("source_forward"):
            read = read_aligned(self._source, self._target, ids)
        with self._meter("target_forward"), looked if attentive else nullcontext():
            own, states = prefill_with_states(self._target, ids, wanted.starts)
        if part == "heldout" and self.turn == 0 and len(self.windows) < WINDOWS:
            self.windows += ids[: WINDOWS - len(self.windows)].unbind()
        with self._meter("statistics"):
            give_back()
            place = self._workspace.near(self._target.device) or torch.device("cpu")
            given = [state_rows(states[s]).flatten(0, 1).to(place) for s in wanted.starts]
            # One by one, so that what the one was made from is gone before the other is made.
            read = read.to(dtype=torch.float32).as_content().to(device=place)
            own = own.to(dtype=torch.float32).as_content().to(device=place)
            order = torch.randperm(ids.numel(), generator=self._random)
            permuted = part == "fit" and self._fitted % CONTROL_EVERY == 0
            self._fitted += part == "fit"
            for number in self._turns_groups():
                x, y = self._side_by_side(number, read, own, given)
                if part == "fit":
                    self._keep_firsts(number, x, y, ids.shape[1])
                if attentive:
                    self._sums["weighted", number].add(x, y, weight=looked.weight.to(place))
                self._sums[part, number].add(x, y, order=order if permuted else None, spend=True)
                del x, y
            del read, own, states, given
            give_back()

    def moments(self, part: str) -> list[PairMoments]:
        """What one part's rows came to, group by group; no more can be added."""
        with self._meter("statistics"):
            return [self._sums[part, number].moments() for number in range(len(self.groups))]

    @property
    def first(self) -> dict[Kind, tuple[Tensor, Tensor]]:
        """By kind, first tokens of the fit's first chunks: source rows, and target rows."""
        return {
            kind: (torch.cat([x for x, _ in rows]), torch.cat([y for _, y in rows]))
            for kind, rows in self._firsts.items()
            if rows
        }

    @property
    def looked(self) -> Looked:
        """Where the target looked."""
        return self._looks[0]

    @property
    def seconds(self) -> dict[str, float]:
        """Wall time of ``source_forward``, ``target_forward`` and ``statistics``."""
        return dict(self._seconds)

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What a gathering of the same text goes on from: plain data, and tensors by name."""
        tensors = {"random": self._random.get_state()}
        for (part, number), sums in self._sums.items():
            tensors |= {f"{part}.{number}.{name}": each for name, each in sums.state().items()}
        for kind, (x, y) in self.first.items():
            tensors |= {f"first.{kind}.x": x, f"first.{kind}.y": y}
        if self.windows:
            tensors["windows"] = torch.stack(self.windows)
        for turn, looked in enumerate(self._looks):
            tensors |= {f"looked.{turn}.{name}": each for name, each in looked.state().items()}
        plain = {
            "turn": self.turn,
            "batches": self.batches,
            "fitted": self._fitted,
            "digest": self.digest,
            "seconds": self.seconds,
        }
        return plain, tensors

    def restore(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Be where a gathering of the same was, but for the text, which has to be passed over."""
        for turn in range(1, plain["turn"] + 1):
            self.begin(turn)
        self._fitted = plain["fitted"]
        self._seconds.update(plain["seconds"])
        self._random.set_state(tensors["random"].clone())
        for (part, number), sums in self._sums.items():
            sums.restore(_under(f"{part}.{number}.", tensors))
        for kind, rows in self._firsts.items():
            if f"first.{kind}.x" in tensors:
                rows.append(
                    (tensors[f"first.{kind}.x"].clone(), tensors[f"first.{kind}.y"].clone())
                )
        self.windows = list(tensors["windows"].clone()) if "windows" in tensors else []
        for turn, looked in enumerate(self._looks):
            looked.restore(_under(f"looked.{turn}.", tensors))

    def _turns_groups(self) -> Sequence[int]:
        """The groups that are gathered this turn."""
        return [self.turn] if self._workspace.passes > 1 else range(len(self.groups))

    def _side_by_side(
        self, number: int, read: KVCache, own: KVCache, given: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """One batch's rows of a group. They are the largest of all that a batch takes, so they are
        made anew each time: kept, they would lie beside the models' own work."""
        group = self.groups[number]
        x = gathered(read, group, self._wanted.before, given)
        return x, rows_of(own, *group)

    def _keep_firsts(self, number: int, x: Tensor, y: Tensor, tokens: int) -> None:
        """The first rows of some chunks, of the kinds that are gathered in one group."""
        group, at = self.groups[number], 0
        kept = self._firsts[group[0]]
        if sum(len(rows) for rows, _ in kept) >= FIRSTS:
            return
        first = x[::tokens].to("cpu", copy=True)
        for kind in group:
            width = size(self._target.spec, kind)
            self._firsts[kind].append((first, y[::tokens, at : at + width].to("cpu", copy=True)))
            at += width

    @contextmanager
    def _meter(self, name: str) -> Iterator[None]:
        """Add up wall time by name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is named with a prefix, by the rest of its name."""
    return {n.removeprefix(prefix): each for n, each in tensors.items() if n.startswith(prefix)}
