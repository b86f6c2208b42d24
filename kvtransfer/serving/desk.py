"""Decides, request by request, how many tokens of a guide an engine may take over.

Knows no engine. A request that may not have its guide is none the worse for it: the prompt holds
the guide's ids, so the engine reads them as it reads any others.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtransfer.errors import GuideRefused, KVTransferError
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.serving.asked import Asked
from kvtransfer.serving.content import Content
from kvtransfer.serving.library import Library, Mark

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A guide that the engine's model can read: what a request has to match."""

    asked: Asked
    ids: tuple[int, ...]
    digest: str
    """Of the numbers that are meant, and no others."""
    salt: str | None
    """That the request has to carry, if any."""

    def require_matched(self, prompt: Sequence[int], salt: str | None) -> None:
        """Raise GuideRefused unless a prompt goes on where the guide ends.

        Args:
            prompt: All its ids.
            salt: Its ``cache_salt``, where it has one.
        """
        name, count = self.asked.guide, len(self.ids)
        shared = next(
            (
                i
                for i, (one, other) in enumerate(zip(self.ids, prompt, strict=False))
                if one != other
            ),
            min(count, len(prompt)),
        )
        if shared < min(count, len(prompt)):
            raise GuideRefused(
                f"the prompt's token {shared} is {prompt[shared]}, and that of the guide {name!r} "
                f"{self.ids[shared]}",
                hint="send the guide's exact ids before what follows: `kvtransfer pack request` "
                "writes such a prompt",
            )
        if len(prompt) <= count:
            raise GuideRefused(
                f"the prompt has {len(prompt)} tokens, the guide {name!r} has {count}",
                hint="one token at least follows a guide: a cache holds no logits",
            )
        if self.salt is not None and salt != self.salt:
            raise GuideRefused(
                f"the guide {name!r} was mapped from another model, and the request's cache_salt "
                f"is {repr(salt)[:80]}",
                hint=f'send "cache_salt": "{self.salt}": under the plain hash of its ids every '
                "request that begins with them would read the approximation",
            )


class Desk:
    """Offers guides to one model, and remembers what it said to which request."""

    def __init__(self, library: Library, reader: ModelSpec) -> None:
        """
        Args:
            library: The packs.
            reader: The model that the engine runs, its weights' fingerprint with it.
        """
        self._library, self._reader = library, reader
        self._offers: dict[Asked, tuple[Mark, Offer]] = {}
        self._said: dict[str, Offer | GuideRefused | None] = {}
        self._taken: dict[str, int] = {}

    def offer(self, asked: Asked) -> Offer:
        """A guide for this model. Its file is read once, and again when the pack is saved anew.

        Raises:
            GuideRefused: there is no such guide, or it does not begin at position 0.
            IncompatibleModels: the pack is for another model.
            CacheLayoutError: it is in another dtype, or holds numbers that are none.
            ArtifactError: it is malformed, truncated or changed.
        """
        mark = self._library.mark(asked.pack)
        before, held = self._offers.get(asked, (None, None))
        if held is not None and before == mark:
            return held
        self._offers.pop(asked, None)
        guide = self._library.guide(asked)
        guide.maker.check_spec(self._reader)
        content = Content.of(guide)
        ids = tuple(int(each) for each in content.prepared.ids)
        made = Offer(asked=asked, ids=ids, digest=content.digest, salt=content.salt)
        self._offers[asked] = mark, made
        return made

    def decide(
        self,
        request: str,
        params: object,
        prompt: Sequence[int] | None,
        salt: str | None,
        *,
        unfit: str | None = None,
    ) -> Offer | None:
        """The guide that stands under a request, or None. Raises nothing that a client can cause.

        An engine may ask more than once; the answer stays what it was until :meth:`leave`.

        Args:
            request: Its id.
            params: Its ``kv_transfer_params``.
            prompt: Its ids, if it has any.
            salt: Its ``cache_salt``, where it has one.
            unfit: What else the request has that a guide's cache does not know of: an adapter, say.
        """
        if request not in self._said:
            self._said[request] = self._decided(params, prompt, salt, unfit)
        said = self._said[request]
        return said if isinstance(said, Offer) else None

    def take(self, request: str, tokens: int) -> Offer:
        """Note that the engine takes that many tokens of the guide; the others it has itself."""
        said = self._said[request]
        if not isinstance(said, Offer):
            raise ValueError(f"no guide was offered to {request}")
        self._taken[request] = tokens
        return said

    def fail(self, request: str) -> None:
        """Note that the guide could not be loaded after all."""
        self._said[request] = GuideRefused(
            "the guide could not be loaded, and was read", hint="the server's log says why"
        )

    def leave(self, request: str) -> dict[str, Any] | None:
        """Forget a request, and tell its client what became of the guide; None if it asked none."""
        taken, said = self._taken.pop(request, 0), self._said.pop(request, None)
        if said is None:
            return None
        if isinstance(said, Offer):
            asked = said.asked
            return {
                "pack": asked.pack,
                "guide": asked.guide,
                "tokens": len(said.ids),
                "loaded": taken,
            }
        return {"refused": said.message, "hint": said.hint}

    def _decided(
        self, params: object, prompt: Sequence[int] | None, salt: str | None, unfit: str | None
    ) -> Offer | GuideRefused | None:
        try:
            asked = Asked.of(params)
            if asked is None:
                return None
            if unfit is not None:
                raise GuideRefused(f"the request has {unfit}, of which no guide's cache knows")
            if prompt is None:
                raise GuideRefused("the prompt has no ids", hint="send text or ids")
            found = self.offer(asked)
            found.require_matched(prompt, salt)
            return found
        except GuideRefused as refused:
            log.warning("no guide: %s", refused.message)
            return refused
        except KVTransferError as error:
            # Where the pack lies, and what is wrong with it, is the operator's to know.
            log.error("a pack cannot be served: %s", error)
            return GuideRefused(
                "the server cannot read this guide for its model", hint="its log says why"
            )
        except OSError as error:
            log.error("a pack cannot be read: %s", error)
            return GuideRefused("the server cannot read this guide", hint="its log says why")
