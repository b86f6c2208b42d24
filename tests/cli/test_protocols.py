"""kvtransfer eval --protocol: what it prints, and what it refuses."""

from pathlib import Path

import pytest

from .conftest import Run
from .test_bad_input import assert_fails
from .test_commands import document

EVAL = "eval {source} {target} --mapping {mapping} --items 2 --continuation 8 "
LENGTHS = EVAL + "--text {heldout} --protocol lengths "
DOMAINS = EVAL + "--prefix 24 --protocol domains "


def asked(line: str, places: dict[str, Path]) -> list[str]:
    return line.format(**places).split()


def test_the_same_tokens_are_scored_after_several_lengths(
    run: Run, places: dict[str, Path]
) -> None:
    line = LENGTHS + "--lengths 16,64,128 --rival again={mapping} --conditions mapped --json"

    done = run(*asked(line, places))

    found = document(done)
    assert "text" not in found and "guides" not in found
    assert found["lengths"]["calibrated_on"] == {"mapped": 64, "again": 64}
    points = found["lengths"]["points"]
    assert [each["prefix_tokens"] for each in points] == [16, 64, 128]
    assert [each["beyond_calibration"]["mapped"] for each in points] == [False, False, True]
    assert len({str(each["items"]["none"]["nll"]) for each in points}) == 1
    for each in points:
        assert set(each["conditions"]) == {"none", "own", "mapped", "again"}
        assert each["items"]["again"]["nll"] == each["items"]["mapped"]["nll"]


def test_texts_by_mappings(run: Run, places: dict[str, Path]) -> None:
    line = DOMAINS + "--domain one={heldout} --domain two={prose} --rival one={mapping} --json"

    done = run(*asked(line, places))

    found = document(done)
    assert found["domains"]["mappings"] == ["mapped", "one"]
    assert set(found["domains"]["texts"]) == {"one", "two"}
    same = found["domains"]["texts"]["one"]["swap"]["mapped"]
    assert same["kl_to_own"]["value"] == 0
    alone = document(run(*asked(line.replace("--mapping {mapping} ", ""), places)))["domains"]
    assert alone["mappings"] == ["one"]
    assert "mapped" not in alone["texts"]["one"]["conditions"]
    assert alone["texts"]["two"]["items"]["one"] == found["domains"]["texts"]["two"]["items"]["one"]


def test_chunks_are_halves_of_1024_unless_it_is_said_otherwise_and_text_alone(
    run: Run, places: dict[str, Path]
) -> None:
    chunks = "eval {source} {target} --mapping {mapping} --text {heldout} --protocol chunks "

    done = run(*asked(chunks + "--prefix 32 --continuation 8 --items 2 --json", places))

    found = document(done)
    assert found["text"]["protocol"] == "chunks"
    assert (found["text"]["prefix_tokens"], found["text"]["continuation_tokens"]) == (32, 8)
    assert "guides" not in found
    whole = run(*asked(chunks + "--items 1", places))  # the target reads 512 tokens
    assert "1023 tokens" in whole.stderr or "2047 tokens" in whole.stderr
    named = run(
        *asked(chunks + "--prefix 32 --continuation 8 --items 2 --guides {guides} --json", places)
    )
    assert document(named)["guides"]["n"] == 1


def test_another_mapping_is_one_more_condition(run: Run, places: dict[str, Path]) -> None:
    line = EVAL + "--prefix 24 --text {heldout} --guides none --rival again={mapping} --json"

    found = document(run(*asked(line, places)))["text"]

    assert found["items"]["again"] == found["items"]["mapped"]


FAILURES = {
    "a text too short for a chunk": (
        "eval {source} {target} --mapping {mapping} --text {short} --protocol chunks",
        "fewer than one chunk of 2048",
    ),
    "a text too short for the longest prefix": (
        LENGTHS.replace("{heldout}", "{short}") + "--lengths 16,64",
        "fewer than one chunk of 72",
    ),
    "a domain that is too short": (
        DOMAINS + "--domain one={heldout} --domain two={short}",
        "two: the text holds",
    ),
    "a domain that is missing": (DOMAINS + "--domain one={root}/no.txt", "no text file at"),
    "a length beyond the positions": (
        LENGTHS + "--lengths 64,4096",
        "a prefix of 4096 tokens and 8 after it, and",
    ),
    "a rival for another pair": (
        LENGTHS + "--lengths 16 --rival shipped=tiny-4l-to-tiny-6l",
        "shipped: this mapping goes tiny-4l",
    ),
    "a rival for another pair, elsewhere": (
        EVAL + "--text {heldout} --guides none --rival shipped=tiny-4l-to-tiny-6l",
        "shipped: this mapping goes tiny-4l",
    ),
    "no such rival": (LENGTHS + "--rival a={root}/nowhere", "no mapping at"),
}

MISTAKES = {
    "an unknown protocol": (EVAL + "--protocol paper", "Invalid value for '--protocol'"),
    "lengths that are no numbers": (LENGTHS + "--lengths 64,many", "not '64,many'"),
    "no lengths": (LENGTHS + "--lengths ''", "not ''"),
    "lengths that do not ascend": (LENGTHS + "--lengths 64,16", "ascend and begin with"),
    "a length of nothing": (LENGTHS + "--lengths 0,16", "at least 2 tokens, not 0, 16"),
    "a length twice": (LENGTHS + "--lengths 16,16", "ascend and begin with"),
    "lengths without their protocol": (EVAL + "--lengths 16", "--lengths is for --protocol"),
    "lengths and a prefix": (LENGTHS + "--prefix 16", "say --lengths and not --prefix"),
    "lengths of no text": (
        LENGTHS.replace("{heldout}", "none"),
        "--protocol lengths reads text",
    ),
    "domains without their protocol": (EVAL + "--domain a={prose}", "--domain is for --protocol"),
    "no domains": (DOMAINS, "--domain NAME=TEXT, at least one"),
    "domains and a text": (
        DOMAINS + "--domain a={prose} --text {prose}",
        "leave --text out",
    ),
    "a domain without a name": (DOMAINS + "--domain {prose}", "--domain is a name and a place"),
    "a domain twice": (
        DOMAINS + "--domain a={prose} --domain a={heldout}",
        "--domain a is given twice",
    ),
    "a rival without a name": (LENGTHS + "--rival {mapping}", "--rival is a name and a place"),
    "a rival twice": (
        LENGTHS + "--rival a={mapping} --rival a={mapping}",
        "--rival a is given twice",
    ),
    "a rival with a condition's name": (
        LENGTHS + "--rival mapped={mapping}",
        "mapped is a condition",
    ),
    "nothing to compare": (
        LENGTHS.replace("--mapping {mapping} ", ""),
        "no mapping to measure",
    ),
    "a share to read again": (LENGTHS + "--recompute 0.5", "are about text and guides"),
    "an unknown condition": (LENGTHS + "--conditions magic", "no condition magic"),
}


@pytest.mark.parametrize("mistake", FAILURES)
def test_input_that_is_wrong_is_named_and_exit_1(
    run: Run, places: dict[str, Path], tmp_path: Path, mistake: str
) -> None:
    line, says = FAILURES[mistake]

    assert_fails(run, places, tmp_path, line, code=1, says=says)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_usage_that_is_wrong_is_named_and_exit_2(
    run: Run, places: dict[str, Path], tmp_path: Path, mistake: str
) -> None:
    line, says = MISTAKES[mistake]

    assert_fails(run, places, tmp_path, line, code=2, says=says)
