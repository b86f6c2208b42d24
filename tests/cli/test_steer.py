"""A vector is read off pairs, swept, and steers an answer, each by one command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.hf.model import LanguageModel, load
from kvtransfer.hf.run import generate
from kvtransfer.steering.vector import CacheVector

from .conftest import Done, Run

PAIRS = [
    {"positive": f"The {noun} is good, and the", "negative": f"The {noun} is bad, and the"}
    for noun in ("boat", "tide", "harbour", "list", "file", "string", "number", "house")
]
PROMPT = "The tide comes in, and the"


def document(done: Done) -> Any:
    assert (done.code, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def made(
    tiny: Callable[..., LanguageModel], run: Run, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("steer")
    names = ("source", "other", "pairs", "vector", "same")
    found = {"root": root} | {name: root / name for name in names}
    for seed, name in enumerate(("source", "other")):
        model = tiny("llama", seed=seed, num_hidden_layers=3)
        model.module.save_pretrained(found[name])
        model.tokenizer.save_pretrained(found[name])
    found["pairs"].write_text("\n".join(map(json.dumps, PAIRS)), encoding="utf-8")
    found["same"].write_text('{"positive": "a", "negative": "a"}', encoding="utf-8")
    done = run("steer", "extract", found["source"], found["pairs"], "--out", found["vector"])
    assert (done.code, done.stderr) == (0, "")
    assert "8 pairs" in " ".join(done.stdout.split())  # folded where a path is long
    assert "Note" not in done.stdout
    return found


def test_a_vector_is_read_off_pairs(run: Run, made: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "vector"

    found = document(
        run("steer", "extract", made["source"], made["pairs"], "--out", out, "--at", "-2", "--json")
    )

    vector = CacheVector.from_pretrained(out)
    assert (found["pairs"], found["at"], vector.at) == (8, -2, -2)
    assert found["model"]["fingerprint"] == vector.identity


def test_pairs_that_say_little_are_noted_and_still_written(
    run: Run, made: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps(PAIRS[0]), encoding="utf-8")
    extract = ("steer", "extract", made["source"], tmp_path / "one.jsonl", "--out", tmp_path / "v")

    table, as_json = run(*extract), run(*extract, "--json")

    assert (table.code, as_json.code) == (0, 0)
    assert "Note: 1 pairs are too few" in table.stdout
    assert "note: 1 pairs are too few" in as_json.stderr
    assert json.loads(as_json.stdout)["agree"] is False
    told = run(
        "steer", "generate", made["source"], tmp_path / "v", "--prompt", PROMPT, "--strength", "1"
    )
    assert "note: 1 pairs are too few" in told.stderr


def test_no_strength_is_the_models_own_answer(run: Run, made: dict[str, Path]) -> None:
    ask = ("steer", "generate", made["source"], made["vector"], "--prompt", PROMPT)
    options = ("--max-new-tokens", "8", "--strength")

    plain = run(*ask, *options, "0")
    pushed = document(run(*ask, *options, "25", "--key-strength", "0", "--json"))

    model = load(str(made["source"]))
    own = model.decode(list(generate(model, model.encode(PROMPT), max_new_tokens=8)))
    assert plain.stdout == own + "\n"
    assert pushed["text"] != own
    assert (pushed["strength"], pushed["key_strength"]) == (25, 0)


def test_a_sweep_says_what_is_useful(run: Run, made: dict[str, Path]) -> None:
    ask = ("steer", "sweep", made["source"], made["vector"], "--prompt", PROMPT)
    options = ("--strengths", "1,30", "--max-new-tokens", "8", "--after", r"\n")
    loose = ("--max-nll", "99", "--max-repetition", "1", "--max-broken", "1")

    found = run(*ask, *options, *loose, "--json")
    never = run(*ask, *options, "--effect", "zzz")

    assert found.stderr == ""
    report = json.loads(found.stdout)
    assert [each["strength"] for each in report["strengths"]] == [0, 1, 30]
    assert report["steered"]["after"] == "\n"
    assert 30 in report["window"]
    assert found.code == 0
    assert never.code == 1
    assert "Useful strengths: none" in never.stdout


FAILURES = {
    "no pairs": ("extract {source} {root}/missing.jsonl --out {root}/v", 1, "no file of pairs"),
    "prompts that are the same": (
        "extract {source} {same} --out {root}/v",
        1,
        "pair 1: both prompts are the same",
    ),
    "a chat without a template": (
        "extract {source} {pairs} --out {root}/v --chat",
        1,
        "no chat template",
    ),
    "a place that holds something else": ("extract {source} {pairs} --out {source}", 1, "holds"),
    "the last but none": ("extract {source} {pairs} --out {root}/v --at 0", 2, "--at"),
    "another model": ("generate {other} {vector} --prompt a --strength 1", 1, "this vector is for"),
    "no number": ("generate {source} {vector} --prompt a --strength nan", 1, "strength is nan"),
    "no such layer": (
        "generate {source} {vector} --prompt a --strength 1 --layers 9",
        1,
        "no layer 9",
    ),
    "no numbers": ("sweep {source} {vector} --prompt a --strengths 1,x", 2, "numbers with commas"),
    "a sweep of NaN": ("sweep {source} {vector} --prompt a --strengths nan", 1, "strength is nan"),
    "no expression": ("sweep {source} {vector} --prompt a --effect (", 1, "no regular expression"),
    "no such vector": ("sweep {source} {root}/nowhere --prompt a", 1, "no steering vector at"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_foreseen_failure_is_two_lines(run: Run, made: dict[str, Path], name: str) -> None:
    command, code, said = FAILURES[name]
    done = run("steer", *command.format(**made).split())

    assert (done.code, done.stdout) == (code, "")
    assert said in done.stderr
    assert done.stderr.startswith("error: ")
    assert "hint: " in done.stderr
