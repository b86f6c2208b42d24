"""lm_eval's own command line runs our model, offline, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtransfer.evaluation.harness.__main__ import main

ROOT = Path(__file__).parents[3]


def test_all_flags_of_lm_eval_go_to_our_model(tmp_path: Path) -> None:
    command = (
        "-m kvtransfer.evaluation.harness --model kvtransfer --model_args "
        "source=tiny-4l,target=tiny-6l,mapping=tiny-4l-to-tiny-6l,condition=mapped "
        "--tasks kvtransfer_guides --limit 2 --batch_size auto --log_samples --output_path out "
        "--use_cache answers"
    )
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "kvtransfer_guides" in done.stdout
    (path,) = (tmp_path / "out").rglob("results_*.json")
    config = json.loads(path.read_text())["config"]
    assert (config["source"], config["target"]) == ("tiny-4l", "tiny-6l")
    assert config["condition"] == "mapped"
    assert config["mapping_digest"]
    assert list((tmp_path / "out").rglob("samples_kvtransfer_guides_*.jsonl"))
    assert (tmp_path / "answers_rank0.db").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--config nowhere.yaml", "error: Config file not found"),
        ("--no_such_flag", "error: unrecognized arguments"),
    ],
)
def test_a_mistake_is_told_and_has_status_2(
    arguments: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["harness", "run", *arguments.split()])

    with pytest.raises(SystemExit) as stop:
        main()

    assert stop.value.code == 2
    assert said in capsys.readouterr().err
