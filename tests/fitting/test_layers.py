"""Layers, and how hard to damp, are chosen by the rows that were held out."""

import pytest
import torch
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score
from torch import Tensor

from kvtransfer.fitting.capture import Capture, Sample
from kvtransfer.fitting.choice import STRENGTHS, Choice, best_strength, choose
from kvtransfer.fitting.columns import Columns
from kvtransfer.fitting.layers import (
    needed_rows,
    rank_layers,
)
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.problem import problem
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solvers import Ridge
from kvtransfer.geometry.spec import LayerSpec, ModelSpec

DEPTH, HEADS, WIDTH = 5, 2, 3


def spec(depth: int, heads: int = HEADS, width: int = WIDTH) -> ModelSpec:
    layer = LayerSpec(kind="full", kv_heads=heads, key_dim=width, value_dim=width)
    return ModelSpec(
        name="m", architecture="llama", layers=(layer,) * depth, dtype="float32", positions="none"
    )


SOURCE, TARGET = spec(DEPTH), spec(2)
FEATURES = HEADS * WIDTH


def rows(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Target layer 0 is made from source layer 2, target layer 1 from source layers 1 and 4."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, DEPTH * FEATURES, generator=random, dtype=torch.float64)
    layers = x.view(n, DEPTH, HEADS, WIDTH)
    noise = 0.3 * torch.randn(n, 2, HEADS, WIDTH, generator=random, dtype=torch.float64)
    y = torch.stack((layers[:, 2], layers[:, 1] + 0.7 * layers[:, 4].flip(-1)), dim=1)
    return x, (y + noise).flatten(1)


def taken() -> Capture:
    def sample(n: int, seed: int, *, twin: bool) -> Sample:
        x, y = rows(n, seed)
        moments = Moments.of(x, torch.cat((y, y.flip(0)), dim=1) if twin else y)
        return Sample(keys=moments, values=moments)

    return Capture(fit=sample(400, 0, twin=True), heldout=sample(200, 1, twin=False), seconds={})


def sources(choices: list[Choice]) -> list[tuple[int, ...]]:
    return [choice.sources for choice in choices]


def test_layers_are_ranked_by_what_each_explains_alone_on_held_out_rows() -> None:
    ranking = rank_layers(taken(), SOURCE, TARGET)

    (x, y), (x_held, y_held) = rows(400, 0), rows(200, 1)
    for t in range(2):
        for s in range(DEPTH):
            scores = []
            for h in range(HEADS):
                head = slice((s * HEADS + h) * WIDTH, (s * HEADS + h + 1) * WIDTH)
                goal = slice((t * HEADS + h) * WIDTH, (t * HEADS + h + 1) * WIDTH)
                fitted = LinearRegression().fit(x[:, head], y[:, goal])
                predicted = fitted.predict(x_held[:, head])
                scores.append(r2_score(y_held[:, goal], predicted, multioutput="variance_weighted"))
            assert float(ranking[t, s]) == pytest.approx(sum(scores) / HEADS, abs=1e-4)


def test_where_head_counts_differ_every_head_is_read_from_all_heads() -> None:
    ranking = rank_layers(taken(), spec(DEPTH, heads=1, width=HEADS * WIDTH), TARGET)

    (x, y), (x_held, y_held) = rows(400, 0), rows(200, 1)
    layer = slice(4 * FEATURES, 5 * FEATURES)
    predicted = LinearRegression().fit(x[:, layer], y[:, FEATURES:]).predict(x_held[:, layer])
    scores = [
        r2_score(y_held[:, FEATURES:][:, h], predicted[:, h], multioutput="variance_weighted")
        for h in (slice(0, WIDTH), slice(WIDTH, None))
    ]
    assert float(ranking[1, 4]) == pytest.approx(sum(scores) / HEADS, abs=1e-4)
    assert ranking.argmax(dim=1).tolist() == [2, 1]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(1, [(2,), (1,)]), ("auto", None), ("all", [(0, 1, 2, 3, 4)] * 2)],
)
def test_the_layers_that_made_the_target_are_chosen(
    layers: int | str, expected: list[tuple[int, ...]] | None
) -> None:
    found = sources(list(choose(taken(), SOURCE, TARGET, FitSettings(layers=layers))))  # type: ignore[arg-type]

    if expected is None:
        assert found[0] == (2,) or 2 in found[0]
        assert {1, 4} <= set(found[1])
    else:
        assert found == expected


def test_two_layers_are_found_where_two_are_needed() -> None:
    first, second = choose(taken(), SOURCE, TARGET, FitSettings(layers=2))

    assert 2 in first.sources
    assert second.sources == (1, 4)
    assert second.r2_keys > 0.85


def test_the_chosen_strength_is_the_best_of_the_grid_on_held_out_rows() -> None:
    posed = problem(taken(), Columns(SOURCE, TARGET), "keys", [1, 4], 1)
    scores = {strength: posed.score(Ridge(strength).solve(posed.fit)) for strength in STRENGTHS}

    score, strength = best_strength(posed, STRENGTHS)

    assert score == max(scores.values()) == scores[strength]


def test_a_given_strength_is_taken() -> None:
    for choice in choose(taken(), SOURCE, TARGET, FitSettings(layers=1, strength=0.25)):
        assert choice.strength_keys == choice.strength_values == 0.25


def test_the_shuffled_problem_explains_nothing() -> None:
    posed = problem(taken(), Columns(SOURCE, TARGET), "values", [1, 4], 1)

    assert posed.score(Ridge().solve(posed.fit)) > 0.85
    assert posed.score(Ridge().solve(posed.shuffled)) < 0.1


@pytest.mark.parametrize(("layers", "rows"), [("auto", 7), (1, 7), (3, 19), ("all", 31)])
def test_as_many_rows_are_needed_as_features_and_one(layers: int | str, rows: int) -> None:
    assert needed_rows(SOURCE, layers) == rows  # type: ignore[arg-type]
