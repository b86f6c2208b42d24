"""Token rows to train on, each drawn from the random generator that the caller gives."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from passages import Passage, passage
from transformers import PreTrainedTokenizerFast

UNPREDICTABLE = 0.1
"""Loss weight of tokens drawn at random: little can be learnt from them but that they are."""
ANSWER = 3.0
"""Loss weight of answers: one token in eight of a passage, and all that it is there for."""


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids and the weight of each in the loss (the first is never predicted)."""

    kind: str
    ids: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents, and the same as one stream of tokens, each ended by the end-of-text token."""

    documents: tuple[str, ...]
    stream: tuple[int, ...]
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def of(cls, documents: Iterable[str], tokenizer: PreTrainedTokenizerFast) -> "Corpus":
        """Tokenize ``documents``."""
        texts = tuple(documents)
        rows = tokenizer(list(texts), verbose=False)["input_ids"]
        return cls(texts, tuple(id_ for ids in rows for id_ in (*ids, end(tokenizer))), tokenizer)

    def window(self, rng: Random, length: int) -> list[int]:
        """``length`` tokens of the stream, from anywhere."""
        start = rng.randrange(len(self.stream) - length + 1)
        return list(self.stream[start : start + length])


def end(tokenizer: PreTrainedTokenizerFast) -> int:
    """Id of the end-of-text token."""
    token = tokenizer.eos_token_id
    if not isinstance(token, int):
        raise TypeError(f"the tokenizer's end-of-text token is {token!r}, not one id")
    return token


def prose(rng: Random, corpus: Corpus, length: int) -> Row:
    """A window of the corpus."""
    return Row("prose", corpus.window(rng, length), [1.0] * length)


def facts(rng: Random, corpus: Corpus, length: int) -> Row:
    """Passages of facts and questions, one after the other, the last cut short."""
    ids: list[int] = []
    weights: list[float] = []
    while len(ids) < length:
        tokens, answer = encode(passage(rng, corpus.documents), corpus.tokenizer)
        ids += [*tokens, end(corpus.tokenizer)]
        weights += [*(ANSWER if in_answer else 1.0 for in_answer in answer), 1.0]
    return Row("facts", ids[:length], weights[:length])


def repeats(rng: Random, corpus: Corpus, length: int) -> Row:
    """Random tokens, a gap of prose, the same tokens again, until the row is full."""
    ids: list[int] = []
    weights: list[float] = []
    while len(ids) < length:
        novel = random_tokens(rng, corpus, rng.randint(8, 96))
        gap = corpus.window(rng, rng.randint(1, 64))
        ids += novel + gap + novel
        weights += [UNPREDICTABLE] * len(novel + gap) + [UNPREDICTABLE]
        weights += [1.0] * (len(novel) - 1)  # nothing tells where the copy begins
    return Row("repeats", ids[:length], weights[:length])


MIXTURE: tuple[tuple[Callable[[Random, Corpus, int], Row], float], ...] = (
    (prose, 0.62),
    (facts, 0.26),
    (repeats, 0.12),
)
"""What a training row is, and how often."""


def batch(rng: Random, corpus: Corpus, *, rows: int, length: int) -> list[Row]:
    """Rows drawn from the mixture."""
    shares = [share for _, share in MIXTURE]
    return [make(rng, corpus, length) for make, _ in rng.choices(MIXTURE, shares, k=rows)]


def random_tokens(rng: Random, corpus: Corpus, length: int) -> list[int]:
    """Tokens drawn evenly from the vocabulary, the end-of-text token (number 0) left out."""
    return [rng.randrange(1, len(corpus.tokenizer)) for _ in range(length)]


def encode(
    text: Passage, tokenizer: PreTrainedTokenizerFast
) -> tuple[Sequence[int], Sequence[bool]]:
    """Token ids of a passage, and whether each begins inside an answer."""
    encoded = tokenizer(text.text, return_offsets_mapping=True)
    inside = [False] * len(text.text)
    for start, stop in text.answers:
        inside[start:stop] = [True] * (stop - start)
    return encoded["input_ids"], [inside[start] for start, _ in encoded["offset_mapping"]]
