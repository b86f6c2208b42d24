"""What the target's attention makes of a mapping, on a few windows: recorded when it is fitted.

Beside the cosine stands that of the shuffled control, which knows the average token and nothing
else: how near it comes depends on the target, whose heads may rest on a sink or read much the same
everywhere, and without it no cosine says whether it is a high one.

This module knows nothing of what is enough; see :mod:`kvtransfer.fitting.gate`.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.transfer import mapped
from kvtransfer.hf.aligned import alignable_start, read_aligned
from kvtransfer.hf.attention import attention_outputs
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill
from kvtransfer.measures.agreement import cosine

COSINE = "held-out attention cosine"
"""Its name in a mapping's quality: over layers, heads and tokens, mapped against own."""

CONTROL = "held-out attention cosine, shuffled"
"""The same of the shuffled control."""

LOOKED_AT = 6
"""Windows at most."""


def seen(
    mapping: KVMapping,
    source: LanguageModel,
    target: LanguageModel,
    windows: Sequence[Int[Tensor, " _t"]],
) -> dict[str, float]:
    """The cosines of a mapping and of its control, by their names in its quality.

    Args:
        mapping: From ``source`` to ``target``.
        source: Makes the caches.
        target: Reads them.
        windows: Its token ids, which the mapping was not fitted on; the first half of each is the
            prefix, the second looks back at it.

    Returns:
        Nothing where no layer goes through transformers' attention interface, or numbers overflow;
        without the control's where the mapping has none.
    """
    found: dict[str, list[Tensor]] = {}
    for ids in windows[:LOOKED_AT]:
        half = alignable_start(source, target, ids, at_most=len(ids) // 2)
        hidden, live = ids[None].split([half, len(ids) - half], dim=1)
        read = read_aligned(source, target, hidden)
        others = {COSINE: mapped(mapping, read, target, hidden)}
        if mapping.shuffled:
            others[CONTROL] = mapped(mapping, read, target, hidden, shuffled=True)
        _, cosines = attention_outputs(target, live, prefill(target, hidden), others, cosine)
        for name, layers in cosines.items():
            found.setdefault(name, []).append(layers)
    means = {name: float(torch.stack(rows).nanmean()) for name, rows in found.items()}
    return {name: round(mean, 4) for name, mean in means.items() if mean == mean}
