"""Requests as lm-eval makes them, and its own ``hf`` to compare with."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel

CONTEXT = "The harbour of Tellmouth opens with the code 4821. Its master is named"
OTHER = "The tide bell hangs above the customs shed, and the night watch begins"
PAIRS = (
    (CONTEXT, " Marlow"),
    (CONTEXT, " Quennell, who mends nets"),
    (OTHER, " at ten o'clock"),
    (CONTEXT, " e"),  # of one token
    (OTHER, " at"),
    (CONTEXT + " ", "Marlow"),  # lm-eval moves the space over
    ("", "The tide"),  # a context of no token
    ("", " Nets are mended behind the salt store."),
    ("e", " at ten"),  # and of one
    (OTHER, " at ten o'clock"),  # asked twice
    (CONTEXT + "\n\n" + OTHER + "\n\n" + CONTEXT, " Marlow, so they say in the harbour"),
)


def asked(kind: str, *arguments: object) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=("task", 0, 1))


def likelihoods(pairs: tuple[tuple[str, str], ...] = PAIRS) -> list[Instance]:
    return [asked("loglikelihood", *pair) for pair in pairs]


def plain(model: LanguageModel, **options: object) -> HFLM:
    """lm-eval's own model: the whole text in one forward pass, no cache."""
    return HFLM(pretrained=model.module, tokenizer=copy.deepcopy(model.tokenizer), **options)


@contextmanager
def forwards(model: LanguageModel) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the ids that a model is run on meanwhile."""
    seen: list[tuple[int, ...]] = []

    def look(part: object, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named["input_ids"] if "input_ids" in named else given[0]
        seen.append(tuple(ids.shape))

    hook = model.module.base_model.register_forward_pre_hook(look, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def crossing(source: LanguageModel, target: LanguageModel) -> KVMapping:
    """A small fit, good for nothing but to cross."""
    settings = FitSettings(tokens=1_024, chunk=64, layers=1, strength=1e-3)
    return fit(source, target, builtin("fit"), settings).mapping
