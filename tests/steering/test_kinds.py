"""An edit's argument of the wrong kind is named, and no traceback."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def said() -> dict[str, dict[str, Any]]:
    """What each text of kinds.py raised, in a process without the tests' type checks."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.steering.kinds"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {each["text"]: each for each in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("Steer(w)", "WrongKind", "the vector is 'w' (str), not a CacheVector"),
        ("Steer(w, 1.0)", "WrongKind", "the vector is 'w' (str), not a CacheVector"),
        ("Steer(cache)", "WrongKind", "the vector is of kind KVCache"),
        ("Replace(w)", "WrongKind", "the donor is 'w' (str), not a KVCache"),
        ("Interpolate(w, 0.5)", "WrongKind", "the donor is 'w' (str), not a KVCache"),
        ("Scale(0.5, layers=1.5)", "SteeringError", "layers are 1.5"),
        ("Scale(0.5, layers=None)", "SteeringError", "layers are None"),
        ("Bank(None)", "SteeringError", "layers are None"),
        ("Scale(0.5, heads=1)", "SteeringError", "heads are 1"),
        ("Scale(0.5, heads=mid)", "SteeringError", "heads are 'mid'"),
        ("Scale(0.5, heads=(0.5,))", "SteeringError", "heads are (0.5,)"),
        ("Scale(0.5, tokens=3)", "SteeringError", "tokens are 3"),
        ("Scale(0.5, tokens=())", "SteeringError", "tokens are ()"),
        ("Scale(0.5, tokens=(0, 6, 2))", "SteeringError", "tokens are (0, 6, 2)"),
        ("Scale(0.5, tokens=(0.5, 3))", "SteeringError", "tokens are (0.5, 3)"),
        ("Shuffle(abc)", "SteeringError", "a seed of 'abc'"),
        ("Shuffle(1.5)", "SteeringError", "a seed of 1.5"),
        ("Shuffle(order=3)", "SteeringError", "order are 3"),
        ("Lag(1.5)", "SteeringError", "a lag of 1.5 tokens"),
        ("nothing", "WrongKind", "made"),
        ("chain(1)", "WrongKind", "a step is 1 (int)"),
    ],
)
def test_the_message_says_what_was_given_and_the_hint_what_is_taken(
    said: dict[str, dict[str, Any]], text: str, error: str, words: str
) -> None:
    assert (said[text]["error"], words in said[text]["message"]) == (error, True)
    assert said[text]["hint"]


def test_an_edit_is_one_value_however_its_places_are_listed(
    said: dict[str, dict[str, Any]],
) -> None:
    assert said["lists"]["same"]
