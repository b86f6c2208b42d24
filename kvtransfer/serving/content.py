"""What an engine is given of a guide, in memory of its own, and a digest that no other has."""

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvtransfer.errors import GuideRefused
from kvtransfer.guides.packed import PackedGuide, Prepared
from kvtransfer.hf.fits import check_finite

SALT = "kvtransfer-"


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """Ids, keys and values of a guide, copied out of its file."""

    prepared: Prepared
    digest: str
    """SHA-256 of whom they are for, and of every one of their numbers."""
    approximate: bool
    """Whether they are other numbers than the model's own of these tokens: a mapped guide's are."""

    @classmethod
    def of(cls, guide: PackedGuide) -> "Content":
        """Copy a guide out of its file, and digest the copy.

        What happens to the file after that makes no difference.

        Raises:
            ArtifactError: the file is missing, truncated or changed.
            CacheLayoutError: numbers of it are none.
            GuideRefused: it does not begin at position 0.
        """
        mapped = guide.prepared
        held = replace(mapped, ids=mapped.ids.clone(), cache=mapped.cache.map(torch.clone))
        positions = held.cache.positions[0]
        if not torch.equal(positions, torch.arange(len(positions))):
            raise GuideRefused(
                f"the guide {guide.name!r} is of positions {int(positions[0])} to "
                f"{int(positions[-1])}",
                hint="a prompt's prefix begins at position 0: build the pack from texts",
            )
        check_finite(held.cache)
        made = guide.made
        approximate = made["how"] != "own" or bool(made.get("approximate"))
        return cls(held, _digest(guide, held, approximate), approximate)

    @property
    def salt(self) -> str | None:
        """The ``cache_salt`` of requests that read them; None where they need none.

        Engines find cached blocks again by the ids that they were computed from. Another model's
        numbers under the plain hash of the ids would be read by whoever sends those ids, so they
        go under a hash of their own, one for each content.
        """
        return f"{SALT}{self.digest[:32]}" if self.approximate else None


def _digest(guide: PackedGuide, held: Prepared, approximate: bool) -> str:
    spec = guide.maker.spec
    told = [spec.identity, spec.tokenizer, spec.dtype, approximate]
    digest = hashlib.sha256(json.dumps(told).encode())
    for name, tensor in sorted(held.tensors().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()  # hashlib reads it as it lies
