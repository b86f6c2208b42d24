"""A mapping seen by the target's attention: errors of every layer and head, measured.

R² says how large an error is; behaviour depends on whether attention looks there. So beside R²
stand the cosine of what attention returns, and how concentrated the error is where it looks.

This module knows nothing of what the numbers mean together;
see :mod:`kvtransfer.fitting.diagnosis`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from kvtransfer.errors import TextError
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.diagnosis import Control, Diagnosis, Heads, LayerDiagnosis
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.transfer import transfer
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.aligned import Alignable
from kvtransfer.hf.attention import Look, attention_heads, looks
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill
from kvtransfer.measures.agreement import cosine
from kvtransfer.measures.concentration import key_concentration, value_concentration
from kvtransfer.measures.intervals import Column, mean
from kvtransfer.report import Provenance


def diagnose(
    mapping: KVMapping,
    source: LanguageModel,
    target: LanguageModel,
    texts: Iterable[str],
    *,
    prefix: int = 256,
    continuation: int = 64,
    items: int = 4,
    progress: Callable[[int], None] = lambda items: None,
) -> Diagnosis:
    """Look at a mapping through the target's attention, layer by layer and head by head.

    Windows are cut as :func:`kvtransfer.evaluation.evaluate.evaluate` cuts them: the prefix's
    last token is run live. Queries are those of the target on its own prefix.

    Args:
        mapping: From ``source`` to ``target``.
        source: Makes the caches.
        target: Reads them.
        texts: Documents that the mapping was not fitted on.
        prefix: Tokens of a window that are hidden (the last of them is run live).
        continuation: Tokens of a window whose queries look back.
        items: Windows at most.
        progress: Told the number of windows after each.

    Raises:
        IncompatibleModels: the mapping is for another pair, or the other way round.
        TextError: the text is shorter than one window.
    """
    if prefix < 2 or continuation < 1 or items < 1:
        raise ValueError(f"{prefix=}, {continuation=}, {items=}: at least 2, 1 and 1 are needed")
    mapping.check_ends(source.spec, target.spec)
    control: Control = "shuffled" if mapping.shuffled else "zeroed"
    depth = len(target.spec.layers)
    tallies = {name: [_Tally() for _ in range(depth)] for name in ("mapped", control)}
    done = 0
    windows = chunks(texts, target.encode, length=prefix + continuation, opening=target.opening)
    for ids in islice(Alignable(source, target, windows, hidden=prefix - 1), items):
        hidden, live = ids[None, : prefix - 1], ids[None, prefix - 1 : -1]
        own = prefill(target, hidden)
        others = {
            "mapped": transfer(mapping, source, target, hidden),
            control: transfer(mapping, source, target, hidden, shuffled=True)
            if mapping.shuffled
            else own.map(torch.zeros_like),
        }
        _, cosines = attention_heads(target, live, own, others, cosine)
        seen = looks(target, live, own)
        for name, other in others.items():
            for tally, was, now, look, heads in zip(
                tallies[name], _layers(own), _layers(other), seen, cosines[name], strict=True
            ):
                tally.add(was, now, look, heads)
        done += 1
        progress(1)
    if not done:
        raise TextError("there is no text to diagnose on", hint="give a text with prose in it")
    cosines_of = {name: _over_items(each) for name, each in tallies.items()}
    ours, theirs = cosines_of["mapped"], cosines_of[control]
    return Diagnosis(
        source=source.spec.name,
        target=target.spec.name,
        layers=tuple(
            LayerDiagnosis(target=i, sources=read, mapped=a.heads(), control=b.heads())
            for i, (read, a, b) in enumerate(
                zip(_sources(mapping, depth), tallies["mapped"], tallies[control], strict=True)
            )
        ),
        control=control,
        cosine=None if ours is None else mean(ours),
        margin=None if ours is None or theirs is None else mean(ours - theirs),
        items=done,
        prefix=prefix,
        continuation=continuation,
        notes=mapping.notes,
        provenance=Provenance.here(seed=int(mapping.settings.get("seed", 0))),
    )


def _sources(mapping: KVMapping, depth: int) -> list[tuple[int, ...]]:
    """What each target layer is read from; nothing for those that a start runs."""
    read = [layer.sources for layer in mapping.layers]
    return [()] * (depth - len(read)) + read


class _Layer(NamedTuple):
    """One layer of one sequence's cache, in float32."""

    keys: Float[Tensor, "h t d"]
    content: Float[Tensor, "h t d"]
    """Its keys without their rotation."""
    values: Float[Tensor, "h t e"]


def _layers(cache: KVCache) -> Iterator[_Layer]:
    wide = cache.to(dtype=torch.float32)
    for keys, content, values in zip(wide.keys, wide.content().keys, wide.values, strict=True):
        yield _Layer(keys[0], content[0], values[0])


class _Tally:
    """Sums over items for one layer; R² is of all their tokens together."""

    def __init__(self) -> None:
        self.keys, self.values = _Explained(), _Explained()
        self.cosines: list[Tensor] = []
        self.of_keys: list[Tensor] = []
        self.of_values: list[Tensor] = []

    def add(
        self, own: _Layer, other: _Layer, look: Look | None, cosines: Float[Tensor, " g"] | None
    ) -> None:
        """Take in one item."""
        self.keys.add(own.content, other.content)
        self.values.add(own.values, other.values)
        if look is None or cosines is None:
            return
        heads, tokens = own.keys.shape[:2]
        # The query heads that read one KV head stand next to each other.
        queries = rearrange(look.query[0], "(h g) s d -> h (g s) d", h=heads)
        weights = rearrange(look.weights[0], "(h g) s t -> h (g s) t", h=heads)[..., :tokens]
        self.cosines.append(cosines.view(heads, -1).mean(1))
        self.of_keys.append(key_concentration(_error(own.keys, other.keys), queries).cpu())
        self.of_values.append(value_concentration(_error(own.values, other.values), weights).cpu())

    def heads(self) -> Heads:
        """All items together."""
        r2_keys, r2_values = self.keys.r2(), self.values.r2()
        unseen = [torch.full_like(r2_keys, float("nan"))]
        cosine, of_keys, of_values = (
            torch.stack(found or unseen).mean(0)
            for found in (self.cosines, self.of_keys, self.of_values)
        )
        return Heads(
            r2_keys=tuple(r2_keys.tolist()),
            r2_values=tuple(r2_values.tolist()),
            cosine=tuple(cosine.tolist()),
            key_concentration=tuple(of_keys.tolist()),
            value_concentration=tuple(of_values.tolist()),
        )


class _Explained:
    """How much of each head's variance is explained, over any number of items, in float64."""

    def __init__(self) -> None:
        self.n = 0
        self.sum = self.squares = self.lost = torch.zeros(())

    def add(self, own: Float[Tensor, "h t d"], other: Float[Tensor, "h t d"]) -> None:
        """Take in the tokens of one item."""
        own, other = own.cpu().double(), other.cpu().double()
        self.n += own.shape[1]
        self.sum = self.sum + own.sum(1)
        self.squares = self.squares + own.square().sum((1, 2))
        self.lost = self.lost + (other - own).square().sum((1, 2))

    def r2(self) -> Float[Tensor, " h"]:
        """A head that does not vary has R² 1 if it is predicted exactly, else 0."""
        total = self.squares - self.sum.square().sum(1) / self.n
        still = total <= 1e-12 * self.squares
        exact = (self.lost <= 1e-12 * self.squares).double()
        return torch.where(still, exact, 1 - self.lost / torch.where(still, 1.0, total))


def _error(own: Float[Tensor, "h t d"], other: Float[Tensor, "h t d"]) -> Float[Tensor, "h t d"]:
    """What is wrong with each head. Float rounding is nothing, and lies nowhere."""
    error = other - own
    lost, whole = (each.square().sum((1, 2), keepdim=True) for each in (error, own))
    return torch.where(lost > 1e-10 * whole, error, 0.0)


def _over_items(tallies: Sequence[_Tally]) -> Column | None:
    """The mean cosine of each item over the layers that were seen and their heads."""
    seen = [torch.stack(tally.cosines).mean(1) for tally in tallies if tally.cosines]
    if not seen:
        return None
    column: Column = torch.stack(seen).mean(0).double().numpy()
    return column
