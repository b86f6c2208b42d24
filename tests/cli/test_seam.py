"""pack generate --seam: a prompt that merges with its guide is refused, or read live."""

import json
from pathlib import Path

import pytest

from kvtransfer.guides.pack import GuidePack
from kvtransfer.hf.model import load
from kvtransfer.hf.run import generate

from .conftest import Run
from .test_commands import document

GUIDE, PROMPT = "Return the fun", "ction object"


@pytest.fixture(scope="module")
def pack(run: Run, places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packs")
    (folder / "guides.jsonl").write_text(json.dumps({"name": "merging", "guide": GUIDE}))
    done = run("pack", "build", places["source"], folder / "guides.jsonl", "--out", folder / "pack")
    assert done.code == 0, done.stderr
    return folder / "pack"


def test_strict_refuses_and_says_what_would_help(
    run: Run, places: dict[str, Path], pack: Path
) -> None:
    asked = ("pack", "generate", pack, "merging", "--model", places["source"], "--prompt", PROMPT)
    done, odd = run(*asked), run(*asked, "--seam", "loose")

    assert (done.code, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: no exact token boundary")
    assert "--seam back-off" in hint
    assert odd.code == 2
    assert "'strict', 'back-off'" in odd.stderr


def test_a_guide_and_its_prompt_are_tokenized_once(
    places: dict[str, Path], pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(str(places["source"]))
    graft = GuidePack.from_pretrained(pack)["merging"].graft(model)
    whole = list(graft.stream(PROMPT, seam="back-off", max_new_tokens=8))
    joint = graft.joined(PROMPT, seam="back-off")

    def never(*_: object, **__: object) -> None:
        raise RuntimeError("tokenized again")

    monkeypatch.setattr("kvtransfer.guides.graft.split", never)

    assert list(graft.stream(joint, max_new_tokens=8)) == whole
    with pytest.raises(RuntimeError, match="tokenized again"):
        list(graft.stream(PROMPT, max_new_tokens=8))


def test_a_prompt_of_nothing_is_named(run: Run, places: dict[str, Path], pack: Path) -> None:
    asked = ("pack", "generate", pack, "merging", "--model", places["source"], "--prompt", "")

    done = run(*asked)

    assert (done.code, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert "the live text is empty" in error
    assert hint.startswith("hint: give a prompt")


def test_backing_off_writes_what_follows_the_joint_text(
    run: Run, places: dict[str, Path], pack: Path
) -> None:
    model = load(str(places["source"]))
    asked = ("--model", places["source"], "--prompt", PROMPT, "--max-new-tokens", "8")
    told = run("pack", "generate", pack, "merging", *asked, "--seam", "back-off")
    found = document(
        run("pack", "generate", pack, "merging", *asked, "--seam", "back-off", "--json")
    )

    written = list(generate(model, model.encode(GUIDE + PROMPT), max_new_tokens=8))
    assert found["text"]
    assert model.decode(written).startswith(found["text"])
    assert told.stdout == found["text"] + "\n"
    assert told.stderr == f"note: {found['seam_moved']}\n"
    assert "moved back by" in found["seam_moved"]
