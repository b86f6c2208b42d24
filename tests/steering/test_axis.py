"""The persona axis against scikit-learn, and its twin: what does not differ is not told apart."""

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from kvtransfer.steering.axis import fit_axis

WIDTH = 12


def spoken(*, texts: int, apart: float, seed: int) -> list[Tensor]:
    """So many texts of 9 tokens, whose states lie ``apart`` off the middle."""
    random = torch.Generator().manual_seed(seed)
    middle = apart * torch.ones(WIDTH) / WIDTH**0.5
    return [torch.randn(9, WIDTH, generator=random) + middle for _ in range(texts)]


def test_raw_is_what_scikit_learn_decides_by() -> None:
    low, high = spoken(texts=6, apart=-1, seed=0), spoken(texts=5, apart=1, seed=1)
    rows = torch.cat([*low, *high]).double().numpy()
    oracle = LinearDiscriminantAnalysis(solver="eigen", shrinkage="auto", priors=[0.5, 0.5])
    oracle.fit(rows, np.repeat([0, 1], [54, 45]))
    states = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(2))

    axis = fit_axis(low, high, layer=0)

    expected = oracle.decision_function(states.reshape(-1, WIDTH).double().numpy())
    np.testing.assert_allclose(axis.raw(states).flatten().numpy(), expected, rtol=1e-6)


def test_scaled_puts_the_sources_texts_at_minus_one_and_the_targets_at_one() -> None:
    low, high = spoken(texts=4, apart=-2, seed=0), spoken(texts=4, apart=2, seed=1)

    axis = fit_axis(low, high, layer=0)

    assert float(axis.scaled(torch.cat(low)).mean()) == pytest.approx(-1)
    assert float(axis.scaled(torch.cat(high)).mean()) == pytest.approx(1)
    assert float(axis.raw(torch.cat(high)).mean()) == pytest.approx(axis.ends[1])
    assert axis.accuracy > 0.95


def test_what_does_not_differ_is_not_told_apart_when_held_out() -> None:
    """Fitted to as many tokens, texts of one voice would still be told apart in sample."""
    low, high = spoken(texts=8, apart=0, seed=0), spoken(texts=8, apart=0, seed=1)

    axis = fit_axis(low, high, layer=0)

    assert 0.3 < axis.accuracy < 0.7
