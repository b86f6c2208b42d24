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
        (("--turns", "1"), 2, "1 turns of 12 tokens"),
        (("--turn-tokens", "2"), 2, "3 turns of 2 tokens"),
        (("--bound", "nan"), 2, "kl=nan"),
        (("--conditions", "own"), 2, "arms of its own"),
        (("--rival", "one=nowhere"), 2, "--rival is measured on"),
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


@pytest.mark.parametrize("alone", ["--back nowhere", "--turn-tokens 8", "--bound 0.2"])
def test_its_options_mean_nothing_without_it(run: Run, places: dict[str, Path], alone: str) -> None:
    done = run("eval", places["source"], places["target"], *alone.split())

    assert (done.code, done.stdout) == (2, "")
    assert "are about --turns" in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        "--turns 3",
        "--turns 3 --back {mapping}",
        "--tasks kvtransfer_guides --limit 0",
        "--tasks kvtransfer_guides --batch-size many",
    ],
)
def test_a_mistake_in_one_part_is_said_before_another_is_measured(
    run: Run, places: dict[str, Path], wrong: str
) -> None:
    ends = places["source"], places["target"], "--mapping", places["mapping"]
    # A condition that cannot be: whoever began to measure guides would say so.
    guides = ("--guides", places["guides"], "--conditions", "own+Nothing(1)")

    done = run("eval", *ends, *wrong.format(**places).split(), *guides)

    assert done.stderr.startswith("error: ")
    assert "Nothing" not in done.stderr


def test_standard_input_is_read_by_everyone_who_asks(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    back = tmp_path / "back"
    fit = ("--data", places["prose"], "--tokens", "1024", "--chunk", "64", "--layers", "1")
    run("fit", places["target"], places["source"], "--out", back, *fit)
    ends = places["source"], places["target"], "--mapping", places["mapping"], "--back", back
    sizes = (*SIZES, "--prefix", "24", "--continuation", "8", "--json", "--guides", "none")
    page = tmp_path / "page.html"

    piped = run(
        *("eval", *ends, *sizes, "--text", "-", "--report", page),
        stdin=places["heldout"].read_bytes(),
    )

    named = document(run("eval", *ends, *sizes, "--text", places["heldout"]))
    found = document(piped)
    assert found["text"]["items"] == named["text"]["items"]
    assert found["turns"]["items"] == named["turns"]["items"]
    assert "Turns</h2>" in page.read_text(encoding="utf-8")
