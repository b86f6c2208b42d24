"""kvtransfer verify: the report's truth as exit status, one JSON document, and named refusals."""

from pathlib import Path

import pytest

from .conftest import Run
from .test_commands import document

QUICK = ("--tokens", "5", "--seeds", "1", "--recompute", "2", "--max-guides", "2")


def test_a_model_is_verified_with_the_builtin_guides(run: Run, places: dict[str, Path]) -> None:
    done = run("verify", places["source"], *QUICK, "--json")

    found = document(done)
    assert done.code == 0
    assert found["exact"] is True
    assert len(found["guides"]) == 2
    ways = [(each["dtype"], each["attention"]) for each in found["climbs"]]
    assert ways == [(d, a) for d in ("float32", "bfloat16") for a in ("eager", "sdpa")]
    for each in found["climbs"]:
        assert each["verdict"]["fault"] is False
        owed = [rung for rung in each["rungs"] if rung["pair"] in (["B2", "D"], ["D", "P"])]
        assert {rung["status"] for rung in owed} == {"equal"}


def test_or_with_guides_of_ones_own_and_a_table(run: Run, places: dict[str, Path]) -> None:
    options = ("--guides", places["guides"], "--attention", "sdpa", "--dtypes", "bfloat16,float32")

    done = run("verify", places["source"], *QUICK, *options)

    assert (done.code, done.stderr) == (0, "")
    assert "float32, sdpa attention" in done.stdout
    assert "bfloat16, sdpa attention" in done.stdout
    assert "token ids" in done.stdout


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--attention", "magic"), 1, "magic"),
        (("--attention", ","), 2, "--attention"),
        (("--dtypes", ""), 2, "--dtypes"),
        (("--dtypes", "int4"), 1, "int4"),
        (("--tokens", "600"), 1, "512"),
        (("--tokens", "0"), 2, "0 tokens"),
        (("--top-p", "2"), 2, "top-p"),
        (("--max-guides", "0"), 2, "--max-guides"),
        (("--guides", "nowhere.jsonl"), 1, "nowhere.jsonl"),
    ],
    ids=str,
)
def test_what_cannot_be_verified_is_two_lines(
    run: Run, places: dict[str, Path], options: tuple[str, ...], code: int, says: str
) -> None:
    done = run("verify", places["source"], *QUICK, *options)

    assert (done.code, done.stdout) == (code, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert says in error
    assert hint.startswith("hint: ")


def test_a_length_that_has_no_room_names_the_guide_and_the_option(
    run: Run, places: dict[str, Path]
) -> None:
    done = run("verify", places["source"], *QUICK, "--guides", places["guides"], "--tokens", "600")

    error, hint = done.stderr.splitlines()
    assert "guide 'guide-1'" in error
    assert "600 that are written" in error
    assert "--tokens" in hint


def test_an_attention_that_the_model_lacks_is_left_out_of_the_report(
    run: Run, places: dict[str, Path]
) -> None:
    options = (*QUICK, "--dtypes", "float32", "--guides", places["guides"])
    found = document(
        run("verify", places["source"], *options, "--attention", "sdpa,magic", "--json")
    )
    alone = run("verify", places["source"], *options, "--attention", "magic", "--json")

    assert (found["verdict"], found["exact"]) == ("exact", True)
    assert [each["attention"] for each in found["climbs"]] == ["sdpa"]
    (why,) = found["left_out"]
    assert "magic" in why
    # An error has no report, and a report no error: the exit code need not tell them apart.
    assert (alone.code, alone.stdout) == (1, "")
    assert alone.stderr.startswith("error: ")
