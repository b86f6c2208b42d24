"""What results carry beside their numbers."""

import json
import sys

import pytest

from kvtransfer.report import Estimate, Provenance, to_json


def test_an_estimate_prints_its_interval_where_there_is_one() -> None:
    assert f"{Estimate(0.5, 0.25, 0.75, 8):.0%}" == "50% [25%, 75%]"
    assert str(Estimate(0.5, None, None, 1)) == "0.5"


def test_an_estimate_has_the_json_shape_that_scripts_rely_on() -> None:
    assert Estimate(1.0, None, None, 1).to_dict() == {
        "value": 1.0,
        "low": None,
        "high": None,
        "n": 1,
    }


def test_json_is_stable_and_keeps_letters_as_they_are() -> None:
    one, other = to_json({"b": 1, "a": "θ"}), to_json({"a": "θ", "b": 1})

    assert one == other
    assert "θ" in one


def test_json_is_json_so_what_is_not_a_number_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        to_json({"x": float("nan")})


def test_provenance_says_what_was_run_with_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/kvtransfer", "fit", "a b", "--out", "m"])

    here = Provenance.here(seed=7)

    assert here.command == "kvtransfer fit 'a b' --out m"
    assert here.seed == 7
    assert {"kvtransfer", "torch", "transformers"} <= set(here.packages)
    assert here.to_dict() == json.loads(to_json(here.to_dict()))
