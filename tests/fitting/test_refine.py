"""Refining lowers what it is judged by, or changes nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvtransfer.errors import IncompatibleModels, TextError
from kvtransfer.fitting.affine import Affine, Corrected, LowRank, PerHead
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.layer_map import LayerMap
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.network import Mlp
from kvtransfer.fitting.refine import refine
from kvtransfer.fitting.refine_report import RefineReport
from kvtransfer.fitting.refine_settings import RefineSettings
from kvtransfer.fitting.seen import CONTROL, COSINE, KL
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.fitting.transfer import transfer
from kvtransfer.hf.model import LanguageModel, load
from kvtransfer.hf.run import logits_on, prefill, score
from kvtransfer.measures.agreement import kl, nll

QUICK = RefineSettings(
    windows=40, rank=8, prefix=64, continuation=32, heldout=5, every=20, learning_rate=0.01
)
IDS = torch.arange(5, 65, 2)[None]


@pytest.fixture(scope="module")
def source() -> LanguageModel:
    """Trained models: noise has nothing to teach."""
    return load("tiny-4l", dtype="float32")


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return load("tiny-6l", dtype="float32")


@pytest.fixture(scope="module")
def coarse(source: LanguageModel, target: LanguageModel) -> KVMapping:
    """A map of a low rank: it has much to learn."""
    settings = FitSettings(tokens=4096, chunk=128, layers=1, rank=8, batch=16)
    return fit(source, target, builtin("fit"), settings).mapping


@pytest.fixture(scope="module")
def refined(coarse: KVMapping, source: LanguageModel, target: LanguageModel) -> RefineReport:
    return refine(coarse, source, target, builtin("fit"), QUICK)


def test_held_out_kl_falls(refined: RefineReport) -> None:
    assert refined
    assert refined.best.kl < 0.95 * refined.history[0].kl
    assert refined.best == min(refined.history, key=lambda each: each.kl)
    assert [each.step for each in refined.history] == [0, 20, 40]
    assert refined.seconds > 0


def test_what_is_kept_is_what_was_judged(
    refined: RefineReport, coarse: KVMapping, source: LanguageModel, target: LanguageModel
) -> None:
    """The same windows, judged once more from outside."""
    from kvtransfer.fitting.chunks import chunks

    separator = target.tokenizer.eos_token_id
    windows = list(chunks(builtin("fit"), target.encode, length=96, separator=separator))
    held = [windows[number] for number in (1, 9, 17, 25, 33)]
    for mapping, judged in ((coarse, refined.history[0]), (refined.mapping, refined.best)):
        found = []
        for ids in held:
            hidden, live = ids[None, :63], ids[None, 63:-1]
            own = score(target, live, prefill(target, hidden))[0]
            mapped = score(target, live, mapping(prefill(source, hidden)))[0]
            found.append((kl(own, mapped).mean(), nll(mapped, ids[64:]).mean()))
        mean_kl, mean_nll = (float(torch.stack(each).mean()) for each in zip(*found, strict=True))
        assert mean_kl == pytest.approx(judged.kl, rel=1e-4)
        assert mean_nll == pytest.approx(judged.nll, rel=1e-4)


def test_windows_in_a_step_are_trained_on_together(
    coarse: KVMapping, source: LanguageModel, target: LanguageModel
) -> None:
    """In steps of one batch all of them count alike, in whatever order they come."""
    done: list[int] = []
    how = replace(QUICK, windows=10, batch=4, every=2)

    found = refine(coarse, source, target, builtin("fit"), how, progress=done.append)

    assert done == [4, 4, 2]
    assert [each.step for each in found.history] == [0, 2, 3]
    assert found.best.kl < found.history[0].kl
    whole = refine(coarse, source, target, builtin("fit"), replace(how, batch=10))
    assert [each.step for each in whole.history] == [0, 1]
    assert whole.history[0].kl == pytest.approx(found.history[0].kl, rel=1e-6)
    assert found.mapping.settings["refine"]["batch"] == 4
    with pytest.raises(ValueError, match="batch must be positive, got 0"):
        replace(how, batch=0)


def test_an_update_of_a_low_rank_map_is_of_low_rank(
    refined: RefineReport, coarse: KVMapping
) -> None:
    for before, after in zip(coarse.layers, refined.mapping.layers, strict=True):
        assert isinstance(after.keys, LowRank)
        assert isinstance(before.keys, LowRank)
        assert after.keys.down.shape[1] == before.keys.down.shape[1] + QUICK.rank
        assert torch.equal(after.keys.down[:, :8], before.keys.down)
    assert refined.mapping.settings["refine"]["kept_step"] == refined.best.step
    assert refined.mapping.shuffled == coarse.shuffled
    assert refined.mapping.quality == {
        **{f"{name}, before refining": value for name, value in coarse.quality.items()},
        "held-out KL to own, before refining": round(refined.history[0].kl, 4),
        "held-out KL to own": round(refined.best.kl, 4),
        **{name: refined.mapping.quality[name] for name in (KL, COSINE, CONTROL)},
    }
    assert refined.mapping.quality[KL] > coarse.quality[KL]


def test_a_whole_map_stays_a_whole_map(source: LanguageModel, target: LanguageModel) -> None:
    settings = FitSettings(tokens=2048, chunk=64, layers=1, batch=16)
    whole = fit(source, target, builtin("fit"), settings).mapping

    after = refine(whole, source, target, builtin("fit"), replace(QUICK, windows=8)).mapping

    for one, other in zip(whole.layers, after.layers, strict=True):
        assert isinstance(other.keys, Affine)
        assert isinstance(one.keys, Affine)
        change = other.keys.weight - one.keys.weight
        assert int(torch.linalg.matrix_rank(change, rtol=1e-4)) <= QUICK.rank


def test_what_cannot_be_better_is_left_as_it_is(source: LanguageModel) -> None:
    """A model mapped to itself: KL is zero already, and every step would raise it."""
    depth = range(len(source.spec.layers))
    same = Affine(torch.eye(64), torch.zeros(64))
    itself = KVMapping(
        source=source.spec,
        target=source.spec,
        layers=tuple(LayerMap((i,), same, same) for i in depth),
        rotate=source.rotary,
        target_config=source.module.config.to_dict(),
        settings={},
        quality={},
        provenance={},
    )

    found = refine(
        itself, source, source, builtin("fit"), replace(QUICK, windows=8, learning_rate=0.5)
    )

    assert not found
    assert found.best == found.history[0]
    assert all(each.kl >= found.best.kl for each in found.history)
    assert found.mapping.layers == itself.layers


def test_models_are_left_as_they_were(
    coarse: KVMapping, source: LanguageModel, target: LanguageModel
) -> None:
    before = [parameter.clone() for parameter in target.module.parameters()]

    refine(coarse, source, target, builtin("fit"), replace(QUICK, windows=2, heldout=1))

    for now, then in zip(target.module.parameters(), before, strict=True):
        assert torch.equal(now, then)
        assert now.requires_grad
        assert now.grad is None


def test_the_same_seed_gives_the_same_maps(
    coarse: KVMapping, source: LanguageModel, target: LanguageModel
) -> None:
    short = replace(QUICK, windows=4, heldout=1)
    one, other = (refine(coarse, source, target, builtin("fit"), short) for _ in range(2))

    assert one.history == other.history


def test_logits_are_differentiable_in_a_prefix(target: LanguageModel) -> None:
    cache = prefill(target, IDS[:, :12])
    keys = tuple(block.clone().requires_grad_() for block in cache.keys)
    grown = replace(cache, keys=keys)

    logits_on(target, IDS[:, 12:], grown).square().sum().backward()

    assert all(block.grad is not None and bool(block.grad.any()) for block in keys)
    assert not score(target, IDS[:, 12:], grown).requires_grad


def test_too_little_text_and_another_pair_are_refused(
    coarse: KVMapping,
    source: LanguageModel,
    target: LanguageModel,
    tiny: Callable[..., LanguageModel],
) -> None:
    with pytest.raises(TextError, match="needs two at least"):
        refine(coarse, source, target, [builtin("fit")[0][:480]], QUICK)
    with pytest.raises(IncompatibleModels):
        refine(coarse, target, source, builtin("fit"), QUICK)


@pytest.mark.parametrize(
    "wrong",
    [{"windows": 0}, {"rank": 0}, {"prefix": 1}, {"continuation": 0}, {"learning_rate": 0.0}],
    ids=str,
)
def test_settings_that_train_nothing_are_a_mistake(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RefineSettings(**wrong)  # type: ignore[arg-type]


def of_form(mapping: KVMapping, form: str) -> KVMapping:
    """The same shapes with maps that no update can be folded into; of an exact map, a rough one."""

    def one(fitted: object) -> PerHead | Mlp:
        assert isinstance(fitted, LowRank)
        whole, heads = fitted.whole(len(fitted.down)), 2
        p, q = whole.weight.shape
        if form == "per head":
            reads = torch.arange(p).expand(heads, -1).contiguous()
            weight = whole.weight.view(p, heads, -1).movedim(1, 0).contiguous()
            return PerHead(reads, weight, whole.bias)
        random = torch.Generator().manual_seed(0)
        return Mlp(
            mean=torch.zeros(p),
            scale=torch.ones(p),
            direct=whole.weight,
            inner=0.1 * torch.randn(p, 8, generator=random),
            inner_bias=torch.zeros(8),
            middle=torch.eye(8),
            middle_bias=torch.zeros(8),
            outer=0.01 * torch.randn(8, q, generator=random),
            bias=whole.bias,
        )

    layers = tuple(
        LayerMap(layer.sources, one(layer.keys), one(layer.values)) for layer in mapping.layers
    )
    return replace(mapping, layers=layers)


@pytest.mark.parametrize("form", ["per head", "network"])
def test_what_no_update_can_be_folded_into_is_corrected_beside_it(
    coarse: KVMapping, source: LanguageModel, target: LanguageModel, form: str, tmp_path: Path
) -> None:
    before = of_form(coarse, form)

    found = refine(before, source, target, builtin("fit"), QUICK)

    assert found
    assert found.best.kl < found.history[0].kl
    for one, other in zip(before.layers, found.mapping.layers, strict=True):
        assert isinstance(other.keys, Corrected)
        assert other.keys.base is one.keys
        assert other.keys.correction.down.shape[1] == QUICK.rank
    # Once more: there is one correction, of twice the rank, and the base is still the base.
    short = replace(QUICK, windows=8, every=4, learning_rate=1e-3)
    again = refine(found.mapping, source, target, builtin("fit"), short)
    assert again.best.kl <= again.history[0].kl
    last = again.mapping.layers[0].keys
    assert isinstance(last, Corrected)
    assert (last is found.mapping.layers[0].keys) is not bool(again)
    assert last.base is before.layers[0].keys
    again.mapping.save_pretrained(tmp_path / "m")
    loaded, cache = KVMapping.from_pretrained(tmp_path / "m"), prefill(source, IDS)
    assert all(map(torch.equal, loaded(cache).keys, again.mapping(cache).keys))


def test_a_mapping_with_a_start_is_refined_with_it(
    source: LanguageModel, target: LanguageModel
) -> None:
    settings = FitSettings(tokens=2048, chunk=64, layers=1, rank=8, batch=16, start=1)
    begun = fit(source, target, builtin("fit"), settings).mapping

    found = refine(begun, source, target, builtin("fit"), replace(QUICK, windows=20, heldout=3))

    assert found
    assert found.mapping.start == 1
    assert len(found.mapping.layers) == len(target.spec.layers) - 2
    made, own = transfer(found.mapping, source, target, IDS), prefill(target, IDS)
    assert torch.equal(made.values[1], own.values[1])
    assert not torch.allclose(made.values[2], own.values[2])
