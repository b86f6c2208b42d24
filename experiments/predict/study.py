"""Measure every pair-direction: what could be known when the mapping was fitted, and how it did.

    python -m experiments.predict.study [--only SUBSTRING]

Writes results/SOURCE-to-TARGET.json, one a direction; those that are there are not made again.
"""

import argparse
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.predict.directions import DIRECTIONS
from experiments.predict.models import MODELS
from kvtransfer import FitSettings, KVMapping, LanguageModel, evaluate
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.diagnose import diagnose
from kvtransfer.fitting.fit import capture_texts
from kvtransfer.fitting.probe import probe
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.fitting.texts import builtin
from kvtransfer.fitting.transfer import mapped
from kvtransfer.geometry.spec import same_tokens
from kvtransfer.hf.aligned import Alignable, alignable_start, read_aligned
from kvtransfer.hf.attention import attention_outputs
from kvtransfer.hf.quiet import quiet
from kvtransfer.hf.run import prefill, score
from kvtransfer.measures.agreement import cosine, kl
from kvtransfer.report import Provenance

RESULTS = Path(__file__).parent / "results"
WINDOWS, WINDOW = 4, 256


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is read; the larger a model, the less, and one direction takes a minute or so."""

    tokens: int
    layers: int
    items: int
    prefix: int
    continuation: int = 64

    def settings(self) -> FitSettings:
        """The command's defaults but for these."""
        return FitSettings(
            tokens=self.tokens, chunk=WINDOW, layers=self.layers, batch=8, products="float32"
        )


SIZES = {
    "tiny": Size(tokens=4_096, layers=4, items=64, prefix=256),
    "smollm2": Size(tokens=2_048, layers=2, items=16, prefix=128),
}
"""By the target. The tiny ones get little from a prefix, so that more items are needed."""


def measured(source: LanguageModel, target: LanguageModel, size: Size) -> dict[str, Any]:
    """Fit, look, probe, and evaluate."""
    began = time.perf_counter()
    captured = capture_texts(source, target, builtin("fit"), size.settings())
    report = fit_captured(captured, source, target, size.settings())
    fitted = time.perf_counter()
    unread = builtin("fit")[::-1]  # the fit read the other end
    more = chunks(unread, target.encode, length=WINDOW, opening=target.opening)
    windows = (*captured.windows, *islice(Alignable(source, target, more), WINDOWS))[:WINDOWS]
    seen = looked(report.mapping, windows, source, target)
    found = diagnose(
        report.mapping,
        source,
        target,
        unread,
        prefix=128,
        continuation=32,
        items=2,
    )
    # Windows that a source with another tokenizer cannot read are left out, and eight are needed.
    alike = same_tokens(source.spec, target.spec)
    probed = probe(source, target, builtin("heldout"), tokens=512 if alike else 1_280)
    looked_at = time.perf_counter()
    text = evaluate(
        source,
        target,
        report.mapping,
        texts=builtin("heldout"),
        conditions=("mapped",),
        prefix=size.prefix,
        continuation=size.continuation,
        items=size.items,
    ).text
    assert text is not None
    return {
        "fit": {
            "rows": report.rows,
            "r2_keys": report.r2_keys,
            "r2_values": report.r2_values,
            "layers": [[each.r2_keys, each.r2_values] for each in report.layers],
        },
        "seen": seen,
        "concentration": {
            kind: [layer.mapped.mean(f"{kind}_concentration") for layer in found.layers]
            for kind in ("key", "value")
        },
        "probe": probed.score.to_dict(),
        "probe_verdict": probed.verdict,
        "text": {
            name: {metric: column.tolist() for metric, column in found.items()}
            for name, found in text.columns.items()
        },
        "seconds": {
            "fit": round(fitted - began, 1),
            "look": round(looked_at - fitted, 1),
            "text": round(time.perf_counter() - looked_at, 1),
        },
        "provenance": Provenance.here(seed=size.settings().seed).to_dict(),
    }


def looked(
    mapping: KVMapping, windows: Iterable[Tensor], source: LanguageModel, target: LanguageModel
) -> dict[str, Any]:
    """What the target's attention, and the target, make of held-out windows of the fit's text.

    Per layer, mapped and under the shuffled control: the cosine of attention's outputs, and their
    squared error in units of the mean row. Per window: KL to own, and that of no prefix.
    """
    rows: dict[str, list[Tensor]] = {}
    for ids in windows:
        half = alignable_start(source, target, ids, at_most=len(ids) // 2)
        hidden, live = ids[None].split([half, len(ids) - half], dim=1)
        cache, own = read_aligned(source, target, hidden), prefill(target, hidden)
        others = {
            name: mapped(mapping, cache, target, hidden, shuffled=name == "shuffled")
            for name in ("mapped", "shuffled")
        }
        logits, cosines = attention_outputs(target, live, own, others, cosine)
        _, errors = attention_outputs(target, live, own, others, relative_error)
        opening = target.opening
        none = prefill(target, opening[None]) if len(opening) else None
        for name, found in cosines.items():
            rows.setdefault(f"cosine_{name}", []).append(found)
        for name, found in errors.items():
            rows.setdefault(f"error_{name}", []).append(found)
        for name, prefix in (("mapped", others["mapped"]), ("none", none)):
            lost = kl(logits[0], score(target, live, prefix)[0]).mean()
            rows.setdefault(f"kl_{name}", []).append(lost)
    stacked = {name: torch.stack(found).double() for name, found in rows.items()}
    return {
        name: found.mean(0).tolist() if found.dim() == 2 else found.tolist()
        for name, found in stacked.items()
    }


def relative_error(other: Tensor, own: Tensor) -> Tensor:
    """Squared, per row, in units of the layer's mean row."""
    lost: Tensor = (other - own).square().sum(-1)
    return lost / own.square().sum(-1).mean((1, 2), keepdim=True)


def main() -> None:
    """Every direction that has no result yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a direction's name")
    asked = parser.parse_args()
    quiet()
    RESULTS.mkdir(exist_ok=True)
    for source, target, family in DIRECTIONS:
        name = f"{source}-to-{target}"
        path = RESULTS / f"{name}.json"
        if path.exists() or asked.only not in name:
            continue
        size = SIZES["tiny" if target.startswith("tiny") else "smollm2"]
        found = measured(MODELS[source](), MODELS[target](), size)
        head = {"source": source, "target": target, "family": family}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(head | found, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
        print(name, found["seconds"], flush=True)


if __name__ == "__main__":
    main()
