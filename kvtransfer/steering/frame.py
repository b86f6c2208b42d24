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
"""Position schemes under which a prompt that begins further on is the same prompt."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Opening:
    """A prompt that has been read up to its last token."""

    ids: Int[Tensor, " t"]
    prefix: KVCache
    """Of all but the last id, one row; what it is shorter than the frame by is hidden at its left.
    """

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
        SteeringError: the prompts are the same, end in different tokens, or differ in length in a
            model whose positions do not allow to read the shorter one further on.
        SeamError: as :func:`prompt`.
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
    ids = [model.opened(joint.ids) for joint in joints]
    lengths = len(ids[0]), len(ids[1])
    if lengths[0] != lengths[1] and model.spec.positions not in MOVABLE:
        raise SteeringError(
            f"the prompts of {source.name} and {target.name} have {lengths[0]} and {lengths[1]} "
            f"tokens, and the positions of {model.spec.name} ({model.spec.positions}) do not allow "
            "to read the shorter one further on",
            hint="word the prompts so that they have one length",
        )
    first, second = (_opening(model, each, max(lengths)) for each in ids)
    return first, second


def _opening(model: LanguageModel, ids: Int[Tensor, " t"], width: int) -> Opening:
    """Read ``ids`` but the last, so that they end at column ``width - 1``."""
    check_ids(model, ids[None])
    check_room(model, width)
    before = width - len(ids)
    positions = torch.arange(before, width - 1, device=model.device)[None]
    everywhere = model.rotary(torch.arange(width - 1, device=model.device)[None])
    cache = read_at(model, ids[None, :-1], positions)
    return Opening(ids=ids, prefix=indent(cache, before, rotations=everywhere))
