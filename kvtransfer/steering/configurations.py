"""The thirteen configurations of the persona battery (arXiv:2609.11020).

Each says what of the target's trajectory the source's run reads in place of its own, at every step
of the generation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvtransfer.errors import SteeringError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.steering.edit import Intervention
from kvtransfer.steering.interventions import Interpolate, Lag, Replace, Shuffle
from kvtransfer.steering.layers import which

BANDS = {"early": "1-8/32", "mid": "9-20/32", "late": "21-31/32"}
"""The battery's own, by fraction of the depth; they are no thirds, and leave the last layer out."""

PARTS_OF_MID = {"mid-a": "9-12/32", "mid-b": "13-16/32", "mid-c": "17-20/32"}

LAG = 5
"""Steps that the transplanted trajectory runs behind."""

Make = Callable[[KVCache, str, int], Intervention]
"""From the target's trajectory, the layers and a seed to an edit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What is done to a run of the source persona."""

    name: str
    does: str
    """In words."""
    layers: str = ""
    """Which are edited; none if empty."""
    make: Make | None = None
    forced: bool = False
    """Whether the target's tokens are written instead of drawing any."""

    def edited(self, depth: int) -> tuple[int, ...]:
        """The numbers of its layers in a model of ``depth`` layers.

        Raises:
            SteeringError: there are none in so shallow a model.
        """
        return which(self.layers, depth) if self.layers else ()

    def edit(self, target: KVCache, seed: int) -> Intervention | None:
        """The edit at every step; None where nothing is edited."""
        return None if self.make is None else self.make(target, self.layers, seed)


def _replace(target: KVCache, layers: str, seed: int) -> Intervention:
    return Replace(target, layers=layers)


def _blend(alpha: float) -> Make:
    return lambda target, layers, seed: Interpolate(target, alpha, layers=layers)


# Moved once, as a whole: what stands in a column is then the same at every step.
def _late(target: KVCache, layers: str, seed: int) -> Intervention:
    return Replace(Lag(LAG)(target), layers=layers)


def _shuffled(target: KVCache, layers: str, seed: int) -> Intervention:
    return Replace(Shuffle(seed)(target), layers=layers)


CONFIGURATIONS = (
    Configuration(name="none", does="nothing: the source persona as it is"),
    Configuration(
        name="full", does="the target's trajectory in all layers", layers="all", make=_replace
    ),
    *(
        Configuration(
            name=name, does=f"the target's trajectory in {name} layers", layers=band, make=_replace
        )
        for name, band in (BANDS | PARTS_OF_MID).items()
    ),
    *(
        Configuration(
            name=f"α {alpha}",
            does=f"{alpha} of the target's trajectory and {1 - alpha} of the own one in mid layers",
            layers=BANDS["mid"],
            make=_blend(alpha),
        )
        for alpha in (0.25, 0.5)
    ),
    Configuration(
        name="lag",
        does=f"the target's trajectory of {LAG} steps before, in mid layers",
        layers=BANDS["mid"],
        make=_late,
    ),
    Configuration(
        name="shuffle",
        does="the target's trajectory in another order, in mid layers",
        layers=BANDS["mid"],
        make=_shuffled,
    ),
    Configuration(
        name="same tokens",
        does="nothing, but the target's tokens are written: only the conditioning differs",
        forced=True,
    ),
)


def fitting(depth: int) -> tuple[tuple[Configuration, ...], tuple[Configuration, ...]]:
    """The configurations that a model of ``depth`` layers has layers for, and those it has not.

    Only parts of the mid band may be left out: a model without one of the three bands is no model
    for this battery.

    Raises:
        SteeringError: a whole band is empty.
    """
    there, missing = [], []
    for each in CONFIGURATIONS:
        try:
            each.edited(depth)
        except SteeringError:
            if each.name not in PARTS_OF_MID:
                raise
            missing.append(each)
        else:
            there.append(each)
    return tuple(there), tuple(missing)
