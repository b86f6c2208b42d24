"""Which characters of a text each token stands for, and so which tokens of two models match."""

import re
from collections.abc import Iterator
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

import torch
from jaxtyping import Int
from tokenizers import Encoding, Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvtransfer.errors import SeamError, UnsupportedModel
from kvtransfer.geometry.align import Spans, align
from kvtransfer.hf.model import LanguageModel

TextTokenizer = PreTrainedTokenizerBase
"""What cuts text into tokens, under a name for rooms that know no transformers."""

SPACE = "▁"
"""How SentencePiece spells a space."""

BYTE = re.compile("<0x[0-9A-F]{2}>")
"""How it spells a byte of a character that it has no piece for."""


def encode_spans(model: LanguageModel, text: str) -> tuple[Int[Tensor, " t"], Spans]:
    """As :func:`spans_of`, by the tokenizer of ``model``; the ids are those of ``model.encode``."""
    return spans_of(model.tokenizer, text, name=model.spec.name)


def spans_of(
    tokenizer: TextTokenizer, text: str, *, name: str | None = None
) -> tuple[Int[Tensor, " t"], Spans]:
    """The ids of ``text``, no special tokens added, and the characters each stands for.

    Characters that the tokenizer drops go to the token after them, at the end of the text to the
    last; so the last token always ends where the text does.

    Args:
        tokenizer: A fast one.
        text: To be cut into tokens.
        name: Whose tokenizer it is, for errors.

    Raises:
        UnsupportedModel: the tokenizer does not say which characters its tokens stand for, or
            says so of other tokens each time.
        SeamError: the text holds characters, and the tokenizer makes no token of them.
    """
    name = name or "this tokenizer"
    if not tokenizer.is_fast:
        raise UnsupportedModel(
            f"{type(tokenizer).__name__} of {name} does not say which characters "
            "its tokens stand for",
            hint="load a fast tokenizer (one with a tokenizer.json)",
        )
    found: Any = tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    ids, offsets = found["input_ids"], found["offset_mapping"]
    if not _tiles(offsets, text):
        encoding = _untrimmed(tokenizer.backend_tokenizer, text)
        if encoding.ids != ids:
            raise UnsupportedModel(
                f"the tokenizer of {name} leaves characters out of its offsets, and "
                f"gives {len(ids)} tokens first, {len(encoding.ids)} without its last step",
                hint="a tokenizer with dropout has no one answer: set its model's dropout to None",
            )
        offsets = encoding.offsets
    if text and not ids:
        raise SeamError(f"{name} makes no token of {text[:20]!r}", hint="leave this text out")
    by_character = _by_character(found.tokens(), offsets, text)
    spans = torch.tensor(by_character, dtype=torch.long).view(-1, 2)
    if len(spans):
        spans[:, 1] = spans[:, 1].cummax(dim=0).values
        spans[-1, 1] = len(text)
        before = torch.cat((spans.new_zeros(1), spans[:-1, 1]))
        spans[:, 0] = torch.minimum(spans[:, 0], before)
    return torch.tensor(ids, dtype=torch.long), spans


def text_of(model: LanguageModel, ids: Int[Tensor, " t"]) -> str:
    """The text whose encoding is ``ids``, special tokens spelt out.

    Raises:
        SeamError: there is none. Tokens cut out of a text may begin or end within a character, or
            be joined otherwise when they stand alone.
    """
    decoded = str(
        model.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
    # SentencePiece puts a space before a text, unless it has one; decoding takes one away.
    for text in (decoded, f" {decoded}"):
        if torch.equal(model.encode(text), ids.cpu()):
            return text
    again = model.encode(decoded)
    shared = min(len(again), len(ids))
    differing = (again[:shared] != ids[:shared].cpu()).nonzero()
    token = int(differing[0]) if len(differing) else shared
    theirs, ours = (
        model.tokenizer.convert_ids_to_tokens(each[token : token + 3].tolist())
        for each in (ids, again)
    )
    raise SeamError(
        f"no text has these {len(ids)} tokens of {model.spec.name}: from token {token} on they are "
        f"{theirs}, and the text they spell encodes to {ours}",
        hint="cut texts between words or lines, and encode the parts",
    )


def paired_ids(
    source: LanguageModel, target: LanguageModel, target_ids: Int[Tensor, " t"]
) -> tuple[Int[Tensor, " s"], Int[Tensor, " t"]]:
    """The source's ids of the same text, and per target token the source token that read as far.

    A begin or end of sequence stands for the source's; texts between them are encoded apart.

    Raises:
        SeamError: the target's ids are not those of any text.
        UnsupportedModel: as :func:`encode_spans`.
    """
    marks = _marks(source, target)
    ids, index, read = [], [], 0
    for part in _between(target_ids.cpu(), marks):
        if int(part[0]) in marks:
            theirs, matching = torch.tensor([marks[int(part[0])]]), torch.zeros(1, dtype=torch.long)
        else:
            text = text_of(target, part)
            theirs, spans = encode_spans(source, text)
            matching = align(spans, encode_spans(target, text)[1])
        ids.append(theirs)
        index.append(matching + read)
        read += len(theirs)
    nothing = torch.empty(0, dtype=torch.long)
    return torch.cat((*ids, nothing)), torch.cat((*index, nothing))


def _tiles(offsets: list[tuple[int, int]], text: str) -> bool:
    """Whether the tokens leave no character out."""
    edges = [(0, 0), *offsets, (len(text), len(text))]
    return all(start <= end for (_, end), (start, _) in pairwise(edges))


def _by_character(
    pieces: list[str], offsets: list[tuple[int, int]], text: str
) -> list[tuple[int, int]]:
    """The offsets, but for two habits of SentencePiece.

    A space put before a text is given the text's first character, and the bytes of several
    characters in a row are all given the whole row.
    """
    following = [*(start for start, _ in offsets), None][1:]
    true_ends = [
        (start, start if piece == SPACE and after == start else end)
        for piece, (start, end), after in zip(pieces, offsets, following, strict=True)
    ]
    found: list[tuple[int, int]] = []
    for (start, end), run in groupby(zip(true_ends, pieces, strict=True), key=itemgetter(0)):
        tokens = [piece for _, piece in run]
        owners = [i for i in range(start, end) for _ in text[i].encode()]
        if len(owners) == len(tokens) and all(map(BYTE.fullmatch, tokens)):
            found += [(owner, owner + 1) for owner in owners]
        else:
            found += [(start, end)] * len(tokens)
    return found


def _untrimmed(tokenizer: Tokenizer, text: str) -> Encoding:
    """The encoding before its last step, where byte-level tokenizers take spaces off offsets.

    They take them off both ends: a line break with its indent would end before the indent.
    """
    bare = Tokenizer(tokenizer.model)
    bare.normalizer, bare.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    bare.add_tokens([added for _, added in sorted(tokenizer.get_added_tokens_decoder().items())])
    return bare.encode(text, add_special_tokens=False)


def _marks(source: LanguageModel, target: LanguageModel) -> dict[int, int]:
    """The target's begin and end of sequence, each with the source's own, or with its other one."""
    begin, end = source.tokenizer.bos_token_id, source.tokenizer.eos_token_id
    begins, ends = target.tokenizer.bos_token_id, target.tokenizer.eos_token_id
    # Where one token is both, it mostly stands between texts: the end is put in last.
    found = {begins: end if begin is None else begin, ends: begin if end is None else end}
    return {int(a): int(b) for a, b in found.items() if a is not None and b is not None}


def _between(ids: Int[Tensor, " t"], marks: dict[int, int]) -> Iterator[Int[Tensor, " p"]]:
    """Stretches of ``ids``: each mark alone, and what lies between marks."""
    alone = [i for i, token in enumerate(ids.tolist()) if token in marks]
    edges = sorted({0, len(ids), *alone, *(i + 1 for i in alone)})
    for start, end in pairwise(edges):
        yield ids[start:end]
