"""A pack is built, shown, taken to another model, read after, asked for and
exported, each by one command."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides.pack import GuidePack
from kvtransfer.hf.edited import Edit
from kvtransfer.hf.model import load
from kvtransfer.hf.run import generate, prefill
from kvtransfer.steering.interventions import Lag, Scale

from .conftest import Done, Run

TEXT, PROMPT = "The code is 4821.", " The code is"


def document(done: Done) -> Any:
    assert (done.code, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_a_pack_is_built_and_shown(run: Run, places: dict[str, Path], tmp_path: Path) -> None:
    build = ("pack", "build", places["source"], places["guides"], "--out", tmp_path / "pack")

    built = document(run(*build, "--json"))
    shown = document(run("pack", "show", tmp_path / "pack", "--json"))
    table = run("pack", "show", tmp_path / "pack")

    assert built == shown
    (guide,) = shown["guides"]
    assert (guide["name"], guide["text"], guide["made"]) == ("guide-1", TEXT, {"how": "own"})
    assert guide["bytes"] == guide["tokens"] * shown_bytes(places["source"])
    assert set(shown["model"]) >= {"name", "fingerprint", "revision", "tokenizer", "dtype"}
    assert "guide-1" in table.stdout
    assert TEXT in table.stdout
    run(*build)  # again, over the first
    assert document(run("pack", "show", tmp_path / "pack", "--json"))["guides"] == [guide]


def shown_bytes(model: Path) -> int:
    return 4 * load(str(model)).spec.numbers_per_token


def test_text_after_a_guide_is_text_after_its_words(run: Run, places: dict[str, Path]) -> None:
    ask = ("pack", "generate", places["pack"], "guide-1", "--prompt", PROMPT)
    options = ("--max-new-tokens", "8", "--model", places["source"])

    streamed, found = run(*ask, *options), document(run(*ask, *options, "--json"))

    model = load(str(places["source"]))
    tokens = list(generate(model, model.encode(TEXT + PROMPT), max_new_tokens=8))
    assert (found["guide"], found["prompt"], found["seam_moved"]) == ("guide-1", PROMPT, None)
    assert model.decode(tokens).startswith(found["text"])
    assert streamed.stdout == found["text"] + "\n"


def test_text_after_an_edited_guide_is_text_on_the_edit(run: Run, places: dict[str, Path]) -> None:
    ask = ("pack", "generate", places["pack"], "guide-1", "--prompt", PROMPT, "--json")
    options = ("--max-new-tokens", "8", "--model", places["source"])

    once = document(run(*ask, *options, "--edit", "Scale(0.3,values)+Lag(1)"))
    always = document(run(*ask, *options, "--edit", "Scale(0.3,values)", "--every-step"))
    nothing = document(run(*ask, *options, "--edit", "Scale(1.0)"))

    model = load(str(places["source"]))
    guide = GuidePack.from_pretrained(places["pack"])["guide-1"]
    joint = guide.graft(model).joined(PROMPT)

    def written(edit: Edit | None, prefix: KVCache) -> str:
        return model.decode(list(generate(model, joint.live, prefix, max_new_tokens=8, edit=edit)))

    prefix = guide.restore(model)
    quieter = Scale(0.3, "values")
    assert written(None, Lag(1)(quieter(prefix))).startswith(once["text"])
    assert written(quieter, prefix).startswith(always["text"])
    assert written(None, prefix).startswith(nothing["text"])
    assert len({once["text"], always["text"], nothing["text"]}) == 3


@pytest.mark.parametrize("option", [("--every-step",), ("--vector", "v=nowhere")], ids=str)
def test_how_to_edit_without_an_edit_is_a_mistake(
    run: Run, places: dict[str, Path], option: tuple[str, ...]
) -> None:
    done = run("pack", "generate", places["pack"], "guide-1", "--prompt", PROMPT, *option)

    assert (done.code, done.stdout) == (2, "")
    assert "there is no --edit" in done.stderr


def test_a_pack_goes_to_another_model(run: Run, places: dict[str, Path], tmp_path: Path) -> None:
    done = run(
        "pack", "transfer", places["pack"], "--mapping", places["mapping"],
        "--out", tmp_path / "to", "--gate", "none", "--json",
    )  # fmt: skip

    (guide,) = document(done)["guides"]
    assert guide["made"]["how"] == "mapped"
    target = load(str(places["target"]))
    restored = GuidePack.from_pretrained(tmp_path / "to")["guide-1"].restore(target)
    own = prefill(target, target.encode(TEXT)[None])
    assert [keys.shape for keys in restored.keys] == [keys.shape for keys in own.keys]


def test_the_device_of_a_transfer_is_used_without_a_target_too(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    move = ("pack", "transfer", places["pack"], "--mapping", places["mapping"], "--out")

    done = run(*move, tmp_path / "to", "--device", "nowhere")

    assert (done.code, done.stdout) == (1, "")
    assert done.stderr.startswith("error: device 'nowhere'")
    assert not (tmp_path / "to").exists()
    assert run(*move, tmp_path / "to", "--device", "cpu").code == 0


def test_a_pack_is_measured_as_one_more_condition(run: Run, places: dict[str, Path]) -> None:
    done = run("pack", "build", places["target"], places["guides"], "--out", places["root"] / "to")
    assert done.code == 0

    done = run(
        "eval", places["source"], places["target"], "--mapping", places["mapping"],
        "--text", "none", "--guides", places["guides"], "--conditions", "mapped",
        "--pack", places["root"] / "to", "--json",
    )  # fmt: skip

    found = json.loads(done.stdout)["guides"]["conditions"]
    assert found["pack"]["accuracy"] == found["own"]["accuracy"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_request_holds_the_guides_ids_and_what_follows(run: Run, places: dict[str, Path]) -> None:
    ask = ("pack", "request", places["pack"], "guide-1", "--prompt", PROMPT)
    body = document(run(*ask, "--model", places["source"], "--served", "mine"))

    assert body == {
        "model": "mine",
        "prompt": load(str(places["source"])).encode(TEXT + PROMPT).tolist(),
        "max_tokens": 128,
        "temperature": 0,
        "kv_transfer_params": {"pack": places["pack"].name, "guide": "guide-1"},
    }


def test_a_guide_is_exported(run: Run, places: dict[str, Path], tmp_path: Path) -> None:
    export = ("pack", "export", places["pack"], "guide-1", "--out", tmp_path / "adapter", "--json")

    found = document(run(*export))

    assert found["tokens"] > 1
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
