"""The persona battery: a run of one persona reads the cache of another, in thirteen ways.

After persona transplantation (arXiv:2609.11020), whose lesson is that a cache can look right and
behave wrong: so alignment of the cache and expression in the text are measured apart.

The target persona's run is recorded: its own prompt, its own tokens. In the source persona's run
the model reads, at every step and in the layers of the configuration, the target's keys and values
at all earlier columns, prompt and writing, in place of its own. Every row draws by numbers of its
own, the same in all configurations, so rows are paired; and where everything is replaced, the run
is the target's own, bit for bit.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvtransfer.errors import SteeringError
from kvtransfer.guides.climb import numbers
from kvtransfer.hf.model import LanguageModel
from kvtransfer.measures.intervals import mean
from kvtransfer.measures.markers import count_markers
from kvtransfer.report import Estimate, Provenance
from kvtransfer.steering.axis import persona_axes
from kvtransfer.steering.battery_report import BatteryReport
from kvtransfer.steering.configurations import BANDS, Configuration, fitting
from kvtransfer.steering.frame import Opening, openings
from kvtransfer.steering.layers import which
from kvtransfer.steering.persona import Persona
from kvtransfer.steering.trajectory import Trajectory, write
from kvtransfer.steering.yardstick import Yardstick, densities

TOPIC = "Tell me about the sea."


def battery(
    model: LanguageModel,
    source: Persona,
    target: Persona,
    *,
    topic: str = TOPIC,
    samples: int = 8,
    tokens: int = 50,
    persistence: int = 150,
    temperature: float = 0.7,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> BatteryReport:
    """Run all configurations that the model has layers for.

    Args:
        model: Plays both personas.
        source: Whose runs are edited.
        target: Whose trajectory they read.
        topic: What both are asked.
        samples: Rows of a configuration.
        tokens: Written in each.
        persistence: Tokens of the long run, a multiple of ``tokens``; 0 for none.
        temperature: Of the drawing.
        seed: Of the drawing, and of the order of shuffled columns.
        progress: Called after every step: :func:`steps` times.

    Raises:
        SteeringError: the prompts cannot be put in one frame, or the model is too shallow.
        PersonaError: a persona has too few example texts.
        SeamError, CacheLayoutError, UnsupportedModel: the model cannot be run so.
    """
    require_settings(samples, tokens, persistence, temperature)
    depth = len(model.spec.layers)
    there, missing = fitting(depth)
    bands = {name: which(band, depth) for name, band in BANDS.items()}
    opened = openings(model, source, target, topic)
    behind = {name: min(layers[-1] + 1, depth - 1) for name, layers in bands.items()}
    fitted = persona_axes(model, source, target, list(dict.fromkeys(behind.values())))
    by_layer = {axis.layer: axis for axis in fitted}
    axes = {name: by_layer[layer] for name, layer in behind.items()}

    stage = Stage(model, *opened, samples, tokens, temperature, seed, tuple(by_layer), progress)
    own = stage.run(opened[1])
    other = stage.run(opened[0], seed=seed + samples)
    yardstick = Yardstick(model, own, other, bands, axes, source, target)
    looked, exact = {}, False
    for each in there:
        run = stage.cell(each, own)
        if each.name == "full":
            exact = is_own(run, own)
        looked[each.name] = yardstick.look(each, run)
    lasting = _persistence(stage, there, persistence, target) if persistence else {}
    return BatteryReport(
        model=model.spec.name,
        source=source,
        target=target,
        topic=topic.strip(),
        samples=samples,
        tokens=tokens,
        long=persistence,
        temperature=temperature,
        bands=bands,
        axes=axes,
        cells=tuple(
            looked[each.name].cell(
                each, each.edited(depth), looked["none"], lasting.get(each.name, ())
            )
            for each in there
        ),
        exact=exact,
        notes=(
            *(f"{each.name} is left out: {each.layers} is no layer of {depth}" for each in missing),
            *(
                f"the prompt of {persona.name} ends with its last token {each.filled} times more: "
                f"{model.spec.positions} positions do not allow to read it further on"
                for each, persona in zip(opened, (source, target), strict=True)
                if each.filled
            ),
        ),
        provenance=Provenance.here(seed=seed),
    )


def steps(model: LanguageModel, *, tokens: int = 50, persistence: int = 150) -> int:
    """How many steps a battery takes."""
    cells = len(fitting(len(model.spec.layers))[0])
    return (cells + 2) * tokens + (cells + 1) * persistence


def require_settings(samples: int, tokens: int, persistence: int, temperature: float) -> None:
    """Raise ValueError for numbers that no battery can be run with."""
    if samples < 1 or tokens < 2:
        raise ValueError(f"{samples} samples of {tokens} tokens: at least 1 of 2 are needed")
    if persistence < 0 or persistence % tokens:
        raise ValueError(f"a persistence run of {persistence} tokens is no multiple of {tokens}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"the temperature is {temperature}, and must be above 0")


def is_own(run: Trajectory, own: Trajectory) -> bool:
    """Whether ``run`` wrote the tokens of ``own``, and kept bit for bit what it kept of them."""
    pairs = zip(
        (*run.cache.keys, *run.cache.values), (*own.cache.keys, *own.cache.values), strict=True
    )
    # From the last token of the prompt on: what stands before was read under the other prompt.
    first = own.width - 1
    return torch.equal(run.ids, own.ids) and all(
        torch.equal(a[:, :, first:], b[:, :, first:]) for a, b in pairs
    )


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """What all runs of a battery share."""

    model: LanguageModel
    source: Opening
    target: Opening
    samples: int
    tokens: int
    temperature: float
    seed: int
    watch: tuple[int, ...]
    progress: Callable[[], None]

    def uniforms(self, seed: int) -> Float[Tensor, "b s"]:
        """What each row draws by, a stream of its own."""
        return numbers(tuple(range(seed, seed + self.samples)), self.tokens)

    def run(self, opening: Opening, *, seed: int | None = None) -> Trajectory:
        """A persona's own run."""
        return write(
            self.model,
            opening,
            self.uniforms(self.seed if seed is None else seed),
            temperature=self.temperature,
            watch=self.watch,
            progress=self.progress,
        )

    def cell(self, configuration: Configuration, own: Trajectory) -> Trajectory:
        """The source's run under ``configuration``, where ``own`` is the target's.

        Raises:
            SteeringError: tokens that were to be the target's are not.
        """
        run = write(
            self.model,
            self.source,
            self.uniforms(self.seed),
            temperature=self.temperature,
            edit=configuration.edit(own.cache, self.seed),
            forced=own.ids if configuration.forced else None,
            watch=self.watch,
            progress=self.progress,
        )
        if configuration.forced:
            require_same_tokens(run, own)
        return run


def require_same_tokens(run: Trajectory, own: Trajectory) -> None:
    """Raise SteeringError unless both wrote the same tokens, and the model read them in both.

    What it read is seen in layer 0, whose values are of a token alone, whatever stands before it.
    """
    hint = "a control whose tokens differ controls nothing: do not use this run"
    if not torch.equal(run.ids, own.ids):
        raise SteeringError(
            f"the same-token control wrote other tokens than the target, {int(own.ids.numel())} in "
            f"all, from step {int((run.ids != own.ids).any(dim=0).int().argmax())} on",
            hint=hint,
        )
    ours, theirs = (each.written(0)[1].float() for each in (run, own))
    if not torch.allclose(ours, theirs, rtol=1e-2, atol=1e-3 * float(theirs.abs().max())):
        raise SteeringError(
            "layer 0 of the same-token control read other tokens than the target wrote: its values "
            f"differ by up to {float((ours - theirs).abs().max()):.2g}",
            hint=hint,
        )


def _persistence(
    stage: Stage, there: Sequence[Configuration], long: int, target: Persona
) -> dict[str, tuple[Estimate, ...]]:
    """Markers in each stretch of a longer run, which is transplanted to its end."""
    longer = replace(stage, tokens=long, watch=())
    own = longer.run(stage.target)
    found = {}
    for each in there:
        stretches = longer.cell(each, own).ids.split(stage.tokens, dim=1)
        counts = [
            [count_markers(stage.model.decode(row), target.markers) for row in ids]
            for ids in stretches
        ]
        found[each.name] = tuple(mean(densities(rows, "deduplicated")) for rows in counts)
    return found
