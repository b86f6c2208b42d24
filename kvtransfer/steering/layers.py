"""Which layers: by number, by name, or as a band of a model of another depth."""

import re
from collections.abc import Iterable
from numbers import Integral

from kvtransfer.errors import SteeringError

Layers = str | int | Iterable[int]
"""``"all"``; a third of the depth: ``"early"``, ``"mid"``, ``"late"``; numbers from 0 on: ``"3"``
or ``"3-7"``, both ends in; a band of another model, counted from 1 as papers do and scaled to this
depth: ``"9-20/32"``; several of these with commas; or numbers themselves."""

THIRDS = ("early", "mid", "late")

_RANGE = re.compile(r"(\d+)(?:-(\d+))?(?:/(\d+))?")


def which(layers: Layers, depth: int) -> tuple[int, ...]:
    """The numbers of ``layers`` in a model of ``depth`` layers, in order, each once.

    Raises:
        SteeringError: one is not there, the spelling is unknown, or a band is empty. No layers at
            all, ``()``, is an answer and no fault.
    """
    named = frozen(layers)
    if isinstance(named, str):
        chosen = [layer for part in named.split(",") for layer in _spelled(part.strip(), depth)]
    else:
        chosen = list(named)
    wrong = [layer for layer in chosen if not _is_layer(layer, depth)]
    if wrong:
        raise SteeringError(
            f"no layer {', '.join(map(str, wrong))} in a model of {depth} layers",
            hint=f"layers are 0 to {depth - 1}",
        )
    return tuple(sorted(set(chosen)))


def frozen(layers: Layers) -> str | tuple[int, ...]:
    """The same layers as a value that compares and hashes, whatever it was given as.

    Raises:
        SteeringError: they are neither words nor numbers.
    """
    if isinstance(layers, str):
        return layers
    if isinstance(layers, int):
        return (layers,)
    if not isinstance(layers, Iterable):
        raise SteeringError(
            f"layers are {layers!r}", hint="a word, as in layers='mid', or numbers: layers=(1, 2)"
        )
    return tuple(int(each) if is_whole(each) else each for each in layers)


def is_whole(number: object) -> bool:
    """Whether it is a whole number, NumPy's too; True and False are none."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def _is_layer(layer: int, depth: int) -> bool:
    return is_whole(layer) and 0 <= layer < depth


def _spelled(part: str, depth: int) -> range:
    if part == "all":
        return range(depth)
    if part in THIRDS:
        third = THIRDS.index(part)
        return _band(part, round(third * depth / 3), round((third + 1) * depth / 3))
    found = _RANGE.fullmatch(part)
    if found is None:
        raise SteeringError(
            f"no layers are called {part!r}",
            hint=f"all, {', '.join(THIRDS)}, 3, 3-7, or 9-20/32: layers 9 to 20 of a model of 32",
        )
    first, last = int(found[1]), int(found[2] or found[1])
    if found[3] is None:
        return _band(part, first, last + 1)
    of = int(found[3])
    if not 1 <= first <= last <= of:
        raise SteeringError(
            f"{part!r} is no band of a model of {of} layers",
            hint="in bands of another model layers are counted from 1: 1-32/32 is all of it",
        )
    return _band(part, round((first - 1) * depth / of), round(last * depth / of))


def _band(part: str, start: int, stop: int) -> range:
    if start >= stop:
        raise SteeringError(
            f"the band {part!r} is empty: it would begin at layer {start} and end before {stop}",
            hint="a shallow model has no layer there; name a wider band, or layers by number",
        )
    return range(start, stop)
