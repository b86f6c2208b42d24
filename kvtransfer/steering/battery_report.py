"""What a persona battery found: one table, one sentence, JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvtransfer.report import Estimate, Provenance, to_json
from kvtransfer.steering.axis import PersonaAxis
from kvtransfer.steering.persona import Persona

ALIGNED = 0.5
"""Share of the full transplant's V-gap, and of its gain in markers, from which on a configuration
counts as aligned, and as speaking like the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One configuration: means over samples."""

    name: str
    does: str
    layers: tuple[int, ...]
    """Which are edited."""
    v_gap: Mapping[str, Estimate]
    """Per band; see :func:`kvtransfer.measures.lean.cosine_gap`."""
    k_gap: Mapping[str, Estimate]
    v_here: Estimate
    """The V-gap in the edited layers; in all, where none is edited."""
    k_here: Estimate
    projection: Mapping[str, Estimate]
    """On the persona axis behind each band, scaled: the source's texts at −1, the target's at 1."""
    projection_raw: Mapping[str, Estimate]
    """The same in log odds of the target."""
    markers: Mapping[str, Estimate]
    """The target's per 100 words: ``naive``, ``boundary``, ``deduplicated``."""
    gain: Estimate
    """The target's per 100 words, deduplicated, over those with nothing edited, paired."""
    source_markers: Estimate
    """The source's per 100 words, deduplicated."""
    type_token_ratio: Estimate
    repetition: Estimate
    persistence: tuple[Estimate, ...]
    """The target's markers per 100 words, deduplicated, in each stretch of the long run."""
    texts: tuple[str, ...]
    """What was written."""
    forced: bool
    """Whether the tokens were given, so that markers, ratio and repetition are the target's own."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "does": self.does,
            "layers": list(self.layers),
            "forced": self.forced,
            "v_gap": _plain(self.v_gap) | {"edited": self.v_here.to_dict()},
            "k_gap": _plain(self.k_gap) | {"edited": self.k_here.to_dict()},
            "projection": _plain(self.projection),
            "projection_raw": _plain(self.projection_raw),
            "markers": _plain(self.markers),
            "gain": self.gain.to_dict(),
            "source_markers": self.source_markers.to_dict(),
            "type_token_ratio": self.type_token_ratio.to_dict(),
            "repetition": self.repetition.to_dict(),
            "persistence": [each.to_dict() for each in self.persistence],
            "texts": list(self.texts),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BatteryReport:
    """Thirteen ways to give a run of one persona the cache of another.

    True where it can tell something: the transplant of everything reproduces the target's own run
    exactly, and the target's markers are then surely more frequent than without it.
    """

    model: str
    source: Persona
    target: Persona
    topic: str
    samples: int
    tokens: int
    long: int
    """Tokens of the persistence run; 0 where there was none."""
    temperature: float
    bands: Mapping[str, tuple[int, ...]]
    axes: Mapping[str, PersonaAxis]
    """Behind each band."""
    cells: tuple[Cell, ...]
    exact: bool
    """Whether full replacement wrote the target's own tokens and kept its own keys and values."""
    notes: tuple[str, ...]
    provenance: Provenance

    def __bool__(self) -> bool:
        return self.exact and self.apart

    @property
    def apart(self) -> bool:
        """Whether the model plays the two personas apart, as far as markers tell."""
        return surely(self.gain)

    @property
    def gain(self) -> Estimate:
        """Markers per 100 words, deduplicated: full replacement over none, paired."""
        return self.cell("full").gain

    def cell(self, name: str) -> Cell:
        """A configuration's figures.

        Raises:
            KeyError: it is not in this report.
        """
        return {each.name: each for each in self.cells}[name]

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "model": self.model,
            "source": _described(self.source),
            "target": _described(self.target),
            "topic": self.topic,
            "samples": self.samples,
            "tokens": self.tokens,
            "persistence_tokens": self.long,
            "temperature": self.temperature,
            "bands": {name: list(layers) for name, layers in self.bands.items()},
            "axes": {
                name: {
                    "layer": axis.layer,
                    "accuracy": axis.accuracy,
                    "texts": axis.texts,
                    "tokens": axis.tokens,
                    "ends_raw": list(axis.ends),
                }
                for name, axis in self.axes.items()
            },
            "configurations": {cell.name: cell.to_dict() for cell in self.cells},
            "full_is_target": self.exact,
            "gain": self.gain.to_dict(),
            "apart": self.apart,
            "sentence": self.sentence(),
            "notes": list(self.notes),
            "provenance": self.provenance.to_dict(),
        }

    def to_json(self) -> str:
        """Stable text."""
        return to_json(self.to_dict())

    def sentence(self) -> str:
        """What the numbers say."""
        names = self.source.name, self.target.name
        if not self.exact:
            return (
                "Replacing everything did not reproduce the target's own run, so no other figure "
                "means anything: this device does not compute one thing twice in one way."
            )
        if not self.apart:
            return (
                f"{self.model} does not surely play {names[1]} apart from {names[0]} on this topic "
                f"({self.gain:.1f} markers in 100 words more), so nothing can be said of transfer."
            )
        full = self.cell("full")
        said = []
        for cell in self.cells:
            if not cell.layers or cell.name == "full":
                continue
            aligned = cell.v_here.value >= ALIGNED * full.v_here.value
            speaks = cell.gain.value >= ALIGNED * self.gain.value and surely(cell.gain)
            said.append((cell.name, aligned, speaks))
        groups = {
            "aligned, and speak like the target": [n for n, a, s in said if a and s],
            "aligned, and do not": [n for n, a, s in said if a and not s],
            "not aligned, and speak like it": [n for n, a, s in said if not a and s],
            "neither": [n for n, a, s in said if not a and not s],
        }
        return (
            f"All of the target's trajectory brings {self.gain:.1f} markers in 100 words. By half "
            "of its V-gap, and half of its gain if surely above none: "
            + "; ".join(f"{word}: {', '.join(cells)}" for word, cells in groups.items() if cells)
            + "."
        )

    def __rich__(self) -> Group:
        return Group(
            *(Text(f"Note: {note}.", style="red") for note in self.notes),
            self._table(),
            Text(self._legend(), style="dim"),
            Text(self.sentence(), style="bold green" if self else "bold red"),
        )

    def _table(self) -> Table:
        table = Table(
            title=f"{self.model}: {self.source.name} reads the trajectory of {self.target.name}",
            box=box.SIMPLE_HEAD,
            padding=(0, 0),
        )
        table.add_column("configuration", no_wrap=True)
        table.add_column("layers", no_wrap=True)
        late = [f"{self.long - self.tokens + 1}–{self.long}"] if self.long else []
        for head in (
            *("V-gap\nearly", "\nmid", "\nlate", "V-gap\nedited", "K-gap\nedited"),
            *("V★", "markers\nnaive", "\nwords", "\nonce", "TTR", "rep."),
            *(f"once,\n{each}" for each in late),
        ):
            table.add_column(head, justify="right", no_wrap=True)
        for cell in self.cells:
            table.add_row(
                cell.name,
                _range(cell.layers),
                *(f"{each.value:.2f}" for each in cell.v_gap.values()),
                _two(cell.v_here, ".2f"),
                f"{cell.k_here.value:.2f}",
                _two(list(cell.projection.values())[-1], ".2f"),
                *(f"{cell.markers[way].value:.1f}" for way in ("naive", "boundary")),
                _two(cell.markers["deduplicated"], ".1f"),
                _two(cell.type_token_ratio, ".2f"),
                f"{cell.repetition.value:.2f}",
                *([_two(cell.persistence[-1], ".1f")] if late else []),
            )
        return table

    def _legend(self) -> str:
        last = list(self.axes.values())[-1]
        return (
            f"{self.samples} samples of {self.tokens} tokens, temperature {self.temperature}; "
            "95 % bootstrap intervals over samples. Gap: cosine of what the model reads to the "
            "target's trajectory, minus that to another run of the source. V★: states entering "
            f"layer {last.layer}, source's texts −1, target's +1 ({last.accuracy:.0%} of tokens of "
            "held-out texts on their side). Markers of the target in 100 words: as substrings, as "
            "whole words, longest first and none twice. TTR: different words over words; rep.: "
            "share of repeated n-grams. Same tokens: its text is the target's."
            + (f" {FEW}" if self.samples < ENOUGH else "")
        )


ENOUGH = 8
FEW = "So few samples tell little: an interval over two numbers above 0 cannot reach 0."


def surely(gain: Estimate) -> bool:
    """Whether all of an interval is above 0."""
    return gain.low is not None and gain.low > 0


def _two(estimate: Estimate, spec: str) -> str:
    """The value, and under it the interval."""
    value = format(estimate.value, spec)
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value}\n{format(estimate.low, spec)}–{format(estimate.high, spec)}"


def _range(layers: tuple[int, ...]) -> str:
    return f"{layers[0]}–{layers[-1]}" if layers else "–"


def _plain(estimates: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: estimate.to_dict() for name, estimate in estimates.items()}


def _described(persona: Persona) -> dict[str, Any]:
    return {
        "name": persona.name,
        "prompt": persona.prompt,
        "markers": list(persona.markers),
        "texts": len(persona.texts),
    }
