"""What restoring, mapping and decoding cost, as ratios within one run.

Seconds depend on the machine and on what else it does. So every way is run once in every round,
in turn, each time is divided by that of its own round, and the median of these ratios is told.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, KVTransferError, TextError
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.texts import builtin
from kvtransfer.guides.bench_report import BenchReport, Cost
from kvtransfer.guides.pack import GuidePack
from kvtransfer.guides.ways import GUIDE, STEPS, WAYS, Case, Way
from kvtransfer.hf.aligned import read_aligned
from kvtransfer.hf.fits import check_tables
from kvtransfer.hf.model import LanguageModel, require_model
from kvtransfer.report import Estimate, Provenance

TOKENS = (64, 256, 1_024, 4_096)
"""Lengths of prefixes, if none are asked for."""


def bench(
    target: LanguageModel,
    *,
    source: LanguageModel | None = None,
    mapping: KVMapping | None = None,
    tokens: Sequence[int] = TOKENS,
    repeats: int = 5,
    progress: Callable[[], None] = lambda: None,
) -> BenchReport:
    """Time every way to a prefix of each length, and decoding after it.

    Files that are restored were written a moment before: they lie in the page cache.

    Args:
        target: Reads the prefixes.
        source: Whose caches are mapped, with ``mapping``; leave both out where nothing is.
        mapping: From ``source`` to ``target``.
        tokens: Lengths of the prefixes. Those that the models have no positions for are left out,
            and the report says so.
        repeats: Rounds.
        progress: Called after each round.

    Raises:
        ValueError: a number is not positive, or only one of source and mapping is given.
        IncompatibleModels: the mapping is for another pair.
        CacheLayoutError: all lengths are left out.
    """
    require_positive(tokens, repeats)
    require_model(target, "target")
    if (source is None) != (mapping is None):
        raise ValueError("a source and a mapping go together: give both, or neither")
    if source is not None and mapping is not None:
        mapping.check_ends(source.spec, target.spec)
    costs: list[Cost] = []
    left_out: list[str] = []
    warm = False
    for length in sorted(set(tokens)):
        try:
            for model in (target, source):
                if model is not None:
                    _check_length(model, length)
            text, ids = _text(target, length)
        except (CacheLayoutError, TextError) as error:
            left_out.append(f"{length:,} tokens: {error.message}")
            for _ in range(repeats):
                progress()
            continue
        with tempfile.TemporaryDirectory() as folder:
            case = _case(target, source, mapping, text, ids, Path(folder) / "pack")
            ways: list[Way] = []
            for make in WAYS:
                try:
                    ways.extend(make(case))
                except KVTransferError as error:
                    left_out.append(f"{make.__name__}: {error.message}")
            if not warm:  # what is done only once, such as loading kernels, is nobody's cost
                _round(target, ways)
                warm = True
            rounds = []
            for _ in range(repeats):
                rounds.append(_round(target, ways))
                progress()
            costs.extend(_costs(length, ways, rounds))
    if not costs:
        raise CacheLayoutError("; ".join(left_out), hint="ask for shorter prefixes (--tokens)")
    return BenchReport(
        target=target.spec.name,
        source=None if source is None else source.spec.name,
        dtype=target.spec.dtype,
        device=str(target.device),
        threads=torch.get_num_threads(),
        repeats=repeats,
        costs=tuple(costs),
        left_out=tuple(dict.fromkeys(left_out)),
        provenance=Provenance.here(seed=0),
    )


def require_positive(tokens: Sequence[int], repeats: int) -> None:
    """Raise ValueError unless there is something to time."""
    if repeats < 1 or not tokens or min(tokens) < 1:
        raise ValueError(f"{repeats} repeats of {list(tokens)} tokens: all must be positive")


def _check_length(model: LanguageModel, length: int) -> None:
    """Raise CacheLayoutError unless a prefix, and what is decoded after it, has room."""
    limit = model.max_positions
    if limit is not None and length + STEPS > limit:
        more = "" if length > limit else f", and {STEPS} tokens are decoded after the prefix"
        raise CacheLayoutError(f"{model.spec.name} reads at most {limit:,}{more}")
    check_tables(model, None, length, length + STEPS)


def _text(model: LanguageModel, length: int) -> tuple[str, Int[Tensor, "1 t"]]:
    """A text of exactly so many tokens, the tokenizer's opening included.

    Raises:
        TextError: there is none.
    """
    wanted = length - len(model.opening)
    prose = builtin("heldout")
    paragraphs = 8 + wanted // 8
    for start in range(0, len(prose), 7):
        ids = model.encode("\n\n".join(prose[start : start + paragraphs]))[:wanted]
        if len(ids) < wanted and start + paragraphs >= len(prose):
            break  # there is no more of it, and later starts leave less
        text = model.decode(ids)
        # Cut anywhere, a text need not have the ids that it was cut from.
        if len(ids) == wanted > 0 and torch.equal(model.encode(text), ids):
            return text, torch.cat((model.opening, ids))[None]
    raise TextError(
        f"no text of exactly {length} tokens was found", hint="ask for another number of tokens"
    )


def _case(
    target: LanguageModel,
    source: LanguageModel | None,
    mapping: KVMapping | None,
    text: str,
    ids: Int[Tensor, "1 t"],
    folder: Path,
) -> Case:
    pack = GuidePack.build(target, [(GUIDE, text)])
    pack.save_pretrained(folder)
    return Case(
        model=target,
        ids=ids,
        prefix=pack[GUIDE].restore(target),
        folder=folder,
        mapping=mapping,
        found=None if source is None else read_aligned(source, target, ids),
    )


def _round(model: LanguageModel, ways: Sequence[Way]) -> dict[str, float]:
    """Seconds of each way, run once, in order; a name that stands twice is run once."""
    seconds: dict[str, float] = {}
    for way in ways:
        if way.name in seconds:
            continue
        _settle(model)
        begun = time.perf_counter()
        kept = way.run()
        _settle(model)
        seconds[way.name] = (time.perf_counter() - begun) / way.tokens
        del kept  # freeing memory is not part of it
    return seconds


def _settle(model: LanguageModel) -> None:
    """Wait for what an accelerator still has to do."""
    if model.device.type != "cpu":
        torch.accelerator.synchronize(model.device)


def _costs(length: int, ways: Sequence[Way], rounds: Sequence[dict[str, float]]) -> Iterator[Cost]:
    for way in ways:
        seconds = median(each[way.name] for each in rounds)
        ratio = None
        if way.against is not None:
            ratios = [each[way.name] / each[way.against] for each in rounds]
            several = len(ratios) > 1
            ratio = Estimate(
                median(ratios),
                min(ratios) if several else None,
                max(ratios) if several else None,
                len(ratios),
            )
        yield Cost(tokens=length, name=way.name, seconds=seconds, against=way.against, ratio=ratio)
