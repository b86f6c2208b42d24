"""Where a mapping goes wrong, layer by layer and head by head: as a table, a sentence and JSON.

This module knows no model, and not how the numbers were measured.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvtransfer.report import Estimate, Provenance, plain, to_json

Control = Literal["shuffled", "zeroed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What one layer of a prefix is worth: one number a KV head, NaN where it cannot be known."""

    r2_keys: tuple[float, ...]
    """Of content keys; dims weigh by their variance."""
    r2_values: tuple[float, ...]
    cosine: tuple[float, ...]
    """Of attention outputs with those from the target's own prefix, over tokens and query heads."""
    key_concentration: tuple[float, ...]
    value_concentration: tuple[float, ...]

    def mean(self, name: str) -> float:
        """Over the heads where it is known."""
        known = [number for number in getattr(self, name) if not math.isnan(number)]
        return sum(known) / len(known) if known else math.nan

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; null stands for what is unknown."""
        return {
            each.name: {
                "mean": _or_none(self.mean(each.name)),
                "heads": [_or_none(x) for x in getattr(self, each.name)],
            }
            for each in fields(self)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDiagnosis:
    """One target layer, mapped and under the control."""

    target: int
    sources: tuple[int, ...]
    """Empty for a layer that the mapping has the target run."""
    mapped: Heads
    control: Heads

    @property
    def seen(self) -> bool:
        """Whether the layer goes through transformers' attention interface."""
        return not math.isnan(self.mapped.mean("cosine"))

    @property
    def worst(self) -> int:
        """The KV head with the lowest attention cosine; in an unseen layer, the lowest R²."""
        found = self.mapped.cosine if self.seen else self.mapped.r2_values
        return found.index(min(found))

    def __bool__(self) -> bool:
        """Whether attention returns more of the right thing than from the control.

        A layer that the target runs itself is right, and the same in the control.
        """
        return not self.sources or self.mapped.mean("cosine") > self.control.mean("cosine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Where a mapping goes wrong. True where every layer's attention cosine beats the control's."""

    source: str
    target: str
    layers: tuple[LayerDiagnosis, ...]
    control: Control
    """The mapping's own ``shuffled`` control; for a mapping saved without, a zeroed prefix."""
    cosine: Estimate | None
    """Over layers and heads, with its interval over items; None where no layer could be seen."""
    margin: Estimate | None
    """By how much it beats the control's, paired over items."""
    items: int
    prefix: int
    continuation: int
    notes: tuple[str, ...]
    provenance: Provenance

    def __bool__(self) -> bool:
        seen = [layer for layer in self.layers if layer.seen]
        return bool(seen) and all(seen)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "source": self.source,
            "target": self.target,
            "n": self.items,
            "prefix_tokens": self.prefix,
            "continuation_tokens": self.continuation,
            "control": self.control,
            "attention_cosine": plain(self.cosine),
            "margin": plain(self.margin),
            "layers": [
                {
                    "target": layer.target,
                    "sources": list(layer.sources),
                    "worst_head": layer.worst,
                    "mapped": layer.mapped.to_dict(),
                    "control": layer.control.to_dict(),
                }
                for layer in self.layers
            ],
            "notes": list(self.notes),
            "provenance": self.provenance.to_dict(),
        }

    def to_json(self) -> str:
        """Stable text."""
        return to_json(self.to_dict())

    def sentence(self) -> str:
        """What the numbers mean, in one sentence."""
        seen = [layer for layer in self.layers if layer.seen]
        if not seen or self.cosine is None or self.margin is None:
            return "No layer goes through transformers' attention interface, so none could be seen."
        lost = [str(layer.target) for layer in seen if not layer]
        weakest = min(seen, key=lambda layer: layer.mapped.mean("cosine"))
        verdict = "every layer beats it"
        if lost:
            verdict = f"it is not beaten in layer{'s' * (len(lost) > 1)} {', '.join(lost)}"
        return (
            f"Attention cosine {self.cosine:.3f}, {self.margin:.3f} above that of the "
            f"{self.control} control; {verdict}; the weakest layer is {weakest.target} "
            f"({weakest.mapped.mean('cosine'):.3f})."
        )

    def __rich__(self) -> Group:
        return Group(
            *(Text(f"Note: {note}.", style="red") for note in self.notes),
            self._table(),
            Text(self.sentence(), style="bold"),
        )

    def _table(self) -> Table:
        table = Table(
            "layer",
            "R² keys",
            "R² values",
            "attention cos",
            self.control,
            "K conc.",
            "V conc.",
            "worst head",
            title=f"{self.source} → {self.target}: what attention meets",
            caption=f"{self.continuation} tokens after {self.prefix}, n = {self.items} items; "
            "means over KV heads. Concentration: 1 where an error is spread evenly, above 1 where "
            "it lies where attention looks.",
        )
        for column in table.columns:
            column.justify = "right"
        for layer in self.layers:
            here = layer.mapped
            worst = here.cosine if layer.seen else here.r2_values
            table.add_row(
                str(layer.target),
                f"{here.mean('r2_keys'):.3f}",
                f"{here.mean('r2_values'):.3f}",
                _number(here.mean("cosine"), ".3f"),
                _number(layer.control.mean("cosine"), ".3f"),
                _number(here.mean("key_concentration"), ".2f"),
                _number(here.mean("value_concentration"), ".2f"),
                f"{layer.worst}: {worst[layer.worst]:.3f}" if len(worst) > 1 else "",
                style="red" if layer.seen and not layer else None,
            )
        return table


def _or_none(number: float) -> float | None:
    return None if math.isnan(number) else number


def _number(number: float, form: str) -> str:
    return "–" if math.isnan(number) else format(number, form)
