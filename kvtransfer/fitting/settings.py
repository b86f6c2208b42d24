"""How to fit: one value that prints, compares, and is saved with the mapping."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Literal

from kvtransfer.fitting.features import Features
from kvtransfer.fitting.layers import Selection
from kvtransfer.fitting.network_settings import NetworkSettings
from kvtransfer.fitting.solvers import SOLVERS, Ridge, Scale, Solver, fields_of, solver

SOLVER_NAMES = (*SOLVERS, "mlp", "auto")
"""Those in closed form; a network; or whatever held-out evidence prefers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """How to fit. Prints, compares, and is saved with the mapping."""

    tokens: int = 32_768
    """Rows to fit on."""
    chunk: int = 512
    """Tokens in a sequence; each is read from position 0."""
    layers: int | Literal["auto", "all"] = "auto"
    """Source layers that feed a target layer."""
    solver: str = "ridge"
    """One of :data:`SOLVER_NAMES`."""
    strength: float | None = None
    """Ridge strength; None to choose a relative one by held-out R²."""
    scale: Scale = "relative"
    """What a given strength is relative to; ``absolute`` is the paper's convention."""
    rank: int | None = None
    """Rank of each layer's map; None for full, or for ``lowrank`` the smallest that costs next to
    nothing on held-out rows."""
    gain: float = 1.0
    """How far outputs are spread from their mean; see :func:`~kvtransfer.fitting.affine.widen`."""
    features: Features = "same"
    """What the target's keys, and its values, are read from."""
    first: int = 256
    """Rows that the first token of a chunk counts for at most, where first tokens are alike. There
    models lean on it (an attention sink), and a map that gets it a little wrong is wrong in every
    token's attention."""
    before: int = 0
    """Source layers, evenly spaced, that may be read at the token before, too."""
    selection: Selection = "top"
    """How the source layers are picked."""
    band: int | None = None
    """How far from its proportional depth a target layer's source layers may lie; None for any.
    What lies further is neither gathered nor looked at; see
    :class:`~kvtransfer.fitting.band.Band`."""
    start: int | None = None
    """Target layers that are run for real; see :class:`~kvtransfer.fitting.mapping.KVMapping`."""
    products: Literal["auto", "float64", "float32"] = "auto"
    """Dtype of the products inside one batch; sums over batches are always float64. ``auto`` is
    float64 up to CHEAP features, and float32 above."""
    batch: int = 4
    seed: int = 0
    network: NetworkSettings = field(default_factory=NetworkSettings)
    """How to train, where the solver is ``mlp``."""

    def __post_init__(self) -> None:
        if self.solver not in SOLVER_NAMES:
            raise ValueError(f"no solver {self.solver!r}; there are {', '.join(SOLVER_NAMES)}")
        for name in ("tokens", "chunk", "batch", "first"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if isinstance(self.layers, int) and self.layers < 1:
            raise ValueError(f"layers must be positive, got {self.layers}")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank must be positive, got {self.rank}")
        if not self.gain > 0:
            raise ValueError(f"gain must be positive, got {self.gain}")
        if self.before < 0:
            raise ValueError(f"before must be ≥ 0, got {self.before}")
        if self.band is not None and self.band < 0:
            raise ValueError(f"band must be ≥ 0 source layers to either side, got {self.band}")
        if self.start is not None and self.start < 0:
            raise ValueError(f"start must be ≥ 0, got {self.start}")
        if self.solver == "mlp" and (self.rank is not None or self.gain != 1.0):
            raise ValueError("a network has no rank and no gain: leave both out with solver 'mlp'")
        ranked = self.solver in ("ridge", "auto") or "rank" in fields_of(self.solver)
        if self.rank is not None and not ranked:
            raise ValueError(f"rank {self.rank} asked of {self.solver!r}, which has none to set")
        if self.solver == "auto":
            self._require_free(
                "layers", "strength", "rank", "gain", "selection", "features", "before"
            )
        if self.strength is not None:
            Ridge(self.strength)  # which refuses what it cannot use, and now rather than later
        if self.scale == "absolute" and self.strength is None:
            raise ValueError("an absolute strength must be given: none is chosen on that scale")

    def solver_of(self, strength: float) -> Solver:
        """The solver of one map."""
        # A network is added to a line; what is to be chosen says so itself later.
        if self.solver == "auto" or self.solver == "mlp":
            return Ridge(strength, self.scale)
        if self.solver == "lowrank" and self.rank is None:  # the strength is chosen before a rank
            return Ridge(strength, self.scale)
        name = "lowrank" if self.solver == "ridge" and self.rank else self.solver
        return solver(name, strength=strength, scale=self.scale, rank=self.rank)

    def _require_free(self, *names: str) -> None:
        """Raise ValueError where something was asked for that ``auto`` is to choose."""
        defaults = {each.name: each.default for each in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} asked of solver 'auto', which chooses it"
                )


Progress = Callable[[str, int], None]
"""Told the stage (``capture`` or ``solve``; with networks, then ``rows`` or ``train``) and what was
done in it since the last call: tokens, or target layers."""
