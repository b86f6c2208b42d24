"""Where a hidden prefix ends and the live text begins, in tokens.

Text concatenation is not token concatenation: ``Hello`` + ``world`` may be one token. So the joint
text is tokenized once, and its ids are split.
"""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import SeamError


@dataclass(frozen=True, slots=True, eq=False)
class Joint:
    """The ids of a joint text: a hidden part, and the live part after it."""

    hidden: Int[Tensor, " p"]
    live: Int[Tensor, " s"]


def split(encode: Callable[[str], Int[Tensor, " t"]], prefix: str, live: str) -> Joint:
    """Tokenize ``prefix + live`` at once and split its ids where ``prefix``'s own ids end.

    Where the last tokens of the prefix merge with what follows, the seam moves back to the last
    token that both have, so that no condition ever sees other ids than the joint text's.

    Raises:
        SeamError: the two share no leading token, or nothing is left on one side.
    """
    joint, alone = encode(prefix + live), encode(prefix)
    shared = min(len(joint), len(alone))
    differing = (joint[:shared] != alone[:shared]).nonzero()
    seam = int(differing[0]) if len(differing) else shared
    # A cache holds no logits: at least one token must be live.
    seam = min(seam, len(joint) - 1)
    if seam < 1:
        raise SeamError(
            f"no token boundary between {prefix[-20:]!r} and {live[:20]!r}: "
            f"{len(alone)} tokens alone, {len(joint)} together",
            hint="let the prefix end at a line break or a full stop",
        )
    return Joint(joint[:seam], joint[seam:])
