"""Two personas on one topic, in one frame: the prompts end at one column and one position.

So a column of the one run and the same column of the other hold corresponding steps, and keys can
be put in each other's places without turning them.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import SteeringError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import indent
from kvtransfer.guides.chat import split_chat
from kvtransfer.guides.seam import Joint, split
from kvtransfer.hf.fits import check_ids, check_room
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import read_at
from kvtransfer.steering.persona import Persona

MOVABLE = ("rotary", "none")
"""Position schemes under which a prompt that begins further on is the same prompt. Under others the
shorter one is filled up."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Opening:
    """A prompt that has been read up to its last token."""

    ids: Int[Tensor, " t"]
    prefix: KVCache
    """Of all but the last id, one row; what it is shorter than the frame by is hidden at its left.
    """
    filled: int = 0
    """How often the last token of the persona's prompt is repeated, to make it as long as the
    other's."""

    @property
    def width(self) -> int:
        """Columns of the frame before the first token that is written."""
        return self.prefix.tokens + 1


def prompt(model: LanguageModel, persona: Persona, said: str) -> Joint:
    """What ``persona`` is asked: its prompt as the system message, ``said`` as the user's.

    A model without a chat template gets the prompt as a line before what is said.

    Raises:
        SeamError: the template, or the tokenizer, does not keep the two apart.
    """
    tokenizer = model.tokenizer
    if tokenizer.chat_template:
        return split_chat(tokenizer, persona.prompt, said)
    return split(tokenizer, f"{persona.prompt}\n", f"{said}\n", seam="back-off")


def openings(
    model: LanguageModel, source: Persona, target: Persona, topic: str
) -> tuple[Opening, Opening]:
    """Both personas' prompts on ``topic``, read so that they end at one column.

    Raises:
        SteeringError: the topic is empty, or the prompts are the same, or end in different tokens.
        SeamError: as :func:`prompt`.
        CacheLayoutError: they are longer than the model has positions for.
    """
    if not topic.strip():
        raise SteeringError("the topic is empty", hint="give something to speak about")
    joints = [prompt(model, persona, topic.strip()) for persona in (source, target)]
    if not torch.equal(joints[0].live, joints[1].live):
        raise SteeringError(
            f"the prompts of {source.name} and {target.name} end in different tokens: "
            f"{joints[0].live.tolist()} and {joints[1].live.tolist()}",
            hint="end both personas' prompts in the same way, with a full stop",
        )
    if torch.equal(joints[0].hidden, joints[1].hidden):
        raise SteeringError(
            f"{source.name} and {target.name} have the same prompt, so nothing can be transplanted",
            hint="name two personas",
        )
    lengths = [len(model.opened(joint.ids)) for joint in joints]
    movable = model.spec.positions in MOVABLE
    first, second = (
        _opening(model, joint, max(lengths), filled=0 if movable else max(lengths) - length)
        for joint, length in zip(joints, lengths, strict=True)
    )
    return first, second


def _opening(model: LanguageModel, joint: Joint, width: int, *, filled: int) -> Opening:
    """Read a prompt but its last id, so that it ends at column ``width - 1``."""
    # With its own last token, mostly a line break, of which nothing hangs.
    filling = joint.hidden[-1:].expand(filled)
    ids = model.opened(torch.cat((joint.hidden, filling, joint.live)))
    check_ids(model, ids[None])
    check_room(model, width)
    before = width - len(ids)
    positions = torch.arange(before, width - 1, device=model.device)[None]
    everywhere = model.rotary(torch.arange(width - 1, device=model.device)[None])
    cache = read_at(model, ids[None, :-1], positions)
    prefix = indent(cache, before, rotations=everywhere)
    return Opening(ids=ids, prefix=prefix, filled=filled)
