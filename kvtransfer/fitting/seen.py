"""What the target makes of a mapping, on a few held-out windows: recorded when it is fitted.

What it predicts: how much of the KL to its own predictions, that having no prefix costs, the mapped
one takes away. And what its attention returns: beside the cosine stands that of the shuffled
control, which knows the average token and nothing else. How near that comes depends on the target,
whose heads may rest on a sink or read much the same everywhere, and without it no cosine says
whether it is a high one.

This module knows nothing of what is enough; see :mod:`kvtransfer.fitting.gate`.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.transfer import mapped
from kvtransfer.hf.aligned import alignable_start, read_aligned
from kvtransfer.hf.attention import attention_outputs
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score
from kvtransfer.measures.agreement import cosine, kl

COSINE = "held-out attention cosine"
"""Its name in a mapping's quality: over layers, heads and tokens, mapped against own."""

CONTROL = "held-out attention cosine, shuffled"
"""The same of the shuffled control."""

KL = "held-out KL taken away"
"""What a mapped prefix takes away of the KL to own that no prefix leaves, as a share."""

LOOKED_AT = 6
"""Windows at most."""


def seen(
    mapping: KVMapping,
    source: LanguageModel,
    target: LanguageModel,
    windows: Sequence[Int[Tensor, " _t"]],
) -> dict[str, float]:
    """What there is to know of a mapping, by its names in its quality.

    Args:
        mapping: From ``source`` to ``target``.
        source: Makes the caches.
        target: Reads them.
        windows: Its token ids, which the mapping was not fitted on; the first half of each is the
            prefix, the second looks back at it.

    Returns:
        Without cosines where no layer goes through transformers' attention interface, without the
        control's where the mapping has none, and without what overflowed.
    """
    cosines: dict[str, list[Tensor]] = {}
    lost: dict[str, list[Tensor]] = {"mapped": [], "none": []}
    opening = target.opening
    none = prefill(target, opening[None]) if len(opening) else None
    for ids in windows[:LOOKED_AT]:
        half = alignable_start(source, target, ids, at_most=len(ids) // 2)
        hidden, live = ids[None].split([half, len(ids) - half], dim=1)
        read = read_aligned(source, target, hidden)
        others = {COSINE: mapped(mapping, read, target, hidden)}
        if mapping.shuffled:
            others[CONTROL] = mapped(mapping, read, target, hidden, shuffled=True)
        own, found = attention_outputs(target, live, prefill(target, hidden), others, cosine)
        for name, layers in found.items():
            cosines.setdefault(name, []).append(layers)
        for name, prefix in (("mapped", others[COSINE]), ("none", none)):
            lost[name].append(kl(own[0], score(target, live, prefix)[0]).mean())
    means = {name: float(torch.stack(rows).nanmean()) for name, rows in cosines.items()}
    if windows:
        ours, all_ = (float(torch.stack(lost[name]).mean()) for name in ("mapped", "none"))
        means[KL] = 1 - ours / all_ if all_ else math.nan
    return {name: round(mean, 4) for name, mean in means.items() if math.isfinite(mean)}
