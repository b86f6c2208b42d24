"""The conditions of a report as bars: gap recovered, KL and NLL on text, accuracy on guides."""

from collections.abc import Iterable, Mapping

from kvtransfer.evaluation.conditions import CONDITIONS, CONTROLS
from kvtransfer.evaluation.guide_items import GuideResult
from kvtransfer.evaluation.page.bars import Axis, Bar, Role, bars, legend
from kvtransfer.evaluation.page.markup import Safe, el, join, n_of, shown
from kvtransfer.evaluation.page.scale import scale
from kvtransfer.evaluation.text import TextResult
from kvtransfer.report import Estimate

PLAIN: Mapping[str, str] = {
    "none": "no prefix: the floor",
    "own": "its own cache: the ceiling",
    "mapped": "the source’s cache, mapped",
    "source": "the source goes on alone",
    "raw": "the source’s cache, unmapped",
    "zeroed": "keys and values of zero",
    "unrotated": "mapped, positions forgotten",
    "shuffled": "fitted on permuted tokens",
    "apart": "its own, halves read apart",
}

FIRST = ("own", "mapped")
"""These stand together at the top, then other mappings, then the source and no prefix."""

ROLES: Mapping[str, Role] = {"own": "ceiling", "none": "floor", "mapped": "mapped"}

Groups = list[tuple[str, list[Bar]]]


def text_bars(text: TextResult) -> Safe:
    """Three pictures of the same items."""
    found = {name: text.estimates(name) for name in text.columns}
    of = {
        key: {name: e for name, each in found.items() if (e := each[key]) is not None}
        for key in ("gap_recovered", "kl_to_own", "nll")
    }
    pictures = []
    if of["gap_recovered"]:
        axis = _gap_axis(of["gap_recovered"])
        pictures.append(
            _figure(
                "Share of the gap recovered",
                "How much of the way from no prefix to its own prefix is won back. Further right "
                f"is better; an arrow leads off the scale. {n_of(text.n)} items.",
                join([legend(axis), bars(_groups(of["gap_recovered"]), axis, ".0%")]),
                wide=True,
            )
        )
    pictures.append(
        _figure(
            "KL to its own predictions, in nats",
            f"How far next-token probabilities drift. Shorter is better. {n_of(text.n)} items.",
            bars(_groups(of["kl_to_own"]), _zero_axis(of["kl_to_own"]), ".3f", compact=True),
        )
    )
    pictures.append(
        _figure(
            "NLL, in nats a token",
            "Surprise at the true text. Further left is better; the scale does not begin at 0, "
            f"so these are dots. {n_of(text.n)} items.",
            bars(_groups(of["nll"]), _nll_axis(of["nll"]), ".3f", compact=True),
        )
    )
    return el("div", {"class": "figures"}, *pictures)


def guide_bars(guides: GuideResult) -> Safe:
    """Accuracy, from nothing to everything."""
    accuracy = {
        name: e for name in guides.right if (e := guides.estimates(name)["accuracy"]) is not None
    }
    axis = Axis(
        low=0,
        high=1,
        zero=0,
        ticks=(0, 0.25, 0.5, 0.75, 1),
        floor=accuracy["none"].value,
        ceiling=accuracy["own"].value,
    )
    guess = shown(float(guides.chance.mean()), ".0%")
    return _figure(
        "Questions answered right",
        f"Only the hidden guide holds the answers; guessing gives {guess}. {n_of(guides.n)} "
        "questions.",
        join([legend(axis), bars(_groups(accuracy), axis, ".0%")]),
        wide=True,
    )


def order(names: Iterable[str]) -> list[str]:
    """Names as a reader wants them: its own, mapped, other mappings, the source, none, controls."""
    given = list(names)
    named = [*FIRST, *(n for n in given if n not in CONDITIONS), "source", "apart", "none"]
    named += [name for name in CONTROLS if name != "none"]
    return [name for name in named if name in given]


def _groups(found: Mapping[str, Estimate]) -> Groups:
    pair: list[Bar] = []
    controls: list[Bar] = []
    for name in order(found):
        control = name in CONTROLS and name != "none"
        role: Role = ROLES.get(name, "control" if control else "rival")
        plain = PLAIN.get(name, "")
        bar = Bar(name=name, plain=plain, role=role, value=found[name])
        (controls if control else pair).append(bar)
    return [("", pair), ("Controls, which should fail", controls)]


def _figure(title: str, note: str, inside: Safe, *, wide: bool = False) -> Safe:
    return el(
        "section",
        {"class": "figure wide" if wide else "figure"},
        el("h3", None, title),
        el("p", {"class": "note"}, note),
        inside,
    )


def _gap_axis(found: Mapping[str, Estimate]) -> Axis:
    """From a little below the floor to a little above the ceiling, whatever lies beyond."""
    top = max(1.0, *(e.value for name, e in found.items() if name not in CONTROLS))
    return Axis(
        low=-0.5,
        high=min(top, 1.5) + 0.1,
        zero=0,
        ticks=(-0.5, 0, 0.5, 1),
        floor=0,
        ceiling=1,
    )


def _zero_axis(found: Mapping[str, Estimate]) -> Axis:
    _, high, step = scale([*_uncontrolled(found), Estimate(0.0, None, None, 0)])
    ticks = tuple(i * step for i in range(round(high / step) + 1))
    floor = found["none"].value if "none" in found else None
    return Axis(low=0, high=high, zero=0, ticks=ticks, floor=floor, ceiling=0)


def _nll_axis(found: Mapping[str, Estimate]) -> Axis:
    low, high, step = scale(_uncontrolled(found))
    floor, ceiling = (found[name].value if name in found else None for name in ("none", "own"))
    ticks = tuple(low + i * step for i in range(round((high - low) / step) + 1))
    return Axis(low=low, high=high, ticks=ticks, floor=floor, ceiling=ceiling)


def _uncontrolled(found: Mapping[str, Estimate]) -> list[Estimate]:
    """What a scale must hold; controls may run off it."""
    return [e for name, e in found.items() if name not in CONTROLS or name == "none"]
