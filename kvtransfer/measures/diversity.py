"""How many different words a text uses."""

from kvtransfer.measures.markers import words


def type_token_ratio(text: str) -> float:
    """Different words over words, up to 1; 0 of a text without words.

    It falls with length of itself, so only texts of about one length are compared by it.
    """
    said = words(text)
    return len(set(said)) / len(said) if said else 0.0
