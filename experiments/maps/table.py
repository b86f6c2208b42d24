"""Every map of one pair and direction, from one pass over the text, side by side on held-out text.

    python experiments/maps/table.py tiny --text prose.txt
    python experiments/maps/table.py smollm2 --reverse --text prose.txt --data builtin self:40000 \
        --refine 240 --dtype bfloat16

The first row is the paper's recipe. Writes results/NAME.json, and prints what it found.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvtransfer import KVMapping, evaluate, load
from kvtransfer.evaluation.text import TextResult
from kvtransfer.fitting.capture import Capture, capture
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.features import spaced
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.layers import rank_layers
from kvtransfer.fitting.plan import BEFORE, PAPER_LAYERS, Plan, Planned
from kvtransfer.fitting.refine import refine
from kvtransfer.fitting.refine_settings import RefineSettings
from kvtransfer.fitting.selftext import read_all_with
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.fitting.texts import builtin, read_all
from kvtransfer.fitting.trial import Trial
from kvtransfer.fitting.tried import AutoReport, Budget, Candidate
from kvtransfer.hf.model import LanguageModel
from kvtransfer.measures.intervals import mean_ratio
from kvtransfer.report import Estimate
from kvtransfer.zoo import PAIRS

HERE = Path(__file__).parent
CHUNK = 256


@dataclass(frozen=True, slots=True)
class Row:
    """One map, before it is measured."""

    name: str
    mapping: KVMapping
    nbytes: int
    r2: tuple[float, float] | None
    seconds: float
    """To solve it, from the moments; or to train it."""


@dataclass(frozen=True, slots=True)
class Bench:
    """One pair, captured once."""

    source: LanguageModel
    target: LanguageModel
    captured: Capture
    texts: list[str]

    def row(self, planned: Planned) -> Row:
        """Solve one map."""
        began = time.perf_counter()
        report = fit_captured(
            self.captured,
            self.source,
            self.target,
            planned.how,
            choices=planned.choices,
            control=False,
        )
        seconds = time.perf_counter() - began
        print(f"{planned.name}: {seconds:.0f} s", flush=True)
        return Row(
            planned.name,
            report.mapping,
            report.mapping.nbytes(),
            (report.r2_keys, report.r2_values),
            seconds,
        )


def starts_of(depth: int) -> tuple[int, ...]:
    """Points of the curve of quality against cost; the second is the most that L/6 allows."""
    return tuple(sorted({0, depth // 6, depth // 3}))


def stored(row: Row) -> Iterator[Row]:
    """The same map in fewer bits."""
    for dtype in ("bfloat16", "int8"):
        yield replace(
            row,
            name=f"{row.name}, {dtype}",
            mapping=row.mapping.rounded(dtype),
            nbytes=row.mapping.nbytes(dtype),
            seconds=0.0,
        )


def refined(bench: Bench, row: Row, how: RefineSettings) -> tuple[Row, dict[str, Any]]:
    """The same map, trained on what counts."""
    found = refine(row.mapping, bench.source, bench.target, bench.texts, how)
    print(row.name, found.to_json(), flush=True)
    made = Row(f"{row.name}, refined", found.mapping, found.mapping.nbytes(), None, found.seconds)
    return made, found.to_dict()


def main() -> None:
    """Capture once, solve everything, measure everything on the same items."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pair", choices=sorted(PAIRS))
    parser.add_argument("--reverse", action="store_true", help="from the larger to the smaller")
    parser.add_argument("--text", required=True, help="held out, of another kind than the data")
    parser.add_argument("--data", nargs="+", default=["builtin"])
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--items", type=int, default=24)
    parser.add_argument("--refine", type=int, default=240, help="windows; 0 for none")
    parser.add_argument("--batch", type=int, default=1, help="windows in a step of refining")
    parser.add_argument("--mlp", action="store_true")
    parser.add_argument("--attention", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype", help="that the models run in, also while they are measured")
    asked = parser.parse_args()

    names = PAIRS[asked.pair][:: -1 if asked.reverse else 1]
    source, target = (load(each, dtype=asked.dtype) for each in names)
    texts = list(read_all_with(asked.data, target))
    settings = FitSettings(tokens=asked.tokens, chunk=CHUNK, batch=8)
    depth = len(target.spec.layers)
    began = time.perf_counter()
    captured = capture(
        source,
        target,
        chunks(texts, source.encode, length=CHUNK, separator=source.tokenizer.eos_token_id),
        tokens=asked.tokens,
        batch=8,
        features="both",
        before=spaced(len(source.spec.layers), BEFORE),
        starts=starts_of(depth),
        attention=asked.attention,
        products=torch.float64 if asked.pair == "tiny" else torch.float32,
    )
    print(f"captured in {time.perf_counter() - began:.0f} s: {captured.seconds}", flush=True)
    bench = Bench(source, target, captured, texts)
    ranking = rank_layers(captured, source.spec, target.spec)
    trial = Trial(source, target, captured.windows, captured.starts)

    # What auto chooses from, within the bytes that the paper's recipe takes.
    plan = Plan(captured, source.spec, target.spec, settings, ranking, storage="bfloat16")
    paper = bench.row(plan.paper(PAPER_LAYERS))
    plan = replace(plan, nbytes=paper.nbytes)
    planned = {each.name: each for each in plan}
    rows = {name: bench.row(each) for name, each in planned.items()}
    paper = next(iter(rows.values()))
    chosen = AutoReport(
        candidates=tuple(
            Candidate(
                name=name,
                nbytes=row.mapping.nbytes("bfloat16"),
                tried=trial.of(row.mapping.rounded("bfloat16")),
            )
            for name, row in rows.items()
        ),
        budget=Budget(nbytes=paper.nbytes),
        storage="bfloat16",
        windows=len(captured.windows),
    )
    Console(width=120).print(chosen)
    auto = rows[chosen.best.name]
    found = [bench.row(plan.paper(1)), *rows.values(), *stored(auto)]
    *_, wide = [
        each for name, each in planned.items() if name.startswith("both and before, greedy")
    ]
    begun = {start: bench.row(plan.begun(wide, start)) for start in captured.starts}
    shallow = begun[depth // 6]
    found += [*begun.values(), *stored(shallow)]
    if asked.mlp:
        how = replace(wide.how, solver="mlp")
        report = fit(source, target, texts, how)
        found.append(
            Row(
                f"mlp, {wide.name}",
                report.mapping,
                report.mapping.nbytes(),
                (report.r2_keys, report.r2_values),
                report.seconds["train"],
            )
        )
    histories = {}
    if asked.refine:
        how = RefineSettings(windows=asked.refine, batch=asked.batch, every=40)
        for row in (auto, shallow):
            made, histories[row.name] = refined(bench, row, how)
            found += [made, *stored(made)]

    report = evaluate(
        source,
        target,
        paper.mapping,
        rivals={row.name: row.mapping for row in found if row is not paper},
        texts=builtin("heldout") if asked.text == "heldout" else read_all([asked.text]),
        conditions=("mapped", "source"),
        items=asked.items,
    )
    assert report.text is not None
    described = [described_row(row, paper, report.text, trial) for row in found]
    pair = "-to-".join(names)
    document = {
        "rows": described,
        "baselines": {name: estimates(report.text, name) for name in ("none", "own", "source")},
        "items": {name: column["nll"].tolist() for name, column in report.text.columns.items()},
        "n": report.text.n,
        "calibration": {"data": asked.data, "rows": captured.fit.rows},
        "auto": chosen.to_dict(),
        "refine": histories,
        "capture_seconds": captured.seconds,
        "provenance": report.provenance.to_dict(),
    }
    (HERE / "results" / f"{pair}.json").write_text(json.dumps(document, indent=1) + "\n")
    Console(width=140).print(table(described, pair))


def described_row(row: Row, paper: Row, text: TextResult, trial: Trial) -> dict[str, Any]:
    """All that is known of one map."""
    name = "mapped" if row is paper else row.name
    tried = trial.of(row.mapping)
    return {
        "name": row.name,
        "bytes": row.nbytes,
        "r2": row.r2,
        "solve_seconds": row.seconds,
        "apply_microseconds_a_token": tried.microseconds,
        "heldout_attention_error": tried.attention_error,
        "heldout_kl": tried.kl,
        **estimates(text, name),
        "of_what_the_paper_leaves": removed(text.columns, name),
    }


def estimates(text: TextResult, name: str) -> dict[str, Any]:
    """What one condition did, as plain data."""
    return {
        key: None if each is None else each.to_dict() for key, each in text.estimates(name).items()
    }


def removed(columns: Any, name: str) -> dict[str, Any]:
    """Of the NLL that the paper's recipe leaves above the target's own, the share that is gone."""
    ours, paper, own = (columns[each]["nll"] for each in (name, "mapped", "own"))
    share = mean_ratio(paper - ours, paper - own)
    return {} if share is None else share.to_dict()


def table(found: list[dict[str, Any]], title: str) -> Table:
    """What a person reads."""
    made = Table(
        "map", "MB", "µs", "R² K", "R² V", "att. err", "NLL", "KL", "gap", "removed", title=title
    )
    for row in found:
        r2 = row["r2"] or (float("nan"),) * 2
        made.add_row(
            row["name"],
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['apply_microseconds_a_token']:.0f}",
            *(f"{each:.3f}" for each in r2),
            f"{row['heldout_attention_error']:.3f}",
            f"{row['nll']['value']:.3f}",
            f"{row['kl_to_own']['value']:.4f}",
            percent(row["gap_recovered"]),
            percent(row["of_what_the_paper_leaves"]),
        )
    return made


def percent(estimate: Any) -> str:
    """Value and interval."""
    return f"{Estimate(**estimate):.0%}" if estimate else "–"


if __name__ == "__main__":
    main()
