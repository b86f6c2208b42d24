"""A shell to run commands in, two tiny models in folders, and everything that can be wrong."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    """What a command left."""

    code: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """``run("check", a, b)``: a fresh process each, with its own streams."""
    streams = tmp_path_factory.mktemp("streams")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.cli.server"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        requests, answers = server.stdin, server.stdout

        def command(*arguments: str | Path, stdin: bytes = b"") -> Done:
            (streams / "stdin").write_bytes(stdin)
            places = {name: str(streams / name) for name in ("stdin", "stdout", "stderr")}
            requests.write(json.dumps({"arguments": list(map(str, arguments))} | places) + "\n")
            requests.flush()
            code = int(answers.readline())
            return Done(code, *((streams / name).read_text() for name in ("stdout", "stderr")))

        yield command
        requests.close()


@pytest.fixture(scope="session")
def places(
    tiny: Callable[..., LanguageModel], run: Run, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Good inputs and bad ones, by name."""
    root = tmp_path_factory.mktemp("places")
    made = {"root": root}
    models = {
        "source": tiny("llama", seed=1, num_hidden_layers=3),
        "target": tiny("llama", seed=2, num_hidden_layers=2, num_key_value_heads=4, head_dim=8),
        "other": tiny("llama", seed=3, num_hidden_layers=3),
    }
    for name, model in models.items():
        made[name] = root / name
        model.module.save_pretrained(made[name])
        model.tokenizer.save_pretrained(made[name])
    made |= broken_models(root, made["source"])
    made |= texts(root)
    made["mapping"] = root / "mapping"
    options = ("--data", made["prose"], "--tokens", "1024", "--chunk", "64", "--layers", "1")
    done = run("fit", made["source"], made["target"], "--out", made["mapping"], *options)
    assert not done.stderr, done.stderr
    made["pack"] = root / "pack"
    done = run("pack", "build", made["source"], made["guides"], "--out", made["pack"])
    assert not done.stderr, done.stderr
    return made | broken_mappings(root, made["mapping"]) | broken_packs(root, made["pack"])


def broken_packs(root: Path, good: Path) -> dict[str, Path]:
    """Pack folders, each with one thing wrong."""
    made = {
        name: Path(shutil.copytree(good, root / name)) for name in ("flipped_pack", "later_pack")
    }
    (tensors,) = (made["flipped_pack"] / "guides").iterdir()
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x01")
    config = json.loads((good / "config.json").read_text(encoding="utf-8"))
    (made["later_pack"] / "config.json").write_text(json.dumps(config | {"format": 9}))
    return made


def texts(root: Path) -> dict[str, Path]:
    """Text and guide files."""
    contents = {
        "prose.txt": "\n\n".join(builtin("fit")[:40]),
        "heldout.txt": "\n\n".join(builtin("heldout")[:10]),
        "empty.txt": " \n",
        "short.txt": "Too short.",
        "bad.jsonl": '{"text": "fine"}\n{"text": \n',
        "guides.jsonl": json.dumps(
            {
                "guide": "The code is 4821.",
                "items": [{"prompt": "\nThe code is", "choices": [" 4821", " 77"], "answer": 0}],
            }
        ),
        "bad_guides.jsonl": '{"guide": "The code is 4821."}\n',
    }
    for name, text in contents.items():
        (root / name).write_text(text, encoding="utf-8")
    return {name.split(".")[0]: root / name for name in contents}


def broken_models(root: Path, good: Path) -> dict[str, Path]:
    """Model folders, each with one thing wrong."""
    made = {
        name: Path(shutil.copytree(good, root / name))
        for name in ("cut_weights", "typeless", "wordless", "stateful")
    }
    weights = made["cut_weights"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5_000])
    config = json.loads((good / "config.json").read_text())
    (made["typeless"] / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key != "model_type"})
    )
    (made["stateful"] / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    tokenizer = made["wordless"] / "tokenizer.json"
    inside = json.loads(tokenizer.read_text(encoding="utf-8"))
    inside["model"]["merges"].pop()
    tokenizer.write_text(json.dumps(inside), encoding="utf-8")
    return made


def broken_mappings(root: Path, good: Path) -> dict[str, Path]:
    """Mapping folders, each with one thing wrong."""
    made = {
        name: Path(shutil.copytree(good, root / name))
        for name in ("cut_mapping", "fieldless_mapping", "nan_mapping", "flipped_mapping")
    }
    tensors = made["cut_mapping"] / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:2_000])
    config = json.loads((good / "config.json").read_text(encoding="utf-8"))
    del config["sources"]
    (made["fieldless_mapping"] / "config.json").write_text(json.dumps(config))
    tensors = made["flipped_mapping"] / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"\x01")
    tensors = made["nan_mapping"] / "tensors.safetensors"
    loaded = load_file(tensors)
    loaded["maps.0.keys.weight"][0, 0] = torch.nan
    save_file(loaded, tensors)
    config = json.loads((good / "config.json").read_text(encoding="utf-8"))
    config["sha256"] = hashlib.sha256(tensors.read_bytes()).hexdigest()
    (made["nan_mapping"] / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made
