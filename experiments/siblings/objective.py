"""What the sibling is asked for: the full model's next-token distribution, and the text's token.

The distribution is kept as its 64 likeliest tokens and one bin for all others, so that it can be
stored and the rows' later rounds need no second pass of the full model.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

KEPT = 64


class Wanted(NamedTuple):
    """The full model's likeliest next tokens at each position of a row."""

    ids: Tensor
    log_chances: Tensor


class FullModel:
    """The full model's distributions, each row's computed once."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Ask ``model``, which is left as it is."""
        self.model = model
        self.known: dict[tuple[str, int], Wanted] = {}

    @torch.inference_mode()
    def of(self, row: tuple[str, int], tokens: Tensor) -> Wanted:
        """Distributions after each token of ``tokens``, which ``row`` names."""
        if row not in self.known:
            logits = self.model(tokens[None], use_cache=False).logits[0, :-1]
            best, ids = logits.topk(KEPT)
            chances = best.float() - logits.float().logsumexp(-1, keepdim=True)
            self.known[row] = Wanted(ids.int(), chances.half())
        return self.known[row]


def losses(logits: Tensor, tokens: Tensor, wanted: list[Wanted]) -> tuple[Tensor, Tensor]:
    """Mean KL from the full model, and mean negative log-likelihood of the text; both in nats."""
    # Clones: what inference mode made may not be saved for a backward pass.
    ids = torch.stack([one.ids for one in wanted]).long().clone()
    full = torch.stack([one.log_chances for one in wanted]).float().clone()
    logits = logits[:, :-1]
    total = logits.float().logsumexp(-1, keepdim=True)
    own = logits.gather(-1, ids).float() - total
    text = logits.gather(-1, tokens[:, 1:, None]).float() - total

    kept = full.exp() * (full - own)
    full_rest, own_rest = _rest(full), _rest(own)
    kl = kept.sum(-1) + full_rest.exp() * (full_rest - own_rest)
    return kl.mean(), -text.mean()


def _rest(log_chances: Tensor) -> Tensor:
    """Log of the chance that no kept token has."""
    # Rounded to 16 bits the kept ones may sum to more than one.
    return torch.log1p(-log_chances.logsumexp(-1).exp().clamp(max=1 - 1e-5))
