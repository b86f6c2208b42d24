"""A short gradient run on what counts: what the target predicts on the mapped prefix.

Closed-form maps minimise an error of keys and values; the target minds some of that error much
more than the rest. Low-rank updates of the maps are trained on KL(own ‖ mapped): how far the
target's next-token distributions on the mapped prefix are from those on its own. No weights of
either model change.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float, Int
from rich.table import Table
from torch import Tensor, nn

from kvtransfer.errors import TextError
from kvtransfer.fitting.affine import Affine, LowRank, Map
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.features import KINDS
from kvtransfer.fitting.mapping import KVMapping, LayerMap
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import logits_on, prefill, score
from kvtransfer.measures.agreement import kl, nll
from kvtransfer.report import to_json

HOLDOUT = 8
"""One window in this many is held out, as long as more are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefineSettings:
    """How to refine. Prints, compares, and is saved with the mapping."""

    windows: int = 240
    """Training windows, each used once."""
    rank: int = 16
    """Of the update of each layer's keys and values."""
    prefix: int = 256
    """Tokens of a window that are mapped."""
    continuation: int = 128
    """Tokens after it, on which the target's predictions are compared."""
    learning_rate: float = 2e-3
    """Of Adam, after a short warm-up and before a cosine decay to zero."""
    heldout: int = 8
    """Windows that judge."""
    every: int = 40
    """Steps between judgements."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("windows", "rank", "continuation", "heldout", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.prefix < 2:
            raise ValueError(f"prefix must be at least 2, got {self.prefix}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")


@dataclass(frozen=True, slots=True)
class Judgement:
    """Held-out windows after some steps, in nats a token."""

    step: int
    kl: float
    nll: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RefineReport:
    """What refining found. True where the held-out KL fell; else the mapping is as it was."""

    mapping: KVMapping
    history: tuple[Judgement, ...]
    """The first is of the mapping as it came."""
    best: Judgement
    """The one whose maps were kept."""
    seconds: float

    def __bool__(self) -> bool:
        return self.best.kl < self.history[0].kl

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "history": [asdict(each) for each in self.history],
            "best": asdict(self.best),
            "seconds": self.seconds,
        }

    def to_json(self) -> str:
        """Stable text."""
        return to_json(self.to_dict())

    def __rich__(self) -> Table:
        table = Table(
            "step",
            "held-out KL to own",
            "held-out NLL",
            title="refined on the target's own predictions",
            caption=f"{self.seconds:.0f} s; the bold one was kept",
        )
        for each in self.history:
            kept = "bold" if each == self.best else None
            table.add_row(str(each.step), f"{each.kl:.4f}", f"{each.nll:.4f}", style=kept)
        return table


def refine(
    mapping: KVMapping,
    source: LanguageModel,
    target: LanguageModel,
    texts: Iterable[str],
    settings: RefineSettings | None = None,
    *,
    progress: Callable[[int], None] = lambda steps: None,
) -> RefineReport:
    """Train low-rank updates of ``mapping`` on KL(own ‖ mapped), and keep the best held-out ones.

    Held-out KL is judged before the first step, every few steps and at the end; the maps that are
    returned are those of the best judgement, which may be the first. So KL never ends up worse.

    Args:
        mapping: From ``source`` to ``target``; it stays as it is.
        source: Makes the caches.
        target: Reads them, and says what it would have predicted on its own.
        texts: Documents of the calibration's kind.
        settings: How to refine; None for the defaults.
        progress: Told the number of steps after each.

    Raises:
        IncompatibleModels: the mapping is for another pair.
        TextError: the text has fewer windows than are to be held out, and one more.
    """
    settings = settings or RefineSettings()
    mapping.check_ends(source.spec, target.spec)
    start = time.perf_counter()
    windows = chunks(
        texts,
        target.encode,
        length=settings.prefix + settings.continuation,
        separator=target.tokenizer.eos_token_id,
    )
    training, judging = _split(windows, settings)
    with _frozen(target.module):
        updates = _Updates(mapping, settings, prefill(source, _hidden(judging[0], settings)))

        def judge(step: int, judged: KVMapping) -> Judgement:
            found = [_measure(judged, source, target, ids, settings) for ids in judging]
            return Judgement(step, *(sum(each) / len(judging) for each in zip(*found, strict=True)))

        history = [judge(0, mapping)]
        best, kept = history[0], mapping
        optimizer = torch.optim.Adam(updates.parameters(), lr=settings.learning_rate)
        for step, ids in enumerate(training, 1):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * _schedule(step, len(training))
            live, own = _own(target, ids, settings)
            mapped = updates.folded()(_wide(prefill(source, _hidden(ids, settings))))
            logits = logits_on(target, live, _narrow(mapped, target))
            loss = kl(own, logits[0]).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(updates.parameters(), 1.0)
            optimizer.step()
            progress(1)
            if step % settings.every == 0 or step == len(training):
                with torch.no_grad():
                    folded = updates.folded()
                history.append(judge(step, folded))
                if history[-1].kl < best.kl:
                    best, kept = history[-1], folded
    seconds = time.perf_counter() - start
    return RefineReport(
        mapping=replace(
            kept,
            settings={**mapping.settings, "refine": asdict(settings) | {"kept_step": best.step}},
            quality=_quality(mapping.quality, history[0], best),
        ),
        history=tuple(history),
        best=best,
        seconds=seconds,
    )


def _quality(before: Mapping[str, Any], first: Judgement, best: Judgement) -> dict[str, Any]:
    """What a card says: R² is of the maps as they came, KL of both."""
    suffix = ", before refining"
    return {name if name.endswith(suffix) else name + suffix: x for name, x in before.items()} | {
        f"held-out KL to own{suffix}": round(first.kl, 4),
        "held-out KL to own": round(best.kl, 4),
    }


class _Updates(nn.Module):
    """Trainable low-rank updates of every map, beside the maps that they update."""

    def __init__(self, mapping: KVMapping, settings: RefineSettings, example: KVCache) -> None:
        super().__init__()
        self._mapping = mapping
        random = torch.Generator().manual_seed(settings.seed)
        content = _wide(example).content()
        self._downs, self._ups, self._biases = (nn.ParameterList() for _ in range(3))
        for layer in mapping.layers:
            for kind in KINDS:
                rows = mapping.rows(content, layer, kind)
                width = getattr(layer, kind).bias.numel()
                # Features differ in size a hundredfold; the update should feel each of them alike.
                scale = rows.flatten(0, -2).std(0).clamp_min(1e-3)
                down = torch.randn(len(scale), settings.rank, generator=random)
                self._downs.append(down / scale.cpu()[:, None] / math.sqrt(len(scale)))
                self._ups.append(torch.zeros(settings.rank, width))
                self._biases.append(torch.zeros(width))

    def folded(self) -> KVMapping:
        """The mapping with its updates folded in: while training, a function of them."""
        parts = iter(zip(self._downs, self._ups, self._biases, strict=True))
        layers = tuple(
            LayerMap(
                layer.sources, _fold(layer.keys, *next(parts)), _fold(layer.values, *next(parts))
            )
            for layer in self._mapping.layers
        )
        return replace(self._mapping, layers=layers)


def _fold(base: Map, down: Tensor, up: Tensor, bias: Tensor) -> Map:
    """y = base(x) + (x @ down) @ up + bias, as one map."""
    if isinstance(base, Affine):
        return Affine(base.weight + down @ up, base.bias + bias)
    return LowRank(torch.cat((base.down, down), dim=1), torch.cat((base.up, up)), base.bias + bias)


def _split(
    windows: Iterable[Tensor], settings: RefineSettings
) -> tuple[list[Int[Tensor, "1 t"]], list[Int[Tensor, "1 t"]]]:
    """Windows to train on and windows to judge by, each a batch of one."""
    training: list[Tensor] = []
    judging: list[Tensor] = []
    for number, ids in enumerate(islice(windows, settings.windows + settings.heldout)):
        # The second window is the first to be held out.
        held = number % HOLDOUT == 1 and len(judging) < settings.heldout
        (judging if held else training).append(ids[None])
    if not training or not judging:
        raise TextError(
            f"the text has {len(training) + len(judging)} windows of "
            f"{settings.prefix + settings.continuation} tokens, and refining needs two at least",
            hint="give more text, or ask for shorter windows",
        )
    return training[: settings.windows], judging


def _hidden(ids: Int[Tensor, "1 t"], settings: RefineSettings) -> Int[Tensor, "1 p"]:
    """The last token of the prefix is run live, as everywhere."""
    return ids[:, : settings.prefix - 1]


def _own(
    target: LanguageModel, ids: Int[Tensor, "1 t"], settings: RefineSettings
) -> tuple[Int[Tensor, "1 s"], Float[Tensor, "s v"]]:
    """The live tokens, and what the target predicts after each on its own prefix."""
    live = ids[:, settings.prefix - 1 : -1]
    return live, score(target, live, prefill(target, _hidden(ids, settings)))[0]


def _measure(
    mapping: KVMapping,
    source: LanguageModel,
    target: LanguageModel,
    ids: Int[Tensor, "1 t"],
    settings: RefineSettings,
) -> tuple[float, float]:
    """KL to own, and NLL, of one window."""
    live, own = _own(target, ids, settings)
    mapped = mapping(_wide(prefill(source, _hidden(ids, settings))))
    logits = score(target, live, _narrow(mapped, target))[0]
    wanted = ids[0, settings.prefix :].to(logits.device)
    return float(kl(own, logits).mean()), float(nll(logits, wanted).mean())


def _wide(cache: KVCache) -> KVCache:
    return cache.to(dtype=torch.float32)


def _narrow(cache: KVCache, target: LanguageModel) -> KVCache:
    return cache.to(dtype=target.dtype, device=target.device)


def _schedule(step: int, steps: int) -> float:
    """A linear warm-up over the first twentieth, and a cosine decay after it."""
    warm = max(1, steps // 20)
    if step <= warm:
        return step / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """Gradients flow through the module, and none are kept for its weights."""
    wanted = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
