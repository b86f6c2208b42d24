"""What a mapping looks like from inside the target: attention layer by layer, and the layer map."""

import math
from collections.abc import Iterator

from kvtransfer.evaluation.figure import Curve, Series
from kvtransfer.evaluation.inside import Inside
from kvtransfer.evaluation.page.curve import curve
from kvtransfer.evaluation.page.heatmap import heatmap
from kvtransfer.evaluation.page.markup import Safe, el, join, n_of
from kvtransfer.evaluation.page.tables import numbers
from kvtransfer.fitting.diagnosis import Diagnosis, LayerDiagnosis
from kvtransfer.report import Estimate

COLUMNS = ("layer", "read from", "R² keys", "R² values", "attention cosine", "of the control")


def inside_section(inside: Inside, source: str, target: str) -> Safe:
    """All that was seen, and why the rest could not be."""
    shown: list[Safe] = []
    if inside.diagnosis is not None:
        shown.append(_attention(inside.diagnosis))
    if (layers := inside.layers) is not None:
        shown.append(
            el(
                "section",
                {"class": "figure wide"},
                el("h3", None, "Which source layer knows of which target layer"),
                el(
                    "p",
                    {"class": "note"},
                    "Percent of the variance of a target layer’s keys and values (R², held out) "
                    "that one source layer explains alone. ",
                    el("b", {"class": "chosen-key"}, "Boxed"),
                    ": read by the mapping, which combines them. "
                    f"Fitted on {layers.rows:,} tokens, judged on {layers.heldout:,} others.",
                ),
                heatmap(layers, source, target),
            )
        )
    named = {"diagnosis": "Attention by layer", "layers": "The layer map"}
    shown += [
        el("p", {"class": "note"}, f"{named.get(key, key)} is left out: {why}.")
        for key, why in inside.missing.items()
    ]
    return join(shown)


def _attention(of: Diagnosis) -> Safe:
    drawn = Curve(
        title="Attention cosine by layer",
        x="target layer",
        y="cosine of attention outputs with those on its own prefix",
        series=(
            Series(name="mapped", points=tuple(_points(of, "mapped"))),
            Series(
                name=f"{of.control} (control)", points=tuple(_points(of, "control")), control=True
            ),
        ),
    )
    return el(
        "section",
        {"class": "figure wide"},
        el("h3", None, "Does attention find the same things?"),
        el(
            "p",
            {"class": "note"},
            f"{of.sentence()} {of.continuation} tokens look back at {of.prefix}; "
            f"{n_of(of.items)} windows, means over heads. 1 is the same as on its own prefix.",
        ),
        curve(drawn, table=False),
        el(
            "details",
            None,
            el("summary", None, "Every layer’s R² and cosine"),
            numbers(
                "Mean over KV heads",
                COLUMNS,
                [_row(layer) for layer in of.layers],
                ("", "", *[".3f"] * 4),
            ),
        ),
    )


def _points(of: Diagnosis, whose: str) -> Iterator[tuple[float, Estimate]]:
    for layer in of.layers:
        cosine = getattr(layer, whose).mean("cosine")
        if not math.isnan(cosine):
            yield float(layer.target), Estimate(cosine, None, None, of.items)


def _row(layer: LayerDiagnosis) -> tuple[str | float, ...]:
    read = ", ".join(map(str, layer.sources)) or "run by the target"
    ours = [layer.mapped.mean(name) for name in ("r2_keys", "r2_values", "cosine")]
    return (str(layer.target), read, *ours, layer.control.mean("cosine"))
