"""Make the guides of a pack: let a model read them, or take them from another model's pack."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, DeviceError, IncompatibleModels, TextError
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.transfer import mapped
from kvtransfer.guides.chat import split_chat
from kvtransfer.guides.guide import Guides, guides_of
from kvtransfer.guides.maker import Maker
from kvtransfer.guides.packed import PackedGuide, Told, whole
from kvtransfer.hf.fits import check_finite
from kvtransfer.hf.model import DTYPES, LanguageModel
from kvtransfer.hf.run import prefill

ANYTHING = "Hello"
"""Said by a user, where the template has to be asked what it puts before it."""

Progress = Callable[[int], None]
"""Told the number of tokens after each guide."""


def prepare(
    model: LanguageModel,
    maker: Maker,
    guides: Guides,
    *,
    chat: bool,
    progress: Progress,
) -> Iterator[PackedGuide]:
    """Let ``model`` read each guide, from position 0 and with its tokenizer's opening first.

    As a system message, where ``chat`` is set: all that the template puts before the user's words.

    Returns:
        Each as it is read, when it is asked for; what can be said against any of them is raised
        before that. No guide is kept here.

    Raises:
        SeamError: the chat template does not keep a guide as system message.
        TextError: there are none, two have one name, or one has no tokens.
        CacheLayoutError: one is longer than the model's positions.
        WrongKind: one is no guide.
    """
    encoded = list(_encoded(model, guides, chat=chat))
    made = {"how": "own"} | ({"chat": True} if chat else {})

    def read(guide: tuple[str, str, Int[Tensor, " t"]]) -> PackedGuide:
        name, text, ids = guide
        cache = prefill(model, ids[None])
        check_finite(cache)
        progress(len(ids))
        told = Told(text=text, made=made)
        return PackedGuide.given(name, told, whole(ids, cache), tokens=len(ids), maker=maker)

    return map(read, encoded)


def _encoded(
    model: LanguageModel, guides: Guides, *, chat: bool
) -> Iterator[tuple[str, str, Int[Tensor, " t"]]]:
    """Names, texts and ids, all of them checked before the first is read."""
    seen: set[str] = set()
    for guide in guides_of(guides):
        name, text = guide.name, guide.text
        if not name.strip():
            raise TextError(f"a guide is called {name!r}", hint="names are texts, and not empty")
        if name in seen:
            raise TextError(
                f"two guides are called {name!r}", hint="guides are told apart by their names"
            )
        seen.add(name)
        ids = split_chat(model.tokenizer, text, ANYTHING).hidden if chat else model.encode(text)
        if not len(ids):
            raise TextError(
                f"the guide {name!r} has no tokens", hint="a prefix has at least one token"
            )
        ids = model.opened(ids)
        if model.max_positions is not None and len(ids) >= model.max_positions:
            raise CacheLayoutError(
                f"the guide {name!r} has {len(ids)} tokens, and {model.spec.name} reads at most "
                f"{model.max_positions}, a live one after it included",
                hint="shorten the guide",
            )
        yield name, text, ids
    if not seen:
        raise TextError("there are no guides", hint="give at least one")


def reader_of(mapping: KVMapping, target: LanguageModel | None, dtype: str) -> Maker:
    """Who can read what ``mapping`` makes.

    Raises:
        IncompatibleModels: the mapping starts with layers of the target, which is not there.
        DeviceError: there is no such dtype.
    """
    if dtype not in DTYPES:
        raise DeviceError(f"no dtype {dtype!r}", hint=f"one of {', '.join(DTYPES)}")
    if target is not None:
        return Maker.of(target)
    if mapping.start is not None:
        raise IncompatibleModels(
            f"this mapping starts with {mapping.start} layers of {mapping.target.name}, which "
            "have to be run",
            hint="give the model (--target), or a mapping without a start",
        )
    spec = replace(mapping.target, dtype=dtype)
    return Maker(spec=spec, config=mapping.target_config)


def cross(
    guides: Iterable[PackedGuide],
    mapping: KVMapping,
    maker: Maker,
    target: LanguageModel | None,
    *,
    device: torch.device,
    progress: Progress,
) -> Iterator[PackedGuide]:
    """Take each guide through ``mapping`` to ``maker``, when it is asked for; no model reads it.

    Maps are computed on ``device``, or where ``target`` is.

    Raises:
        IncompatibleModels: the mapping is from another model than theirs, or to another than
            ``target``.
        CacheLayoutError: the target cuts text into other tokens.
    """

    def take(guide: PackedGuide) -> PackedGuide:
        if target is not None:
            mapping.check_ends(guide.maker.spec, target.spec)
        if target is None:
            wide = guide.plain().to(dtype=torch.float32, device=device)  # as maps are computed
            made = mapping(wide).to(dtype=DTYPES[maker.spec.dtype])
        else:
            made = mapped(mapping, guide.plain(), target, guide.ids[None])
        check_finite(made)
        how = {
            "how": "mapped",
            "source": guide.maker.spec.name,
            "source_identity": guide.maker.spec.identity,
            "mapping": dict(mapping.settings),
            "mapping_notes": list(mapping.notes),
            "approximate": made.approximate,
        }
        progress(guide.tokens)
        return PackedGuide.given(
            guide.name,
            Told(text=guide.text, made=how | ({"chat": True} if guide.made.get("chat") else {})),
            whole(guide.ids, made),
            tokens=guide.tokens,
            maker=maker,
        )

    return map(take, guides)
