"""Arguments of the wrong kind, given as a user gives them: without the tests' own type checks.

Run by test_kinds.py; prints, for each case, what was raised.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvtransfer import (
    GuidePack,
    KVMapping,
    Modules,
    RePrefill,
    Session,
    bench,
    concat,
    load,
    prefill,
    profile_groups,
    recompute,
    relocate,
    score,
    split,
    split_chat,
    stack,
    verify,
)
from kvtransfer.guides.schema import Schema

SCHEMA = {
    "name": "trip",
    "layout": [
        {"module": "persona", "text": "You plan.\n"},
        {"module": "plan", "text": "Plan {days} days.", "parameters": {"days": 4}},
    ],
}


def cases() -> dict[str, Callable[[], object]]:
    model: Any = load("tiny-4l", dtype="float32")
    ids = model.encode("The tide comes in twice a day.")[None]
    cache: Any = prefill(model, ids)
    pack: Any = GuidePack.build(model, {"a": "The tide."})
    modules: Any = Modules.build(model, Schema.from_dict(SCHEMA))
    build: Any = GuidePack.build
    any_: dict[str, Any] = {
        each.__name__: each
        for each in (
            RePrefill,
            Session,
            bench,
            concat,
            profile_groups,
            recompute,
            relocate,
            score,
            split,
            split_chat,
        )
    }
    session: Any = Session({"one": model, "two": model})
    session.feed("The tide.")
    mapping = KVMapping.from_pretrained("tiny-4l-to-tiny-6l")
    check: Any = verify
    every: Any = stack
    return {
        "share: text": lambda: any_["recompute"](model, ids, cache, "0.5"),
        "share: True": lambda: any_["recompute"](model, ids, cache, True),
        "share: None": lambda: any_["recompute"](model, ids, cache, None),
        "after: half": lambda: any_["recompute"](model, ids, cache, 0.5, after=0.5),
        "layers: text": lambda: any_["recompute"](model, ids, cache, 0.5, layers="2"),
        "ids: list": lambda: any_["recompute"](model, ids.tolist(), cache, 0.5),
        "cache: list": lambda: any_["recompute"](model, ids, [cache], 0.5),
        "model: its module": lambda: any_["recompute"](model.module, ids, cache, 0.5),
        "profile: share": lambda: any_["profile_groups"](model, model, [], prefix=4, share="1/3"),
        "relocate: half": lambda: any_["relocate"](model, cache, 1.5),
        "relocate: model": lambda: any_["relocate"]("tiny-4l", cache, 1),
        "concat: None": lambda: any_["concat"](model, None),
        "concat: one cache": lambda: any_["concat"](model, cache),
        "concat: a graft": lambda: any_["concat"](model, [cache, pack["a"].graft(model)]),
        "concat: model": lambda: any_["concat"]("tiny-4l", [cache]),
        "stack: None": lambda: every(None),
        "stack: one cache": lambda: every(cache),
        "stack: a text": lambda: every(["cache"]),
        "score: a graft": lambda: any_["score"](model, ids, pack["a"].graft(model)),
        "score: list": lambda: any_["score"](model, ids.tolist()),
        "assemble: a list": lambda: modules.assemble(["persona", "plan"]),
        "assemble: a number": lambda: modules.assemble(
            "plan", arguments={"plan": {"days": 4}}
        ),
        "assemble: flat": lambda: modules.assemble("plan", arguments={"plan": "4"}),
        "assemble: pairs": lambda: modules.assemble("plan", arguments=[("plan", "4")]),
        "modules: a path": lambda: Modules.build(model, "trip.json"),  # type: ignore[arg-type]
        "modules: data": lambda: Modules.build(model, SCHEMA),  # type: ignore[arg-type]
        "modules: model": lambda: Modules.build(model.module, Schema.from_dict(SCHEMA)),
        "split: model": lambda: any_["split"](model, "a guide", " and more"),
        "split: ids": lambda: any_["split"](model.tokenizer, ids, " and more"),
        "split: None": lambda: any_["split"](model.tokenizer, "a guide", None),
        "split_chat: model": lambda: any_["split_chat"](model, "a guide", "Hi"),
        "build: texts": lambda: build(model, ["ab", "cd"]),
        "build: a text": lambda: build(model, "guides.jsonl"),
        "build: a path": lambda: build(model, Path("guides.jsonl")),
        "build: None": lambda: build(model, None),
        "build: numbers": lambda: build(model, {"a": 5}),
        "build: triples": lambda: build(model, [("a", "b", "c")]),
        "build: a pack": lambda: build(model, pack),
        "build: model": lambda: build("tiny-4l", {"a": "b"}),
        "transferred: a name": lambda: pack.transferred("tiny-4l-to-tiny-6l"),
        "restore: model": lambda: pack["a"].restore(model.module),
        "restore: None": lambda: pack["a"].graft(None),
        "stream: None": lambda: list(pack["a"].graft(model).stream(None)),
        "verify: texts": lambda: check(model, ["The tide."]),
        "verify: model": lambda: check("tiny-4l", {"a": "b"}),
        "bench: a name": lambda: any_["bench"]("tiny-4l"),
        "session: a model": lambda: any_["Session"](model),
        "session: its module": lambda: any_["Session"]({"one": model.module}),
        "session: a mapping": lambda: any_["Session"]({"one": model}, mapping),
        "session: names": lambda: any_["Session"]({"one": model}, ["tiny-4l-to-tiny-6l"]),
        "session: a bound": lambda: any_["Session"]({"one": model}, policy=0.1),
        "policy: half": lambda: any_["RePrefill"](every=1.5),
        "feed: a number": lambda: session.feed(3.5),
        "feed: words": lambda: session.feed([1, "x"]),
        "generate: text": lambda: session.generate(max_new_tokens="4"),
        "deviation: text": lambda: session.deviation(layers="2"),
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    for name, act in cases().items():
        try:
            act()
        except Exception as error:
            said = {
                "kinds": [kind.__name__ for kind in type(error).__mro__],
                "message": getattr(error, "message", str(error)),
                "hint": getattr(error, "hint", None),
            }
        else:
            said = {"kinds": [], "message": "nothing was raised", "hint": None}
        print(json.dumps({"case": name} | said), flush=True)


if __name__ == "__main__":
    main()
