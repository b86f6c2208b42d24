"""A short gradient run on what counts: what the target predicts on the mapped prefix.

Closed-form maps minimise an error of keys and values; the target minds some of that error much
more than the rest. Low-rank updates of the maps are trained on KL(own ‖ mapped): how far the
target's next-token distributions on the mapped prefix are from those on its own. No weights of
either model change.

This module knows nothing of how the maps that it is given were fitted.
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
from torch import Tensor, nn

from kvtransfer.errors import TextError
from kvtransfer.fitting.affine import Affine, Corrected, LowRank, Map
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.features import KINDS, flat, state_rows
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.refine_report import Judgement, RefineReport
from kvtransfer.fitting.refine_settings import RefineSettings
from kvtransfer.fitting.seen import seen
from kvtransfer.fitting.transfer import mapped
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.aligned import Alignable, read_aligned
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import logits_on, score
from kvtransfer.hf.start import Start, prefill_with_states, start_of
from kvtransfer.measures.agreement import kl, nll

HOLDOUT = 8
"""One window in this many is held out, as long as more are wanted."""


def refine(
    mapping: KVMapping,
    source: LanguageModel,
    target: LanguageModel,
    texts: Iterable[str],
    settings: RefineSettings | None = None,
    *,
    progress: Callable[[int], None] = lambda windows: None,
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
        progress: Told the number of windows after each step.

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
        opening=target.opening,
    )
    readable = Alignable(source, target, windows, hidden=settings.prefix - 1)
    training, judging = _split(readable, settings)
    with _frozen(target.module):

        def read(ids: Tensor) -> Prefix:
            return Prefix.of(mapping, source, target, ids, settings)

        updates = _Updates(mapping, settings, read(judging[0]))

        def judge(step: int, judged: KVMapping) -> Judgement:
            found = [
                _measure(judged, read(ids), target, ids[:, settings.prefix :]) for ids in judging
            ]
            return Judgement(step, *(sum(each) / len(judging) for each in zip(*found, strict=True)))

        history = [judge(0, mapping)]
        best, kept = history[0], mapping
        optimizer = torch.optim.Adam(updates.parameters(), lr=settings.learning_rate)
        for step, ids in enumerate(training, 1):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * _schedule(step, len(training))
            prefix = read(ids)
            loss = prefix.kl(prefix.logits(updates.folded(), target))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(updates.parameters(), 1.0)
            optimizer.step()
            progress(len(ids))
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
            quality=_quality(mapping.quality, history[0], best)
            | seen(kept, source, target, [ids[0] for ids in judging]),
        ),
        history=tuple(history),
        best=best,
        seconds=seconds,
    )


def _quality(before: Mapping[str, Any], first: Judgement, best: Judgement) -> dict[str, Any]:
    """What a card says: what was known is of the maps as they came, KL of both."""
    suffix = ", before refining"
    return {name if name.endswith(suffix) else name + suffix: x for name, x in before.items()} | {
        f"held-out KL to own{suffix}": round(first.kl, 4),
        "held-out KL to own": round(best.kl, 4),
    }


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """What both models have of a hidden prefix, and what the target predicts on its own."""

    ids: Int[Tensor, "b p"]
    cache: KVCache
    """The source's, in float32."""
    start: Start | None
    live: Int[Tensor, "b s"]
    wanted: KVCache
    """The target's own."""
    own: Float[Tensor, "b s v"]
    """What it predicts on that."""

    @classmethod
    def of(
        cls,
        mapping: KVMapping,
        source: LanguageModel,
        target: LanguageModel,
        ids: Int[Tensor, "b t"],
        settings: RefineSettings,
    ) -> "Prefix":
        """Let both read."""
        hidden, live = _hidden(ids, settings), ids[:, settings.prefix - 1 : -1]
        starts = () if mapping.start is None else (mapping.start,)
        own, states = prefill_with_states(target, hidden, starts)
        return cls(
            ids=hidden,
            cache=read_aligned(source, target, hidden).to(
                dtype=torch.float32, device=target.device
            ),
            start=None if mapping.start is None else start_of(own, states, mapping.start),
            live=live,
            wanted=own,
            own=score(target, live, own),
        )

    def logits(self, mapping: KVMapping, target: LanguageModel) -> Float[Tensor, "b s v"]:
        """What the target predicts on the mapped prefix, differentiable in the maps."""
        made = mapped(mapping, self.cache, target, self.ids, start=self.start)
        return logits_on(target, self.live, made)

    def kl(self, logits: Float[Tensor, "b s v"]) -> Float[Tensor, ""]:
        """KL(own ‖ mapped), mean over tokens."""
        return kl(self.own.flatten(0, 1), logits.flatten(0, 1)).mean()


class _Updates(nn.Module):
    """Trainable low-rank updates of every map, beside the maps that they update.

    Features and errors differ in size a hundredfold, from layer to layer and between keys and
    values. What is trained is in units of both, so that a step is as large as there is something
    to correct: maps that are nearly exact are nearly left alone.
    """

    def __init__(self, mapping: KVMapping, settings: RefineSettings, example: Prefix) -> None:
        super().__init__()
        self._mapping = mapping
        random = torch.Generator().manual_seed(settings.seed)
        content, wanted = example.cache.as_content(), example.wanted.as_content()
        state = None if example.start is None else state_rows(example.start.state)
        self._downs, self._ups, self._biases = (nn.ParameterList() for _ in range(3))
        self._into: list[Tensor] = []
        self._out: list[Tensor] = []
        for index, layer in enumerate(mapping.layers, mapping.first):
            for kind in KINDS:
                fitted: Map = getattr(layer, kind)
                # Position 0 is left out: what stands there can be a hundred times as large.
                rows = mapping.rows(content, layer, kind, state).flatten(0, -2)[1:]
                own = flat(getattr(wanted, kind)[index]).to(rows)[1:]
                size = rows.std(0)
                # Some features hardly vary in one example and vary much in the next.
                size = torch.maximum(size, 0.1 * size.median()).clamp_min(1e-6)
                self._into.append((1 / size / math.sqrt(len(size)))[:, None])
                self._out.append((fitted(rows) - own).square().mean().sqrt())
                down = torch.randn(len(size), settings.rank, generator=random)
                self._downs.append(down.to(size))
                self._ups.append(torch.zeros(settings.rank, own.shape[1], device=size.device))
                self._biases.append(torch.zeros(own.shape[1], device=size.device))

    def folded(self) -> KVMapping:
        """The mapping with its updates folded in: while training, a function of them."""
        parts = iter(zip(self._into, self._out, self._downs, self._ups, self._biases, strict=True))
        layers = tuple(
            replace(
                layer,
                keys=_fold(layer.keys, *next(parts)),
                values=_fold(layer.values, *next(parts)),
            )
            for layer in self._mapping.layers
        )
        return replace(self._mapping, layers=layers)


def _fold(base: Map, into: Tensor, out: Tensor, down: Tensor, up: Tensor, bias: Tensor) -> Map:
    """y = base(x) + (x @ down) @ up + bias, as one map."""
    update = LowRank(into * down, out * up, out * bias)
    if isinstance(base, Affine):
        return Affine(base.weight + update.down @ update.up, base.bias + update.bias)
    if isinstance(base, LowRank):
        return _beside(base, update)
    if isinstance(base, Corrected):  # refined once already
        return Corrected(base.base, _beside(base.correction, update))
    return Corrected(base, update)


def _beside(one: LowRank, other: LowRank) -> LowRank:
    """The sum of two maps of low rank."""
    down, up = torch.cat((one.down, other.down), dim=1), torch.cat((one.up, other.up))
    return LowRank(down, up, one.bias + other.bias)


def _split(
    windows: Iterable[Tensor], settings: RefineSettings
) -> tuple[list[Int[Tensor, "_b t"]], list[Int[Tensor, "1 t"]]]:
    """Batches of windows to train on, and windows to judge by, each a batch of one."""
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
    kept = torch.cat(training[: settings.windows])
    return list(kept.split(settings.batch)), judging


def _hidden(ids: Int[Tensor, "b t"], settings: RefineSettings) -> Int[Tensor, "b p"]:
    """The last token of the prefix is run live, as everywhere."""
    return ids[:, : settings.prefix - 1]


def _measure(
    mapping: KVMapping, prefix: Prefix, target: LanguageModel, wanted: Int[Tensor, "1 s"]
) -> tuple[float, float]:
    """KL to own, and NLL, of one window."""
    with torch.no_grad():
        logits = prefix.logits(mapping, target)
    return (
        float(prefix.kl(logits)),
        float(nll(logits[0], wanted[0].to(logits.device)).mean()),
    )


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
