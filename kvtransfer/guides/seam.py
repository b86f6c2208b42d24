"""Where a hidden guide ends and the live text begins, in tokens.

Text concatenation is not token concatenation: ``Hello`` + ``world`` may be one token. So the joint
text is tokenized once, and its ids are split where the guide's own ids end.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import SeamError, require
from kvtransfer.guides.character import inside_character
from kvtransfer.hf.spans import TextTokenizer, spans_of

Seam = Literal["strict", "back-off"]
"""What to do where no token ends with the guide: refuse, or end it at an earlier token."""

SEAMS: tuple[Seam, ...] = ("strict", "back-off")

SHOWN = 3
"""Tokens on each side of a seam that an error shows."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Joint:
    """The ids of a joint text: a hidden part, and the live part after it."""

    hidden: Int[Tensor, " p"]
    live: Int[Tensor, " s"]
    text: str
    """The joint text."""
    cut: int
    """The character of it with which the live part begins."""
    moved_tokens: int
    """Tokens that the guide has alone, and that are live here: 0 where it was asked for."""
    moved_characters: int

    @property
    def ids(self) -> Int[Tensor, " t"]:
        """All of them, as the joint text has them."""
        return torch.cat((self.hidden, self.live))

    @property
    def hidden_text(self) -> str:
        """What a guide must hold that is to have the hidden ids."""
        return self.text[: self.cut]

    @property
    def moved(self) -> str | None:
        """How far the seam had to move back, in words; None where it is as asked."""
        if not self.moved_tokens:
            return None
        tokens = f"{self.moved_tokens} token{'s' if self.moved_tokens > 1 else ''}"
        live = self.text[self.cut : self.cut + self.moved_characters]
        return (
            f"the seam moved back by {tokens} ({self.moved_characters} characters): {live!r} is "
            "read live"
        )


def split(tokenizer: TextTokenizer, guide: str, live: str, *, seam: Seam = "strict") -> Joint:
    """Tokenize ``guide + live`` at once, and split its ids where the guide ends.

    The seam is exact where a token of the joint text ends with the guide, no character spans it
    (letter and accent, say, or a joined emoji), and the tokens before it are those of the text
    before it alone: a cache of it can be made without knowing what follows. At least one token
    stays live, because a cache holds no logits.

    Args:
        tokenizer: Of the model that reads both.
        guide: To be hidden.
        live: What follows it.
        seam: Where the seam is not exact, ``strict`` refuses; ``back-off`` moves it back to the
            last token where it is. What lies between is read live.

    Returns:
        Ids without an opening token, which stands before the guide; ``joint.moved`` says if the
        seam is not where it was asked for.

    Raises:
        SeamError: there is no exact seam at the asked place (strict), or none at all.
        UnsupportedModel: the tokenizer does not say which characters its tokens stand for.
        WrongKind: an argument is of another kind: the model instead of its tokenizer, say.
    """
    if seam not in SEAMS:
        raise ValueError(f"seam is one of {', '.join(SEAMS)}, not {seam!r}")
    check_kinds(tokenizer, guide, live)
    _check_text(guide, "guide")
    _check_text(live, "live text")
    text = guide + live
    if not guide:
        raise SeamError("the guide is empty", hint="give a text to be hidden")
    ids, spans = spans_of(tokenizer, text)
    alone, _ = spans_of(tokenizer, guide)

    def exact(tokens: int) -> int | None:
        """The character at which ``tokens`` hidden tokens end, if the seam is exact there."""
        if not 0 < tokens < len(ids) or not torch.equal(ids[:tokens], alone[:tokens]):
            return None
        end, begin = int(spans[tokens - 1, 1]), int(spans[tokens, 0])
        # A tokenizer may drop the guide's last characters; then they make no difference.
        at = len(guide) if tokens == len(alone) and end <= len(guide) else end
        if begin < end or inside_character(text, at):
            return None
        return at if tokens == len(alone) or _alone(tokenizer, text[:at], ids[:tokens]) else None

    found = ((tokens, exact(tokens)) for tokens in range(len(alone), 0, -1))
    tokens, at = next(((n, cut) for n, cut in found if cut is not None), (0, 0))
    if not tokens or (seam == "strict" and tokens < len(alone)):
        raise _refusal(
            tokenizer, guide, live, alone, ids, back=len(alone) - tokens if tokens else 0
        )
    return Joint(
        hidden=ids[:tokens],
        live=ids[tokens:],
        text=text,
        cut=at,
        moved_tokens=len(alone) - tokens,
        moved_characters=len(guide) - at,
    )


def _alone(tokenizer: TextTokenizer, text: str, ids: Tensor) -> bool:
    """Whether ``text`` by itself has these ids: merging may look at what comes after."""
    return torch.equal(spans_of(tokenizer, text)[0], ids)


def check_kinds(tokenizer: object, guide: object, live: object) -> None:
    """Raise WrongKind unless there is a tokenizer, and two texts."""
    require("tokenizer", tokenizer, TextTokenizer, "a tokenizer", hint="it is model.tokenizer")
    for what, text in (("the guide", guide), ("the live text", live)):
        require(
            what, text, str, "a text", hint="split(model.tokenizer, 'the guide', 'what follows')"
        )


def _check_text(text: str, what: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise SeamError(
            f"the {what} holds half a character (a lone surrogate)", hint="leave it out"
        )


def _refusal(
    tokenizer: TextTokenizer, guide: str, live: str, alone: Tensor, ids: Tensor, *, back: int
) -> SeamError:
    """What stands at the place, and what would help."""
    if not live:
        hint = "give a prompt, if only a line break"
        if back:
            hint += (
                ", or let the guide's last token be read live (seam='back-off', --seam back-off)"
            )
        return SeamError(
            f"nothing follows the guide {guide[-20:]!r}, the live text is empty: a cache holds no "
            "logits, so that one token at least is read after it",
            hint=hint,
        )
    shared = min(len(alone), len(ids))
    differing = (alone[:shared] != ids[:shared]).nonzero()
    start = max(int(differing[0]) if len(differing) else shared, SHOWN) - SHOWN
    ends, joins = (
        tokenizer.convert_ids_to_tokens(each[start : start + 2 * SHOWN].tolist())
        for each in (alone, ids)
    )
    hint = "let the guide end at a line break or a full stop"
    if back:
        hint += (
            f", or allow the seam to move (seam='back-off', --seam back-off): {back} of the "
            "guide's tokens would be read live"
        )
    return SeamError(
        f"no exact token boundary between {guide[-20:]!r} and {live[:20]!r}: the guide alone goes "
        f"on {ends} from token {start} ({len(alone)} tokens), with the live text {joins} "
        f"({len(ids)} tokens)",
        hint=hint,
    )
