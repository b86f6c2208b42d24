"""The topics of a comparison, one generator each.

A check may find nothing, one thing, or several; to add a topic, write it and name it in CHECKS.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from kvtransfer.geometry.compat.report import Finding, Verdict
from kvtransfer.geometry.spec import KEEPS, LayerSpec, ModelSpec, same_tokens

Check = Callable[[ModelSpec, ModelSpec], Iterator[Finding]]


def layers(source: ModelSpec, target: ModelSpec) -> Iterator[Finding]:
    """Depth never blocks: each target layer reads the source layers that predict it."""
    yield _compared(
        "layers",
        str(len(source.layers)),
        str(len(target.layers)),
        "each target layer reads the source layers that predict it best",
    )


def kv_heads(source: ModelSpec, target: ModelSpec) -> Iterator[Finding]:
    """A map reads all source heads of a layer, so their number never blocks."""
    yield _compared(
        "kv_heads",
        _runs(str(layer.kv_heads) for layer in source.layers if layer.has_kv),
        _runs(str(layer.kv_heads) for layer in target.layers if layer.has_kv),
        "each target head reads every source head",
    )


def head_dim(source: ModelSpec, target: ModelSpec) -> Iterator[Finding]:
    """Maps are rectangular where widths differ."""
    yield _compared(
        "head_dim",
        _runs(_width(layer) for layer in source.layers if layer.has_kv),
        _runs(_width(layer) for layer in target.layers if layer.has_kv),
        "maps are rectangular",
    )


def rope(source: ModelSpec, target: ModelSpec) -> Iterator[Finding]:
    """A known rotation can be undone and redone; learned positions and ALiBi stay as they are."""
    seen = _positions(source), _positions(target)
    schemes = {source.positions, target.positions}
    if "unknown" in schemes or any(
        layer.rotation is not None and layer.rotation.pairing == "unknown"
        for layer in (*source.layers, *target.layers)
    ):
        why = "no rotation convention is known for this architecture; it must be measured"
        yield Finding("rope", *seen, Verdict.UNKNOWN, why)
    elif schemes & {"learned", "alibi"}:
        same = seen[0] == seen[1]
        why = "positions cannot be taken out of these keys: only the same positions can be mapped"
        yield Finding("rope", *seen, Verdict.SAME if same else Verdict.MAPPED, why)
    else:
        yield _compared("rope", *seen, "the source's rotation is undone, and the target's applied")


def cache_format(source: ModelSpec, target: ModelSpec) -> Iterator[Finding]:
    """Only layers that keep one key and value per token and head can be mapped."""
    seen = _formats(source), _formats(target)
    for spec in (source, target):
        if bad := sorted({layer.kind for layer in spec.layers if not layer.has_kv}):
            why = f"layers of {spec.name} keep " + "; others ".join(KEEPS[kind] for kind in bad)
            yield Finding("cache_format", *seen, Verdict.BLOCKED, why)
            return
    yield _compared(
        "cache_format", *seen, "windows are kept whole at capture; the target masks its own"
    )


def dtype(source: ModelSpec, target: ModelSpec) -> Iterator[Finding]:
    """A cast, after a map computed in float32."""
    yield _compared("dtype", source.dtype, target.dtype, "the mapped cache is cast")


def tokenizer(source: ModelSpec, target: ModelSpec) -> Iterator[Finding]:
    """Where text becomes other tokens, those that have read as far stand for each other."""
    seen = _digest(source.tokenizer), _digest(target.tokenizer)
    if source.tokenizer is None or target.tokenizer is None:
        yield Finding("tokenizer", *seen, Verdict.UNKNOWN, "no tokenizer was found to compare")
    elif source.tokenizer == target.tokenizer:
        yield Finding("tokenizer", *seen, Verdict.SAME)
    elif same_tokens(source, target):
        why = "ordinary text becomes the same tokens; keep to text without the added ones"
        yield Finding("tokenizer", *seen, Verdict.MAPPED, why)
    else:
        why = "tokens are aligned by the characters they have read; how well, must be measured"
        yield Finding("tokenizer", *seen, Verdict.MAPPED, why)


def settings(source: ModelSpec, target: ModelSpec) -> Iterator[Finding]:
    """Norms, activations, multipliers: the same weights under others make another cache."""
    if source.settings is not None and target.settings is not None:
        seen = _digest(source.settings), _digest(target.settings)
        yield _compared("settings", *seen, "the configs compute differently")


def weights(source: ModelSpec, target: ModelSpec) -> Iterator[Finding]:
    """Only the same weights make the same cache, whatever the configs say."""
    seen = _digest(source.weights), _digest(target.weights)
    if source.weights is None or target.weights is None:
        why = "weights were not read; two models with one config can still differ"
        yield Finding("weights", *seen, Verdict.UNKNOWN, why)
    else:
        yield _compared("weights", *seen, "other weights make another cache")


CHECKS: tuple[Check, ...] = (
    layers,
    kv_heads,
    head_dim,
    rope,
    cache_format,
    dtype,
    tokenizer,
    settings,
    weights,
)


def _compared(topic: str, source: str, target: str, why: str) -> Finding:
    if source == target:
        return Finding(topic, source, target, Verdict.SAME)
    return Finding(topic, source, target, Verdict.MAPPED, why)


def _digest(digest: str | None) -> str:
    """The beginning of each part: enough to tell two apart on a line."""
    return "+".join(part[:8] for part in digest.split("+")) if digest else "not read"


def _width(layer: LayerSpec) -> str:
    if layer.key_dim == layer.value_dim:
        return str(layer.key_dim)
    return f"{layer.key_dim} keys, {layer.value_dim} values"


def _positions(spec: ModelSpec) -> str:
    if spec.positions != "rotary":
        return spec.positions
    return _tally(
        "none" if layer.rotation is None else str(layer.rotation)
        for layer in spec.layers
        if layer.has_kv
    )


def _formats(spec: ModelSpec) -> str:
    return _tally(
        layer.kind if layer.window is None else f"{layer.kind} {layer.window}"
        for layer in spec.layers
    )


def _tally(names: Iterable[str]) -> str:
    """``full × 3, sliding 512 × 15``; a single kind stands without its count."""
    counts = Counter(names)
    if len(counts) <= 1:
        return next(iter(counts), "none")
    return ", ".join(f"{name} × {count}" for name, count in counts.items())


def _runs(names: Iterable[str]) -> str:
    """Values layer by layer, runs folded: ``8`` or ``8 × 2, 4 × 26``."""
    runs = [(name, len(list(group))) for name, group in groupby(names)]
    if len(runs) <= 1:
        return runs[0][0] if runs else "none"
    return ", ".join(f"{name} × {count}" for name, count in runs)
