"""Whether the hub answers at all. Its own client would go on asking for half a minute."""

from huggingface_hub import constants, get_session

SECONDS = 5
"""How long to wait for a first answer."""


def unreachable() -> bool:
    """Whether the hub was asked and gave no answer; where HF_HUB_OFFLINE is set, nobody asks."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS)
    except Exception:  # no name, no route, no certificate, a proxy that refuses: all the same here
        return True
    return False
