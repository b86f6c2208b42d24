"""What edits that take from another cache have in common."""

from abc import abstractmethod
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from kvtransfer.errors import IncompatibleModels, SteeringError
from kvtransfer.geometry.cache import Block, KVCache
from kvtransfer.geometry.hidden import filled, plain
from kvtransfer.geometry.join import require_cache
from kvtransfer.steering.edit import SPACES, Edit, Space, require_one_of, turn
from kvtransfer.steering.layers import which


@dataclass(frozen=True, slots=True, eq=False)
class Donated(Edit):
    """Keys and values on the way to those of a donor, column by column.

    The donor may be longer: of a whole run's cache, the first columns are what the run had read by
    then. Where its tokens stand at other positions, its content keys are turned to the cache's, or
    with ``space="cached"`` taken as they are.

    Where one of the two hides a column, it is hidden in what is mixed of both; what is the donor's
    alone hides what the donor hides.
    """

    donor: KVCache
    space: Space = field(default="content", kw_only=True)

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        require_cache(self.donor, "the donor")
        require_one_of("space", self.space, SPACES)

    @property
    @abstractmethod
    def weight(self) -> float:
        """How much of the donor."""

    @property
    def idle(self) -> bool:
        """Nothing of the donor."""
        return self.weight == 0

    def __call__(self, cache: KVCache) -> KVCache:
        """The edited cache; the given one stays as it is.

        Raises:
            SteeringError: the donor is shorter than the cache, of another batch or other shapes,
                or there is no such layer, head or token.
            IncompatibleModels: it is another model's.
        """
        _check(self.donor, cache)
        donor = self.donor.prefix(cache.tokens)
        if donor.keys[0].device != cache.keys[0].device:
            donor = donor.to(device=cache.keys[0].device)
        made = Edit.__call__(replace(self, donor=donor), cache)
        if made is cache or (donor.hidden is None and cache.hidden is None):
            return made
        hidden = list(filled(cache.hidden, cache.keys))
        theirs = filled(donor.hidden, donor.keys)
        for layer in which(self.layers, len(cache)):
            mixed = self.weight != 1 or self.part != "both"
            gone = theirs[layer] | hidden[layer] if mixed else theirs[layer]
            chosen: Bool[Tensor, "h t"] = self.chosen(cache, layer)
            hidden[layer] = torch.where(chosen, gone, hidden[layer])
        return replace(made, hidden=plain(hidden))

    def keys(self, cache: KVCache, layer: int) -> Block:
        """On the way to the donor's, turned as they would be here."""
        theirs = self.donor.keys[layer]
        if self.space == "content" and not _turned_alike(self.donor, cache, layer):
            made, here = turn(self.donor, layer), turn(cache, layer)
            content = theirs if made is None else made.undo(theirs)
            theirs = content if here is None else here.apply(content)
        return torch.lerp(cache.keys[layer], theirs.to(cache.keys[layer]), float(self.weight))

    def values(self, cache: KVCache, layer: int) -> Block:
        """On the way to the donor's."""
        theirs = self.donor.values[layer].to(cache.values[layer])
        return torch.lerp(cache.values[layer], theirs, float(self.weight))


def _turned_alike(donor: KVCache, cache: KVCache, layer: int) -> bool:
    """Whether keys of both are turned by the same angles, so that not a bit needs to change."""
    if donor.keys_are != cache.keys_are:
        return False
    if cache.keys_are == "content":
        return True
    if not bool((donor.positions == cache.positions).all()):
        return False
    theirs, ours = (
        None if each.rotations is None else each.rotations[layer] for each in (donor, cache)
    )
    if theirs is None or ours is None:
        return True
    # At one position, too, tables differ that depend on how long the text was (dynamic, longrope).
    rows = ours.cos.shape[0]
    return theirs.expand(rows).agrees(ours)


def _check(donor: KVCache, cache: KVCache) -> None:
    donor.require_unchanged()
    if donor.model is not None and cache.model is not None and donor.model != cache.model:
        raise IncompatibleModels(
            f"the donor is a cache for {donor.model}, and this is one for {cache.model}",
            hint="map the donor first: mapping(donor)",
        )
    if donor.tokens < cache.tokens or donor.batch not in (1, cache.batch):
        raise SteeringError(
            f"a donor of {donor.batch} rows and {donor.tokens} tokens for a cache of {cache.batch} "
            f"and {cache.tokens}",
            hint="a donor holds a column for each of the cache's, in one row or in as many",
        )
    ours, theirs = (
        [(keys.shape[1::2], values.shape[1::2]) for keys, values in each] for each in (cache, donor)
    )
    if ours != theirs:
        raise SteeringError(
            f"the donor has {len(theirs)} layers, the first of (heads, width) "
            f"{tuple(theirs[0][0])}, and the cache {len(ours)}, the first of {tuple(ours[0][0])}",
            hint="a donor is a cache of the same model",
        )
