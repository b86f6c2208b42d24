"""What a person calls a model is found, or said to be missing in one line."""

import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from kvtransfer.errors import ModelNotFound
from kvtransfer.hf import hub
from kvtransfer.hf.locate import locate
from kvtransfer.hf.model import load
from kvtransfer.hf.spec import read_spec
from kvtransfer.zoo import ZOO


def test_a_folder_with_a_config_is_a_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = locate(str(folder))

    assert (found.path, found.gguf_file, found.on_hub) == (str(folder), None, False)
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate("~/tiny").path == str(folder)
    monkeypatch.chdir(folder)
    assert Path(locate(".").path).resolve() == folder.resolve()


def test_a_gguf_file_is_named_by_its_folder_and_its_name(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()

    found = locate(str(tmp_path / "m.gguf"))

    assert (found.path, found.keywords) == (str(tmp_path), {"gguf_file": "m.gguf"})


@pytest.mark.parametrize("name", ["owner/name", "gpt2", "Owner.x/na_me-1.5B"])
def test_what_looks_like_a_hub_id_is_one(name: str) -> None:
    assert locate(name).on_hub


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./missing", "no model at './missing'"),
        ("/no/such/folder", "no model at"),
        ("a/b/c", "no model at 'a/b/c'"),
        ("two words", "no model at 'two words'"),
        ("model?", "no model at 'model?'"),
        ("x" * 300, "no model at"),
        ("missing.gguf", "no file at missing.gguf"),
        ("./missing.GGUF", "no file at"),
    ],
)
def test_nonsense_is_no_model_and_the_hint_says_what_is(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ModelNotFound) as caught:
        locate(name)

    assert says in caught.value.message
    assert len(name) > 200 or "gguf" in str(caught.value.hint)


def test_a_folder_without_a_config_and_a_plain_file_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").touch()

    with pytest.raises(ModelNotFound, match="is a folder without config"):
        locate(str(tmp_path))
    with pytest.raises(ModelNotFound, match="neither a model folder nor") as caught:
        locate(str(tmp_path / "weights.bin"))
    assert all(alias in str(caught.value.hint) for alias in ZOO)


def test_a_gguf_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF nonsense")

    with pytest.raises(ModelNotFound, match="no config for"):
        read_spec(str(tmp_path / "m.gguf"))


def test_a_hub_id_that_was_never_downloaded_is_an_error_in_one_line_offline() -> None:
    start = time.monotonic()

    with pytest.raises(ModelNotFound) as caught:
        load("nobody/nothing")

    assert "nobody/nothing" in caught.value.message
    assert "\n" not in caught.value.message
    assert "network or an earlier download" in str(caught.value.hint)
    assert time.monotonic() - start < 10


@pytest.fixture
def dead_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """No name resolves, and nobody said beforehand that the hub is off limits."""
    asked: list[object] = []

    def refuse(host: object, *arguments: object, **keywords: object) -> None:
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return iter([asked])


def test_without_a_network_a_hub_id_fails_in_seconds_and_is_not_asked_for_again_and_again(
    dead_network: Iterator[list[object]],
) -> None:
    asked, start = next(dead_network), time.monotonic()

    assert hub.unreachable()
    with pytest.raises(ModelNotFound, match="no config for nobody/nothing"):
        read_spec("nobody/nothing")

    assert len(asked) == 2
    assert time.monotonic() - start < 10


def test_where_the_hub_is_off_limits_it_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("asked")

    monkeypatch.setattr(hub, "get_session", fail)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    assert not hub.unreachable()


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_gguf_file_without_what_reads_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert locate(str(file)).gguf_file == "model.gguf"
    monkeypatch.setitem(sys.modules, package, None)

    with pytest.raises(ModelNotFound, match=f"read with {package}") as caught:
        locate(str(file))
    assert caught.value.hint is not None
    assert package in caught.value.hint
