"""Read a sibling's cache: most layers as they are, a group of them computed anew.

After DroidSpeak (arXiv:2411.02820): models of one architecture, fine-tuned apart, can read each
other's caches in most layers. A contiguous group that matters is recomputed for all tokens, from
the state that entered it when the sibling read the text; which group, a profile says once a pair
(:mod:`kvtransfer.guides.group_profile`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, IncompatibleModels
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.spec import same_tokens
from kvtransfer.hf.fits import check_fits
from kvtransfer.hf.group import ELSE, read_group
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.part import State
from kvtransfer.hf.start import prefill_with_states, state_width


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """Layers ``first`` to ``last``, both included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise ValueError(f"layers {self.first} to {self.last} are no group")

    def __len__(self) -> int:
        """Number of layers."""
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.first}–{self.last}"


def lend(
    source: LanguageModel,
    target: LanguageModel,
    ids: Int[Tensor, "b t"],
    *,
    layers: Sequence[int] = (),
) -> tuple[KVCache, dict[int, State]]:
    """A prefix as ``source`` reads it, in the name of ``target``, and what entered some layers.

    The cache says that it is approximate. Nothing promises that it works; measure it.

    Args:
        source: Reads ``ids``.
        target: A sibling: same layers, heads, widths and RoPE.
        ids: The prefix.
        layers: Whose entering state is to be kept.

    Raises:
        CacheLayoutError: there is nothing to read, or the two are not shaped alike.
        IncompatibleModels: they read other tokens, or states of another width.
        UnsupportedModel: the source's layers cannot be told apart.
    """
    if not same_tokens(source.spec, target.spec):
        raise IncompatibleModels(
            f"{source.spec.name} reads other tokens than {target.spec.name}",
            hint="siblings share a tokenizer; between other models, fit a mapping",
        )
    read, states = prefill_with_states(source, ids, layers, otherwise=ELSE)
    cache = replace(
        read.to(dtype=target.dtype, device=target.device),
        model=target.spec.identity,
        approximate=f"read by {source.spec.name}",
    )
    check_fits(target, cache)
    widths = [state_width(each.module.config) for each in (source, target)]
    if layers and widths[0] != widths[1]:
        raise IncompatibleModels(
            f"what enters a layer of {source.spec.name} is {widths[0]} numbers a token, and "
            f"{widths[1]} in {target.spec.name}",
            hint="a state can only be handed on between siblings of one width",
        )
    return cache, states


def recompute_group(
    model: LanguageModel,
    ids: Int[Tensor, "b t"],
    cache: KVCache,
    state: State | None,
    group: Group,
) -> KVCache:
    """``cache`` with a group of layers computed anew for all tokens.

    A group of n layers costs n − 1 of them and a projection. All layers together, from the
    embeddings, are a prefill.

    Args:
        model: Whose layers run, and who is to read the cache.
        ids: The tokens that ``cache`` holds, at positions 0 to t − 1.
        cache: As ``model`` can read it.
        state: What entered the group's first layer when the cache was made; None for the embeddings
            of ``ids``, which enter layer 0.
        group: Layers of ``model``.

    Raises:
        CacheLayoutError, IncompatibleModels: the cache is not ``model``'s, or not of these tokens.
        UnsupportedModel: the model's layers cannot be told apart.
        ValueError: the model has no such layers, or a state is missing.
    """
    check_fits(model, cache)
    cache.require_plain("recomputed")
    expected = torch.arange(ids.shape[1], device=cache.positions.device).expand(len(ids), -1)
    if not torch.equal(cache.positions, expected):
        raise CacheLayoutError(
            f"a cache of positions {_ends(cache.positions)} for {ids.shape[1]} tokens from 0 on",
            hint="recompute layers of a prefix where it was read, and move it afterwards",
        )
    made = read_group(model, ids, state, first=group.first, last=group.last)
    blocks = [*cache]
    blocks[group.first : group.last + 1] = made
    keys, values = zip(*blocks, strict=True)
    whole = len(group) == len(cache) and state is None
    remark = None
    if cache.approximate is not None and not whole:
        remark = f"{cache.approximate}; layers {group} recomputed"
    return replace(cache, keys=keys, values=values, approximate=remark)


def reuse(
    source: LanguageModel, target: LanguageModel, ids: Int[Tensor, "b t"], group: Group | None
) -> KVCache:
    """The target's cache of ``ids``, read by ``source`` but for one group of layers.

    Args:
        source: Reads the text.
        target: Its sibling, that will go on from it.
        ids: The prefix.
        group: Layers that the target computes itself; None for none.

    Raises:
        CacheLayoutError, IncompatibleModels, UnsupportedModel, ValueError: as :func:`lend` and
            :func:`recompute_group`.
    """
    if group is None:
        return lend(source, target, ids)[0]
    cache, states = lend(source, target, ids, layers=(group.first,))
    return recompute_group(target, ids, cache, states[group.first], group)


def _ends(positions: Tensor) -> str:
    """Where a row of positions begins and ends."""
    row = positions[0].tolist() if len(positions) else []
    return f"{row[0]} to {row[-1]}" if row else "none"
