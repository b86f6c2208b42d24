"""The text of tokens, piece by piece, as they come."""

from collections.abc import Callable, Iterable, Iterator

HALF = "\ufffd"
"""Stands at the end of a text whose last character is not complete yet."""


def pieces(decode: Callable[[list[int]], str], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of ``tokens`` in pieces that end with whole characters.

    Joined, they are the text that ``decode`` makes of all tokens at once, and every token is
    decoded a few times at most: from where the last piece but one ended, which was between two
    characters. The last piece goes with the new tokens, because some tokenizers (SentencePiece)
    write the first token of a text without the space before it; that piece's text is then left out.

    Args:
        decode: Gives the text of token ids.
        tokens: One after another.
    """
    held: list[int] = []  # the tokens of the last piece, and those since
    before = 0  # how many of them are the last piece's
    piece = ""
    for token in tokens:
        held.append(token)
        piece = decode(held)[len(decode(held[:before])) :]
        if piece and not piece.endswith(HALF):
            yield piece
            held, before, piece = held[before:], len(held) - before, ""
    if piece:  # it ended in the midst of a character
        yield piece
