"""Calibration text that the target writes itself: nothing to fetch, and no domain by accident.

How tokens are drawn is :mod:`kvtransfer.hf.sample`'s matter; which documents are fit to calibrate
on is decided here.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import count

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import TextError
from kvtransfer.fitting.surface import SPACED, as_named
from kvtransfer.fitting.texts import read_all
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.sample import sample

LENGTH = 256
"""Tokens in a document, at most. Small models lose their thread, and begin to repeat themselves,
much beyond that; and a token costs more the more there are before it."""

BATCH = 64
"""Documents written side by side. A step of 64 costs a CPU little more than one of 16: it is the
weights that are slow to read. More would keep the reader waiting."""

SHORTEST = 80
"""Characters below which a document is a scrap (a chat model's "Sure!") rather than prose."""

LEAST_VARIED = 0.5
"""Share of distinct runs of RUN tokens below which a document goes round in circles. A loop gives
the same few keys and values over and over: it fills the fit with rows, and teaches it nothing."""

RUN = 4

PATIENCE = 32
"""Documents after which a model is given up that has written less prose than one in eight."""


def self_tokens(name: str) -> int | None:
    """The N of a text that is named ``self:N`` or ``spaced:self:N``; None for any other name.

    Raises:
        TextError: the name begins like that, and N is no positive number.
    """
    head, _, number = name.removeprefix(SPACED).partition(":")
    if head != "self":
        return None
    if not re.fullmatch("[1-9][0-9]{0,11}", number):
        raise TextError(
            f"{name[:200]!r} does not say how many tokens the target is to write",
            hint="give a positive number, as in self:40000; a file of that name is ./self",
        )
    return int(number)


def self_texts(model: LanguageModel, tokens: int, *, seed: int = 0) -> Iterator[str]:
    """Yield documents that ``model`` writes, until they encode to ``tokens`` tokens or more.

    A batch of them is written when the last one is used up. Documents that are too short for prose,
    or go round in circles, are left out. A seed gives the same documents on one machine.

    Raises:
        TextError: the model writes hardly any prose.
        UnsupportedModel: its tokenizer marks neither the start nor the end of a text.
    """
    if tokens < 1:
        raise ValueError(f"{tokens} tokens are no text")
    random = torch.Generator().manual_seed(seed)
    missing, tried, kept = tokens, 0, 0
    while True:
        for ids in sample(model, min(BATCH, -(-missing // LENGTH)), length=LENGTH, random=random):
            # A document may begin or be cut off inside a character; its bytes decode to a mark.
            text = model.decode(ids).strip("\ufffd").strip()
            again = model.encode(text)  # what will be read: not always the tokens that were drawn
            tried += 1
            if is_prose(text, again):
                yield text
                kept, missing = kept + 1, missing - len(again)
            if missing <= 0:
                return
        if tried >= PATIENCE and 8 * kept < tried:
            raise TextError(
                f"of {tried} documents that {model.spec.name} wrote, {tried - kept} are shorter "
                f"than {SHORTEST} characters or repeat themselves",
                hint="fit on text of another origin, such as --data builtin",
            )


def is_prose(text: str, ids: Int[Tensor, " t"]) -> bool:
    """Whether ``text``, whose tokens are ``ids``, is long and varied enough to calibrate on."""
    if len(text) < SHORTEST or len(ids) < RUN:
        return False
    runs = ids.unfold(0, RUN, 1)
    return len(runs.unique(dim=0)) >= LEAST_VARIED * len(runs)


def read_all_with(names: Iterable[str], target: LanguageModel, *, seed: int = 0) -> Iterator[str]:
    """As :func:`read_all`, and ``self:N`` stands for N tokens that ``target`` writes.

    Named twice, it stands for two different texts.

    Raises:
        TextError: as :func:`read_all` and :func:`self_texts`.
        UnsupportedModel: as :func:`self_texts`.
    """
    wanted = [(name, self_tokens(name)) for name in names]
    seeds = count(seed)
    read = [name for name, tokens in wanted if tokens is None]
    own = [
        as_named(name, self_texts(target, n, seed=next(seeds)))
        for name, n in wanted
        if n is not None
    ]
    return read_all([*read, *own])  # files first: a missing one is known before anything is written
