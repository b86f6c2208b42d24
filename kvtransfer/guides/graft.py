"""A guide under a model: what transformers' ``generate`` and the evaluator take."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, SeamError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import require_cache
from kvtransfer.guides.chat import split_chat
from kvtransfer.guides.seam import Joint, Seam, split
from kvtransfer.hf.edited import Edit
from kvtransfer.hf.graft import grafted
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.pieces import pieces
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
    chat: bool = False
    """Whether the guide is a system message, and prompts are what the user says."""
    edit: Edit | None = None
    """What is read at every step in place of all that is cached by then."""
    _open: list[ExitStack] = field(default_factory=list, repr=False)

    def __enter__(self) -> Any:
        """A fresh ``DynamicCache`` for one run of ``model.module`` or its ``generate``, whose calls
        are looked at; see :func:`kvtransfer.hf.graft.grafted`."""
        stack = ExitStack()
        cache = stack.enter_context(grafted(self.model, self.prefix, edit=self.edit))
        self._open.append(stack)
        return cache

    def __exit__(self, *raised: object) -> None:
        self._open.pop().close()

    def edited(self, edit: Edit, *, every_step: bool = False) -> "Graft":
        """The same guide, its cache edited once, or at every step anew; this one stays as it is.

        At every step the edit sees live and written tokens too, and edits do not add up.

        A later edit at every step reads what the earlier ones made.

        >>> pack["harbour"].graft(model).edited(Ablate("removed", layers="mid"))

        Raises:
            WrongKind: what an edit made once is no cache.
        """
        if not every_step:
            made = edit(self.prefix)
            require_cache(made, "what the edit made")
            return replace(self, prefix=made, _open=[])
        if (earlier := self.edit) is None:
            return replace(self, edit=edit, _open=[])
        return replace(self, edit=lambda cache: edit(earlier(cache)), _open=[])

    def joined(self, prompt: str, *, seam: Seam = "strict") -> Joint:
        """The ids of guide and ``prompt``, tokenized at once; see :func:`guides.seam.split` and, of
        a system message, :func:`guides.chat.split_chat`.

        Raises:
            SeamError: as they do, or the hidden ids are not those that the graft is of.
        """
        put = split_chat if self.chat else split
        joint = put(self.model.tokenizer, self.text, prompt, seam=seam)
        hidden = self.model.opened(joint.hidden)
        if not torch.equal(hidden, self.ids[: len(hidden)]):
            raise SeamError(
                f"the guide is {hidden[:6].tolist()}… now, and {self.ids[:6].tolist()}… where it "
                "was read",
                hint="the tokenizer or its chat template changed since: build the pack again",
            )
        return joint

    def stream(
        self, prompt: str | Joint, *, seam: Seam = "strict", max_new_tokens: int = 128
    ) -> Iterator[str]:
        """Yield greedy text after the guide and ``prompt``, piece by piece.

        Where the seam moves back, so much of the prefix is left out, and its text is read live.

        Args:
            prompt: What follows the guide, or what :meth:`joined` made of it.
            seam: As of :meth:`joined`, where it was not asked before.
            max_new_tokens: Pieces may be fewer: a character can take several tokens.

        Raises:
            SeamError: no token ends between the two (strict), or anywhere in the guide.
            CacheLayoutError: together they are longer than the model's positions.
        """
        joint = prompt if isinstance(prompt, Joint) else self.joined(prompt, seam=seam)
        prefix = self.prefix.prefix(self.prefix.tokens - joint.moved_tokens)
        length, limit = prefix.tokens + len(joint.live), self.model.max_positions
        if limit is not None and length + max_new_tokens - 1 > limit:
            raise CacheLayoutError(
                f"{max_new_tokens} new tokens after {length} of guide and prompt, and "
                f"{self.model.spec.name} reads at most {limit}",
                hint=f"ask for {max(limit - length + 1, 0)} at most (--max-new-tokens)",
            )
        tokens = generate(
            self.model, joint.live, prefix, max_new_tokens=max_new_tokens, edit=self.edit
        )
        yield from pieces(self.model.decode, tokens)
