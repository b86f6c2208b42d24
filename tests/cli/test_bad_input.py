"""Every foreseen mistake ends in an error line and a hint line, and leaves nothing behind."""

import shlex
from pathlib import Path

import pytest
import torch

from .conftest import Run

FIT = "fit {source} {target} --out {out} --tokens 512 --chunk 64 --layers 1 "
EVAL = (
    "eval {source} {target} --text {heldout} --guides none --prefix 24 --continuation 8 --items 1 "
)
MAPPED = EVAL + "--mapping {mapping} "

ASK = "pack generate {pack} guide-1 --prompt x --model {source} "

FAILURES = {
    # text
    "a missing data file": (FIT + "--data {root}/missing.txt", "no text file at"),
    "one of two data files missing": (
        FIT + "--data {prose} --tokens 99999 --data {root}/missing.jsonl",
        "no text file at",
    ),
    "an empty text": (FIT + "--data {empty}", "holds no text"),
    "nothing on standard input": (FIT + "--data -", "standard input holds no text"),
    "a target that is to write nothing": (FIT + "--data self:0", "'self:0' does not say how many"),
    "a target that is to write a lot of": (FIT + "--data self:many", "'self:many' does not say"),
    "a broken line of data": (FIT + "--data {bad}", "line 2 is not JSON"),
    "an unknown data set": (FIT + "--data nobody/nothing", "no hub data set by that name"),
    "a text shorter than a chunk": (FIT + "--data {short}", "fewer than one chunk of 64"),
    "fewer rows than features": (
        FIT + "--data {prose} --tokens 16 --chunk 16",
        "rows cannot determine 32 coefficients",
    ),
    "a missing text to evaluate on": (MAPPED + "--text {root}/missing.txt", "no text file at"),
    "a text shorter than an item": (MAPPED + "--text {short}", "fewer than one chunk of 32"),
    "a guide file with a broken line": (
        MAPPED + "--guides {bad_guides}",
        "line 1 has no list of 'items'",
    ),
    "a missing guide file": (MAPPED + "--guides {root}/missing.jsonl", "no guide file at"),
    "a report in a missing folder": (
        MAPPED + "--report {root}/missing/report.html",
        "there is no folder",
    ),
    "a report in a missing folder, of models that are missing too": (
        "eval ./missing ./missing --report {root}/missing/report.html",
        "there is no folder",
    ),
    "a report that is a folder": (MAPPED + "--report {root}", "is a folder"),
    "a report in a folder that nobody writes to": (
        MAPPED + "--report /proc/report.html",
        "/proc/report.html cannot be written",
    ),
    # models
    "no such model": ("check {source} ./missing", "no model at './missing'"),
    "a folder that is no model": ("check {source} {root}", "a folder without config.json"),
    "a hub id that was never downloaded": ("check {source} nobody/nothing", "no config for"),
    "a model whose config lacks a field": ("check {source} {typeless}", "model_type"),
    "truncated weights": (
        "fit {cut_weights} {target} --out {out} --data {prose}",
        "cannot be loaded",
    ),
    "a model without keys and values": (
        "fit {source} {stateful} --out {out} --data {prose}",
        "linear",
    ),
    "a dtype that nobody has": (FIT + "--data {prose} --dtype float99", "no dtype 'float99'"),
    "a device that nobody has": (FIT + "--data {prose} --device abacus", "device 'abacus'"),
    # edits
    "an edit that nobody knows": (
        MAPPED + "--conditions own,mapped+Twist(1)",
        "no intervention is called 'Twist'",
    ),
    "an edit of layers that are not there": (
        MAPPED + "--conditions mapped+Scale(0.5,layers=9-20)",
        "no layer ",
    ),
    "an edit whose arguments are none": (
        MAPPED + "--conditions mapped+Scale(0.5,nan)",
        "part is nan",
    ),
    "a vector that is nowhere": (MAPPED + "--vector v={root}/nowhere", "no steering vector at"),
    "an ablation of layers that are not there": (
        "ablate {source} --layers 77",
        "no layer 77 in a model of",
    ),
    "an ablation without questions": (
        "ablate {source} --guides {root}/missing.jsonl",
        "no guide file at",
    ),
    # mappings
    "no such mapping": (EVAL + "--mapping {root}/nowhere", "no mapping at"),
    "a mapping for another pair": (
        MAPPED.replace("{target}", "{other}"),
        "the target's weights are",
    ),
    "the reverse direction": (
        MAPPED.replace("{source} {target}", "{target} {source}"),
        "asked for",
    ),
    "a truncated mapping": (EVAL + "--mapping {cut_mapping}", "truncated or no safetensors"),
    "a mapping whose config lacks a field": (
        EVAL + "--mapping {fieldless_mapping}",
        "config.json lacks sources",
    ),
    "a NaN in a mapping": (EVAL + "--mapping {nan_mapping}", "NaN or infinite"),
    "a flipped byte in a mapping": (EVAL + "--mapping {flipped_mapping}", "has checksum"),
    "a model in place of a mapping": (EVAL + "--mapping {source}", "config.json lacks"),
    # places
    "a model folder to write to": (
        "fit {source} {target} --out {other} --data {prose}",
        "holds something else",
    ),
    "a file to write to": ("fit {source} {target} --out {prose} --data {prose}", "is a file"),
    "moments where a file is": (
        "fit {source} {target} --out {out} --data {prose} --moments {prose}",
        "moments cannot be kept in",
    ),
    "checkpoints where something else lies": (
        "fit {source} {target} --out {out} --data {prose} --checkpoint {other}",
        "which is no checkpoint of a fit",
    ),
    "a device map of no device": (
        "fit {source} {target} --out {out} --data {prose} --device-map abacus",
        "no device map 'abacus'",
    ),
    "a device that is absent": (
        "fit {source} {target} --out {out} --data {prose} --target-device abacus",
        "device 'abacus' cannot compute",
    ),
    # packs
    "no such pack": ("pack show {root}/nowhere", "no guide pack at"),
    "a mapping for a pack": ("pack show {mapping}", "describes a 'kv_mapping'"),
    "a pack of a later format": ("pack show {later_pack}", "is in format 9"),
    "a pack with a flipped bit": (ASK.replace("{pack}", "{flipped_pack}"), "has checksum"),
    "no such guide": (ASK.replace("guide-1", "tide"), "no guide 'tide'"),
    "another model for a pack": (ASK.replace("{source}", "{other}"), "with fingerprint"),
    "a model of another shape for a pack": (ASK.replace("{source}", "{target}"), "with layers 3"),
    "another dtype for a pack": (ASK + "--dtype bfloat16", "this pack is in float32"),
    "a pack of no guides": ("pack build {source} {empty} --out {out}", "holds no guides"),
    "a pack where something else lies": (
        "pack build {source} {guides} --out {mapping}",
        "holds something else",
    ),
    "a pack for another mapping": (
        "pack transfer {pack} --mapping smollm2-24l-to-smollm2-135m --out {out}",
        "the mapping reads caches of smollm2-24l",
    ),
    "a request for no such guide": (
        "pack request {pack} tide --prompt x --model {source}",
        "no guide 'tide'",
    ),
    "an adapter of no such guide": ("pack export {pack} tide --out {out}", "no guide 'tide'"),
}

MISTAKES = {
    "a vector without a name": (MAPPED + "--vector {root}", "--vector is a new name and a folder"),
    "no source layers": (FIT + "--layers 0", "--layers is a positive number"),
    "layers that are no number": (FIT + "--layers some", "--layers is a positive number"),
    "more source layers than there are": (FIT + "--data {prose} --layers 9", "9 source layers"),
    "no tokens": (FIT + "--tokens 0", "tokens must be positive"),
    "no chunks": (FIT + "--data {prose} --chunk 1", "at least 2"),
    "no rank": (FIT + "--rank 0", "rank must be positive"),
    "a negative strength": (FIT + "--data {prose} --strength -1", "strength must be"),
    "an unknown solver": (FIT + "--solver magic", "--solver is one of"),
    "a budget with nothing to choose": (FIT + "--budget 1MB", "--budget is for --solver auto"),
    "a rank where it is to be chosen": (
        "fit {source} {target} --out {out} --solver auto --rank 8",
        "rank 8 asked of solver 'auto'",
    ),
    "a budget of no size": (
        "fit {source} {target} --out {out} --solver auto --budget huge",
        "a size such as 9.6MB",
    ),
    "an unknown scale": (FIT + "--scale log", "Invalid value for '--scale'"),
    "an unknown selection": (FIT + "--select best", "Invalid value for '--select'"),
    "a strength on a scale without one": (FIT + "--scale absolute", "an absolute strength must be"),
    "a start beyond the target": (FIT + "--data {prose} --start 99", "a start of 99 layers"),
    "a start before the target": (FIT + "--start -1", "start must be"),
    "no gain": (FIT + "--gain 0", "gain must be positive"),
    "a first token that counts for none": (FIT + "--first 0", "first must be positive, got 0"),
    "fewer layers than none": (FIT + "--before -1", "before must be ≥ 0, got -1"),
    "a band of less than nothing": (FIT + "--band -1", "band must be ≥ 0 source layers"),
    "more source layers than a band holds": (
        "fit {source} {target} --out {out} --data {prose} --tokens 512 --chunk 64 --layers 3 "
        "--band 1",
        "give a band of 2 or more",
    ),
    "moments on a device by its name": (FIT + "--moments cuda:0", "--moments is 'cpu', 'device'"),
    "three passes": (FIT + "--passes 3", "passes must be 1 or 2, got 3"),
    "two passes for what is read together": (
        FIT + "--data {prose} --passes 2 --features both",
        "2 passes, and features 'both' are gathered together",
    ),
    "no batch between checkpoints": (FIT + "--checkpoint-every 0", "must be positive, got 0"),
    "a device map and a device": (
        FIT + "--device-map auto --target-device cpu",
        "--device-map places the models",
    ),
    "a heat map that is no picture": (
        FIT + "--heatmap {out}.txt",
        "a picture ends in .png or .svg",
    ),
    "an unknown storage": (FIT + "--storage paper", "Invalid value for '--storage'"),
    "unknown products": (FIT + "--products exact", "Invalid value for '--products'"),
    "an unknown condition": (MAPPED + "--conditions own,magic", "no condition magic"),
    "a share that is no number": (MAPPED + "--recompute 0.1,x", "such as 0.1,0.15, not '0.1,x'"),
    "no share": (MAPPED + "--recompute ''", "such as 0.1,0.15, not ''"),
    "more than everything": (MAPPED + "--recompute 15", "15.0 is to be recomputed"),
    "no items": (MAPPED + "--items 0", "items=0"),
    "no guides": (MAPPED + "--guides {guides} --max-guides 0", "--max-guides is a positive number"),
    "nothing to evaluate": (MAPPED + "--text none", "nothing to evaluate"),
    "a report that would replace a file": (MAPPED + "--out {prose}", "is a file"),
    "an unknown option": ("check {source} {target} --nonsense", "No such option: --nonsense"),
    "an unknown command": ("translate {source} {target}", "No such command 'translate'"),
    "a missing argument": ("check {source}", "Missing argument"),
    "a missing option": ("fit {source} {target}", "Missing option '--out'"),
    "words for numbers": (FIT + "--tokens many", "Invalid value for '--tokens'"),
}


def assert_fails(
    run: Run, places: dict[str, Path], tmp_path: Path, line: str, *, code: int, says: str
) -> None:
    before = snapshot(places["root"])
    arguments = shlex.split(line.format(out=tmp_path / "out", **places))

    done = run(*arguments, "--json")

    assert "Traceback" not in done.stderr
    first, second = done.stderr.splitlines()
    assert first.startswith("error: ")
    assert says in first
    assert second.startswith("hint: ")
    assert len(second) > len("hint: ")
    assert done.code == code
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())
    assert snapshot(places["root"]) == before


def snapshot(root: Path) -> dict[str, int]:
    """Every file below and when it changed."""
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*")}


@pytest.mark.parametrize("mistake", FAILURES)
def test_what_is_wrong_with_the_input_is_said_in_two_lines_and_exit_1(
    run: Run, places: dict[str, Path], tmp_path: Path, mistake: str
) -> None:
    line, says = FAILURES[mistake]

    assert_fails(run, places, tmp_path, line, code=1, says=says)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_with_the_usage_is_said_in_two_lines_and_exit_2(
    run: Run, places: dict[str, Path], tmp_path: Path, mistake: str
) -> None:
    line, says = MISTAKES[mistake]

    assert_fails(run, places, tmp_path, line, code=2, says=says)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("command", [FIT + "--data {prose} ", MAPPED])
def test_without_a_gpu_cuda_is_an_error(
    run: Run, places: dict[str, Path], tmp_path: Path, command: str
) -> None:
    line = command + "--device cuda --dtype bfloat16"

    assert_fails(run, places, tmp_path, line, code=1, says="device 'cuda' cannot compute")


def test_a_mapping_is_not_replaced_by_a_fit_that_fails(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    line = (FIT + "--data {short}").replace("{out}", "{mapping}")

    assert_fails(run, places, tmp_path, line, code=1, says="fewer than one chunk")
