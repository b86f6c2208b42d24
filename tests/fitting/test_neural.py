"""Networks learn what lines leave over, never make a layer worse, and repeat themselves."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtransfer.errors import KVTransferError
from kvtransfer.fitting.affine import Affine
from kvtransfer.fitting.features import KINDS
from kvtransfer.fitting.fit import capture_texts, fit
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.network import Mlp
from kvtransfer.fitting.network_settings import NetworkSettings
from kvtransfer.fitting.neural import Trained, normed, r2, train, wide
from kvtransfer.fitting.report import FitReport
from kvtransfer.fitting.rows import LIMIT, Rows, Units, gather, require_room, units_of
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.fitting.solvers import Ridge
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel, load
from kvtransfer.hf.run import prefill
from kvtransfer.hf.start import begin

SMALL = NetworkSettings(hidden=32, epochs=10, batch=64, learning_rate=5e-3)
SETTINGS = FitSettings(
    tokens=1_024,
    chunk=128,
    batch=8,
    layers=1,
    strength=1e-3,
    solver="mlp",
    network=replace(SMALL, epochs=5),
)
HEADS, WIDTH = 2, 4


@pytest.fixture(scope="module")
def source() -> LanguageModel:
    """Trained models: noise has nothing to teach."""
    return load("tiny-4l", dtype="float32")


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return load("tiny-6l", dtype="float32")


@pytest.fixture(scope="module")
def report(source: LanguageModel, target: LanguageModel) -> FitReport:
    return fit(source, target, builtin("fit"), SETTINGS)


class Problem:
    """Rows of six features, and what two heads of four make of them: a line, and a bend."""

    def __init__(self, *, bend: float) -> None:
        random = torch.Generator().manual_seed(0)
        x = 3 + torch.tensor([0.01, 1, 1, 1, 1, 100]) * torch.randn(2_304, 6, generator=random)
        z = (x - 3) / x.std(0)
        slope, turn = (torch.randn(6, HEADS * WIDTH, generator=random) for _ in range(2))
        noise = torch.randn(len(x), HEADS * WIDTH, generator=random)
        y = 50 + z @ slope + bend * ((z @ turn).abs() - 2) + 0.1 * noise
        self.x, self.y = x[2_048:], y[2_048:]
        moments = Moments.of(x[:2_048].double(), y[:2_048].double())
        self.line = Ridge(1e-10).solve(moments).float()
        self.units = Units.of_source(moments), Units.of_target(moments, heads=HEADS)
        into, out = self.units
        rows = Rows(into.norm(x).half(), out.norm(y))
        self.fit = Rows(rows.x[:2_048], rows.y[:2_048])
        self.heldout = Rows(rows.x[2_048:], rows.y[2_048:])

    def train(self, **changed: Any) -> Trained:
        settings = replace(SMALL, **changed)
        return train(
            self.fit,
            self.heldout,
            normed(self.line, *self.units),
            settings,
            heads=HEADS,
            random=torch.Generator().manual_seed(settings.seed),
        )


@pytest.fixture(scope="module")
def bent() -> Problem:
    return Problem(bend=1.0)


@pytest.fixture(scope="module")
def learnt(bent: Problem) -> Trained:
    return bent.train()


def test_a_network_learns_a_bend_that_no_line_can_follow(learnt: Trained) -> None:
    assert learnt.history[0] < 0.8
    assert learnt.r2 > 0.95


def test_where_a_line_is_all_there_is_the_network_leaves_it_as_good() -> None:
    found = Problem(bend=0.0).train()

    assert found.history[0] > 0.99
    assert found.r2 == pytest.approx(found.history[0], abs=1e-3)


def test_the_loss_starts_at_the_line_to_which_nothing_is_added_yet(
    bent: Problem, learnt: Trained
) -> None:
    lost = (bent.line(bent.x) - bent.y).square().view(-1, HEADS, WIDTH).sum((0, 2))
    total = (bent.y - bent.y.mean(0)).square().view(-1, HEADS, WIDTH).sum((0, 2))

    assert learnt.history[0] == pytest.approx(float((1 - lost / total).mean()), abs=1e-3)


def test_units_are_taken_off_and_put_back(bent: Problem, learnt: Trained) -> None:
    assert learnt.network is not None
    into, out = bent.units
    network = wide(learnt.network, into, out)

    expected = out.mean + out.spread * learnt.network(into.norm(bent.x))
    torch.testing.assert_close(network(bent.x), expected, rtol=1e-4, atol=1e-3)
    assert float((network(bent.x) - bent.y).square().mean()) < 0.2 * float(
        (bent.line(bent.x) - bent.y).square().mean()
    )


def test_the_best_epoch_is_kept_and_not_the_last(bent: Problem) -> None:
    few = replace(bent.fit, x=bent.fit.x[:48], y=bent.fit.y[:48])  # which are soon known by heart
    settings = replace(SMALL, hidden=64, epochs=40, batch=16)
    line = normed(bent.line, *bent.units)
    found = train(
        few, bent.heldout, line, settings, heads=HEADS, random=torch.Generator().manual_seed(0)
    )

    assert found.network is not None
    assert found.history[-1] < max(found.history) == found.r2
    assert r2(found.network, bent.heldout, heads=HEADS) == found.r2


def test_a_network_that_is_never_better_than_the_line_is_not_kept() -> None:
    problem = Problem(bend=0.0)
    noise = torch.randn(problem.fit.y.shape, generator=torch.Generator().manual_seed(5))
    problem.fit = Rows(problem.fit.x, noise)

    found = problem.train(epochs=2)

    assert found.network is None
    assert found.r2 == found.history[0] > max(found.history[1:])


def test_a_run_that_diverges_leaves_the_line(bent: Problem) -> None:
    found = bent.train(epochs=2, learning_rate=1e20)

    assert found.network is None
    assert found.r2 == found.history[0]


def test_a_seed_decides_everything_and_the_global_generator_is_left_alone(
    bent: Problem, learnt: Trained
) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    again, other = bent.train(), bent.train(seed=1)

    assert torch.equal(torch.get_rng_state(), before)
    assert learnt.network is not None
    assert again.network is not None
    assert other.network is not None
    assert again.history == learnt.history != other.history
    assert torch.equal(again.network.inner, learnt.network.inner)
    assert not torch.equal(other.network.inner, learnt.network.inner)


def test_a_head_that_never_varies_counts_as_known_or_not() -> None:
    x, steady = torch.zeros(8, 1), torch.zeros(8, HEADS * WIDTH)
    exact = Affine(torch.zeros(1, HEADS * WIDTH), torch.zeros(HEADS * WIDTH))
    half = replace(exact, bias=torch.arange(HEADS * WIDTH) // WIDTH * 1.0)

    assert r2(exact, Rows(x, steady), heads=HEADS) == 1.0
    assert r2(half, Rows(x, steady), heads=HEADS) == 0.5


def test_chunks_that_were_not_captured_are_a_mistake(
    source: LanguageModel, target: LanguageModel
) -> None:
    linear = replace(SETTINGS, solver="ridge", tokens=256)
    captured = capture_texts(source, target, builtin("fit"), linear)

    with pytest.raises(ValueError, match="not those captured"):
        gather(
            captured,
            units_of(captured, target.spec),
            source,
            target,
            [torch.arange(128)],
            tokens=256,
            batch=2,
        )


def test_a_feature_that_never_varies_is_not_blown_up() -> None:
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)).double()
    x[:, 1] = 7.0
    units = Units.of_source(Moments.of(x, x))

    assert float(units.norm(x.float())[:, 1].abs().max()) < 1e-2


@pytest.mark.parametrize(
    "changed",
    [{"hidden": 0}, {"epochs": 0}, {"batch": -1}, {"learning_rate": 0.0}],
    ids=str,
)
def test_settings_that_mean_nothing_are_a_mistake(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changed))):
        NetworkSettings(**changed)


@pytest.mark.parametrize("changed", [{"rank": 3}, {"gain": 1.1}], ids=str)
def test_what_only_lines_have_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no rank and no gain"):
        FitSettings(solver="mlp", **changed)


class Unread:
    """Texts that nobody should ask for."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the text was read")


def test_rows_that_would_not_fit_in_memory_are_refused_before_a_text_is_read(
    source: LanguageModel, target: LanguageModel
) -> None:
    a_token = 2 * (4 * 4 * 32 + 6 * 4 * 32) * 8 / 7
    most = int(LIMIT / a_token)

    require_room(source.spec, target.spec, "same", tokens=most)
    with pytest.raises(KVTransferError, match=r"80\.0 GB of memory; at most 8\.0 GB") as caught:
        fit(source, target, Unread(), replace(SETTINGS, tokens=10 * most))
    assert f"{most:,} tokens" in str(caught.value.hint)


def test_moments_alone_are_not_enough(source: LanguageModel, target: LanguageModel) -> None:
    linear = replace(SETTINGS, solver="ridge", tokens=256)
    captured = capture_texts(source, target, builtin("fit"), linear)

    with pytest.raises(ValueError, match=r"call fit\(\)"):
        fit_captured(captured, source, target, SETTINGS)


def test_a_fit_reports_the_networks_beside_the_lines_that_they_began_with(
    report: FitReport,
) -> None:
    quality, settings = report.mapping.quality, report.mapping.settings

    assert set(report.seconds) >= {"rows", "train", "solve"}
    assert settings["solver"] == "mlp"
    assert settings["network"]["hidden"] == 32
    assert quality["maps that are networks"] == "12 of 12"
    for kind in KINDS:
        own = quality[f"held-out R² of {kind}"]
        assert own == round(getattr(report, f"r2_{kind}"), 4)
        assert own > quality[f"held-out R² of {kind}, linear"] + 0.005


def test_what_was_fitted_makes_better_values_than_its_control_and_its_line(
    report: FitReport, source: LanguageModel, target: LanguageModel
) -> None:
    ids = source.encode(builtin("heldout")[0])[None, :256]
    own, cache = prefill(target, ids), prefill(source, ids)
    line = fit(source, target, builtin("fit"), replace(SETTINGS, solver="ridge"))

    def lost(mapping: KVMapping, *, shuffled: bool = False) -> float:
        pairs = zip(mapping(cache, shuffled=shuffled).values, own.values, strict=True)
        return float(sum(((a - b) / b.std()).square().mean() for a, b in pairs))

    assert lost(report.mapping) < 0.98 * lost(line.mapping)
    assert lost(report.mapping) < 0.7 * lost(report.mapping, shuffled=True)


def test_texts_that_can_be_read_once_only_give_the_same_maps(
    report: FitReport, source: LanguageModel, target: LanguageModel
) -> None:
    told: list[tuple[str, int]] = []
    again = fit(
        source,
        target,
        (text for text in builtin("fit")),
        SETTINGS,
        progress=lambda stage, done: told.append((stage, done)),
    )

    assert again.layers == report.layers
    first, second = again.mapping.layers[0].keys, report.mapping.layers[0].keys
    assert isinstance(first, Mlp)
    assert isinstance(second, Mlp)
    assert torch.equal(first.outer, second.outer)
    sums = {stage: sum(done for name, done in told if name == stage) for stage, _ in told}
    assert sums == {"capture": 1_152, "solve": 6, "rows": 1_152, "train": 6}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_saved_mapping_comes_back_as_it_was(
    dtype: Any, report: FitReport, source: LanguageModel, tmp_path: Path
) -> None:
    mapping = report.mapping.rounded(dtype)
    report.mapping.save_pretrained(tmp_path / "mapping", dtype=dtype)
    loaded = KVMapping.from_pretrained(tmp_path / "mapping")
    cache = prefill(source, torch.arange(5, 37)[None])

    assert isinstance(loaded.layers[0].keys, Mlp)
    assert loaded.parameters == report.mapping.parameters
    assert "A trained mapping" in (tmp_path / "mapping" / "README.md").read_text()
    for mine, theirs in zip(mapping(cache).values, loaded(cache).values, strict=True):
        assert torch.equal(mine, theirs)


def test_networks_read_the_targets_state_where_a_fit_has_a_start(
    source: LanguageModel, target: LanguageModel
) -> None:
    settings = replace(SETTINGS, start=3, features="both")
    found = fit(source, target, builtin("fit"), settings)

    assert [layer.target for layer in found.layers] == [4, 5]
    assert found.r2_values > found.mapping.quality["held-out R² of values, linear"]
    ids = source.encode(builtin("heldout")[0])[None, :32]
    mapped = found.mapping(prefill(source, ids), start=begin(target, ids, layers=3))
    torch.testing.assert_close(mapped.values[:4], prefill(target, ids).values[:4])


def test_a_network_of_zeros_is_the_line_beside_it(bent: Problem, learnt: Trained) -> None:
    assert learnt.network is not None
    none = replace(learnt.network, outer=torch.zeros_like(learnt.network.outer))
    line = Affine(none.direct, none.bias)

    torch.testing.assert_close(none(bent.fit.y[:, :6]), line(bent.fit.y[:, :6]))
