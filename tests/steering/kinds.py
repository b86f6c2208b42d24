"""Edits with arguments of the wrong kind, as a user gives them: without the tests' type checks.

Run by test_kinds.py; prints, for each text, what was raised.
"""

import json
from typing import Any

import numpy as np
import torch

from kvtransfer.errors import KVTransferError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.steering.chain import chain
from kvtransfer.steering.expression import parse
from kvtransfer.steering.interventions import Scale

TEXTS = (
    "Steer(w)",
    "Steer(w, 1.0)",
    "Steer(cache)",
    "Replace(w)",
    "Interpolate(w, 0.5)",
    "Scale(0.5, layers=1.5)",
    "Scale(0.5, layers=None)",
    "Bank(None)",
    "Scale(0.5, heads=1)",
    "Scale(0.5, heads=mid)",
    "Scale(0.5, heads=(0.5,))",
    "Scale(0.5, tokens=3)",
    "Scale(0.5, tokens=())",
    "Scale(0.5, tokens=(0, 6, 2))",
    "Scale(0.5, tokens=(0.5, 3))",
    "Shuffle(abc)",
    "Shuffle(1.5)",
    "Shuffle(order=3)",
    "Lag(1.5)",
    "nothing",
)


def main() -> None:
    block = torch.ones(1, 2, 6, 8)
    cache = KVCache(
        keys=(block,), values=(block,), positions=torch.arange(6)[None], keys_are="content"
    )
    for text in TEXTS:
        try:
            parse(text, {"cache": cache, "nothing": lambda each: None})(cache)
            said: dict[str, Any] = {"error": None}
        except KVTransferError as error:
            said = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        print(json.dumps({"text": text} | said))
    number: Any = 1
    try:
        chain(number)
    except KVTransferError as error:
        raised = {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        print(json.dumps({"text": "chain(1)"} | raised))
    listed: Any = {"layers": np.array([0, 2]), "heads": [1], "tokens": [0, 3]}
    made = Scale(0.5, **listed)
    same = Scale(0.5, layers=(0, 2), heads=(1,), tokens=(0, 3))
    print(json.dumps({"text": "lists", "same": made == same and hash(made) == hash(same)}))


if __name__ == "__main__":
    main()
