"""Read a steering vector off contrastive pairs of prompts.

The mean difference of keys and of values at one token of the prompts, in every layer (cache
steering, Belitsky et al., arXiv:2507.08799). Pairs are read one at a time, and only sums are kept.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from kvtransfer.errors import SteeringError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill
from kvtransfer.report import Provenance
from kvtransfer.steering.contrast import Contrast, Extraction, doubts
from kvtransfer.steering.pairs import Pair, Said, prompt_ids, read_alike
from kvtransfer.steering.vector import CacheVector, Direction


def extract(
    model: LanguageModel,
    pairs: Iterable[Pair | tuple[Said, Said]],
    *,
    at: int = -1,
    chat: bool = False,
    seed: int = 0,
    progress: Callable[[int], None] = lambda pairs: None,
) -> Extraction:
    """The mean of positive minus negative, over any number of pairs.

    The two prompts of a pair may be of different lengths: keys are compared without their rotation.

    Args:
        model: Reads both prompts of every pair.
        pairs: Of prompts, positive first.
        at: The token to look at, from the end: -1 is the last of the prompt.
        chat: Whether a plain text is what a user says, put into the model's chat template.
        seed: Of the control: which pair of every two is turned round.
        progress: Told 1 after each pair.

    Returns:
        A report, with the vector and a control of the same pairs; it is false, and its ``notes``
        say why, where the pairs hardly differ.

    Raises:
        SteeringError: there are no pairs, the two prompts of one are the same up to that token, or
            shorter than it is from the end, or the tokenizer has no chat template.
        CacheLayoutError: a prompt is longer than the model's positions.
    """
    if at >= 0:
        raise ValueError(f"at counts from a prompt's end: -1 is its last token, not {at}")
    sums = {"keys": _Sums(), "values": _Sums()}
    source = torch.Generator().manual_seed(seed)
    tokens = differing = number = sign = 0
    for number, pair in enumerate(pairs, 1):
        said = (pair.positive, pair.negative) if isinstance(pair, Pair) else pair
        positive, negative = (prompt_ids(model, each, chat=chat) for each in said)
        _check(positive, negative, at, number)
        # One of every two is turned round: whatever all pairs share cancels out.
        sign = int(torch.randint(2, (), generator=source)) * 2 - 1 if number % 2 else -sign
        have, lack = (_token(prefill(model, ids[None]), at) for ids in (positive, negative))
        for kind, each in sums.items():
            each.add(getattr(have, kind), getattr(lack, kind), sign)
        tokens += len(positive) + len(negative)
        differing += int(positive[at] != negative[at])
        progress(1)
    if number == 0:
        raise SteeringError(
            "no pairs to read a vector off", hint="give at least one positive and negative prompt"
        )
    found = {kind: each.contrast() for kind, each in sums.items()}
    provenance = Provenance.here(seed=seed)
    made = {"pairs": number, "chat": chat}
    notes = (*doubts(found, number), *_ends(differing, number, at))
    vector, flipped = (
        CacheVector(
            keys=_blocks(getattr(sums["keys"], which) / number, model.spec, "key_dim"),
            values=_blocks(getattr(sums["values"], which) / number, model.spec, "value_dim"),
            spec=model.spec,
            at=at,
            made=made | {"how": how},
            provenance=provenance.to_dict(),
            notes=said,
        )
        for which, how, said in (
            ("total", "mean difference", notes),
            ("flipped", "mean difference, half of the pairs turned round", ("a control",)),
        )
    )
    return Extraction(
        vector=vector,
        flipped=flipped,
        pairs=number,
        tokens=tokens,
        keys=found["keys"],
        values=found["values"],
        notes=notes,
        provenance=provenance,
    )


@dataclass(slots=True)
class _Sums:
    """Of keys, or of values: how pairs differ, all layers end to end, in double precision."""

    total: Float[Tensor, " _n"] = field(default_factory=lambda: torch.zeros(1).double())
    flipped: Float[Tensor, " _n"] = field(default_factory=lambda: torch.zeros(1).double())
    """The same with a sign for each pair."""
    apart: float = 0.0
    """Lengths of the differences."""
    squares: float = 0.0
    size: float = 0.0
    """Lengths of what they are the differences of."""
    pairs: int = 0

    def add(self, have: Float[Tensor, " n"], lack: Float[Tensor, " n"], sign: int) -> None:
        difference = have - lack
        length = difference.norm().item()
        self.total = self.total + difference
        self.flipped = self.flipped + sign * difference
        self.apart += length
        self.squares += length**2
        self.size += (have.norm().item() + lack.norm().item()) / 2
        self.pairs += 1

    def contrast(self) -> Contrast:
        apart = self.apart or 1.0  # no difference at all agrees in nothing
        return Contrast(
            size=self.apart / (self.size or 1.0),
            agreement=self.total.norm().item() / apart,
            chance=self.squares**0.5 / apart,
            length=self.total.norm().item() / self.pairs,
        )


@dataclass(frozen=True, slots=True)
class _Token:
    """Content keys and values of one token, all layers end to end, in double precision."""

    keys: Float[Tensor, " n"]
    values: Float[Tensor, " n"]


def _token(cache: KVCache, at: int) -> _Token:
    content = cache.to(dtype=torch.float32).content()
    keys, values = (
        torch.cat([block[0, :, at].double().flatten().cpu() for block in blocks])
        for blocks in (content.keys, content.values)
    )
    return _Token(keys, values)


def _blocks(flat: Float[Tensor, " n"], spec: ModelSpec, width: str) -> tuple[Direction, ...]:
    shapes = [(layer.kv_heads, int(getattr(layer, width))) for layer in spec.layers]
    pieces = flat.float().split([heads * dims for heads, dims in shapes])
    return tuple(piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True))


def _check(positive: Tensor, negative: Tensor, at: int, number: int) -> None:
    shortest = min(len(positive), len(negative))
    if shortest < -at:
        raise SteeringError(
            f"pair {number}: a prompt of {shortest} tokens has no token {at}",
            hint="look at a token nearer to the end (--at -1 is the last)",
        )
    if read_alike(positive, negative, at):
        raise SteeringError(
            f"pair {number}: both prompts are the same {len(positive) + at + 1} tokens up to the "
            "one that is looked at",
            hint="give two prompts that differ in what the vector is to steer towards",
        )


def _ends(differing: int, pairs: int, at: int) -> Iterator[str]:
    if differing:
        yield (
            f"in {differing} of {pairs} pairs token {at} is not the same on both sides: the vector "
            "is also of those tokens' difference"
        )
