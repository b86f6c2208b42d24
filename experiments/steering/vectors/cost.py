"""What a steered cache costs in every later token, and what steering costs once.

    OMP_NUM_THREADS=1 python experiments/steering/vectors/cost.py

Decoding takes as long however the cache came about, so that the honest comparison is of runs side
by side: in every round the same tokens are read on the plain and on the steered cache, in turns.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer import KVCache, LanguageModel, Steer, extract, load, prefill
from kvtransfer.hf.quiet import quiet
from kvtransfer.hf.reader import Reader
from kvtransfer.report import Provenance, to_json
from kvtransfer.steering.pairs import prompt_ids, read_pairs

HERE = Path(__file__).parent
ROUNDS, TOKENS = 9, 9


def main() -> None:
    """Measure, print and write results/cost.json."""
    quiet()
    torch.set_num_threads(1)
    model = load("smollm2-135m", dtype="float32")
    vector = extract(model, read_pairs("steps")[:4], chat=True).vector
    ids = prompt_ids(model, "How do I make a cup of tea?", chat=True)[None]
    began = time.perf_counter()
    plain = prefill(model, ids)
    prefilled = time.perf_counter() - began
    steer = Steer(vector, 2.0)
    steering = median(seconds(lambda: steer(plain)) for _ in range(9))
    each: dict[str, list[float]] = {"plain": [], "again": [], "steered": []}
    arms = {"plain": plain, "again": plain, "steered": steer(plain)}
    names = list(arms)
    for turn in range(ROUNDS):
        for name in names[turn % 3 :] + names[: turn % 3]:
            each[name].append(per_token(model, arms[name], ids[:, -1:]))
    middle = {name: median(found) for name, found in each.items()}
    document = {
        "prompt_tokens": ids.shape[1],
        "rounds": ROUNDS,
        "tokens": TOKENS,
        "seconds_a_token": middle,
        "steered_to_plain": middle["steered"] / middle["plain"],
        "plain_to_plain": middle["again"] / middle["plain"],
        "seconds_of_steering": steering,
        "seconds_of_prefill": prefilled,
        "provenance": Provenance.here(seed=0).to_dict(),
    }
    (HERE / "results" / "cost.json").write_text(to_json(document), encoding="utf-8")
    print(to_json({name: found for name, found in document.items() if name != "provenance"}))


def per_token(model: LanguageModel, cache: KVCache, token: Int[Tensor, "1 1"]) -> float:
    """Median seconds of a decoding step on ``cache``."""
    read_on = Reader.over(model, cache)

    def step() -> None:
        with torch.no_grad():
            read_on(token, last=True)

    return median(seconds(step) for _ in range(TOKENS))


def seconds(job: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    job()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
