"""Ask questions that only a hidden guide can answer, under every condition."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import SeamError
from kvtransfer.evaluation.conditions import Arm, Pair, Reading, arms
from kvtransfer.guides.guide import Expect, Guide, Item
from kvtransfer.guides.seam import split
from kvtransfer.hf.run import generate, score
from kvtransfer.measures.agreement import nll
from kvtransfer.measures.intervals import Column, mean, mean_ratio
from kvtransfer.report import Estimate

ANSWER_TOKENS = 12
"""Tokens that a free answer may take; it ends at the first line break."""


@dataclass(frozen=True, slots=True)
class Example:
    """One free-text item, and what each condition wrote."""

    guide: str
    prompt: str
    expect: str
    texts: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False)
class GuideResult:
    """Per condition, whether each item was answered right."""

    right: dict[str, Column]
    chance: Column
    examples: tuple[Example, ...]
    missing: dict[str, str]

    @property
    def n(self) -> int:
        """Items."""
        return len(self.chance)

    def estimates(self, condition: str) -> dict[str, Estimate | None]:
        """Accuracy, and what it is worth between ``none`` and ``own``, paired over items."""
        found, floor, ceiling = self.right[condition], self.right["none"], self.right["own"]
        return {
            "accuracy": mean(found),
            "gap_recovered": mean_ratio(found - floor, ceiling - floor),
            "retention": mean_ratio(found, ceiling),
        }


def evaluate_guides(
    pair: Pair,
    guides: Iterable[Guide],
    names: tuple[str, ...],
    *,
    progress: Callable[[], None] = lambda: None,
) -> GuideResult:
    """Graft each guide as a hidden prefix and ask its items, under every condition.

    Args:
        pair: The models and the mapping.
        guides: What to hide, and what to ask.
        names: Conditions; ``none`` and ``own`` must be among them.
        progress: Called after each item.

    Raises:
        SeamError: a guide and a prompt share no token boundary, or a pack's guide has other ids.
        ArtifactError, IncompatibleModels, CacheLayoutError: a pack lacks a guide, or is not the
            target's.
    """
    right: dict[str, list[float]] = {}
    chance: list[float] = []
    examples: list[Example] = []
    missing: dict[str, str] = {}
    for guide in guides:
        prepared: dict[tuple[int, ...], dict[str, Arm]] = {}
        for item in guide.items:
            hidden = split(pair.target.tokenizer, guide.text, item.prompt, seam="back-off").hidden
            key = tuple(hidden.tolist())
            if key not in prepared:  # the seam, and with it the cache, is nearly always the same
                begun = torch.cat((pair.target.opening, hidden))
                made, unavailable = arms(Reading.of(pair, begun), names)
                prepared[key] = made | _packed(pair, guide, begun)
                missing |= unavailable
            texts = {}
            for name, arm in prepared[key].items():
                correct, texts[name] = ask(arm, guide.text, len(hidden), item)
                right.setdefault(name, []).append(float(correct))
            chance.append(item.chance)
            if isinstance(item, Expect):
                examples.append(Example(guide.name, item.prompt, item.expect, texts))
            progress()
    return GuideResult(
        {name: np.array(column) for name, column in right.items()},
        np.array(chance),
        tuple(examples),
        missing,
    )


def _packed(pair: Pair, guide: Guide, hidden: Int[Tensor, " t"]) -> dict[str, Arm]:
    """The target on what each pack holds of the guide, as far as it is hidden."""
    found = {}
    for name, pack in pair.packs.items():
        held = pack[guide.name]
        if not torch.equal(held.ids[: len(hidden)], hidden):
            raise SeamError(
                f"{name} holds {held.tokens} other ids of {guide.name!r} than the {len(hidden)} "
                "that are hidden",
                hint="a pack of the same guides, not read as system messages, is needed",
            )
        prefix = held.restore(pair.target).prefix(len(hidden))
        found[name] = Arm(pair.target, prefix)
    for name, (base, edit) in pair.edits.items():
        if base in found and (plain := found[base].prefix) is not None:
            found[name] = Arm(pair.target, edit(plain))
    return found


def ask(arm: Arm, guide: str, hidden: int, item: Item) -> tuple[bool, str]:
    """Whether the arm answers right, and the text that it gave.

    Args:
        arm: Who answers, on what prefix.
        guide: The text of the guide.
        hidden: Its leading tokens that the prefix holds, an opening before them not counted.
        item: What is asked.
    """
    encode = arm.reader.encode
    prompt = encode(guide + item.prompt)
    if isinstance(item, Expect):
        text = _written(arm, prompt[hidden:])
        return item.right(text), text
    ends = [encode(guide + item.prompt + choice) for choice in item.choices]
    best = int(_likelihoods(arm, prompt, ends, hidden).argmax())
    return best == item.answer, item.choices[best]


def _likelihoods(
    arm: Arm, prompt: Int[Tensor, " t"], ends: list[Int[Tensor, " _t"]], hidden: int
) -> Tensor:
    """Mean log-likelihood a token of each choice, all of them in one batch."""
    # Shorter rows are filled up to the right, where no scored token can see it, with their own last
    # token: the model's padding token (0, often) would be taken for padding.
    longest = max(map(len, ends))
    live = torch.stack([torch.cat((ids, ids[-1:].expand(longest - len(ids)))) for ids in ends])
    live = live[:, hidden:]
    prefix = None if arm.prefix is None else arm.prefix.expand(len(ends))
    logits = score(arm.reader, live, prefix).cpu()
    found = []
    for row, ids in zip(logits, ends, strict=True):
        start = max(min(shared(prompt, ids), len(ids) - 1) - hidden, 1)
        tokens = ids[hidden:]
        found.append(-nll(row[start - 1 : len(tokens) - 1], tokens[start:]).mean())
    return torch.stack(found)


def shared(a: Tensor, b: Tensor) -> int:
    """Leading tokens that both have."""
    shortest = min(len(a), len(b))
    differing = (a[:shortest] != b[:shortest]).nonzero()
    return int(differing[0]) if len(differing) else shortest


def _written(arm: Arm, live: Int[Tensor, " s"]) -> str:
    """Greedy text up to the first line break."""
    tokens: list[int] = []
    for token in generate(arm.reader, live, arm.prefix, max_new_tokens=ANSWER_TOKENS):
        tokens.append(token)
        text = arm.reader.decode(torch.tensor(tokens))
        if "\n" in text.lstrip("\n "):
            break
    return arm.reader.decode(torch.tensor(tokens, dtype=torch.long)).strip().split("\n")[0]
