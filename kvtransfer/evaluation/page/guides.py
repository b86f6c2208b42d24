"""Answers to questions about a hidden guide, side by side, and what differs in them."""

from collections.abc import Sequence

from kvtransfer.evaluation.guide_items import Example
from kvtransfer.evaluation.page.markup import Safe, el, join, said
from kvtransfer.evaluation.page.words import marked
from kvtransfer.guides.guide import Expect

SHOWN = 8
"""Questions that a page has room for; the first, not the best."""

ORDER = ("own", "mapped", "source", "none")


def answers(examples: Sequence[Example], names: Sequence[str]) -> Safe:
    """One card a question; conditions in the order of ``names``."""
    cards = [_card(each, names) for each in examples[:SHOWN]]
    return el("ol", {"class": "cards"}, *cards)


def _card(example: Example, names: Sequence[str]) -> Safe:
    own = example.texts.get("own", "")
    lines = [
        join(
            [
                el("dt", None, name),
                el("dd", None, *_answer(example, name, own)),
            ]
        )
        for name in names
        if name in example.texts
    ]
    return el(
        "li",
        {"class": "card"},
        el("p", {"class": "about"}, "guide ", said(example.guide)),
        el("p", {"class": "question"}, said(question(example.prompt))),
        el("dl", None, el("dt", None, "expected"), el("dd", None, said(example.expect)), *lines),
    )


def _answer(example: Example, name: str, own: str) -> list[Safe | str]:
    text = example.texts[name]
    right = Expect(example.prompt, example.expect).right(text)
    sign = el(
        "span",
        {
            "class": "right" if right else "wrong",
            "role": "img",
            "aria-label": "right" if right else "wrong",
        },
        "✓" if right else "✗",
    )
    if not text.strip():
        return [sign, " ", el("i", None, "nothing")]
    shown = said(text) if name == "own" else el("bdi", None, marked(text, own))
    return [sign, " ", shown]


def question(prompt: str) -> str:
    """The question of a prompt, without what leads to it and the start of its answer."""
    lines = prompt.strip().splitlines() or [""]
    return lines[0].removeprefix("Question:").strip()
