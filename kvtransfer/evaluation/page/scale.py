"""Round numbers for an axis."""

import math
from collections.abc import Sequence

from kvtransfer.report import Estimate


def scale(estimates: Sequence[Estimate]) -> tuple[float, float, float]:
    """A low and a high end that hold all values and intervals, and a round step between."""
    ends = [
        x for e in estimates for x in (e.value, e.low, e.high) if x is not None and math.isfinite(x)
    ] or [0.0]
    low, high = min(ends), max(ends)
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if span / (power * m) <= 4.5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return first * step, max(last, first + 1) * step, step


def digits(step: float, form: str) -> str:
    """As many digits as tell the levels apart."""
    if form.endswith("%"):
        return form
    return f".{max(0, -math.floor(math.log10(step) + 1e-9) + (f'{step:e}'[:3] == '2.5'))}f"
