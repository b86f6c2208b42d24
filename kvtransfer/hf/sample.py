"""Let a model write: documents of its own, from their first token to their end.

This module does not know what the text is for.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from kvtransfer.errors import UnsupportedModel
from kvtransfer.hf.call import call
from kvtransfer.hf.fits import check_ids
from kvtransfer.hf.model import LanguageModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a token is drawn from the logits.

    ``Sampling(first_temperature=1.0, floor=0.0)`` draws from the model's own distribution.
    """

    temperature: float = 1.0
    first_temperature: float = 2.0
    """Of a document's first token. It decides what the rest is about, and a model may have a
    favourite: at 1, SmolLM2-135M-Instruct begins 37 documents of 100 with a hyphen."""
    floor: float = 0.003
    """Tokens below this share of the likeliest one's chance are not drawn (min-p). In what
    SmolLM2-135M-Instruct writes they have 9 % of all chance together: at 0 a misfit every dozen
    tokens turns its prose into debris, and from 0.01 on it repeats itself."""

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and self.first_temperature > 0):
            raise ValueError(
                f"temperatures are positive, not {self.temperature} and {self.first_temperature}"
            )
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor is a share from 0 to 1, not {self.floor}")

    def choose(
        self, logits: Float[Tensor, "b v"], uniform: Float[Tensor, " b"], *, first: bool = False
    ) -> Int[Tensor, " b"]:
        """A token a row, by inverting the distribution at ``uniform`` (from 0, below 1)."""
        temperature = self.first_temperature if first else self.temperature
        chances = (logits / temperature).softmax(dim=-1)
        likely = chances >= self.floor * chances.amax(dim=-1, keepdim=True)
        mass = (chances * likely).double().cumsum(dim=-1)
        # The first token whose cumulated mass is beyond the number; one without mass never is.
        return torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True)[:, 0]


def sample(
    model: LanguageModel,
    documents: int,
    *,
    length: int,
    random: torch.Generator,
    sampling: Sampling | None = None,
) -> tuple[Int[Tensor, " t"], ...]:
    """Token ids of ``documents`` texts that ``model`` writes, side by side in one batch.

    Each begins after the model's start of a document, which is left out, holds at least one token,
    and ends before a special token or after ``length`` tokens. The same state of ``random`` gives
    the same texts, on one machine.

    Args:
        model: Writes.
        documents: How many.
        length: Tokens, at most. Fewer where the model's positions end, or its RoPE table changes.
        random: A generator on the CPU, wherever the model is.
        sampling: How tokens are drawn.

    Raises:
        UnsupportedModel: the tokenizer marks neither the start nor the end of a text, or the
            logits are not finite.
    """
    if documents < 1 or length < 1:
        raise ValueError(f"{documents} documents of {length} tokens are none")
    model.require_as_wrapped()
    sampling = sampling or Sampling()
    ends = text_ends(model)
    step = torch.full((documents, 1), start_token(model))
    check_ids(model, step)
    cache = DynamicCache()  # plain layers: they keep every token, also where the model has windows
    writing = torch.arange(documents)
    written: list[list[int]] = [[] for _ in range(documents)]
    for position in range(min(length, _room(model))):
        logits = _next_logits(model, step, cache, position)
        if position == 0:
            logits[:, ends[ends < logits.shape[1]]] = -torch.inf  # an empty document is none
        # A number for every document, also those that ended: none depends on the others' ends.
        uniform = torch.rand(documents, generator=random)[writing]
        drawn = sampling.choose(logits, uniform, first=position == 0)
        going = torch.isin(drawn, ends, invert=True).nonzero()[:, 0]
        if len(going) < len(drawn):
            writing, drawn = writing[going], drawn[going]
            cache.batch_select_indices(going.to(model.device))
        for row, token in zip(writing.tolist(), drawn.tolist(), strict=True):
            written[row].append(token)
        if not len(going):
            break
        step = drawn[:, None]
    return tuple(torch.tensor(ids) for ids in written)


def start_token(model: LanguageModel) -> int:
    """The id that stands before a document: the beginning of sequence, or else the end of one.

    Raises:
        UnsupportedModel: the tokenizer has neither.
    """
    for token in (model.tokenizer.bos_token_id, model.tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    raise UnsupportedModel(
        f"the tokenizer of {model.spec.name} marks neither the start nor the end of a text, so "
        "nothing asks the model for one",
        hint="give text of another origin, such as 'builtin'",
    )


def _next_logits(
    model: LanguageModel, step: Tensor, cache: DynamicCache, position: int
) -> Float[Tensor, "b v"]:
    """What to draw the token after ``step`` from."""
    device = model.device
    positions = torch.full_like(step, position, device=device)
    mask = torch.ones(len(step), position + 1, dtype=torch.long, device=device)
    with torch.no_grad():
        output = call(model.module, step.to(device), cache, positions, mask, logits_to_keep=1)
    return drawable(model, output.logits[:, -1])


def drawable(model: LanguageModel, logits: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
    """A copy to draw from: in float32 on the CPU, where sums have one order, as they have not on
    every accelerator, and without rows that only fill up the embedding.

    Raises:
        UnsupportedModel: the logits are not finite.
    """
    logits = logits.to("cpu", torch.float32, copy=True)
    if not bool((logits < torch.inf).all()):  # NaN is not below it either
        raise UnsupportedModel(
            f"{model.spec.name} in {model.spec.dtype} has logits that are not finite",
            hint="they overflow in float16: choose --dtype bfloat16 or float32",
        )
    logits[:, len(model.tokenizer) :] = -torch.inf
    return logits


def _room(model: LanguageModel) -> int:
    """Tokens that can be written one by one on top of the start of a document."""
    # Dynamic and longrope turn later tokens by another table than the cached ones were turned by.
    fixed = (layer.rotation.fixed_up_to for layer in model.spec.layers if layer.rotation)
    limits = [limit for limit in (model.max_positions, *fixed) if limit is not None]
    return min(limits, default=1 << 30)


def text_ends(model: LanguageModel) -> Int[Tensor, " n"]:
    """Tokens after which another text begins, or a turn of a conversation: text holds none."""
    tokenizer = model.tokenizer
    ends = getattr(getattr(model.module, "generation_config", None), "eos_token_id", None)
    added = tokenizer.added_tokens_decoder.items()
    return torch.tensor(
        sorted(
            {
                *([ends] if isinstance(ends, int) else ends or ()),
                *tokenizer.all_special_ids,
                *(index for index, token in added if token.special),
            }
        ),
        dtype=torch.long,
    )
