"""Reports to draw: as large as a real pair's, and with texts that would break a careless page."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from kvtransfer.evaluation.figure import Curve, Figure, Listing, Series
from kvtransfer.evaluation.guide_items import Example, GuideResult
from kvtransfer.evaluation.inside import Inside, LayerMatrix
from kvtransfer.evaluation.report import EvalReport
from kvtransfer.evaluation.text import TextResult
from kvtransfer.fitting.diagnosis import Diagnosis, Heads, LayerDiagnosis
from kvtransfer.report import Estimate, Provenance

HOSTILE = "<script>alert('x')</script><img src=http://evil.example/a.png onerror=alert(1)>"
"""What a model may write, and a folder may be called."""

NLL = {
    "none": 3.37,
    "own": 2.78,
    "mapped": 2.89,
    "source": 3.27,
    "raw": 5.93,
    "zeroed": 5.95,
    "unrotated": 2.97,
    "shuffled": 3.65,
    "shipped": 2.87,
}

SOURCE_DEPTH, TARGET_DEPTH = 24, 30


@dataclass(frozen=True)
class Turns:
    """A part that says what it wants drawn."""

    good: bool = True

    def __bool__(self) -> bool:
        return self.good

    def __rich__(self) -> str:
        return "a table"

    def to_dict(self) -> dict[str, Any]:
        return {}

    def sentence(self) -> str:
        return "after 10 turns it drifts by 0.1 nats"

    def figures(self) -> tuple[Figure, ...]:
        def line(slope: float) -> tuple[tuple[float, Estimate], ...]:
            return tuple(
                (turn, Estimate(slope * turn, slope * turn - 0.02, slope * turn + 0.03, 8))
                for turn in range(1, 11)
            )

        names = ("mapped", "whole cache", "re-prefill", "source", "none", "a long name of a line")
        lines = tuple(
            Series(name=name, points=line(0.02 * (i + 1))) for i, name in enumerate(names)
        )
        tasks = (("prose", Estimate(0.5, 0.4, 0.6, 40), 0.25), (HOSTILE, None, 0.25))
        return (
            Curve(title="Drift by turn", x="turn", y="KL to own", series=lines, note="n = 8."),
            Listing(
                title="Tasks",
                columns=("task", "accuracy", "chance"),
                rows=tasks,
                forms=("", ".0%", ".0%"),
            ),
        )


@dataclass(frozen=True)
class Plain:
    """A part that has a table, and no more."""

    def __bool__(self) -> bool:
        return True

    def __rich__(self) -> str:
        return f"a table with {HOSTILE}"

    def to_dict(self) -> dict[str, Any]:
        return {}

    def sentence(self) -> str:
        return ""


def text(n: int = 24, nll: dict[str, float] | None = None) -> TextResult:
    random = np.random.default_rng(0)
    difficulty = random.normal(0, 0.2, n)
    columns = {}
    for name, level in (nll or NLL).items():
        noise = random.normal(0, 0.03, n) if name != "own" else np.zeros(n)
        kl = np.zeros(n) if name == "own" else np.abs(level - 2.78 + noise)
        columns[name] = {
            "nll": level + difficulty + noise,
            "kl_to_own": kl,
            "top1_agreement": np.exp(-kl),
        }
        if name not in ("none", "own", "source"):
            columns[name]["attention_cosine"] = np.exp(-kl / 10)
    return TextResult(columns, {"apart": f"it was {HOSTILE}"}, 256, 256)


def guides(right: dict[str, float], n: int = 60) -> GuideResult:
    answers = {
        "own": "Copper Moon",
        "mapped": f"the Moon {HOSTILE}",
        "source": "Copper",
        "none": "",
    }
    examples = [
        Example(f"band {HOSTILE}", f"\nQuestion: What is {i}?\nAnswer: It", "Copper Moon", answers)
        for i in range(12)
    ]
    found = {
        name: (np.arange(n) < round(share * n)).astype(np.float64) for name, share in right.items()
    }
    return GuideResult(found, np.full(n, 0.25), tuple(examples), {})


RIGHT = {
    "none": 0.13,
    "own": 0.93,
    "mapped": 0.66,
    "source": 0.5,
    "raw": 0.13,
    "zeroed": 0.13,
    "unrotated": 0.3,
    "shuffled": 0.14,
}


def report(**changes: Any) -> EvalReport:
    provenance = replace(
        Provenance.here(seed=1), command="kvtransfer eval a b --report 'out of the way.html'"
    )
    whole = EvalReport(
        source="smollm2-24l",
        target="smollm2-135m",
        text=text(),
        guides=guides(RIGHT),
        provenance=provenance,
    )
    return replace(whole, **changes)


def inside(source: int = SOURCE_DEPTH, target: int = TARGET_DEPTH) -> Inside:
    def heads(cosine: float) -> Heads:
        three = (cosine, cosine, cosine)
        return Heads(
            r2_keys=three,
            r2_values=three,
            cosine=three,
            key_concentration=three,
            value_concentration=three,
        )

    def sources(layer: int) -> tuple[int, ...]:
        at = layer * (source - 1) // max(1, target - 1)
        return tuple(sorted({max(0, at - 1), at, min(source - 1, at + 1)}))

    diagnosis = Diagnosis(
        source="smollm2-24l",
        target="smollm2-135m",
        layers=tuple(
            LayerDiagnosis(
                target=i,
                sources=sources(i),
                mapped=heads(0.99 - 0.002 * (i % 7)),
                control=heads(0.5 + 0.03 * (i % 11)),
            )
            for i in range(target)
        ),
        control="shuffled",
        cosine=Estimate(0.98, 0.97, 0.99, 4),
        margin=Estimate(0.3, 0.2, 0.4, 4),
        items=4,
        prefix=256,
        continuation=64,
        notes=(),
        provenance=Provenance.here(seed=1),
    )
    t, s = torch.arange(target)[:, None], torch.arange(source)[None]
    near = -(t / max(1, target - 1) - s / max(1, source - 1)).abs()
    return Inside(
        diagnosis=diagnosis,
        layers=LayerMatrix(
            scores=1.05 * (4 * near).exp().double() - 0.06,
            chosen=tuple(sources(i) for i in range(target)),
            rows=2048,
            heldout=768,
        ),
    )


@pytest.fixture(scope="session")
def usual() -> EvalReport:
    """Text and guides, as a real pair has them."""
    return report()


@pytest.fixture(scope="session")
def usual_page(usual: EvalReport) -> str:
    return usual.to_html(inside=inside())


@pytest.fixture(scope="session")
def hostile_page(whole: EvalReport) -> str:
    return whole.to_html(inside=replace(inside(), missing={"layers": HOSTILE}))


@pytest.fixture(scope="session")
def whole() -> EvalReport:
    """Text, guides, another mapping, parts, and names that nobody should have."""
    made = report(
        source=f"source-{HOSTILE}",
        target="a-folder/of-models/whose-name-is-far-too-long-for-a-phone/" + "x" * 60,
        notes=(f"a fingerprint was overruled for {HOSTILE}",),
    )
    return made.with_part("turns", Turns()).with_part("gate", Plain())
