"""The request that uses a guide, as an OpenAI-compatible server takes it."""

from pathlib import Path
from typing import Any

import torch

from kvtransfer.errors import SeamError
from kvtransfer.guides.chat import split_chat
from kvtransfer.guides.pack import GuidePack
from kvtransfer.guides.seam import split
from kvtransfer.hf.locate import locate
from kvtransfer.hf.model import opening_of
from kvtransfer.hf.spec import load_tokenizer
from kvtransfer.serving.asked import Asked
from kvtransfer.serving.content import Content


def completion(
    pack: str | Path, name: str, prompt: str, *, model: str, max_tokens: int
) -> dict[str, Any]:
    """The body of a request to ``/v1/completions``: the guide's exact ids, and the prompt's.

    Args:
        pack: Its folder, by whose name the server has it.
        name: Of the guide.
        prompt: What follows the guide; where that is a system message, what the user says.
        model: Its name or folder, from which its tokenizer is loaded.
        max_tokens: To be written.

    Raises:
        GuideRefused: no server would take the pack's name.
        SeamError: no token ends between guide and prompt, or the tokenizer is another one now.
        ArtifactError: there is no such pack or guide, or it is broken.
        ModelNotFound: there is no such tokenizer.
    """
    asked = {"pack": Path(pack).resolve().name, "guide": name}
    Asked.of(asked)
    guide = GuidePack.from_pretrained(pack)[name]
    content = Content.of(guide)
    tokenizer = load_tokenizer(locate(model))
    put = split_chat if guide.made.get("chat") else split
    try:
        joint = put(tokenizer, guide.text, prompt)
    except SeamError as error:
        raise SeamError(
            error.message,
            hint="a server takes a guide whole: begin the prompt with a space or a line break, or "
            "let the guide end at one",
        ) from error
    ids, opening = content.prepared.ids, opening_of(tokenizer)
    begun = torch.equal(joint.hidden[: len(opening)], opening)
    hidden = joint.hidden if begun else torch.cat((opening, joint.hidden))
    if not torch.equal(hidden, ids):
        raise SeamError(
            f"the guide is {hidden[:6].tolist()}… by the tokenizer of {model}, and "
            f"{ids[:6].tolist()}… in the pack",
            hint="name the model that can read the pack: kvtransfer pack show",
        )
    salted = {} if content.salt is None else {"cache_salt": content.salt}
    return {
        "model": model,
        "prompt": torch.cat((ids, joint.live)).tolist(),
        "max_tokens": max_tokens,
        "temperature": 0,
        "kv_transfer_params": asked,
    } | salted
