"""A guide as the system message of a conversation, split from the turns after it.

What a template makes of the guide is looked at, not trusted: some drop system messages, trim them,
or put them into the user's turn.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvtransfer.errors import SeamError
from kvtransfer.guides.seam import Joint, Seam, check_kinds, split
from kvtransfer.hf.model import opening_of
from kvtransfer.hf.spans import TextTokenizer
from kvtransfer.hf.spec import first_line

PROBE = "kvtransfer asks where the words of a user stand"
"""No template has it of its own."""

Message = dict[str, str]


def split_chat(tokenizer: TextTokenizer, guide: str, live: str, *, seam: Seam = "strict") -> Joint:
    """Render ``guide`` as system message and ``live`` as the user's, and split the prompt's ids.

    Hidden is the system turn, where the template renders it alone, and otherwise all that stands
    before the user's words. The generation prompt ends the live part. Where the tokenizer opens
    texts with a begin of sequence, the hidden part begins with exactly one.

    Args:
        tokenizer: With a chat template.
        guide: The system message; the template must keep it as it is.
        live: What the user says.
        seam: As of :func:`kvtransfer.guides.seam.split`.

    Returns:
        ``joint.text`` is the rendered prompt, ``joint.hidden_text`` the part that is hidden.

    Raises:
        SeamError: there is no template, or it refuses, drops, changes or moves the system message,
            or writes two begins of sequence; or as :func:`kvtransfer.guides.seam.split`.
        UnsupportedModel: as :func:`kvtransfer.guides.seam.split`.
    """
    check_kinds(tokenizer, guide, live)
    head, prompt = _rendered(tokenizer, guide, live)
    joint = split(tokenizer, head, prompt[len(head) :], seam=seam)
    opening = opening_of(tokenizer)
    width = len(opening)
    if width == 0:
        return joint
    if not torch.equal(joint.hidden[:width], opening):
        return replace(joint, hidden=torch.cat((opening, joint.hidden)))
    if torch.equal(joint.hidden[width : 2 * width], opening):
        raise SeamError(
            f"the chat template begins the prompt twice: {prompt[:40]!r}",
            hint="leave the begin of sequence out of the template, or out of the guide",
        )
    return joint


def _rendered(tokenizer: TextTokenizer, guide: str, live: str) -> tuple[str, str]:
    """What the template puts before the user's words, the guide in it, and the whole prompt."""
    if not tokenizer.chat_template:
        raise SeamError(
            "this tokenizer has no chat template",
            hint="put guide and prompt together as text: split(tokenizer, guide, live)",
        )
    if not guide.strip():
        raise SeamError("the guide is empty", hint="give a system message")
    system = {"role": "system", "content": guide}
    prompt, probe = (
        _render(tokenizer, [system, {"role": "user", "content": said}], ask=True)
        for said in (live, PROBE)
    )
    before, found, _ = probe.partition(PROBE)
    if not found:
        raise SeamError("the chat template drops what the user says", hint="mend the template")
    if guide not in before:
        kept = "behind what the user says" if guide in probe else "out, or not as it is"
        raise SeamError(
            f"the chat template puts the system message {kept}: the prompt begins {probe[:60]!r}",
            hint="a guide without spaces or line breaks at its ends survives trimming; some models "
            "have no system message: put the guide into plain text, or mend the template",
        )
    if not prompt.startswith(before):
        raise SeamError(
            "the chat template writes the system turn otherwise for another message of the user",
            hint="what is hidden must not depend on what follows: mend the template",
        )
    try:
        turn = _render(tokenizer, [system], ask=False)
    except SeamError:  # many templates want a user's message
        return before, prompt
    alone = guide in turn and len(turn) < len(before) and before.startswith(turn)
    return (turn if alone else before), prompt


def _render(tokenizer: TextTokenizer, messages: Sequence[Message], *, ask: bool) -> str:
    try:
        prompt = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=ask
        )
    # A template is a program: it raises what it likes, from jinja2 or not.
    except Exception as error:
        raise SeamError(
            f"the chat template refuses {' and '.join(m['role'] for m in messages)}: "
            f"{first_line(error)}",
            hint="some models have no system message: put the guide into plain text",
        ) from error
    return str(prompt)
