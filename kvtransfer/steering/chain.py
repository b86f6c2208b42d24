"""Several interventions as one."""

from dataclasses import dataclass
from functools import reduce

from kvtransfer.errors import WrongKind, require
from kvtransfer.geometry.cache import KVCache
from kvtransfer.steering.edit import Intervention

STEP = "any function from a KVCache to a new one, as dataclasses.replace(cache, values=…) makes"


@dataclass(frozen=True, slots=True)
class Chain:
    """Steps from left to right."""

    steps: tuple[Intervention, ...]

    def __call__(self, cache: KVCache) -> KVCache:
        """The cache after all steps; the given one stays as it is."""
        return reduce(_after, self.steps, cache)

    def __str__(self) -> str:
        return "+".join(map(str, self.steps))


def _after(cache: KVCache, step: Intervention) -> KVCache:
    made = step(cache)
    require(f"what {step} made", made, KVCache, "a cache", hint=STEP)
    return made


def chain(*steps: Intervention) -> Chain:
    """Left to right: ``chain(f, g)(cache)`` is ``g(f(cache))``; no steps is no change.

    Chains of chains are flat, so that ``chain(f, chain(g, h)) == chain(chain(f, g), h)``.

    Raises:
        WrongKind: a step is no intervention, nor any other function from a cache to a cache.
    """
    flat: list[Intervention] = []
    for step in steps:
        if not callable(step):
            raise WrongKind("a step", step, "an edit of a cache", hint=STEP)
        flat.extend(step.steps if isinstance(step, Chain) else (step,))
    return Chain(tuple(flat))
