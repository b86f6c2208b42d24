"""Where one character ends and the next begins, as a reader sees characters.

A letter and the accent that follows it, the parts of a joined emoji, the two halves of a flag and
the two of a line break are one character each, of several code points. The rules are the part of
Unicode's annex 29 that texts for language models meet; scripts of stacked syllables are left out.
"""

import unicodedata
from itertools import takewhile

JOINER = "\u200d"
SKIN_TONES = range(0x1F3FB, 0x1F400)
FLAG_LETTERS = range(0x1F1E6, 0x1F200)
TAGS = range(0xE0020, 0xE0080)


def inside_character(text: str, at: int) -> bool:
    """Whether the place before ``text[at]`` lies within a character."""
    if not 0 < at < len(text):
        return False
    before, after = text[at - 1], text[at]
    if unicodedata.category(before) == "Cc":
        return before == "\r" and after == "\n"
    if ord(after) in FLAG_LETTERS:
        return _flag_letters_before(text, at) % 2 == 1
    if before == JOINER:
        # Before a letter or a space a joiner is a stray one: it joins pictures.
        return unicodedata.category(after).startswith("S")
    return after == JOINER or _extends(after)


def _flag_letters_before(text: str, at: int) -> int:
    return sum(1 for _ in takewhile(lambda one: ord(one) in FLAG_LETTERS, reversed(text[:at])))


def _extends(letter: str) -> bool:
    """Whether a code point belongs to what stands before it: accents, variations, skin tones."""
    return (
        unicodedata.category(letter).startswith("M")
        or ord(letter) in SKIN_TONES
        or ord(letter) in TAGS
    )
