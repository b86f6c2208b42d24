"""Several interventions as one."""

from dataclasses import dataclass
from functools import reduce

from kvtransfer.geometry.cache import KVCache
from kvtransfer.steering.edit import Intervention


@dataclass(frozen=True, slots=True)
class Chain:
    """Steps from left to right."""

    steps: tuple[Intervention, ...]

    def __call__(self, cache: KVCache) -> KVCache:
        """The cache after all steps; the given one stays as it is."""
        return reduce(lambda changed, step: step(changed), self.steps, cache)

    def __str__(self) -> str:
        return "+".join(map(str, self.steps))


def chain(*steps: Intervention) -> Chain:
    """Left to right: ``chain(f, g)(cache)`` is ``g(f(cache))``; no steps is no change.

    Chains of chains are flat, so that ``chain(f, chain(g, h)) == chain(chain(f, g), h)``.
    """
    flat: list[Intervention] = []
    for step in steps:
        flat.extend(step.steps if isinstance(step, Chain) else (step,))
    return Chain(tuple(flat))
