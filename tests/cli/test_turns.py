"""``kvtransfer eval --turns``: one document of what was asked; both directions, or an error."""

from pathlib import Path

import pytest

from .conftest import Run
from .test_commands import document

SIZES = ("--turns", "3", "--turn-tokens", "12", "--items", "2")


def test_only_turns_are_measured_where_nothing_else_is_named(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    back = tmp_path / "back"
    fit = ("--data", places["prose"], "--tokens", "1024", "--chunk", "64", "--layers", "1")
    fitted = run("fit", places["target"], places["source"], "--out", back, *fit)
    ends = places["source"], places["target"], "--mapping", places["mapping"], "--back", back

    done = run("eval", *ends, *SIZES, "--json")

    assert fitted.code == 0
    found = document(done)
    assert "text" not in found
    assert "guides" not in found
    assert (found["turns"]["n"], found["turns"]["turns"], found["turns"]["bound"]) == (2, 3, 0.1)
    assert done.code in (0, 1)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ((), 1, "none leads from"),
        (("--text", "none"), 2, "--text none leaves none"),
        (("--back", "nowhere"), 1, "nowhere"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_an_error_and_a_hint(
    run: Run, places: dict[str, Path], options: tuple[str, ...], code: int, says: str
) -> None:
    ends = places["source"], places["target"], "--mapping", places["mapping"]

    done = run("eval", *ends, *SIZES, *options)

    assert done.code == code
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert says in error
    assert hint.startswith("hint: ")
