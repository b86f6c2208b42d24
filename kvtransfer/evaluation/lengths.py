"""Does a mapping hold on prefixes longer than those that it was calibrated on?

The same tokens are scored after prefixes of different lengths that end right before them. A shorter
prefix is a text of its own, that begins at position 0: its tokens have seen nothing of what the
longer one begins with. The end of the longer one's cache would be something else (tokens that did
see it, at other positions), and no transfer ever has that; so both models read each length anew.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, SeamError, TextError
from kvtransfer.evaluation.conditions import Pair
from kvtransfer.evaluation.lengths_report import LengthsResult
from kvtransfer.evaluation.rivals import mappings_of
from kvtransfer.evaluation.text import evaluate_text
from kvtransfer.fitting.chunks import chunks, one_stream
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.hf.aligned import Alignable
from kvtransfer.hf.model import LanguageModel

LENGTHS = (64, 128, 256, 512, 1_024, 2_048, 4_096)
"""Tokens of a prefix, where nobody says how many."""


def calibrated_on(mapping: KVMapping) -> int | None:
    """Tokens of the longest text that a mapping's fit read, each from position 0; None if its
    settings do not say."""
    refined = mapping.settings.get("refine") or {}
    said = (mapping.settings.get("chunk"), refined.get("prefix"))
    return max((each for each in said if isinstance(each, int)), default=None)


def checked_lengths(
    lengths: Iterable[int] | None, pair: Pair, names: Iterable[str], continuation: int
) -> tuple[int, ...]:
    """The lengths, if both models have the positions; of LENGTHS, where None are given, those for
    which they have.

    Raises:
        ValueError: there is none; or they do not ascend, or begin below 2, or hold nothing but what
            the target puts before every text.
        CacheLayoutError: a model has too few positions.
    """
    needs = {
        pair.target: continuation,
        # What is mapped is all that the source reads, unless it stands alone too.
        pair.source: continuation if "source" in names or pair.source is pair.target else 0,
    }
    room = {
        model: model.max_positions - more
        for model, more in needs.items()
        if model.max_positions is not None
    }
    least = max(2, len(pair.target.opening) + 1)
    if lengths is None:
        fit = [each for each in LENGTHS if all(each <= most for most in room.values())]
        lengths = fit or LENGTHS[:1]
    found = tuple(lengths)
    if not found or list(found) != sorted(set(found)) or found[0] < least:
        raise ValueError(
            f"lengths of prefixes ascend and begin with at least {least} tokens, not "
            f"{', '.join(map(str, found)) or 'none'}"
        )
    for model, most in room.items():
        if found[-1] > most:
            raise CacheLayoutError(
                f"a prefix of {found[-1]} tokens and {needs[model]} after it, and "
                f"{model.spec.name} reads at most {model.max_positions}",
                hint=f"leave out lengths above {most}",
            )
    return found


def ending(
    window: Int[Tensor, " w"], length: int, continuation: int, opening: Int[Tensor, " o"]
) -> Int[Tensor, " t"]:
    """The last ``continuation`` tokens of ``window``, behind ``length`` tokens: the opening, and
    those that stand right before them."""
    return torch.cat((opening, window[len(window) - continuation - length + len(opening) :]))


def evaluate_lengths(
    pair: Pair,
    texts: Iterable[str],
    names: tuple[str, ...],
    *,
    lengths: Iterable[int] | None = None,
    continuation: int = 256,
    items: int = 32,
    progress: Callable[[], None] = lambda: None,
) -> LengthsResult:
    """Score the same tokens after prefixes of each length.

    Of each prefix, the last token is run live, as everywhere.

    Args:
        pair: The models and their mappings.
        texts: Held-out documents, read as one text.
        names: Conditions; ``none`` and ``own`` must be among them.
        lengths: Tokens of a prefix, the target's opening among them, ascending; None for those of
            LENGTHS that the models have positions for.
        continuation: Tokens that are scored.
        items: Windows at most.
        progress: Called after each window, once a length.

    Raises:
        CacheLayoutError: a length is more than a model has positions for.
        SeamError: the tokenizers differ, and no text has the ids that are to be hidden.
        TextError: the text is shorter than the longest prefix with what follows it.
        ValueError: lengths do not ascend, or there is nothing to score.
    """
    if continuation < 1 or items < 1:
        raise ValueError(f"{continuation=}, {items=}: at least 1 of each is needed")
    chosen = checked_lengths(lengths, pair, names, continuation)
    opening = pair.target.opening
    room = chosen[-1] - len(opening) + continuation
    cut = _windows(pair.target, texts, room)
    windows: list[Tensor] = []
    left_out, reason = 0, None
    for window in cut:
        endings = (ending(window, each, continuation, opening) for each in chosen)
        try:
            _require_readable(pair, endings, continuation)
        except SeamError as error:
            left_out, reason = left_out + 1, error
            continue
        windows.append(window)
        if len(windows) == items:
            break
    if reason is not None and not windows:
        raise reason
    return LengthsResult(
        texts={
            length: evaluate_text(
                pair,
                [ending(window, length, continuation, opening) for window in windows],
                names,
                prefix=length,
                progress=progress,
            )
            for length in chosen
        },
        calibrated={name: calibrated_on(each) for name, each in mappings_of(pair).items()},
        left_out=left_out,
    )


def _windows(target: LanguageModel, texts: Iterable[str], room: int) -> Iterator[Tensor]:
    try:
        yield from chunks(one_stream(texts), target.encode, length=room)
    except TextError as error:
        raise TextError(error.message, hint="give more text, or shorter lengths") from error


def _require_readable(pair: Pair, endings: Iterable[Tensor], continuation: int) -> None:
    """Raise SeamError unless the source can read the hidden part of each."""
    for ids in endings:
        hidden = len(ids) - continuation - 1
        list(Alignable(pair.source, pair.target, [ids], hidden=hidden))
