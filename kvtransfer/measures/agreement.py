"""How near one model's next-token distributions are to another's, or to the truth.

All of it in float32 and in nats, one number a token.
"""

from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

Number = TypeVar("Number", float, NDArray[np.float64])


def nll(logits: Float[Tensor, "t v"], ids: Int[Tensor, " t"]) -> Float[Tensor, " t"]:
    """Negative log-likelihood of each id under the logits that predict it."""
    chosen = logits.float().log_softmax(-1).gather(-1, ids[:, None])
    return -chosen[:, 0]


def kl(own: Float[Tensor, "t v"], other: Float[Tensor, "t v"]) -> Float[Tensor, " t"]:
    """KL(own ‖ other): the nats lost by predicting with ``other`` what ``own`` would predict."""
    p, q = own.float().log_softmax(-1), other.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def top1_agreement(own: Float[Tensor, "t v"], other: Float[Tensor, "t v"]) -> Bool[Tensor, " t"]:
    """Whether both rank the same token first."""
    return own.argmax(-1) == other.argmax(-1)


def cosine(a: Float[Tensor, "*shape d"], b: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape"]:
    """Cosine of the angle along the last axis; 0 where either is zero."""
    return torch.nn.functional.cosine_similarity(a, b, dim=-1)


def cosine_gain(cosine: Number, control: Number) -> Number:
    """What a cosine is above its control's, as a share of what that lacks to 1.

    0 where it is no better, 1 where it is exact. A control near 1 leaves little to gain, and makes
    of a small difference what it is there.
    """
    return (cosine - control) / (1 - control)
