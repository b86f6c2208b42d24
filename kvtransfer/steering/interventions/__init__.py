"""Deliberate edits to a cache, each a frozen value: from a cache to a new one."""

from kvtransfer.steering.interventions.ablate import Ablate
from kvtransfer.steering.interventions.bank import Bank
from kvtransfer.steering.interventions.forget import ForgetRotation
from kvtransfer.steering.interventions.interpolate import Interpolate
from kvtransfer.steering.interventions.lag import Lag
from kvtransfer.steering.interventions.replace import Replace
from kvtransfer.steering.interventions.scale import Scale
from kvtransfer.steering.interventions.shuffle import Shuffle
from kvtransfer.steering.interventions.steer import Steer

INTERVENTIONS = (Ablate, Bank, ForgetRotation, Interpolate, Lag, Replace, Scale, Shuffle, Steer)
"""Every one of them, as expressions name them (:mod:`kvtransfer.steering.expression`)."""

__all__ = [
    "INTERVENTIONS",
    "Ablate",
    "Bank",
    "ForgetRotation",
    "Interpolate",
    "Lag",
    "Replace",
    "Scale",
    "Shuffle",
    "Steer",
]
