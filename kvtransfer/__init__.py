"""Move, reuse and change the KV caches of language models.

>>> from kvtransfer import KVMapping, check, evaluate, fit, load
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtransfer.errors import KVTransferError
    from kvtransfer.evaluation.ablation import ablate
    from kvtransfer.evaluation.evaluate import evaluate
    from kvtransfer.fitting.diagnose import diagnose
    from kvtransfer.fitting.fit import fit
    from kvtransfer.fitting.gate import Gate
    from kvtransfer.fitting.mapping import KVMapping
    from kvtransfer.fitting.probe import probe
    from kvtransfer.fitting.refine import refine
    from kvtransfer.fitting.settings import FitSettings
    from kvtransfer.fitting.texts import builtin, documents
    from kvtransfer.fitting.transfer import transfer
    from kvtransfer.geometry.cache import KVCache
    from kvtransfer.geometry.join import stack
    from kvtransfer.geometry.spec import ModelSpec
    from kvtransfer.guides.bench import bench
    from kvtransfer.guides.chat import split_chat
    from kvtransfer.guides.concat import concat
    from kvtransfer.guides.drift import RePrefill
    from kvtransfer.guides.group_profile import profile_groups
    from kvtransfer.guides.guide import read_guides
    from kvtransfer.guides.ladder import verify
    from kvtransfer.guides.modules import Modules
    from kvtransfer.guides.pack import GuidePack
    from kvtransfer.guides.recompute import recompute
    from kvtransfer.guides.reuse import reuse
    from kvtransfer.guides.schema import read_schema
    from kvtransfer.guides.seam import split
    from kvtransfer.guides.session import Session
    from kvtransfer.hf.adopt import adopt
    from kvtransfer.hf.check import check
    from kvtransfer.hf.graft import grafted
    from kvtransfer.hf.model import LanguageModel, load, wrap
    from kvtransfer.hf.relocate import relocate
    from kvtransfer.hf.run import generate, prefill, score
    from kvtransfer.hf.start import begin
    from kvtransfer.steering.battery import battery
    from kvtransfer.steering.chain import chain
    from kvtransfer.steering.extract import extract
    from kvtransfer.steering.interventions import (
        Ablate,
        Bank,
        ForgetRotation,
        Interpolate,
        Lag,
        Replace,
        Scale,
        Shuffle,
        Steer,
    )
    from kvtransfer.steering.persona import read_persona
    from kvtransfer.steering.sweep import sweep
    from kvtransfer.steering.vector import CacheVector

HOMES = {
    "Ablate": "steering.interventions.ablate",
    "Bank": "steering.interventions.bank",
    "CacheVector": "steering.vector",
    "FitSettings": "fitting.settings",
    "ForgetRotation": "steering.interventions.forget",
    "Gate": "fitting.gate",
    "GuidePack": "guides.pack",
    "Interpolate": "steering.interventions.interpolate",
    "KVCache": "geometry.cache",
    "KVMapping": "fitting.mapping",
    "KVTransferError": "errors",
    "Lag": "steering.interventions.lag",
    "LanguageModel": "hf.model",
    "ModelSpec": "geometry.spec",
    "Modules": "guides.modules",
    "RePrefill": "guides.drift",
    "Replace": "steering.interventions.replace",
    "Scale": "steering.interventions.scale",
    "Session": "guides.session",
    "Shuffle": "steering.interventions.shuffle",
    "Steer": "steering.interventions.steer",
    "ablate": "evaluation.ablation",
    "adopt": "hf.adopt",
    "battery": "steering.battery",
    "begin": "hf.start",
    "bench": "guides.bench",
    "builtin": "fitting.texts",
    "chain": "steering.chain",
    "check": "hf.check",
    "concat": "guides.concat",
    "diagnose": "fitting.diagnose",
    "documents": "fitting.texts",
    "evaluate": "evaluation.evaluate",
    "extract": "steering.extract",
    "fit": "fitting.fit",
    "generate": "hf.run",
    "grafted": "hf.graft",
    "load": "hf.model",
    "prefill": "hf.run",
    "probe": "fitting.probe",
    "profile_groups": "guides.group_profile",
    "read_guides": "guides.guide",
    "read_persona": "steering.persona",
    "read_schema": "guides.schema",
    "recompute": "guides.recompute",
    "refine": "fitting.refine",
    "relocate": "hf.relocate",
    "reuse": "guides.reuse",
    "score": "hf.run",
    "split": "guides.seam",
    "split_chat": "guides.chat",
    "stack": "geometry.join",
    "sweep": "steering.sweep",
    "transfer": "fitting.transfer",
    "verify": "guides.ladder",
    "wrap": "hf.model",
}
"""Where each public name lives. They load on first use, so that importing the package is quick."""

__all__ = [
    "Ablate",
    "Bank",
    "CacheVector",
    "FitSettings",
    "ForgetRotation",
    "Gate",
    "GuidePack",
    "Interpolate",
    "KVCache",
    "KVMapping",
    "KVTransferError",
    "Lag",
    "LanguageModel",
    "ModelSpec",
    "Modules",
    "RePrefill",
    "Replace",
    "Scale",
    "Session",
    "Shuffle",
    "Steer",
    "ablate",
    "adopt",
    "battery",
    "begin",
    "bench",
    "builtin",
    "chain",
    "check",
    "concat",
    "diagnose",
    "documents",
    "evaluate",
    "extract",
    "fit",
    "generate",
    "grafted",
    "load",
    "prefill",
    "probe",
    "profile_groups",
    "read_guides",
    "read_persona",
    "read_schema",
    "recompute",
    "refine",
    "relocate",
    "reuse",
    "score",
    "split",
    "split_chat",
    "stack",
    "sweep",
    "transfer",
    "verify",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
