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
from kvtransfer.fitting.auto import PAPER, Budget, choose_map
from kvtransfer.fitting.capture import Capture, capture
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.columns import Columns
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.layers import Choice, choose, greedy, rank_layers
from kvtransfer.fitting.refine import refine
from kvtransfer.fitting.refine_settings import RefineSettings
from kvtransfer.fitting.selftext import read_all_with
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.fitting.texts import builtin, read_all
from kvtransfer.fitting.trial import Trial
from kvtransfer.hf.model import LanguageModel
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
    settings: FitSettings
    texts: list[str]

    def row(self, name: str, choices: tuple[Choice, ...] | None = None, **how: Any) -> Row:
        """Solve one map."""
        began = time.perf_counter()
        report = fit_captured(
            self.captured,
            self.source,
            self.target,
            replace(self.settings, **how),
            choices=choices,
            control=False,
        )
        seconds = time.perf_counter() - began
        print(f"{name}: {seconds:.0f} s", flush=True)
        return Row(
            name,
            report.mapping,
            report.mapping.nbytes(),
            (report.r2_keys, report.r2_values),
            seconds,
        )

    def choices(self, ranking: Any, **how: Any) -> tuple[Choice, ...]:
        """Layers and strengths."""
        began = time.perf_counter()
        found = tuple(
            choose(self.captured, self.source.spec, self.target.spec, ranking=ranking, **how)
        )
        print(f"choices: {time.perf_counter() - began:.0f} s", flush=True)
        return found


def starts_of(depth: int, *, quick: bool = False) -> tuple[int, ...]:
    """Points of the curve of quality against cost; the second is the most that L/6 allows."""
    return tuple(sorted({0, depth // 6} | (set() if quick else {depth // 3})))


def closed_form(bench: Bench, *, quick: bool) -> Iterator[Row]:
    """Every closed-form row, or those that matter most."""
    source, target = bench.source.spec, bench.target.spec
    depth, most = len(source.layers), min(8, len(source.layers))
    ranking = rank_layers(bench.captured, source, target)
    for k in [most] if quick else sorted({1, most}):
        yield bench.row(
            f"paper, k = {k}",
            bench.choices(ranking, layers=k, strength=0.01, scale="absolute", features="same"),
            **PAPER,
            layers=k,
        )
    few = min(4, depth)
    if not quick:
        same = bench.choices(ranking, layers=most, features="same")
        yield bench.row(f"ridge, k = {most}", same, layers=most, features="same")
    both = {"features": "both", "selection": "greedy"}
    columns = Columns.of(bench.captured, source, target)
    alone = [row.argsort(descending=True).tolist() for row in ranking]
    deepest = few if quick else most
    orders = [greedy(bench.captured, columns, t, order, deepest) for t, order in enumerate(alone)]
    small = bench.choices(ranking, layers=few, features="both", orders=orders)
    yield bench.row(f"keys and values, k = {few}", small, layers=few, **both)
    if quick:
        yield from spread_and_begun(bench, small, orders, few)
        return
    wide = small
    if most > few:
        found = bench.choices(ranking, layers=most, strength=1e-5, features="both", orders=orders)
        wide = tuple(
            replace(a, strength_keys=b.strength_keys, strength_values=b.strength_values)
            for a, b in zip(found, small, strict=True)
        )
        yield bench.row(f"keys and values, k = {most}", wide, layers=most, **both)
    attention = ("attention",) if bench.captured.weighted is not None else ()
    for solver in ("headwise", "procrustes", *attention):
        yield bench.row(f"{solver}, k = {most}", wide, layers=most, solver=solver, **both)
    # A quarter of the bytes of the whole map of the same layers.
    p = sum(2 * source.layers[s].kv_heads * source.layers[s].key_dim for s in wide[0].sources)
    q = target.layers[0].kv_heads * target.layers[0].key_dim
    rank = p * q // (4 * (p + q))
    for solver in ("lowrank", *attention):
        how = {"layers": most, "solver": solver, "rank": rank, **both}
        yield bench.row(f"{solver} of rank {rank}, k = {most}", wide, **how)
    yield from spread_and_begun(bench, small, orders, few)


def spread_and_begun(
    bench: Bench, small: tuple[Choice, ...], orders: list[list[int]], few: int
) -> Iterator[Row]:
    """The small map at other gains, and with the target's own first layers."""
    both = {"features": "both", "selection": "greedy"}
    for gain in (1.05, 1.1):
        yield bench.row(
            f"keys and values, k = {few}, gain {gain}", small, layers=few, gain=gain, **both
        )
    for start in bench.captured.starts:
        how = {"layers": few, "start": start, **both}
        begun = bench.choices(
            None, layers=few, features="both", start=start, strength=1e-4, orders=orders
        )
        yield bench.row(f"start {start}, k = {few}", begun, **how)


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


def refined(bench: Bench, row: Row, windows: int) -> tuple[Row, dict[str, Any]]:
    """The same map, trained on what counts."""
    found = refine(
        row.mapping,
        bench.source,
        bench.target,
        bench.texts,
        RefineSettings(windows=windows, heldout=6),
    )
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
    parser.add_argument("--refine", type=int, default=240)
    parser.add_argument("--mlp", action="store_true")
    parser.add_argument("--quick", action="store_true", help="fewer rows, and no choice by auto")
    parser.add_argument("--attention", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--dtype", help="that the models run in, also while they are measured")
    asked = parser.parse_args()

    names = PAIRS[asked.pair][:: -1 if asked.reverse else 1]
    source, target = (load(each, dtype=asked.dtype) for each in names)
    texts = list(read_all_with(asked.data, target))
    settings = FitSettings(tokens=asked.tokens, chunk=CHUNK, batch=8)
    began = time.perf_counter()
    captured = capture(
        source,
        target,
        chunks(texts, source.encode, length=CHUNK, separator=source.tokenizer.eos_token_id),
        tokens=asked.tokens,
        batch=8,
        features="both",
        starts=starts_of(len(target.spec.layers), quick=asked.quick),
        attention=asked.attention,
        products=torch.float64 if asked.pair == "tiny" else torch.float32,
    )
    print(f"captured in {time.perf_counter() - began:.0f} s: {captured.seconds}", flush=True)
    bench = Bench(source, target, captured, settings, texts)
    rows = list(closed_form(bench, quick=asked.quick))
    by_name = {row.name: row for row in rows}
    few, most = (min(k, len(source.spec.layers)) for k in (4, 8))
    paper = by_name[f"paper, k = {most}"]
    rows += stored(by_name[f"keys and values, k = {few if asked.quick else most}"])

    chosen = None
    if not asked.quick:
        began = time.perf_counter()
        budget = Budget(nbytes=paper.nbytes)
        chosen = choose_map(captured, source, target, settings, budget=budget, storage="bfloat16")
        Console(width=120).print(chosen.auto)
        auto = Row(
            "auto",
            chosen.mapping.rounded("bfloat16"),
            chosen.mapping.nbytes("bfloat16"),
            (chosen.r2_keys, chosen.r2_values),
            time.perf_counter() - began,
        )
        rows.append(auto)
    begun = by_name[f"start {starts_of(len(target.spec.layers))[1]}, k = {few}"]
    plain = rows[-1] if chosen else by_name[f"keys and values, k = {few}"]
    if asked.mlp:
        how = replace(settings, solver="mlp", features="both", layers=few)
        report = fit(source, target, texts, how)
        rows.append(
            Row(
                f"mlp, k = {few}",
                report.mapping,
                report.mapping.nbytes(),
                (report.r2_keys, report.r2_values),
                report.seconds["train"],
            )
        )
    histories = {}
    if asked.refine:
        for row in (plain, begun):
            made, histories[row.name] = refined(bench, row, asked.refine)
            rows.append(made)
            rows += [each for each in stored(made) if each.name.endswith("bfloat16")]

    trial = Trial(source, target, captured.windows, captured.starts)
    report = evaluate(
        source,
        target,
        paper.mapping,
        rivals={row.name: row.mapping for row in rows if row is not paper},
        texts=builtin("heldout") if asked.text == "heldout" else read_all([asked.text]),
        conditions=("mapped", "source"),
        items=asked.items,
    )
    assert report.text is not None
    found = []
    for row in rows:
        name = "mapped" if row is paper else row.name
        tried = trial.of(row.mapping)
        found.append(
            {
                "name": row.name,
                "bytes": row.nbytes,
                "r2": row.r2,
                "solve_seconds": row.seconds,
                "apply_microseconds_a_token": tried.microseconds,
                "heldout_attention_error": tried.attention_error,
                "heldout_kl": tried.kl,
                **{
                    key: None if each is None else each.to_dict()
                    for key, each in report.text.estimates(name).items()
                },
                "of_what_the_paper_leaves": removed(report.text.columns, name),
            }
        )
    pair = "-to-".join(names)
    document = {
        "rows": found,
        "baselines": {
            name: {
                key: None if each is None else each.to_dict()
                for key, each in report.text.estimates(name).items()
            }
            for name in ("none", "own", "source")
        },
        "items": {name: column["nll"].tolist() for name, column in report.text.columns.items()},
        "n": report.text.n,
        "calibration": {"data": asked.data, "rows": captured.fit.rows},
        "auto": chosen.auto.to_dict() if chosen and chosen.auto else None,
        "refine": histories,
        "capture_seconds": captured.seconds,
        "provenance": report.provenance.to_dict(),
    }
    (HERE / "results" / f"{pair}.json").write_text(json.dumps(document, indent=1) + "\n")
    Console(width=140).print(table(found, pair))


def removed(columns: Any, name: str) -> dict[str, Any]:
    """Of the NLL that the paper's recipe leaves above the target's own, the share that is gone."""
    from kvtransfer.measures.intervals import mean_ratio

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
