"""Both models read the same text; only the moments of what they cached are kept."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import tee

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import TextError
from kvtransfer.fitting.band import Band
from kvtransfer.fitting.checkpoint import Checkpoint
from kvtransfer.fitting.chunks import batches
from kvtransfer.fitting.features import KINDS, Features, Kind, size
from kvtransfer.fitting.gathering import Gathering, Wanted
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.pairs import PairMoments
from kvtransfer.fitting.workspace import Workspace
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.hf.model import LanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Moments of the same tokens for content keys and for values, all layers at once.

    Features lie layer by layer, within a layer head by head. Where each kind is read from both,
    the source's keys of all layers come first and their values follow. Features of the token
    before come next, and the target's states, where there are any, last.
    """

    keys: Moments | PairMoments
    values: Moments | PairMoments

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
    band: int | None = None
    """Which source layers were gathered for each target layer; see :class:`Band`."""
    nbytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the moments, by kind; see :func:`kvtransfer.fitting.layout.moments_bytes`."""
    left_out: int = 0
    """Chunks that could not be read, as the source has another tokenizer and no text their ids."""

    def limits(self, source: ModelSpec, target: ModelSpec) -> Band:
        """The source layers that each target layer may be read from."""
        return Band(self.band, len(source.layers), len(target.layers))


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
    band: int | None = None,
    workspace: Workspace | None = None,
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
        products: In what dtype a batch's rows are multiplied; see :class:`Sums`.
        features: What the target's keys (and its values) are to be read from.
        before: Source layers whose features of the token before are to be features too.
        starts: Target layers whose incoming states are to be features too.
        attention: Whether to gather what the ``attention`` solver needs: weighted rows, for half
            the statistics again, and the queries' second moments.
        band: How far from its own depth a target layer's source layers are gathered; None for all.
        workspace: Where the moments lie, and how a killed capture goes on; None for in memory, and
            not at all.
        progress: Told the number of tokens after each batch.

    Raises:
        TextError: there are fewer than two chunks, so nothing could be held out.
        ArtifactError: there is a checkpoint, and it is of another text, model or setting.
        KVTransferError: there is no room for the moments.
        ValueError: two passes were asked for features that are gathered together.
    """
    workspace = workspace or Workspace()
    wanted = Wanted(
        tokens=tokens,
        batch=batch,
        holdout=holdout,
        seed=seed,
        products=products,
        features=features,
        before=tuple(before),
        starts=tuple(starts),
        attention=attention,
        band=band,
    )
    gathering = Gathering(source, target, wanted, workspace)
    checkpoint = Checkpoint.of_capture(workspace, source.spec, target.spec, wanted)
    resumed = checkpoint.resume(gathering) if checkpoint else None
    for turn, sequences in enumerate(tee(chunks, workspace.passes)):
        if turn < gathering.turn:
            continue
        if turn > gathering.turn:
            gathering.begin(turn)
        for part, ids in batches(sequences, tokens=tokens, batch=batch, holdout=holdout):
            if resumed is not None and not resumed.reached(gathering):
                gathering.pass_over(part, ids)
            else:
                gathering.take(part, ids)
                if checkpoint is not None and gathering.batches % workspace.every == 0:
                    checkpoint.save(gathering)
            progress(ids.numel())
        if resumed is not None:
            resumed.require_reached(gathering)
    samples = {
        part: _sample(gathering.moments(part), target.spec, twins=2 if part == "fit" else 1)
        for part in ("fit", "heldout", *(["weighted"] if attention else []))
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
        seconds=gathering.seconds,
        features=features,
        first={kind: First(*rows) for kind, rows in gathering.first.items()},
        before=tuple(before),
        starts=tuple(starts),
        state_width=gathering.state_width,
        weighted=samples.get("weighted"),
        sees=gathering.looked.sees() if attention else (),
        windows=tuple(gathering.windows),
        band=band,
        nbytes=gathering.nbytes,
    )


def _sample(moments: list[PairMoments], target: ModelSpec, twins: int) -> Sample:
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
