"""Commands do what they say: one JSON document on stdout, and the report's truth as exit status."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.hf.model import load
from kvtransfer.hf.run import prefill, score

from .conftest import Done, Run

QUICK_FIT = ("--tokens", "1024", "--chunk", "64")
QUICK_EVAL = ("--prefix", "24", "--continuation", "8", "--items", "3")


def document(done: Done) -> dict[str, Any]:
    """What stdout holds, if it holds one JSON document and stderr nothing."""
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("arguments", [["--help"], ["fit", "--help"], ["--nonsense"], []], ids=str)
def test_what_needs_no_torch_imports_none(arguments: list[str]) -> None:
    code = (
        "import sys; from kvtransfer.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: print(stop.code, {'torch', 'transformers'} & set(sys.modules))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines()[-1] == ("2 set()" if "--nonsense" in arguments else "0 set()")


def test_the_installed_command_lists_its_commands() -> None:
    command = shutil.which("kvtransfer", path=str(Path(sys.executable).parent))
    if command is None:
        pytest.skip("kvtransfer is not installed beside this Python")

    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)

    assert all(name in done.stdout for name in ("check", "fit", "eval", "demo"))
    assert done.stderr == ""


def test_a_cache_may_be_reused_by_the_model_that_made_it(run: Run, places: dict[str, Path]) -> None:
    done = run("check", places["source"], places["source"], "--json")

    assert done.code == 0
    assert document(done)["verdict"] == "reuse"


def test_a_cache_may_be_mapped_to_a_model_of_another_shape(
    run: Run, places: dict[str, Path]
) -> None:
    done = run("check", places["source"], places["target"], "--json")

    assert done.code == 0
    found = document(done)
    assert found["verdict"] == "map"
    verdicts = {each["topic"]: each["verdict"] for each in found["topics"]}
    assert verdicts["layers"] == verdicts["kv_heads"] == verdicts["head_dim"] == "mapped"
    assert verdicts["tokenizer"] == "same"


def test_loaded_weights_are_compared_too(run: Run, places: dict[str, Path]) -> None:
    done = run("check", places["source"], places["other"], "--weights", "--json")
    (weights,) = (t for t in document(done)["topics"] if t["topic"] == "weights")
    unseen = run("check", places["source"], places["other"], "--json")
    (unread,) = (t for t in document(unseen)["topics"] if t["topic"] == "weights")
    stateful = run("check", places["source"], places["stateful"], "--weights")

    assert (weights["verdict"], unread["verdict"]) == ("mapped", "unknown")
    assert weights["source"] != weights["target"]
    assert (
        document(run("check", places["source"], places["source"], "--weights", "--json"))["verdict"]
        == "reuse"
    )
    assert stateful.code == 1
    assert stateful.stderr.startswith("error:")


def test_a_cache_that_cannot_cross_is_exit_1_and_no_error(
    run: Run, places: dict[str, Path]
) -> None:
    done = run("check", places["source"], places["stateful"], "--json")

    assert done.code == 1
    assert document(done)["verdict"] == "blocked"


def test_a_cache_crosses_to_another_tokenizer_from_check_to_eval(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    pair = places["source"], places["wordless"]
    checked = run("check", *pair, "--json")
    options = ("--data", places["prose"], "--tokens", "512", "--chunk", "64", "--layers", "1")
    fitted = run("fit", *pair, "--out", tmp_path / "mapping", *options, "--json")
    sizes = ("--prefix", "24", "--continuation", "8", "--items", "2", "--guides", places["guides"])
    text = ("--text", places["heldout"], *sizes)
    scored = run("eval", *pair, "--mapping", tmp_path / "mapping", *text, "--json")

    (topic,) = (t for t in document(checked)["topics"] if t["topic"] == "tokenizer")
    assert (checked.code, topic["verdict"]) == (0, "mapped")
    assert document(fitted)["chunks_left_out"] == 0
    for part in ("text", "guides"):
        found = document(scored)[part]
        assert {"none", "own", "mapped", "shuffled"} < found["conditions"].keys()
        assert found["missing"].keys() == {"source", "raw"}
        assert "other tokens" in found["missing"]["source"]


def test_without_json_there_is_a_table(run: Run, places: dict[str, Path]) -> None:
    done = run("check", places["source"], places["target"])

    assert (done.code, done.stderr) == (0, "")
    assert "tokenizer" in done.stdout
    assert "the cache can cross through a fitted mapping" in done.stdout
    with pytest.raises(json.JSONDecodeError):
        json.loads(done.stdout)


def test_a_fit_writes_a_mapping_and_says_how_good_it_is(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    ends = str(places["source"]), str(places["target"])

    done = run(
        "fit", *ends, "--out", tmp_path / "m", "--data", places["prose"], *QUICK_FIT,
        "--layers", "2", "--json",
    )  # fmt: skip

    found = document(done)
    assert found["mapping"] == str(tmp_path / "m")
    assert found["rows"] == 1024
    assert [layer["target"] for layer in found["layers"]] == [0, 1]
    for layer in found["layers"]:
        assert len(layer["sources"]) == 2
        assert layer["r2_keys"] <= 1
        assert layer["r2_values"] <= 1
    assert set(found["seconds"]) >= {"source_forward", "target_forward", "statistics", "solve"}
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "m").iterdir())
    assert found["provenance"]["command"].startswith("kvtransfer fit ")
    good = all(
        sum(layer[name] for layer in found["layers"]) > 0 for name in ("r2_keys", "r2_values")
    )
    assert done.code == (0 if good else 1)
    source, target = map(load, ends)
    ids = source.encode("A mapping that was fitted may be used.")[None]
    mapped = KVMapping.from_pretrained(tmp_path / "m")(prefill(source, ids))
    assert score(target, ids[:, :2], mapped).shape[1] == 2


def test_a_fit_in_a_narrow_place_is_the_same_fit(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    common = (
        "fit", places["source"], places["target"], "--data", places["prose"], *QUICK_FIT,
        "--layers", "2", "--band", "1", "--json",
    )  # fmt: skip
    work = (
        "--moments", tmp_path / "moments", "--passes", "2", "--checkpoint", tmp_path / "state",
        "--checkpoint-every", "2", "--device-map", "cpu", "--heatmap", tmp_path / "m.png",
    )  # fmt: skip

    plain = run(*common, "--out", tmp_path / "a")
    narrow = run(*common, "--out", tmp_path / "b", *work)

    found, expected = document(narrow), document(plain)
    assert found["layers"] == expected["layers"]
    assert found["moments_bytes"] == expected["moments_bytes"]
    assert found["moments_bytes"]["keys"] > 0
    a, b = (load_file(tmp_path / name / "tensors.safetensors") for name in "ab")
    assert a.keys() == b.keys()
    assert all(torch.equal(b[name], tensor) for name, tensor in a.items())
    assert not (tmp_path / "state").exists()  # the mapping is saved, so nothing is left to go on
    assert list((tmp_path / "moments").iterdir()) == []
    assert KVMapping.from_pretrained(tmp_path / "b").settings["band"] == 1


def test_a_fit_is_repeatable_and_reads_several_texts_and_standard_input(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    common = ("fit", places["source"], places["target"], *QUICK_FIT, "--layers", "1", "--json")
    text = places["prose"].read_bytes()

    once, again, piped = (
        document(run(*common, "--out", tmp_path / name, "--data", data, stdin=stdin))
        for name, data, stdin in (
            ("a", places["prose"], b""),
            ("b", places["prose"], b""),
            ("c", "-", text),
        )
    )

    assert once["layers"] == again["layers"] == piped["layers"]
    tensors = [(tmp_path / name / "tensors.safetensors").read_bytes() for name in "abc"]
    assert tensors[0] == tensors[1] == tensors[2]


def test_a_fit_can_be_refined_and_says_what_that_was_worth(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    common = (
        "fit", places["source"], places["target"], *QUICK_FIT, "--layers", "1",
        "--features", "both", "--refine", "3",
    )  # fmt: skip
    text = places["prose"].read_bytes()

    done = run(*common, "--out", tmp_path / "a", "--data", places["prose"], "--json")
    piped = run(*common, "--out", tmp_path / "b", "--data", "-", stdin=text)

    found = document(done)
    history = found["refine"]["history"]
    assert [each["step"] for each in history] == [0, 3]
    assert found["refine"]["best"]["kl"] == min(each["kl"] for each in history)
    assert found["seconds"]["refine"] > 0
    mapping = KVMapping.from_pretrained(tmp_path / "a")
    assert mapping.features == "both"
    assert mapping.settings["refine"]["kept_step"] in (0, 3)
    assert "held-out KL to own" in piped.stdout
    tensors = [(tmp_path / name / "tensors.safetensors").read_bytes() for name in "ab"]
    assert tensors[0] == tensors[1]


def test_a_map_is_chosen_within_a_budget_from_what_was_tried(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    fit = (
        "fit", places["source"], places["target"], "--out", tmp_path / "m", *QUICK_FIT,
        "--data", places["prose"], "--solver", "auto", "--storage", "bfloat16",
    )  # fmt: skip

    done = run(*fit, "--budget", "20KB", "--heatmap", tmp_path / "m.png", "--json")

    found = document(done)["auto"]
    allowed = [each for each in found["candidates"] if each["bytes"] <= 20_000]
    (taken,) = (each for each in found["candidates"] if each["taken"])
    least = min(each["attention_error"] for each in allowed)
    close = [each for each in allowed if each["attention_error"] <= 1.1 * least]
    assert taken["kl_to_own"] == min(each["kl_to_own"] for each in close)
    assert len(found["candidates"]) > len(allowed) > 1
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")
    mapping = KVMapping.from_pretrained(tmp_path / "m")
    assert mapping.nbytes("bfloat16") == taken["bytes"]
    refused = run(*fit, "--budget", "1B")
    assert refused.code == 1
    assert "no map fits" in refused.stderr


def test_a_start_is_fitted_evaluated_and_diagnosed(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    pair = places["source"], places["target"]
    fit = run("fit", *pair, "--out", tmp_path / "m", *QUICK_FIT, "--data", places["prose"],
              "--layers", "1", "--start", "0", "--solver", "headwise", "--json")  # fmt: skip
    score = run("eval", *pair, "--mapping", tmp_path / "m", "--text", places["heldout"],
                "--guides", "none", *QUICK_EVAL, "--json")  # fmt: skip
    look = run("diagnose", *pair, "--mapping", tmp_path / "m", "--text", places["heldout"],
               "--prefix", "24", "--continuation", "8", "--items", "2", "--json")  # fmt: skip

    assert [each["target"] for each in document(fit)["layers"]] == [1]
    assert "mapped" in document(score)["text"]["conditions"]
    first, second = document(look)["layers"]
    assert first["sources"] == []
    assert len(second["sources"]) == 1


def test_the_token_before_is_read_and_the_paper_s_first_token_counts_for_one(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    done = run("fit", places["source"], places["target"], "--out", tmp_path / "m", *QUICK_FIT,
               "--data", "spaced:" + str(places["prose"]), "--layers", "2", "--before", "2",
               "--first", "1", "--json")  # fmt: skip

    mapping = KVMapping.from_pretrained(tmp_path / "m")
    assert (mapping.settings["before"], mapping.settings["first"]) == (2, 1)
    for layer, row in zip(mapping.layers, document(done)["layers"], strict=True):
        assert list(layer.before) == row["before"]
        assert len(layer.sources) + len(layer.before) == 2


def test_the_target_writes_its_own_calibration_text(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    done = run("fit", places["source"], places["target"], "--out", tmp_path / "m", "--tokens",
               "128", "--chunk", "32", "--data", "self:256", "--layers", "1", "--json")  # fmt: skip

    assert document(done)["rows"] >= 96


@pytest.mark.parametrize("storage", ["bfloat16", "int8"])
def test_narrow_storage_and_a_rank_make_a_smaller_mapping(
    run: Run, places: dict[str, Path], tmp_path: Path, storage: str
) -> None:
    done = run(
        "fit", places["source"], places["target"], "--out", tmp_path / "m", *QUICK_FIT,
        "--data", places["prose"], "--layers", "1", "--storage", storage, "--rank", "8", "--json",
    )  # fmt: skip

    assert done.stderr == ""
    whole = (places["mapping"] / "tensors.safetensors").stat().st_size
    assert (tmp_path / "m" / "tensors.safetensors").stat().st_size < whole / 2
    assert KVMapping.from_pretrained(tmp_path / "m").settings["storage"] == storage


def test_an_evaluation_prints_what_it_writes(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    done = run(
        "eval", places["source"], places["target"], "--mapping", places["mapping"],
        "--text", places["heldout"], "--guides", places["guides"], *QUICK_EVAL,
        "--out", tmp_path / "out", "--json",
    )  # fmt: skip

    found = document(done)
    assert done.code in (0, 1)
    assert found["text"]["n"] == 3
    assert found["guides"]["n"] == 1
    assert {"none", "own", "mapped", "source", "zeroed"} <= set(found["text"]["conditions"])
    assert found["text"]["conditions"]["own"]["kl_to_own"]["value"] == 0
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == found
    assert "gap recovered" in (tmp_path / "out" / "report.txt").read_text()


def test_an_evaluation_measures_only_what_it_is_asked_for(
    run: Run, places: dict[str, Path]
) -> None:
    done = run(
        "eval", places["source"], places["target"], "--mapping", places["mapping"],
        "--text", places["heldout"], "--guides", "none", "--conditions", "mapped, zeroed",
        *QUICK_EVAL, "--json",
    )  # fmt: skip

    found = document(done)
    assert "guides" not in found
    assert set(found["text"]["conditions"]) == {"none", "own", "mapped", "zeroed"}


def test_an_evaluation_shows_what_reading_some_tokens_again_brings(
    run: Run, places: dict[str, Path]
) -> None:
    arguments = (
        "eval", places["source"], places["target"], "--mapping", places["mapping"],
        "--text", places["heldout"], "--guides", "none", "--conditions", "none",
        "--recompute", "0,0.15, 1", *QUICK_EVAL,
    )  # fmt: skip

    found, shown = document(run(*arguments, "--json")), run(*arguments).stdout

    assert [point["condition"] for point in found["recompute"]] == [
        "mapped",
        "mapped+15%",
        "mapped+100%",
    ]
    assert found["text"]["conditions"]["mapped+100%"]["kl_to_own"]["value"] < 1e-4
    assert "repaired by the target" in shown


def test_an_evaluation_without_json_ends_in_a_sentence(run: Run, places: dict[str, Path]) -> None:
    done = run(
        "eval", places["source"], places["target"], "--mapping", places["mapping"],
        "--text", places["heldout"], "--guides", "none", *QUICK_EVAL,
    )  # fmt: skip

    assert done.stderr == ""
    assert "across (a share of NLL, n = 3)" in " ".join(done.stdout.split())


def test_a_mapping_of_other_weights_needs_insisting_and_the_report_says_so(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    arguments = (
        "eval", places["other"], places["target"], "--mapping", places["mapping"],
        "--text", places["heldout"], "--guides", "none", *QUICK_EVAL,
    )  # fmt: skip
    flag = "--allow-fingerprint-mismatch"

    refused = run(*arguments)
    shown = run(*arguments, flag, "--out", tmp_path / "out")
    (note,) = document(run(*arguments, flag, "--json"))["notes"]

    assert refused.code == 1
    assert "the source's weights" in refused.stderr
    assert "used on request" in note
    assert " ".join(shown.stdout.split()).startswith(f"Note: {note}.")
    assert note in " ".join((tmp_path / "out" / "report.txt").read_text().split())


def test_nothing_makes_a_mapping_of_another_shape_usable(run: Run, places: dict[str, Path]) -> None:
    done = run(
        "eval", places["target"], places["target"], "--mapping", places["mapping"],
        "--allow-fingerprint-mismatch", "--guides", "none",
    )  # fmt: skip

    assert (done.code, done.stdout) == (1, "")
    assert "only weights may differ" in done.stderr
