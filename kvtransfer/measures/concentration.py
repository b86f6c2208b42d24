"""Whether the error of a prefix sits where attention looks. No models here, only tensors.

Both measures have no unit. 1 means that the error is spread as if attention did not exist; 3, that
it weighs three times as much as its size says; 0, that attention never meets it. Axes: ``h`` KV
head, ``t`` prefix token, ``s`` query (of all query heads that read the KV head), ``d`` width.
"""

from jaxtyping import Float
from torch import Tensor


def key_concentration(
    error: Float[Tensor, "h t d"], queries: Float[Tensor, "h s d"]
) -> Float[Tensor, " h"]:
    """How much more of the keys' error lies in the directions of the queries than evenly spread.

    With E the errors of a head's keys (t × d), Q its queries (s × d) and Q = U·diag(σ)·Vᵀ::

        d · Σᵢ σᵢ² ‖E vᵢ‖² / (Σᵢ σᵢ² · Σᵢ ‖E vᵢ‖²)  =  d · tr(EᵀE · QᵀQ) / (‖E‖² · ‖Q‖²)

    The energy of the error along each right singular vector of the queries, weighted by the
    squared singular value, over what the mean energy would give (arXiv:2608.03893, §4.5). It is
    the squared error of all scores q·k over that of an isotropic error of the same size, and lies
    between 0 and d. A head without error, or without queries, is NaN.

    Args:
        error: Mapped keys less own, both cached: rotated, as attention sees them.
        queries: Rotated as well.

    A shift of all keys alike adds one number to all scores, which softmax ignores; this measure,
    like the paper's, does not.
    """
    error, queries = error.float(), queries.float()
    met = (error @ (queries.mT @ queries) * error).sum((-2, -1))
    return error.shape[-1] * met / (_energy(error) * _energy(queries))


def value_concentration(
    error: Float[Tensor, "h t d"], weights: Float[Tensor, "h s t"]
) -> Float[Tensor, " h"]:
    """How much larger the values' error is on the tokens that attention reads than on the average.

    With e_t the error of token t's value and p_st the attention that query s gives it::

        Σ_t w_t ‖e_t‖² / Σ_t w_t  over  Σ_t ‖e_t‖² / t,    w_t = Σ_s p_st²

    (arXiv:2608.03893, §4.5). Squared, because that is how errors that are independent from token
    to token add up in Σ_t p_st e_t. A head without error, or without attention, is NaN. A head
    that rests on a sink, such as the first token, gives that token most of the weight: mapped
    well there, it is near 0 whatever its other tokens are.

    Args:
        error: Mapped values less own.
        weights: Attention to the prefix's tokens; rows may sum to less than one.
    """
    lost, received = error.float().square().sum(-1), weights.float().square().sum(-2)
    return (received * lost).sum(-1) / received.sum(-1) / lost.mean(-1)


def _energy(rows: Float[Tensor, "h n d"]) -> Float[Tensor, " h"]:
    return rows.square().sum((-2, -1))
