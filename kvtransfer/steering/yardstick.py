"""What a run of the persona battery looks like beside its two references.

Gaps are of what the model reads, over the columns that were written. The target reference is the
trajectory that is transplanted, row by row. The source reference is a run of the source drawn by
other numbers: a run that is neither's then has a gap near zero in every layer, which it would not
have beside its own paired run, with whose first tokens it still agrees.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.hf.model import LanguageModel
from kvtransfer.measures.diversity import type_token_ratio
from kvtransfer.measures.intervals import mean
from kvtransfer.measures.lean import cosine_gap
from kvtransfer.measures.markers import MATCHING, MarkerCount, Matching, count_markers
from kvtransfer.measures.repetition import repetition
from kvtransfer.report import Estimate
from kvtransfer.steering.axis import PersonaAxis
from kvtransfer.steering.battery_report import Cell
from kvtransfer.steering.configurations import Configuration
from kvtransfer.steering.persona import Persona
from kvtransfer.steering.trajectory import Trajectory

Rows = NDArray[np.float64]
"""One number a sample."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Looked:
    """Figures of a configuration, sample by sample."""

    v_gap: Mapping[str, Rows]
    k_gap: Mapping[str, Rows]
    projection: Mapping[str, Rows]
    projection_raw: Mapping[str, Rows]
    markers: Mapping[str, Rows]
    source_markers: Rows
    type_token_ratio: Rows
    repetition: Rows
    texts: tuple[str, ...]

    def cell(
        self,
        of: Configuration,
        layers: tuple[int, ...],
        none: "Looked",
        persistence: tuple[Estimate, ...],
    ) -> Cell:
        """Their means, with intervals; the gain is over ``none``."""
        gaps = [
            {name: mean(rows) for name, rows in each.items()} for each in (self.v_gap, self.k_gap)
        ]
        v_here, k_here = (each.pop("edited") for each in gaps)
        return Cell(
            name=of.name,
            does=of.does,
            layers=layers,
            v_gap=gaps[0],
            k_gap=gaps[1],
            v_here=v_here,
            k_here=k_here,
            projection={name: mean(rows) for name, rows in self.projection.items()},
            projection_raw={name: mean(rows) for name, rows in self.projection_raw.items()},
            markers={name: mean(rows) for name, rows in self.markers.items()},
            gain=mean(self.markers["deduplicated"] - none.markers["deduplicated"]),
            source_markers=mean(self.source_markers),
            type_token_ratio=mean(self.type_token_ratio),
            repetition=mean(self.repetition),
            persistence=persistence,
            texts=self.texts,
            forced=of.forced,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Yardstick:
    """The references of a battery, and what is looked for."""

    model: LanguageModel
    own: Trajectory
    """The target's run."""
    other: Trajectory
    """Another run of the source."""
    bands: Mapping[str, tuple[int, ...]]
    axes: Mapping[str, PersonaAxis]
    source: Persona
    target: Persona

    def look(self, of: Configuration, run: Trajectory) -> Looked:
        """The figures of ``run``, sample by sample."""
        depth = len(run.cache)
        places = {**self.bands, "edited": of.edited(depth) or tuple(range(depth))}
        each_layer = [gaps(run, self.own, self.other, layer) for layer in range(depth)]
        texts = tuple(map(self.model.decode, run.ids))
        counted = [count_markers(text, self.target.markers) for text in texts]
        sources = [count_markers(text, self.source.markers) for text in texts]
        raw = {name: axis.raw(run.states[axis.layer]) for name, axis in self.axes.items()}
        scaled = {name: axis.scaled(run.states[axis.layer]) for name, axis in self.axes.items()}
        return Looked(
            k_gap={name: _over(each_layer, 0, layers) for name, layers in places.items()},
            v_gap={name: _over(each_layer, 1, layers) for name, layers in places.items()},
            projection={name: found.mean(dim=1).numpy() for name, found in scaled.items()},
            projection_raw={name: found.mean(dim=1).numpy() for name, found in raw.items()},
            markers={way: densities(counted, way) for way in MATCHING},
            source_markers=densities(sources, "deduplicated"),
            type_token_ratio=np.array([type_token_ratio(text) for text in texts]),
            repetition=np.array([repetition(row.tolist()) for row in run.ids]),
            texts=texts,
        )


def gaps(
    run: Trajectory, own: Trajectory, other: Trajectory, layer: int
) -> tuple[Float[Tensor, " b"], Float[Tensor, " b"]]:
    """K-gap and V-gap of each row in one layer: towards ``own``, the target, or ``other``."""
    keys, values = (
        cosine_gap(*(each.written(layer)[part] for each in (run, own, other))) for part in (0, 1)
    )
    return keys, values


def _over(each_layer: Sequence[tuple[Tensor, Tensor]], part: int, layers: tuple[int, ...]) -> Rows:
    """The mean over ``layers``."""
    found = torch.stack([each_layer[layer][part] for layer in layers]).double().mean(dim=0)
    return found.numpy(force=True)


def densities(counts: Sequence[MarkerCount], way: Matching) -> Rows:
    """Markers per 100 words, counted in one of the three ways."""
    return np.array([count.density(way) for count in counts])
