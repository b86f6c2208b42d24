"""A guide under a model: what transformers' ``generate`` and the evaluator take."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides.seam import split
from kvtransfer.hf.graft import grafted
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import generate


@dataclass(slots=True, eq=False)
class Graft:
    """A guide's cache under a model.

    >>> with pack["harbour"].graft(model) as cache:
    ...     out = model.module.generate(live, cache=cache, attention_mask=mask)
    >>> score(model, live, pack["harbour"].graft(model).prefix)
    """

    model: LanguageModel
    text: str
    ids: Int[Tensor, " t"]
    prefix: KVCache
    """What :func:`~kvtransfer.hf.run.score`, :func:`~kvtransfer.hf.run.generate` and the evaluator
    read; a value that stays as it is."""
    _open: list[ExitStack] = field(default_factory=list, repr=False)

    def __enter__(self) -> Any:
        """A fresh ``DynamicCache`` for one run of ``model.module`` or its ``generate``, whose calls
        are looked at; see :func:`kvtransfer.hf.graft.grafted`."""
        stack = ExitStack()
        cache = stack.enter_context(grafted(self.model, self.prefix))
        self._open.append(stack)
        return cache

    def __exit__(self, *raised: object) -> None:
        self._open.pop().close()

    def stream(self, prompt: str, *, max_new_tokens: int = 128) -> Iterator[str]:
        """Yield greedy text after the guide and ``prompt``, piece by piece.

        The joint text is tokenized at once. Where the guide's last tokens merge with the prompt's
        first, the prefix is cut back to the last token that both have.

        Raises:
            SeamError: the two share no leading token.
            CacheLayoutError: together they are longer than the model's positions.
        """
        opening = len(self.model.opening)
        joint = split(self.model.encode, self.text, prompt)
        prefix = self.prefix.prefix(opening + len(joint.hidden))
        tokens: list[int] = []
        told = ""
        for token in generate(self.model, joint.live, prefix, max_new_tokens=max_new_tokens):
            tokens.append(token)
            text = self.model.decode(torch.tensor(tokens))
            if not text.endswith("\ufffd"):  # half a character: the rest of it comes next
                yield text.removeprefix(told)
                told = text
