"""--gate on eval and on pack transfer."""

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import Run


@pytest.fixture
def scored(run: Run, places: dict[str, Path]) -> Any:
    """``eval`` of the tiny mapping, with more arguments, as JSON and exit code."""

    def evaluated(*more: str) -> tuple[dict[str, Any], int]:
        done = run(
            "eval", places["source"], places["target"], "--mapping", places["mapping"],
            "--text", places["heldout"], "--guides", "none", "--prefix", "24",
            "--continuation", "8", "--items", "2", "--json", *more,
        )  # fmt: skip
        assert done.stderr == ""
        return json.loads(done.stdout), done.code

    return evaluated


def transfer(run: Run, places: dict[str, Path], out: Path, *more: str, mapping: str = "") -> Any:
    return run(
        "pack", "transfer", places["pack"], "--mapping", mapping or places["mapping"],
        "--out", out, *more,
    )  # fmt: skip


def test_eval_says_whether_the_gate_is_reached_and_exits_as_ever(scored: Any) -> None:
    (usual, code), (lenient, same), (off, also) = (
        scored(*more) for more in ((), ("--gate", "cosine=-1"), ("--gate", "none"))
    )

    gate = usual["gate"]
    assert gate.keys() == {"measure", "value", "threshold", "below", "on", "why"}
    found = usual["text"]["conditions"]
    ours, none = (found[name]["kl_to_own"]["value"] for name in ("mapped", "none"))
    cosine = found["mapped"]["attention_cosine"]["value"]
    assert gate["value"] == pytest.approx(1 - ours / none)
    assert gate["below"] == (gate["value"] < gate["threshold"])
    assert (lenient["gate"]["value"], lenient["gate"]["below"]) == (pytest.approx(cosine), False)
    assert "gate" not in off
    assert code == same == also


def test_eval_probes_where_the_gate_looks_at_a_probe(
    run: Run, places: dict[str, Path], scored: Any
) -> None:
    found, _ = scored("--gate", "probe=1")
    probed = run("probe", places["source"], places["target"], "--data", places["heldout"], "--json")

    assert found["gate"]["value"] == pytest.approx(json.loads(probed.stdout)["score"]["value"])
    assert found["gate"]["below"] is True


def test_a_transfer_below_the_gate_is_warned_of_and_written(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    done = transfer(run, places, tmp_path / "low", "--gate", "cosine=1", "--json")
    fine = transfer(run, places, tmp_path / "high", "--gate", "cosine=-1", "--json")
    off = transfer(run, places, tmp_path / "off", "--gate", "none", "--json")

    assert done.code == fine.code == off.code == 0
    assert done.stderr.startswith("warning: below the gate: attention cosine ")
    assert done.stderr.count("\n") == 1
    assert json.loads(done.stdout)["gate"]["below"] is True
    assert (tmp_path / "low" / "config.json").is_file()
    assert (fine.stderr, json.loads(fine.stdout)["gate"]["below"]) == ("", False)
    assert off.stderr == ""
    assert "gate" not in json.loads(off.stdout)


def test_a_mapping_that_carries_nothing_cannot_be_judged(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    done = transfer(run, places, tmp_path / "to", "--gate", "probe=0.3", "--json")

    assert done.code == 0
    assert done.stderr == (
        "warning: the gate cannot judge: no probe is recorded with a mapping; "
        "kvtransfer probe runs one\n"
    )
    assert json.loads(done.stdout)["gate"]["below"] is None


@pytest.mark.parametrize("gate", ["high", "r2=0.5", "probe=2", "nan", ""])
@pytest.mark.parametrize("command", ["eval", "transfer"])
def test_what_is_no_gate_is_a_usage_error(
    run: Run, places: dict[str, Path], tmp_path: Path, command: str, gate: str
) -> None:
    ends = (places["source"], places["target"])
    done = (
        run("eval", *ends, "--mapping", places["mapping"], "--gate", gate)
        if command == "eval"
        else transfer(run, places, tmp_path / "to", "--gate", gate)
    )

    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert "gate" in done.stderr.splitlines()[0]
    assert done.stderr.splitlines()[1].startswith("hint: ")
    assert not (tmp_path / "to").exists()


def test_a_gate_without_a_mapping_is_a_usage_error(run: Run, places: dict[str, Path]) -> None:
    done = run("eval", places["source"], places["target"], "--gate", "0.3")

    assert (done.code, done.stdout) == (2, "")
    assert "--gate 0.3 judges a mapping, and there is no --mapping" in done.stderr
