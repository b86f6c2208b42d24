"""The verdict on every topic, and on the pair."""

import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from kvtransfer.errors import IncompatibleModels
from kvtransfer.geometry.compat import CHECKS, CompatReport, Verdict, compare
from kvtransfer.geometry.spec import LayerSpec, ModelSpec, RotationSpec

ROTATION = RotationSpec(type="default", theta=10_000.0, rotary_dim=16, pairing="half")
LAYER = LayerSpec(kind="full", kv_heads=2, key_dim=16, value_dim=16, rotation=ROTATION)
SPEC = ModelSpec(
    name="here",
    architecture="llama",
    layers=(LAYER,) * 3,
    dtype="float32",
    positions="rotary",
    tokenizer="t" * 16,
    settings="s" * 12,
    weights="w" * 16,
)
TOPICS = (
    "layers",
    "kv_heads",
    "head_dim",
    "rope",
    "cache_format",
    "dtype",
    "tokenizer",
    "settings",
    "weights",
)


def every_layer(**changed: Any) -> dict[str, Any]:
    return {"layers": (replace(LAYER, **changed),) * 3}


def rotated(**changed: Any) -> dict[str, Any]:
    return every_layer(rotation=replace(ROTATION, **changed))


EMPTY: dict[str, Any] = {"kv_heads": 0, "key_dim": 0, "value_dim": 0, "rotation": None}

TABLE: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    # changes at the source, changes at the target, topic, verdict
    ({}, {"layers": (LAYER,) * 5}, "layers", "mapped"),
    ({}, every_layer(kv_heads=4), "kv_heads", "mapped"),
    ({}, {"layers": (LAYER, replace(LAYER, kv_heads=1), LAYER)}, "kv_heads", "mapped"),
    ({}, every_layer(key_dim=32), "head_dim", "mapped"),
    ({}, every_layer(value_dim=8), "head_dim", "mapped"),
    ({}, rotated(theta=500_000.0), "rope", "mapped"),
    ({}, rotated(type="yarn", scaling=(("factor", 4.0),)), "rope", "mapped"),
    ({}, rotated(rotary_dim=8), "rope", "mapped"),
    ({}, rotated(pairing="interleaved"), "rope", "mapped"),
    ({}, rotated(pairing="unknown"), "rope", "unknown"),
    (rotated(pairing="unknown"), rotated(pairing="unknown"), "rope", "unknown"),
    ({}, {"layers": (replace(LAYER, rotation=None), LAYER, LAYER)}, "rope", "mapped"),
    ({}, every_layer(rotation=None) | {"positions": "learned"}, "rope", "mapped"),
    ({}, every_layer(rotation=None) | {"positions": "unknown"}, "rope", "unknown"),
    (
        every_layer(rotation=None) | {"positions": "alibi"},
        every_layer(rotation=None) | {"positions": "alibi"},
        "rope",
        "same",
    ),
    (
        every_layer(rotation=None) | {"positions": "learned"},
        every_layer(rotation=None) | {"positions": "learned"},
        "rope",
        "same",
    ),
    ({}, every_layer(kind="sliding", window=64), "cache_format", "mapped"),
    ({}, every_layer(kind="linear", **EMPTY), "cache_format", "blocked"),
    (
        {},
        {"layers": (LAYER, LAYER, LayerSpec(kind="none", kv_heads=0, key_dim=0, value_dim=0))},
        "cache_format",
        "blocked",
    ),
    (every_layer(kind="latent"), {}, "cache_format", "blocked"),
    (every_layer(kind="latent"), every_layer(kind="latent"), "cache_format", "blocked"),
    ({}, {"dtype": "bfloat16"}, "dtype", "mapped"),
    ({}, {"tokenizer": "u" * 16}, "tokenizer", "mapped"),
    ({}, {"tokenizer": None}, "tokenizer", "unknown"),
    ({"tokenizer": None}, {"tokenizer": None}, "tokenizer", "unknown"),
    ({"tokenizer": "a+b"}, {"tokenizer": "a+c"}, "tokenizer", "mapped"),
    ({"tokenizer": "a+b"}, {"tokenizer": "d+b"}, "tokenizer", "mapped"),
    ({}, {"settings": "z" * 12}, "settings", "mapped"),
    ({}, {"weights": "x" * 16}, "weights", "mapped"),
    ({}, {"weights": None}, "weights", "unknown"),
    ({"weights": None}, {"weights": None}, "weights", "unknown"),
]


def verdicts(report: CompatReport) -> dict[str, str]:
    return {finding.topic: str(finding.verdict) for finding in report.findings}


def test_a_spec_compared_with_itself_is_the_same_on_every_topic() -> None:
    report = compare(SPEC, SPEC)

    assert verdicts(report) == dict.fromkeys(TOPICS, "same")
    assert report.verdict == "reuse"
    assert report


@pytest.mark.parametrize(("at_source", "at_target", "topic", "verdict"), TABLE)
def test_a_difference_has_the_verdict_of_its_topic_and_leaves_the_others_alone(
    at_source: dict[str, Any], at_target: dict[str, Any], topic: str, verdict: str
) -> None:
    source, target = replace(SPEC, **at_source), replace(SPEC, **at_target, name="there")

    report = compare(source, target)

    found = verdicts(report)
    assert tuple(found) == TOPICS
    assert found[topic] == verdict
    if verdict != "same":
        finding = next(each for each in report.findings if each.topic == topic)
        assert finding.why
        assert report.verdict == ("blocked" if "blocked" in found.values() else "map")
    if "layers" not in at_target and not at_source:
        assert {name for name, each in found.items() if each != "same"} == {topic}


@pytest.mark.parametrize("topic", TOPICS)
def test_only_the_same_everywhere_is_reuse(topic: str) -> None:
    same = compare(SPEC, SPEC)
    for verdict, expected in (("mapped", "map"), ("unknown", "map"), ("blocked", "blocked")):
        findings = tuple(
            replace(each, verdict=Verdict(verdict)) if each.topic == topic else each
            for each in same.findings
        )

        report = CompatReport(SPEC, SPEC, findings)

        assert report.verdict == expected
        assert bool(report) is (expected != "blocked")


def test_a_verdict_is_symmetric_but_its_columns_are_not() -> None:
    other = replace(SPEC, dtype="bfloat16", **every_layer(kv_heads=4))

    there, back = compare(SPEC, other), compare(other, SPEC)

    assert verdicts(there) == verdicts(back)
    assert [(f.source, f.target) for f in there.findings] == [
        (f.target, f.source) for f in back.findings
    ]


def test_raise_if_blocked_names_both_values_and_the_pair() -> None:
    other = replace(SPEC, name="there", **every_layer(kind="latent"))

    with pytest.raises(IncompatibleModels) as caught:
        compare(SPEC, other).raise_if_blocked()

    for value in ("here → there", "cache_format", "full", "latent"):
        assert value in caught.value.message
    assert "kvtransfer check" in str(caught.value.hint)


def test_raise_if_blocked_lets_everything_else_pass() -> None:
    other = replace(SPEC, weights=None, dtype="bfloat16", tokenizer="u" * 16)

    compare(SPEC, other).raise_if_blocked()


def test_the_json_shape_is_the_one_that_scripts_rely_on() -> None:
    report = compare(SPEC, replace(SPEC, name="there", dtype="bfloat16"))

    document = json.loads(report.to_json())

    assert set(document) >= {"verdict", "source", "target", "topics"}
    assert document["verdict"] == "map"
    assert (document["source"]["name"], document["target"]["name"]) == ("here", "there")
    assert [each["topic"] for each in document["topics"]] == list(TOPICS)
    for each in document["topics"]:
        assert set(each) >= {"topic", "source", "target", "verdict", "why"}
        assert all(isinstance(value, str) for value in each.values())
        assert each["verdict"] in {"same", "mapped", "blocked", "unknown"}
    assert ModelSpec.from_dict(document["source"]) == SPEC


def test_the_table_shows_every_topic_and_the_sum_of_them() -> None:
    console = Console(width=200, record=True, quiet=False, file=None)
    with console.capture() as captured:
        console.print(compare(SPEC, replace(SPEC, name="there", dtype="bfloat16")))

    text = captured.get()
    assert all(topic in text for topic in TOPICS)
    assert "map: the cache can cross through a fitted mapping" in text


def test_layers_that_differ_are_told_apart_in_runs() -> None:
    wide = replace(LAYER, kv_heads=8)
    report = compare(replace(SPEC, layers=(wide, LAYER, LAYER)), SPEC)

    found = {each.topic: each.source for each in report.findings}

    assert found["kv_heads"] == "8 × 1, 2 × 2"


def test_checks_are_named_as_their_topics() -> None:
    assert tuple(check.__name__ for check in CHECKS) == TOPICS
