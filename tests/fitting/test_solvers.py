"""Every closed-form solver is what its oracle is: scikit-learn, scipy, or an SVD in numpy."""

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes
from sklearn.linear_model import LinearRegression
from sklearn.linear_model import Ridge as SklearnRidge
from torch import Tensor

from kvtransfer.errors import UnderdeterminedFit
from kvtransfer.fitting.affine import Affine, LowRank, PerHead, reduce_rank, through_means
from kvtransfer.fitting.columns import EVERY_HEAD, Columns, Heads
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solvers import (
    SOLVERS,
    Attention,
    Headwise,
    Procrustes,
    ReducedRank,
    Ridge,
    Solver,
    solver,
    weighs,
)
from kvtransfer.geometry.spec import LayerSpec, ModelSpec

from .test_moments import sums

HEADS, WIDTH, N = 2, 3, 150
P, Q = 8, HEADS * WIDTH
PAIRED = Heads(target=HEADS, source=torch.tensor([0] * 4 + [1] * 4), count=torch.full((P,), 2))


def sample(n: int = N, p: int = P, q: int = Q, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated features of unequal size, an offset, and noise."""
    random = torch.Generator().manual_seed(seed)
    mixed = torch.Generator().manual_seed(99)
    mix = torch.randn(p, p, generator=mixed, dtype=torch.float64) * torch.logspace(-1, 0.5, p)
    slope = torch.randn(p, q, generator=mixed, dtype=torch.float64)
    x = torch.randn(n, p, generator=random, dtype=torch.float64) @ mix.double() + 3
    noise = torch.randn(n, q, generator=random, dtype=torch.float64)
    return x, x @ slope - 2 + noise


def queries(heads: int = HEADS, width: int = WIDTH) -> Tensor:
    """Second moments that look along some directions much more than along others."""
    random = torch.Generator().manual_seed(5)
    root = torch.randn(heads, width, width, generator=random, dtype=torch.float64)
    root = root * torch.logspace(-1, 0.7, width).double()
    return root @ root.mT


def oracle(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    fitted = SklearnRidge(alpha=alpha, solver="svd").fit(x, y)
    return torch.from_numpy(fitted.predict(x)).view(len(x), -1)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def test_every_solver_by_name_is_one_that_is_tested_here() -> None:
    assert dict(SOLVERS) == {
        "ridge": Ridge,
        "headwise": Headwise,
        "procrustes": Procrustes,
        "lowrank": ReducedRank,
        "attention": Attention,
    }


def test_a_solver_takes_the_settings_it_has_and_leaves_the_others() -> None:
    given = {"strength": 0.5, "scale": "absolute", "rank": 3}

    assert solver("ridge", **given) == Ridge(0.5, "absolute")
    assert solver("headwise", **given) == Headwise(0.5, "absolute")
    assert solver("procrustes", **given) == Procrustes()
    assert solver("lowrank", **given) == ReducedRank(3, 0.5, "absolute")
    assert solver("attention", **given) == Attention(0.5, "absolute", 3)


EACH: dict[str, Solver] = {
    "ridge": Ridge(),
    "headwise": Headwise(),
    "procrustes": Procrustes(),
    "lowrank": ReducedRank(2),
    "attention": Attention(),
    "attention of a rank": Attention(rank=2),
}


@pytest.mark.parametrize("name", EACH)
def test_too_few_rows_are_refused_with_the_number_needed(name: str) -> None:
    features = 4 if name in ("headwise", "procrustes") else P  # of one head, or of all
    x, y = sample()

    with pytest.raises(UnderdeterminedFit, match=rf"\b{features} rows .* \b{features} ") as caught:
        EACH[name].solve(Moments.of(x[:features], y[:features]), PAIRED)
    assert caught.value.hint is not None
    assert f"at least {features + 1} rows" in caught.value.hint

    EACH[name].solve(Moments.of(x[: features + 1], y[: features + 1]), PAIRED)  # one more will do


@pytest.mark.parametrize("solve", [Ridge, Headwise, Attention, lambda s: ReducedRank(2, s)])
def test_features_that_depend_on_each_other_need_strength(solve: type[Ridge]) -> None:
    x, y = sample()
    x = torch.cat((x[:, :3], x[:, :1] - x[:, 1:2], x[:, 4:7], x[:, 4:5] + x[:, 5:6]), dim=1)
    moments = Moments.of(x, y)

    with pytest.raises(UnderdeterminedFit, match="rows") as caught:
        solve(0.0).solve(moments, PAIRED)
    assert "raise strength" in str(caught.value.hint)

    fitted = solve(1e-9).solve(moments, PAIRED)
    assert bool(fitted.bias.isfinite().all())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: Headwise(-1.0), "strength"),
        (lambda: Attention(float("nan")), "strength"),
        (lambda: Attention(rank=0), "rank"),
        (lambda: ReducedRank(0), "rank"),
        (lambda: ReducedRank(2, -1.0), "strength"),
    ],
)
def test_settings_that_no_fit_can_use_are_a_mistake(wrong: type[Solver], says: str) -> None:
    with pytest.raises(ValueError, match=f"{says} must be"):
        wrong()


# Head to head


def test_headwise_is_one_ridge_a_head() -> None:
    x, y = sample()

    fitted = Headwise(2.0, "absolute").solve(Moments.of(x, y), PAIRED)

    expected = torch.cat([oracle(x[:, :4], y[:, :3], 2.0), oracle(x[:, 4:], y[:, 3:], 2.0)], dim=1)
    torch.testing.assert_close(fitted(x), expected)
    whole = Ridge(2.0, "absolute").solve(Moments.of(x, y))
    assert not torch.allclose(fitted(x), whole(x), rtol=0.01)  # which reads the other head as well
    assert fitted.parameters < whole.parameters


@pytest.mark.parametrize(
    ("source", "target", "pairs"),
    [
        (2, 4, [0, 0, 1, 1]),
        (4, 2, [0, 2]),
        (3, 2, [0, 1]),
        (2, 3, [0, 0, 1]),
        (1, 3, [0, 0, 0]),
    ],
)
def test_unequal_heads_are_paired_by_place(source: int, target: int, pairs: list[int]) -> None:
    x, y = sample(p=2 * source, q=2 * target)
    heads = Heads(
        target=target,
        source=torch.arange(source).repeat_interleave(2),
        count=torch.full((2 * source,), source),
    )

    fitted = Headwise(1.0, "absolute").solve(Moments.of(x, y), heads)

    expected = [
        oracle(x[:, 2 * s : 2 * s + 2], y[:, 2 * t : 2 * t + 2], 1.0) for t, s in enumerate(pairs)
    ]
    torch.testing.assert_close(fitted(x), torch.cat(expected, dim=1))


def test_what_is_no_heads_own_is_read_by_all() -> None:
    x, y = sample()
    owners = torch.tensor([0, 0, 1, 1] + [EVERY_HEAD] * 4)
    heads = Heads(target=HEADS, source=owners, count=torch.full((P,), 2))

    fitted = Headwise(1.0, "absolute").solve(Moments.of(x, y), heads)

    assert fitted.reads.tolist() == [[0, 1, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7]]
    expected = [
        oracle(x[:, read], y[:, 3 * h : 3 * h + 3], 1.0) for h, read in enumerate(fitted.reads)
    ]
    torch.testing.assert_close(fitted(x), torch.cat(expected, dim=1))


def test_layers_of_unequal_heads_are_each_paired_by_place() -> None:
    """Gemma 4's full layers have fewer, wider heads than its windowed ones."""

    def layer(heads: int, width: int) -> LayerSpec:
        return LayerSpec(kind="full", kv_heads=heads, key_dim=width, value_dim=width)

    def spec(*layers: LayerSpec) -> ModelSpec:
        return ModelSpec(
            name="m", architecture="llama", layers=layers, dtype="float32", positions="none"
        )

    columns = Columns(spec(layer(1, 4), layer(2, 2)), spec(layer(2, 3)))
    x, y = sample()

    fitted = Headwise(1.0).solve(Moments.of(x, y), columns.heads("keys", [0, 1], 0))

    assert fitted.reads.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7]]


@pytest.mark.parametrize("read", [3, 4], ids=["square", "wide"])
def test_procrustes_is_scipys_rotation_head_by_head(read: int) -> None:
    x, y = sample(p=2 * read)
    heads = Heads(
        target=HEADS,
        source=torch.arange(2).repeat_interleave(read),
        count=torch.full((2 * read,), 2),
    )
    moments = Moments.of(x, y)

    plain, scaled = (Procrustes(scaled).solve(moments, heads) for scaled in (False, True))

    for head in range(HEADS):
        mine, goal = (
            centred(each).numpy()
            for each in (x[:, read * head : read * (head + 1)], y[:, 3 * head : 3 * head + 3])
        )
        turn = plain.weight[head]
        torch.testing.assert_close(turn.mT @ turn, torch.eye(3, dtype=torch.float64))
        if read == 3:
            expected, _ = orthogonal_procrustes(mine, goal)
            torch.testing.assert_close(turn, torch.from_numpy(expected))
        turned = (mine @ turn.numpy()).reshape(-1, 1)
        (scale,) = np.linalg.lstsq(turned, goal.reshape(-1), rcond=None)[0]
        assert abs(scale - 1) > 0.05  # so that the scale matters
        torch.testing.assert_close(scaled.weight[head], float(scale) * turn)
    torch.testing.assert_close(plain(moments.mean_x), moments.mean_y)


def test_a_rotation_is_found_exactly_and_a_stretch_is_not() -> None:
    x, _ = sample(p=6)
    random = torch.Generator().manual_seed(3)
    turn = torch.linalg.qr(torch.randn(3, 3, generator=random, dtype=torch.float64)).Q
    stretch = torch.diag(torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64))
    heads = Heads(target=2, source=torch.arange(2).repeat_interleave(3), count=torch.full((6,), 2))

    for basis, exact in ((1.7 * turn, True), (stretch @ turn, False)):
        y = torch.cat((x[:, :3] @ basis, x[:, 3:] @ basis), dim=1) + 1
        fitted = Procrustes().solve(Moments.of(x, y), heads)
        assert torch.allclose(fitted(x), y) is exact


# Of a rank


def root_of(matrix: Tensor) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix.numpy())
    root: np.ndarray = (vectors * np.sqrt(values)) @ vectors.T
    return root


@pytest.mark.parametrize("strength", [0.0, 0.1, 10.0])
@pytest.mark.parametrize("rank", [1, 3, 6])
def test_reduced_rank_is_the_cut_svd_of_the_whitened_ridge(rank: int, strength: float) -> None:
    x, y = sample()
    moments = Moments.of(x, y)

    fitted = ReducedRank(rank, strength).solve(moments)

    whole = Ridge(strength).solve(moments)
    damping = strength * float(moments.xx.diagonal().mean())
    root = root_of(moments.xx + damping * torch.eye(P, dtype=torch.float64))
    u, s, vh = np.linalg.svd(root @ whole.weight.numpy(), full_matrices=False)
    expected = np.linalg.solve(root, u[:, :rank] * s[:rank] @ vh[:rank])
    torch.testing.assert_close(fitted.down @ fitted.up, torch.from_numpy(expected))
    assert fitted.down.shape == (P, rank)
    if rank == Q:
        torch.testing.assert_close(fitted(x), whole(x))


def penalised(weight: Tensor, moments: Moments, damping: float) -> float:
    """Ridge's objective, up to a constant."""
    quadratic = (weight * ((moments.xx + damping * torch.eye(len(weight))) @ weight)).sum()
    return float(quadratic - 2 * (weight * moments.xy).sum())


def test_reduced_rank_beats_the_cut_svd_of_the_weight_itself() -> None:
    moments = Moments.of(*sample())
    whole = Ridge(0.1).solve(moments)
    damping = 0.1 * float(moments.xx.diagonal().mean())
    u, s, vh = torch.linalg.svd(whole.weight, full_matrices=False)

    for rank in (1, 2, 3):
        fitted = ReducedRank(rank, 0.1).solve(moments)
        cut = u[:, :rank] * s[:rank] @ vh[:rank]
        undamped = reduce_rank(whole, moments, rank)
        mine = penalised(fitted.down @ fitted.up, moments, damping)
        assert mine < penalised(cut, moments, damping)
        assert mine < penalised(undamped.down @ undamped.up, moments, damping)


# By what queries see


@pytest.mark.parametrize("strength", [1e-3, 0.3])
@pytest.mark.parametrize("sees", [None, torch.eye(WIDTH).double().expand(HEADS, -1, -1)])
def test_where_all_directions_matter_alike_attention_is_ridge(
    sees: Tensor | None, strength: float
) -> None:
    moments = Moments.of(*sample())
    heads = Heads(target=HEADS, source=PAIRED.source, count=PAIRED.count, sees=sees)

    fitted = Attention(strength).solve(moments, heads)

    assert isinstance(fitted, Affine)
    ridge = Ridge(strength).solve(moments)
    torch.testing.assert_close(fitted.weight, ridge.weight)
    torch.testing.assert_close(fitted.bias, ridge.bias)
    lower = Attention(strength, rank=2).solve(moments, heads)
    torch.testing.assert_close(
        lower(moments.xx), ReducedRank(2, strength).solve(moments)(moments.xx)
    )


def looking(sees: Tensor) -> Heads:
    return Heads(target=HEADS, source=PAIRED.source, count=PAIRED.count, sees=sees)


def test_undamped_attention_is_least_squares_whatever_the_metric() -> None:
    x, y = sample()
    heads = looking(queries())

    fitted = Attention(0.0).solve(Moments.of(x, y), heads)

    torch.testing.assert_close(fitted(x), torch.from_numpy(LinearRegression().fit(x, y).predict(x)))
    damped = Attention(0.3).solve(Moments.of(x, y), heads)
    assert not torch.allclose(damped(x), Ridge(0.3).solve(Moments.of(x, y))(x), rtol=0.01)


def test_damped_attention_is_one_ridge_for_each_direction_that_queries_look_along() -> None:
    x, y = sample()
    metric = queries() * torch.tensor([3.0, 0.01], dtype=torch.float64)[:, None, None]

    fitted = Attention(5.0, "absolute").solve(Moments.of(x, y), looking(metric))

    expected = []
    for head in range(HEADS):
        seen, axes = torch.linalg.eigh(metric[head])
        seen = seen / seen.mean()
        along = y[:, 3 * head : 3 * head + 3] @ axes
        made = torch.cat([oracle(x, along[:, [i]], 5.0 / float(seen[i])) for i in range(3)], dim=1)
        expected.append(made @ axes.mT)
    torch.testing.assert_close(fitted(x), torch.cat(expected, dim=1))


def weighed(fitted: LowRank, x: Tensor, y: Tensor, sees: Tensor) -> float:
    """tr (Y − XW) M (Y − XW)ᵀ, with each head's metric of mean one."""
    metric = sees / sees.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    lost = (y - fitted(x)).view(-1, HEADS, WIDTH)
    return float(torch.einsum("nhd,hde,nhe->", lost, metric, lost))


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_of_a_rank_attention_loses_least_of_what_queries_see(rank: int) -> None:
    x, y = sample()
    moments, sees = Moments.of(x, y), queries()

    mine = Attention(0.0, rank=rank).solve(moments, looking(sees))

    assert isinstance(mine, LowRank)
    least = weighed(mine, x, y, sees)
    reduced = ReducedRank(rank, 0.0).solve(moments)
    assert least < 0.999 * weighed(reduced, x, y, sees)
    whole = Ridge(0.0).solve(moments)
    random = torch.Generator().manual_seed(0)
    for _ in range(20):
        axes = torch.randn(Q, rank, generator=random, dtype=torch.float64)
        into, out = whole.weight @ axes, torch.linalg.pinv(axes)
        other = LowRank(into, out, through_means(into @ out, moments).bias)
        assert least < weighed(other, x, y, sees)
    # And the other way round: what minds no direction loses less where all count alike.
    alike = torch.eye(WIDTH).double().expand(HEADS, -1, -1)
    assert weighed(reduced, x, y, alike) < 0.999 * weighed(mine, x, y, alike)


def test_a_head_that_no_query_reads_is_fitted_all_the_same() -> None:
    moments, sees = Moments.of(*sample()), queries()
    sees[1] = 0

    for rank in (None, 2):
        fitted = Attention(1e-3, rank=rank).solve(moments, looking(sees))
        assert bool(fitted.whole(P).weight.isfinite().all())


# Rows that count more


def weights(n: int = N) -> Tensor:
    drawn = torch.rand(n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    heavy: Tensor = 0.05 + drawn**4
    return heavy / heavy.mean()


def gathered(x: Tensor, y: Tensor, weight: Tensor | None, cuts: tuple[int, ...] = ()) -> Moments:
    accumulator = sums(x.shape[1], y.shape[1])
    for rows in torch.arange(len(x)).tensor_split(cuts):
        accumulator.add(x[rows], y[rows], weight=None if weight is None else weight[rows])
    return accumulator.moments().dense()


def test_weighted_rows_are_scikit_learns_sample_weight() -> None:
    x, y = sample()
    weight = weights()

    fitted = Ridge(2.0, "absolute").solve(gathered(x, y, weight))

    expected = SklearnRidge(alpha=2.0, solver="svd").fit(x, y, sample_weight=weight.numpy())
    torch.testing.assert_close(fitted(x), torch.from_numpy(expected.predict(x)))
    assert not torch.allclose(fitted(x), oracle(x, y, 2.0), rtol=0.01)


def test_weights_of_one_are_no_weights_and_their_scale_is_nothing() -> None:
    x, y = sample()
    plain = gathered(x, y, None)

    for weight in (torch.ones(N), torch.full((N,), 7.0)):
        found = gathered(x, y, weight)
        assert found.n == plain.n
        for field in ("mean_x", "mean_y", "xx", "xy", "yy"):
            torch.testing.assert_close(getattr(found, field), getattr(plain, field))


@pytest.mark.parametrize("cuts", [(75,), (10, 30, 90), (0, 149)])
def test_weights_of_mean_one_in_every_batch_may_be_batched_at_will(cuts: tuple[int, ...]) -> None:
    x, y = sample()
    weight = weights().clone()
    for rows in torch.arange(N).tensor_split(cuts):
        if len(rows):
            weight[rows] /= weight[rows].mean()

    found, whole = gathered(x, y, weight, cuts), gathered(x, y, weight)

    for field in ("mean_x", "mean_y", "xx", "xy", "yy"):
        torch.testing.assert_close(getattr(found, field), getattr(whole, field))
    other = gathered(x, y, weights(), cuts)  # whose batches mean more or less than one
    assert not torch.allclose(other.xx, gathered(x, y, weights()).xx, rtol=1e-3)


def test_every_map_of_heads_stands_in_the_order_of_the_heads() -> None:
    fitted = Headwise().solve(Moments.of(*sample()), PAIRED)

    assert isinstance(fitted, PerHead)
    assert fitted.reads.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert fitted.weight.shape == (HEADS, 4, WIDTH)


def test_settings_name_a_solver_that_there_is_and_a_rank_that_it_has() -> None:
    with pytest.raises(ValueError, match=r"no solver 'rigde'; there are ridge, headwise"):
        FitSettings(solver="rigde")
    for name in ("headwise", "procrustes"):
        with pytest.raises(ValueError, match=rf"rank 3 asked of '{name}'"):
            FitSettings(solver=name, rank=3)

    assert FitSettings(solver="attention", rank=3).solver_of(0.5) == Attention(0.5, rank=3)


def test_queries_are_gathered_for_the_one_that_weighs_by_them() -> None:
    assert [name for name in SOLVERS if weighs(name)] == ["attention"]
    assert not weighs("mlp")  # which is in no registry
