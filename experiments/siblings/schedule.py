"""The learning rate of a run that makes a sibling."""

import math


def rate(step: int, *, steps: int, warmup: int, highest: float, least: float) -> float:
    """Learning rate of a step: a linear warm-up, then a cosine down to ``least`` of the highest."""
    if step < warmup:
        return highest * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return highest * (least + (1 - least) * cosine)
