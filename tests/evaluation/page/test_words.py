"""Words that differ are found, and no word is lost."""

from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.evaluation.page.words import Run, compare, marked

TEXTS = st.lists(st.sampled_from(["the", "tide", "bell", "Marlow", "Marlow.", "a"])).map(" ".join)


@given(TEXTS, TEXTS)
def test_both_texts_can_be_had_again_from_their_comparison(text: str, other: str) -> None:
    runs = compare(text, other)

    assert " ".join(filter(None, (run.words for run in runs))) == text
    assert " ".join(filter(None, (run.other for run in runs))) == other


@given(TEXTS)
def test_a_text_does_not_differ_from_itself(text: str) -> None:
    assert not any(run.differs for run in compare(text, text))


@given(TEXTS, TEXTS)
def test_texts_that_are_not_alike_differ_somewhere(text: str, other: str) -> None:
    assert any(run.differs for run in compare(text, other)) == (text != other)


def test_what_differs_is_marked_by_a_sign_and_not_by_colour_alone() -> None:
    runs = compare("the old Moon rises", "the Copper Moon rises slowly")

    assert runs == (
        Run("the", "the"),
        Run("old", "Copper"),
        Run("Moon rises", "Moon rises"),
        Run("", "slowly"),
    )
    assert marked("the old Moon rises", "the Copper Moon rises slowly") == (
        'the <mark title="instead of: Copper">≠old</mark> Moon rises '
        '<span class="gap" title="missing here: slowly">[…]</span>'
    )


def test_words_are_escaped() -> None:
    assert "<i>" not in marked("<i> a", "<i> b")
    assert "<i>" not in marked("a", "<i> b")
