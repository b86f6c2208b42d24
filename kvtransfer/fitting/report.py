"""What a fit found, layer by layer, as a table and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jaxtyping import Float
from rich.console import Group
from rich.table import Table
from torch import Tensor

from kvtransfer.fitting.choice import Choice
from kvtransfer.fitting.heatmap import LayerScores
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.refine_report import RefineReport
from kvtransfer.fitting.tried import AutoReport
from kvtransfer.report import to_json


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FitReport:
    """What a fit found. True where held-out rows are explained better than by their mean."""

    mapping: KVMapping
    rows: int
    heldout_rows: int
    layers: tuple[Choice, ...]
    """With the held-out R² of the maps as they were saved."""
    seconds: dict[str, float]
    moments: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the moments that were held, by kind."""
    ranking: Float[Tensor, "target source"] | None = None
    """What each source layer alone explains of each target layer, where layers were ranked; −∞
    where a band left it out."""
    refined: RefineReport | None = None
    """What refining found, where it was asked for; the mapping is the refined one."""
    auto: AutoReport | None = None
    """What was tried, where the map was to be chosen."""

    def __bool__(self) -> bool:
        return self.r2_keys > 0 and self.r2_values > 0

    @property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """The source layers of every target layer; none for those that a start gives."""
        exact = len(self.mapping.target.layers) - len(self.layers)
        return ((),) * exact + tuple(layer.sources for layer in self.layers)

    @property
    def r2_keys(self) -> float:
        """Held-out R² of content keys, mean over layers."""
        return sum(layer.r2_keys for layer in self.layers) / len(self.layers)

    @property
    def r2_values(self) -> float:
        """Held-out R² of values, mean over layers."""
        return sum(layer.r2_values for layer in self.layers) / len(self.layers)

    @property
    def left_out(self) -> int:
        """Chunks that could not be read, as the models' tokenizers differ and no text has them."""
        return int(self.mapping.settings.get("chunks_left_out", 0))

    def refined_by(self, found: RefineReport) -> "FitReport":
        """The same report with the refined mapping."""
        return replace(
            self,
            mapping=found.mapping,
            refined=found,
            seconds=self.seconds | {"refine": found.seconds},
        )

    def to_dict(self, *, folder: Path | None = None) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        size = sum(p.stat().st_size for p in folder.iterdir()) if folder else None
        return {
            "mapping": str(folder) if folder else None,
            "rows": self.rows,
            "heldout_rows": self.heldout_rows,
            "layers": [
                {
                    "target": layer.target,
                    "sources": list(layer.sources),
                    "before": list(layer.before),
                    "r2_keys": layer.r2_keys,
                    "r2_values": layer.r2_values,
                    "strength_keys": layer.strength_keys,
                    "strength_values": layer.strength_values,
                }
                for layer in self.layers
            ],
            "quality": dict(self.mapping.quality),
            "seconds": self.seconds,
            "chunks_left_out": self.left_out,
            "bytes": size,
            "moments_bytes": dict(self.moments),
            "auto": None if self.auto is None else self.auto.to_dict(),
            "refine": None if self.refined is None else self.refined.to_dict(),
            "provenance": dict(self.mapping.provenance),
        }

    def to_json(self, *, folder: Path | None = None) -> str:
        """Stable text."""
        return to_json(self.to_dict(folder=folder))

    def __rich__(self) -> Group:
        scores = None
        if self.ranking is not None:
            ends = self.mapping.source.name, self.mapping.target.name
            scores = LayerScores(self.ranking, *ends, chosen=self.sources)
        more = (scores, self.auto, self.refined)
        return Group(self._table(), *(each for each in more if each is not None))

    def _table(self) -> Table:
        late = "; | at the token before" if any(each.before for each in self.layers) else ""
        passed = f"{self.left_out} chunks left out, of no text; " if self.left_out else ""
        table = Table(
            "target layer",
            "source layers",
            "R² keys",
            "R² values",
            title=f"{self.mapping.source.name} → {self.mapping.target.name}",
            caption=f"held-out R²{late}; fitted on {self.rows:,} tokens, "
            f"held out {self.heldout_rows:,}; "
            + passed
            + (f"moments {sum(self.moments.values()) / 1e6:.0f} MB; " if self.moments else "")
            + ", ".join(f"{name} {value:.1f} s" for name, value in self.seconds.items()),
        )
        for column in table.columns[2:]:
            column.justify = "right"
        for layer in self.layers:
            table.add_row(
                str(layer.target),
                _read(layer),
                f"{layer.r2_keys:.3f}",
                f"{layer.r2_values:.3f}",
            )
        table.add_section()
        table.add_row("mean", "", f"{self.r2_keys:.3f}", f"{self.r2_values:.3f}")
        return table


def _read(layer: Choice) -> str:
    """Source layers, and after a bar those that are read at the token before."""
    own, before = (" ".join(map(str, each)) for each in (layer.sources, layer.before))
    return f"{own} | {before}" if before else own
