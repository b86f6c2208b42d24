"""Let a model answer one prompt in several ways at once: one row for each edit of its cache.

A cache holds no logits. Where the steered token is a prompt's last, what is read on top of it is
therefore the answer's first token, which the prompt as it is decides, as after a prefill that is
edited once it is done; or some text that is put there, a line break in the paper's own runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import SteeringError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import stack
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.reader import Reader
from kvtransfer.hf.run import end_tokens, prefill, score
from kvtransfer.hf.sample import Sampling
from kvtransfer.steering.pairs import Said, prompt_ids


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Start:
    """A prompt that was read up to the token that is to be steered."""

    prefix: KVCache
    """That token is its last."""
    live: Int[Tensor, " s"]
    """What is read on top of it."""
    answered: int
    """How many of the live tokens are the answer's."""

    @classmethod
    def of(
        cls, model: LanguageModel, said: Said, *, at: int = -1, chat: bool = False, after: str = ""
    ) -> "Start":
        """Read a prompt.

        Args:
            model: Reads it.
            said: The prompt, as :func:`kvtransfer.steering.pairs.prompt_ids` takes it.
            at: The token that is to be steered, from the prompt's end.
            chat: Whether a plain text is what a user says.
            after: Text to put after the prompt; without it and where ``at`` is the last token, the
                answer's first token is that of the prompt as it is.

        Raises:
            SteeringError: the prompt is shorter, or there is no chat template.
            CacheLayoutError: it is longer than the model's positions.
        """
        ids = prompt_ids(model, said, chat=chat)
        if len(ids) < -at:
            raise SteeringError(
                f"a prompt of {len(ids)} tokens has no token {at}",
                hint="give a longer prompt, or a vector of a token nearer to the end",
            )
        cut = len(ids) + at + 1
        live = torch.cat((ids[cut:], model.encode(after)))
        answered = 0
        if not len(live):
            live, answered = score(model, ids[None])[0, -1:].argmax(-1).cpu(), 1
        return cls(prefix=prefill(model, ids[None, :cut]), live=live, answered=answered)


def answer(
    model: LanguageModel,
    start: Start,
    caches: Sequence[KVCache],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> tuple[Int[Tensor, " _t"], ...]:
    """What the model writes on each of ``caches``, all of them edits of one start's prefix.

    Token ids of the answer alone: without what was put after the prompt, and without the end.

    Args:
        model: Writes.
        start: Of the prompt.
        caches: A row each.
        max_new_tokens: At most.
        sampling: How tokens are drawn, with the same numbers in every row; greedy if not given.
        seed: Of those numbers.

    Raises:
        CacheLayoutError, IncompatibleModels: the model cannot read one of the caches, or all that
            is to be written has no room.
    """
    ends = torch.tensor(sorted(end_tokens(model)), device=model.device)
    begun = start.live[len(start.live) - start.answered :].to(model.device)
    if bool(torch.isin(begun, ends).any()):  # the prompt as it is says nothing
        return tuple(start.live[:0] for _ in caches)
    uniform = torch.rand(max_new_tokens, generator=torch.Generator().manual_seed(seed))
    read_on = Reader.over(model, stack(caches), rows=len(caches))
    step = start.live.to(model.device).expand(len(caches), -1)
    written = [begun.expand(len(caches), -1)]
    done = torch.zeros(len(caches), dtype=torch.bool, device=model.device)
    for each in uniform[start.answered :]:
        with torch.no_grad():
            logits = read_on(step, last=True)[:, -1].float()
        drawn = (
            logits.argmax(-1)
            if sampling is None
            else sampling.choose(logits, each.to(logits).expand(len(logits)))
        )
        step = drawn[:, None]
        written.append(step)
        done |= torch.isin(drawn, ends)
        if bool(done.all()):
            break
    rows = torch.cat(written, dim=1)
    return tuple(_until_end(row.cpu(), ends.cpu()) for row in rows)


def _until_end(row: Int[Tensor, " t"], ends: Int[Tensor, " n"]) -> Int[Tensor, " _u"]:
    found = torch.isin(row, ends).nonzero()
    return row[: int(found[0])] if len(found) else row
