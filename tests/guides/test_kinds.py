"""An argument of the wrong kind is named, with what it is, what is needed and where that is had."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtransfer.errors import KVTransferError, WrongKind, require
from kvtransfer.geometry.join import stack
from kvtransfer.guides.concat import concat
from kvtransfer.guides.recompute import recompute
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def said() -> dict[str, dict[str, Any]]:
    """What each case of kinds.py raised, in a process without the tests' type checks."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.guides.kinds"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {each["case"]: each for each in found}


@pytest.mark.parametrize(
    ("case", "says", "hint"),
    [
        ("session: a model", "models is of kind LanguageModel, not a dict", "small"),
        ("session: its module", "model 'one' is of kind LlamaForCausalLM", "wrap("),
        ("session: a mapping", "mappings is of kind KVMapping, not a list", "KVMapping"),
        ("session: names", "mapping 1 is 'tiny-4l-to-tiny-6l' (str)", "KVMapping"),
        ("session: a bound", "policy is 0.1 (float), not a RePrefill", "RePrefill("),
        ("policy: half", "every is 1.5 (float), not a whole number", "RePrefill("),
        ("feed: a number", "what is fed is 3.5 (float), not a text or ids", "list of ids"),
        ("feed: words", "what is fed is of kind list, not a text or ids", "list of ids"),
        ("generate: text", "max_new_tokens is '4' (str), not a whole number", "64"),
        ("deviation: text", "layers is '2' (str), not a whole number", "number of layers"),
        ("share: text", "share is '0.5' (str), not a number", "0.15"),
        ("share: True", "share is True (bool)", "0.15"),
        ("share: None", "share is None (NoneType)", "0.15"),
        ("after: half", "after is 0.5 (float), not a whole number", "tokens"),
        ("concat: None", "is None (NoneType), not a list", "[one]"),
        ("concat: one cache", "is of kind KVCache, not a list", "[one]"),
        ("concat: a graft", "piece 2 is of kind Graft, not a KVCache", "prefill"),
        ("stack: None", "what holds the caches is None (NoneType)", "[one]"),
        ("stack: a text", "cache 1 is 'cache' (str), not a KVCache", "prefill"),
        ("score: a graft", "prefix is of kind Graft", "prefill"),
        ("model: its module", "model is of kind LlamaForCausalLM", "wrap(module, tokenizer)"),
        ("assemble: a list", "a module is of kind list, not a name", "assemble("),
        ("assemble: a number", "the argument for 'days' of module 'plan' is 4 (int)", "str"),
        ("assemble: flat", "module 'plan' is '4' (str), not a dict", "arguments="),
        ("modules: a path", "schema is 'trip.json' (str), not a Schema", "read_schema"),
        ("split: model", "tokenizer is of kind LanguageModel", "model.tokenizer"),
        ("split: None", "the live text is None (NoneType), not a text", "split("),
        ("build: texts", "a guide is 'ab' (str)", "{name: text"),
        ("build: a text", "is 'guides.jsonl' (str), not a list or a dict", "read_guides"),
        ("build: numbers", "the guide 'a' is 5 (int), not a text", "{name: text"),
        ("transferred: a name", "mapping is 'tiny-4l-to-tiny-6l' (str)", "from_pretrained"),
    ],
)
def test_the_message_has_both_and_the_hint_a_way(
    said: dict[str, dict[str, Any]], case: str, says: str, hint: str
) -> None:
    assert says in said[case]["message"]
    assert hint in said[case]["hint"]


def test_all_of_them_are_named_errors(said: dict[str, dict[str, Any]]) -> None:
    odd = {name: each["message"] for name, each in said.items() if "WrongKind" not in each["kinds"]}

    assert len(said) > 40
    assert odd == {}
    assert all(each["hint"] for each in said.values())


def test_such_an_error_is_foreseen_and_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"after is 2\.0") as caught:
        require("after", 2.0, int, "a whole number", hint="2")
    assert isinstance(caught.value, WrongKind)
    assert isinstance(caught.value, KVTransferError)
    require("after", 2, int, "a whole number", hint="2")  # and nothing is raised


def test_what_is_reasonable_is_taken(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny("llama", num_hidden_layers=2)
    ids = torch.tensor([[5, 6, 7]])
    cache = prefill(model, ids)

    def several() -> Iterator[Any]:
        yield from (cache, cache)

    for made, expected in (
        (concat(model, several()), concat(model, [cache, cache])),
        (stack(several()), stack([cache, cache])),
    ):
        assert all(map(torch.equal, made.keys, expected.keys))
    assert recompute(model, ids, cache, 0) is cache  # a whole number is a number
    with pytest.raises(ValueError, match="a share of nan"):
        recompute(model, ids, cache, float("nan"))
