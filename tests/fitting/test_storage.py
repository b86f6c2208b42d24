"""A saved mapping that is not what it was is refused, with the reason, before it is used."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvtransfer.errors import ArtifactError
from kvtransfer.fitting.mapping import KVMapping

FIELDS = (
    "format",
    "kind",
    "sha256",
    "source",
    "target",
    "target_config",
    "sources",
    "shuffled",
    "settings",
    "quality",
    "provenance",
)


@pytest.fixture
def saved(make_mapping: Callable[..., KVMapping], tmp_path: Path) -> Path:
    """A mapping on the disk, to be broken."""
    make_mapping().save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    edit(config)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change tensors and set the checksum right: only their content can give them away."""
    path = folder / "tensors.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edit_config(folder, lambda config: config.update(sha256=digest))


def refusal(folder: Path) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        KVMapping.from_pretrained(folder)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def test_what_is_not_broken_loads(saved: Path) -> None:
    edit_tensors(saved, lambda tensors: None)

    KVMapping.from_pretrained(saved)


@pytest.mark.parametrize("field", FIELDS)
def test_a_config_that_lacks_a_field_is_refused_by_the_fields_name(saved: Path, field: str) -> None:
    edit_config(saved, lambda config: config.pop(field))

    assert f"config.json lacks {field}" in refusal(saved).message


@pytest.mark.parametrize("field", ["name", "layers", "dtype", "architecture", "positions"])
@pytest.mark.parametrize("end", ["source", "target"])
def test_a_spec_that_lacks_a_field_is_refused_by_the_fields_name(
    saved: Path, end: str, field: str
) -> None:
    edit_config(saved, lambda config: config[end].pop(field))

    assert field in refusal(saved).message


@pytest.mark.parametrize("field", ["kind", "kv_heads", "key_dim", "value_dim", "rotation"])
def test_a_layer_that_lacks_a_field_is_refused_by_the_fields_name(saved: Path, field: str) -> None:
    edit_config(saved, lambda config: config["target"]["layers"][1].pop(field))

    assert field in refusal(saved).message


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda c: c.update(format=99), "in format 99; this version reads formats 1, 2 and 3"),
        (lambda c: c.update(kind="guide_pack"), "a 'guide_pack', not a 'kv_mapping'"),
        (lambda c: c["target"]["layers"][0].update(kind="quantum"), "unknown layer kind 'quantum'"),
        (lambda c: c["target"].update(wings=2), "wings"),
        (lambda c: c.update(source=7), "spec is malformed"),
        (lambda c: c.update(target_config={}), "model_type"),
        (lambda c: c["target_config"].update(model_type="unheard-of"), "unheard-of"),
        (lambda c: c["target_config"].update(num_hidden_layers=5), "config cannot be read"),
        (
            lambda c: c["target_config"].update(num_hidden_layers=1, layer_types=None),
            "'target_config' describes 1 layers, its 'target' 2",
        ),
        (lambda c: c.update(target_config=[1]), "config cannot be read"),
        (lambda c: c.update(sources=[[0, 2]]), "no table of 2 target layers over 3"),
        (lambda c: c.update(sources=[[0, 3], [1]]), "no table of 2 target layers over 3"),
        (lambda c: c.update(sources=[[0, -1], [1]]), "no table of 2 target layers over 3"),
        (lambda c: c.update(sources=[[0, 2], []]), "no table of 2 target layers over 3"),
        (lambda c: c.update(sources=[[0, 2], ["1"]]), "no table of 2 target layers over 3"),
        (lambda c: c.update(sources={"0": [1]}), "no table of 2 target layers over 3"),
        (lambda c: c.update(sources=[[0], [1]]), "maps.0.keys.weight has shape (64, 32)"),
        (lambda c: c["target"]["layers"][1].update(kv_heads=2), "maps.1.keys.bias has shape (32,)"),
    ],
)
def test_a_config_that_says_something_else_is_refused(
    saved: Path, edit: Callable[[dict[str, Any]], object], says: str
) -> None:
    edit_config(saved, edit)

    assert says in refusal(saved).message


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\udc80"])
def test_a_config_that_is_no_json_object_is_refused(saved: Path, text: str) -> None:
    (saved / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))

    assert "config.json" in refusal(saved).message


@pytest.mark.parametrize("name", ["config.json", "tensors.safetensors"])
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()

    error = refusal(saved)
    assert name in error.message
    assert error.hint


@pytest.mark.parametrize("size", [0, 7, 100, 20_000])
def test_a_truncated_safetensors_is_refused(saved: Path, size: int) -> None:
    path = saved / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:size])

    error = refusal(saved)
    assert "truncated or no safetensors file" in error.message
    assert f"({size} bytes)" in error.message


def test_one_flipped_bit_is_refused(saved: Path) -> None:
    path = saved / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)

    error = refusal(saved)
    assert "checksum" in error.message
    assert hashlib.sha256(content).hexdigest()[:12] in error.message


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tensor", ["maps.1.values.weight", "shuffled.0.keys.bias"])
def test_a_number_that_is_none_is_refused_though_the_checksum_is_right(
    saved: Path, tensor: str, number: float
) -> None:
    edit_tensors(saved, lambda tensors: tensors[tensor].view(-1)[5:6].fill_(number))

    message = refusal(saved).message
    assert tensor in message
    assert "holds 1 numbers that are NaN or infinite" in message


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda t: t.pop("maps.1.values.weight"), "lacks the tensor maps.1.values"),
        (lambda t: t.pop("maps.0.keys.bias"), "lacks the tensor maps.0.keys.bias"),
        (lambda t: t.pop("shuffled.0.keys.bias"), "lacks the tensor shuffled.0.keys.bias"),
        (
            lambda t: t.update({"maps.0.keys.weight": torch.zeros(32, 64)}),
            "maps.0.keys.weight has shape (32, 64), the specs ask for (64, 32)",
        ),
        (
            lambda t: t.update({"maps.0.keys.weight": torch.zeros(64 * 32)}),
            "maps.0.keys.weight has shape (2048,)",
        ),
        (
            lambda t: t.update({"maps.1.keys.bias": torch.zeros(33)}),
            "maps.1.keys.bias has shape (33,), the specs ask for (32,)",
        ),
        (
            lambda t: t.update({"maps.0.keys.weight": torch.zeros(64, 32, dtype=torch.int8)}),
            "lacks the tensor maps.0.keys.weight.scale",
        ),
        (
            lambda t: t.update({"maps.0.keys.weight": torch.zeros(64, 32, dtype=torch.int32)}),
            "maps.0.keys.weight is torch.int32",
        ),
        (
            lambda t: t.update({"maps.0.keys.bias": torch.zeros(32, dtype=torch.int8)}),
            "maps.0.keys.bias is torch.int8",
        ),
    ],
)
def test_tensors_that_the_specs_do_not_ask_for_are_refused_though_the_checksum_is_right(
    saved: Path, edit: Callable[[dict[str, Tensor]], object], says: str
) -> None:
    edit_tensors(saved, edit)

    assert says in refusal(saved).message


def test_a_mapping_that_is_not_there_is_an_error_that_names_those_that_ship(tmp_path: Path) -> None:
    for name in (tmp_path / "missing", "no-such-mapping", "n" * 300):
        with pytest.raises(ArtifactError, match="no mapping at") as caught:
            KVMapping.from_pretrained(name)
        assert "kvtransfer fit" in str(caught.value.hint)
