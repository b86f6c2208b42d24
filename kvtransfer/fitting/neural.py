"""The ``mlp`` solver: networks trained by Adam on what linear maps leave over.

Heo et al. repair pairs that no line can join with a small network a head. Here it is one network
for each map, beside the line that was fitted before. It needs rows, not moments, so the text is
read once more and its rows are kept, in half precision. What a network is worth to the model that
reads its caches is not known here: held-out R² decides.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvtransfer.fitting.affine import Affine, Map
from kvtransfer.fitting.capture import Capture
from kvtransfer.fitting.columns import Columns
from kvtransfer.fitting.features import KINDS, Kind
from kvtransfer.fitting.layer_map import LayerMap
from kvtransfer.fitting.network import Mlp
from kvtransfer.fitting.network_settings import NetworkSettings
from kvtransfer.fitting.report import FitReport
from kvtransfer.fitting.rows import Rows, Units, gather, units_of
from kvtransfer.hf.model import LanguageModel

WIDE = 4096
"""Rows that are mapped at once when nothing is learnt from them."""


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """What training found, in the units of its rows."""

    network: Mlp | None
    """Of the best epoch; None where none was better than the line alone."""
    history: tuple[float, ...]
    """Held-out R² of the line alone, then after each epoch."""

    @property
    def r2(self) -> float:
        """Of what is kept."""
        return max(self.history)


def add_networks(
    report: FitReport,
    captured: Capture,
    source: LanguageModel,
    target: LanguageModel,
    chunks: Iterable[Int[Tensor, " t"]],
    settings: NetworkSettings,
    *,
    tokens: int,
    batch: int,
    progress: Callable[[str, int], None] = lambda stage, done: None,
) -> FitReport:
    """Train a network on what each map of a linear mapping leaves over.

    Where no epoch was better on held-out rows than the line, the line stays: no layer gets worse.
    The shuffled control stays as it is.

    Args:
        report: Of a fit in closed form.
        captured: The moments that it was fitted to.
        source: Makes the cache.
        target: Is to read it.
        chunks: The same token sequences as were captured.
        settings: How to train.
        tokens: As for the capture.
        batch: As for the capture.
        progress: Told of ``rows`` the tokens read, and of ``train`` the target layers done.

    Raises:
        ValueError: the chunks are not those that were captured.
    """
    began = time.perf_counter()
    units = units_of(captured, target.spec)
    gathered = gather(
        captured,
        units,
        source,
        target,
        chunks,
        tokens=tokens,
        batch=batch,
        progress=lambda done: progress("rows", done),
    )
    read = time.perf_counter()
    mapping = report.mapping
    columns = Columns.of(
        captured, source.spec, target.spec, features=mapping.features, start=mapping.start
    )
    random = torch.Generator().manual_seed(settings.seed)
    layers, rows = [], []
    for choice, layer in zip(report.layers, mapping.layers, strict=True):
        maps: dict[Kind, Map] = {}
        scores: dict[Kind, float] = {}
        for kind in KINDS:
            x, y = (
                columns.reads(kind, choice.sources, choice.before),
                columns.writes(kind, choice.target),
            )
            fit, heldout = (each.select(x, y, target.device) for each in gathered[kind])
            into, out = (
                each.select(those) for each, those in zip(units[kind], (x, y), strict=True)
            )
            line = getattr(layer, kind)
            found = train(
                fit,
                heldout,
                normed(line.whole(len(x)), into, out),
                settings,
                heads=target.spec.layers[choice.target].kv_heads,
                random=random,
            )
            maps[kind] = line if found.network is None else wide(found.network, into, out)
            scores[kind] = found.r2
        layers.append(replace(layer, keys=maps["keys"], values=maps["values"]))
        rows.append(replace(choice, r2_keys=scores["keys"], r2_values=scores["values"]))
        progress("train", 1)
    seconds = {"rows": read - began, "train": time.perf_counter() - read}
    better = replace(report, layers=tuple(rows), seconds=report.seconds | seconds)
    return replace(
        better,
        mapping=replace(
            mapping,
            layers=tuple(layers),
            settings={**mapping.settings, "solver": "mlp", "network": asdict(settings)},
            quality=_quality(better, mapping.quality, layers),
        ),
    )


def _quality(
    report: FitReport, of_lines: Mapping[str, Any], layers: list[LayerMap]
) -> dict[str, Any]:
    """What a card says: R² of what is saved, beside that of the lines it began with."""
    maps = [getattr(layer, kind) for layer in layers for kind in KINDS]
    networks = sum(isinstance(each, Mlp) for each in maps)
    return {
        **{f"held-out R² of {kind}": round(getattr(report, f"r2_{kind}"), 4) for kind in KINDS},
        **{f"{name}, linear": value for name, value in of_lines.items()},
        "maps that are networks": f"{networks} of {len(maps)}",
    }


def train(
    fit: Rows,
    heldout: Rows,
    line: Affine,
    settings: NetworkSettings,
    *,
    heads: int,
    random: torch.Generator,
) -> Trained:
    """Train a network on what ``line`` leaves over of ``fit``, and keep its best held-out epoch.

    Everything is in the units of the rows. The loss is, but for a factor, what R² lacks to one.

    Args:
        fit: Rows to learn from.
        heldout: Rows that judge.
        line: What the network is added to; it stays as it is.
        settings: How to train.
        heads: Of the target layer.
        random: Where weights and the order of rows are drawn from.
    """
    line = Affine(line.weight.to(fit.y), line.bias.to(fit.y))
    left = fit.y - _map(line, fit.x)
    unit = left.square().mean().sqrt().clamp_min(1e-6)
    left = left / unit
    network = _begin(line, settings.hidden, random)
    weights = [getattr(network, name) for name in LEARNT]
    history, best = [r2(line, heldout, heads=heads)], None
    optimizer = torch.optim.Adam(weights, lr=settings.learning_rate)
    steps = settings.epochs * -(-len(left) // settings.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(settings.epochs):
        order = torch.randperm(len(left), generator=random).to(left.device)
        for some in order.split(settings.batch):
            bent = network.hidden(fit.x[some].float()) @ network.outer + network.bias
            loss = (bent - left[some]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            schedule.step()
        now = _settled(network, line, unit)
        history.append(r2(now, heldout, heads=heads))
        if history[-1] > max(history[:-1]):
            best = now
    if best is not None:
        best = Mlp(**{field.name: getattr(best, field.name).cpu() for field in fields(Mlp)})
    return Trained(best, tuple(history))


def r2(fitted: Map, rows: Rows, *, heads: int) -> float:
    """Share of each head's variance that ``fitted`` explains of these rows, mean over heads.

    As :func:`kvtransfer.fitting.affine.r2`, of maps that moments say nothing of.
    """
    lost = (_map(fitted, rows.x) - rows.y).square().double().sum(0)
    total = (rows.y - rows.y.mean(0)).square().double().sum(0)
    lost, total = (each.view(heads, -1).sum(1) for each in (lost, total))
    varies = total > 0
    share = 1 - lost / torch.where(varies, total, 1.0)
    return float(torch.where(varies, share, (lost <= 1e-6).to(share)).mean())


def normed(line: Affine, into: Units, out: Units) -> Affine:
    """A line that takes normed rows to normed rows, of one that takes rows as they are."""
    bias = line.bias + into.mean @ line.weight - out.mean
    return Affine(line.weight * into.spread[:, None] / out.spread, bias / out.spread)


def wide(network: Mlp, into: Units, out: Units) -> Mlp:
    """The reverse of :func:`normed`, for a network, which takes the norming of x with it."""
    return replace(
        network,
        mean=into.mean,
        scale=into.spread,
        direct=network.direct * out.spread,
        outer=network.outer * out.spread,
        bias=network.bias * out.spread + out.mean,
    )


LEARNT = ("inner", "inner_bias", "middle", "middle_bias", "outer", "bias")
"""What Adam moves."""


def _begin(line: Affine, hidden: int, random: torch.Generator) -> Mlp:
    """A network that adds nothing to the line yet: what it would add comes out of ``outer``."""
    p, q = line.weight.shape

    def drawn(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) * math.sqrt(2 / rows)

    made = {
        "inner": drawn(p, hidden),
        "inner_bias": torch.zeros(hidden),
        "middle": drawn(hidden, hidden),
        "middle_bias": torch.zeros(hidden),
        "outer": torch.zeros(hidden, q),
        "bias": torch.zeros(q),
    }
    fixed = {"mean": torch.zeros(p), "scale": torch.ones(p), "direct": line.weight}
    return Mlp(
        **{name: each.to(line.bias).requires_grad_() for name, each in made.items()},
        **{name: each.to(line.bias) for name, each in fixed.items()},
    )


def _settled(network: Mlp, line: Affine, unit: Tensor) -> Mlp:
    """Line and network as one, apart from what Adam goes on to move."""
    apart = {field.name: getattr(network, field.name).detach().clone() for field in fields(Mlp)}
    apart["outer"] *= unit
    apart["bias"] = line.bias + unit * apart["bias"]
    return Mlp(**apart)


def _map(fitted: Map, rows: Float[Tensor, "n p"]) -> Float[Tensor, "n q"]:
    """Map many rows, some at a time, in single precision."""
    return torch.cat([fitted(some.float()) for some in rows.split(WIDE)])
