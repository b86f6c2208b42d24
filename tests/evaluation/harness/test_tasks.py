"""Our own tasks work anywhere and offline, and what cannot be run says so."""

import contextlib
import json
from pathlib import Path

import pytest

from kvtransfer.errors import KVTransferError, TaskError
from kvtransfer.evaluation.evaluate import BUILTIN_GUIDES
from kvtransfer.evaluation.harness import extra, rows
from kvtransfer.evaluation.harness.tasks import OURS, find
from kvtransfer.fitting.texts import builtin

YAML = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
output_type: {kind}
test_split: test
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_every_ending_is_right_once_and_wrong_three_times() -> None:
    asked = list(rows.prose()["test"])
    right = [row["choices"][row["answer"]] for row in asked]
    wrong = [choice for row in asked for choice in row["choices"] if choice not in right]

    assert len({*right}) == len(asked) == rows.PASSAGES
    assert not wrong
    assert all(len({*row["choices"]}) == rows.CHOICES for row in asked)
    assert {row["answer"] for row in asked} == {0, 1, 2, 3}


def test_a_right_ending_is_what_follows_in_a_held_out_text() -> None:
    texts = [" ".join(text.split()) for text in builtin("heldout")]

    for row in rows.prose()["test"]:
        whole = row["context"] + row["choices"][row["answer"]]
        assert any(whole in text for text in texts)
        assert not any(
            row["context"] + row["choices"][(row["answer"] + 1) % rows.CHOICES] in text
            for text in texts
        )


def test_any_leading_part_of_the_guides_asks_about_all_of_them() -> None:
    asked = list(rows.guides()["test"])
    lines = BUILTIN_GUIDES.read_text(encoding="utf-8").splitlines()
    choices = sum("choices" in item for line in lines for item in json.loads(line)["items"])

    assert len(asked) == choices
    assert len({row["guide"] for row in asked[: len(lines)]}) == len(lines)


def test_our_tasks_are_found_in_any_folder(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        found = find(OURS)

    assert set(found) == set(OURS) == {"kvtransfer_guides", "kvtransfer_prose"}
    assert len(found["kvtransfer_prose"].eval_docs) == rows.PASSAGES


def write_task(folder: Path, name: str, kind: str = "multiple_choice") -> Path:
    """A task of one's own, and its rows beside it."""
    items = [
        {"question": f"Say {word}:", "choices": ["yes", "no"], "answer": index % 2}
        for index, word in enumerate(("yes", "no", "yes"))
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, items)))
    path = folder / f"{name}.yaml"
    path.write_text(YAML.format(name=name, rows=folder / f"{name}.jsonl", kind=kind))
    return path


def test_a_folder_of_ones_own_is_looked_through_and_a_file_is_taken(tmp_path: Path) -> None:
    path = write_task(tmp_path, "yes_or_no")

    assert set(find(["yes_or_no", OURS[0]], include_path=tmp_path)) == {"yes_or_no", OURS[0]}
    assert set(find([str(path)])) == {"yes_or_no"}


def test_a_task_whose_rows_are_not_there_is_named(tmp_path: Path) -> None:
    write_task(tmp_path, "rowless")
    (tmp_path / "rowless.jsonl").unlink()

    with pytest.raises(TaskError, match="task rowless cannot be loaded"):
        find(["rowless"], include_path=tmp_path)


def test_no_such_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no folder of tasks at"):
        find(OURS, include_path=tmp_path / "nowhere")


@pytest.mark.parametrize("names", [[], [""], ["kvtransfer_prose", " "]], ids=str)
def test_no_name_is_none(names: list[str]) -> None:
    with pytest.raises(TaskError, match="tasks are"):
        find(names)


def test_an_unknown_task_and_one_without_data_offline_are_named() -> None:
    with pytest.raises(TaskError, match=r"no task 'arc_eazy'; there is .*arc_easy"):
        find(["arc_eazy"])
    with pytest.raises(TaskError, match="task arc_easy cannot be loaded") as caught:
        find(["arc_easy"])

    assert "on the hub, which cannot be reached" in str(caught.value.hint)
    assert "kvtransfer_guides" in str(caught.value.hint)


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "find_spec", lambda name: None)

    with pytest.raises(KVTransferError, match="lm_eval is not installed") as caught:
        find(OURS)

    assert caught.value.hint is not None
    assert "pip install 'lm-eval" in caught.value.hint
