"""Vectors of one model are vectors: they add, scale, and come back from the disk as they were."""

import json
import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvtransfer import artifact
from kvtransfer.errors import ArtifactError, IncompatibleModels, SteeringError
from kvtransfer.hf.model import LanguageModel
from kvtransfer.steering.extract import extract
from kvtransfer.steering.vector import CacheVector

from .conftest import PAIRS


def same(one: CacheVector, other: CacheVector) -> bool:
    return all(map(torch.equal, (*one.keys, *one.values), (*other.keys, *other.values)))


def near(one: CacheVector, other: CacheVector) -> bool:
    pairs = zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


@pytest.fixture(scope="module")
def second(model: LanguageModel) -> CacheVector:
    return extract(model, [("One, two, three, and the", "Nothing at all, and the")]).vector


# Algebra


def test_they_add_and_scale(vector: CacheVector, second: CacheVector) -> None:
    assert same(vector + second, second + vector)
    assert near((vector + second) - second, vector)
    assert same(vector + vector, 2 * vector)
    assert same(2 * vector / 2, vector)
    assert same(vector * 2, 2 * vector)
    assert near(3 * (vector - second), 3 * vector - 3 * second)
    assert same(-1 * -vector, vector)
    assert same(-vector, vector * -1)
    assert sum((vector - vector).norms) == 0
    assert not near(vector, second)


def test_what_it_is_made_of_is_told(vector: CacheVector, second: CacheVector) -> None:
    made = (vector - second / 2).made

    assert made["how"] == "-"
    assert [part["how"] for part in made["of"]] == ["mean difference", "/"]
    assert made["of"][1]["divisor"] == 2
    assert made["of"][0]["pairs"] == len(PAIRS)


def test_a_random_one_is_as_long_in_every_layer_and_points_elsewhere(vector: CacheVector) -> None:
    drawn = vector.random(0)

    for new, old in zip((*drawn.keys, *drawn.values), (*vector.keys, *vector.values), strict=True):
        torch.testing.assert_close(new.norm(), old.norm())
    assert same(drawn, vector.random(0))
    assert not near(drawn, vector.random(1))
    assert not near(drawn, vector)


def test_another_direction_takes_the_length_layer_by_layer(
    vector: CacheVector, second: CacheVector
) -> None:
    found = second.as_long_as(vector)

    for new, old, wanted in zip(found.values, second.values, vector.values, strict=True):
        torch.testing.assert_close(new.norm(), wanted.norm())
        torch.testing.assert_close(new * old.norm(), old * new.norm())
    assert near((0 * second).as_long_as(vector), 0 * vector)  # no direction has no length


def test_those_of_different_models_refuse_each_other(
    vector: CacheVector, other: LanguageModel
) -> None:
    stranger = extract(other, PAIRS[:1]).vector

    for mix in (operator.add, operator.sub):
        with pytest.raises(IncompatibleModels, match="this vector is for") as caught:
            mix(vector, stranger)
        assert str(stranger.identity) in caught.value.message
        assert str(vector.identity) in caught.value.message


def test_those_of_different_tokens_refuse_each_other(
    model: LanguageModel, vector: CacheVector
) -> None:
    earlier = extract(model, PAIRS[:1], at=-2).vector

    with pytest.raises(SteeringError, match="off token -1 of its prompts, the other off -2"):
        vector + earlier


def test_only_a_vector_adds_to_a_vector(vector: CacheVector) -> None:
    with pytest.raises(TypeError):
        vector + 1  # type: ignore[operator]


@pytest.mark.parametrize("scale", [lambda v: v / 0, lambda v: v * float("nan")])
def test_what_is_not_finite_is_no_vector(
    vector: CacheVector, scale: Callable[[CacheVector], CacheVector]
) -> None:
    with pytest.raises(SteeringError, match="layer 0: the vector is not finite"):
        scale(vector)


def test_blocks_that_are_not_the_models_are_refused(vector: CacheVector) -> None:
    with pytest.raises(SteeringError, match="keys of 3 layers and values of 4"):
        replace(vector, keys=vector.keys[:3])
    with pytest.raises(SteeringError, match="layer 1: the vector has keys of 2 × 8"):
        replace(vector, keys=(vector.keys[0], vector.keys[1][:, :8], *vector.keys[2:]))
    with pytest.raises(ValueError, match="at counts from a prompt's end"):
        replace(vector, at=0)


# The disk


@pytest.fixture
def saved(vector: CacheVector, tmp_path: Path) -> Path:
    vector.save_pretrained(tmp_path / "vector")
    return tmp_path / "vector"


def test_it_comes_back_as_it_was(vector: CacheVector, saved: Path) -> None:
    found = CacheVector.from_pretrained(saved)

    assert same(found, vector)
    assert (found.identity, found.at, found.made) == (vector.identity, -1, vector.made)
    assert sorted(path.name for path in saved.iterdir()) == [
        "README.md", "config.json", "tensors.safetensors",
    ]  # fmt: skip
    assert same(found + vector, 2 * vector)


def test_the_card_says_how_it_was_made(vector: CacheVector, saved: Path) -> None:
    card = (saved / "README.md").read_text(encoding="utf-8")

    for said in ("| pairs | 8 |", "mean difference", str(vector.identity), "steer sweep"):
        assert said in card


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"at": 0}, "has at 0"),
        ({"at": "last"}, "has at 'last'"),
        ({"made": []}, "has made"),
        ({"kind": "kv_mapping"}, "describes a 'kv_mapping', not a 'cache_vector'"),
        ({"format": 99}, "is in format 99"),
        ({"model": {}}, "a saved model spec is malformed"),
    ],
)
def test_an_edited_config_is_refused(saved: Path, change: dict[str, object], said: str) -> None:
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    (saved / "config.json").write_text(json.dumps(config | change), encoding="utf-8")

    with pytest.raises(ArtifactError, match=said):
        CacheVector.from_pretrained(saved)


def rewrite(folder: Path, **changed: torch.Tensor | None) -> None:
    """Other tensors, and their checksum."""
    tensors = load_file(folder / "tensors.safetensors") | changed
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "tensors.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["sha256"] = artifact.checksum(folder / "tensors.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_tensors_of_other_shapes_are_refused(saved: Path) -> None:
    rewrite(saved, **{"values.1": torch.zeros(2, 7)})

    with pytest.raises(ArtifactError, match="layer 1: the vector has keys of 2 × 16 and values of"):
        CacheVector.from_pretrained(saved)


def test_a_missing_tensor_is_refused(saved: Path) -> None:
    rewrite(saved, **{"keys.3": None})

    with pytest.raises(ArtifactError, match=r"has 7 tensors, .* needs 8: keys\.3"):
        CacheVector.from_pretrained(saved)


def test_what_is_no_vector_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no cache vector") as caught:
        CacheVector.from_pretrained(tmp_path)
    assert "kvtransfer steer extract" in str(caught.value.hint)
    with pytest.raises(ArtifactError, match="no steering vector at nobody/nothing"):
        CacheVector.from_pretrained("nobody/nothing")


def test_no_other_artifact_is_replaced(vector: CacheVector, saved: Path) -> None:
    vector.save_pretrained(saved)  # one of its kind is
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    (saved / "config.json").write_text(json.dumps(config | {"kind": "kv_mapping"}))

    with pytest.raises(ArtifactError, match="holds no steering vector"):
        vector.save_pretrained(saved)


def test_a_hub_that_cannot_be_reached_is_said(vector: CacheVector) -> None:
    with pytest.raises(ArtifactError, match="nobody/nothing cannot be written on the hub"):
        vector.push_to_hub("nobody/nothing")
