"""Every form of a map is what it says, on rows and as one matrix, and stays so on the disk."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.metrics import r2_score
from torch import Tensor

from kvtransfer.errors import ArtifactError
from kvtransfer.fitting.affine import (
    Affine,
    Corrected,
    Linear,
    LowRank,
    Map,
    PerHead,
    r2,
    reduce_rank,
    widen,
)
from kvtransfer.fitting.layer_map import LayerMap
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.network import Mlp
from kvtransfer.fitting.solvers import Headwise, ReducedRank, Ridge
from kvtransfer.fitting.storage import Dtype
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill

P, Q, HEADS = 32, 32, 4
FORMS = ("affine", "low rank", "per head", "network", "corrected", "corrected network")
LINEAR = ("affine", "low rank", "per head")


def make(form: str, *, p: int = P, seed: int = 0, dtype: torch.dtype = torch.float32) -> Map:
    """A random map of each form, from p features to four heads of eight."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    if form == "affine":
        return Affine(draw(p, Q), draw(Q))
    if form == "low rank":
        return LowRank(draw(p, 5), draw(5, Q), draw(Q))
    if form == "per head":
        reads = torch.stack([torch.randperm(p, generator=random)[:9] for _ in range(HEADS)])
        return PerHead(reads, draw(HEADS, 9, Q // HEADS), draw(Q))
    if form == "network":
        return Mlp(
            mean=draw(p),
            scale=draw(p).abs() + 0.5,
            direct=draw(p, Q),
            inner=draw(p, 16),
            inner_bias=draw(16),
            middle=draw(16, 16),
            middle_bias=draw(16),
            outer=draw(16, Q),
            bias=draw(Q),
        )
    base = make("per head" if form == "corrected" else "network", p=p, seed=seed + 1, dtype=dtype)
    correction = make("low rank", p=p, seed=seed + 2, dtype=dtype)
    assert isinstance(correction, LowRank)
    assert not isinstance(base, Corrected)
    return Corrected(base, correction)


def linear(form: str, *, seed: int = 0) -> Linear:
    made = make(form, seed=seed, dtype=torch.float64)
    assert isinstance(made, Affine | LowRank | PerHead)
    return made


def rows(n: int = 20, p: int = P, *, dtype: torch.dtype = torch.float64) -> Tensor:
    random = torch.Generator().manual_seed(4)
    return torch.randn(n, p, generator=random, dtype=torch.float64).to(dtype) * 2 + 1


def sample(n: int = 90) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(6)
    x = rows(n)
    y = linear("affine", seed=3)(x) + 3 * torch.randn(n, Q, generator=random, dtype=torch.float64)
    return x, y * torch.logspace(-1, 1, Q).double()


@pytest.mark.parametrize("form", LINEAR)
def test_as_one_matrix_it_is_the_same_map(form: str) -> None:
    fitted, x = linear(form), rows()

    whole = fitted.whole(P)

    assert whole.weight.shape == (P, Q)
    torch.testing.assert_close(whole(x), fitted(x))
    assert form == "affine" or whole.parameters > fitted.parameters


def test_a_head_reads_its_own_features_and_no_other() -> None:
    fitted, x = linear("per head"), rows()
    assert isinstance(fitted, PerHead)

    expected = [
        x[:, read] @ weight + bias
        for read, weight, bias in zip(
            fitted.reads, fitted.weight, fitted.bias.view(HEADS, -1), strict=True
        )
    ]
    torch.testing.assert_close(fitted(x), torch.cat(expected, dim=1))
    for head, read in enumerate(fitted.reads.tolist()):
        unread = [i for i in range(P) if i not in read]
        changed = x.clone()
        changed[:, unread] += 5.0
        same = (fitted(changed) == fitted(x)).view(-1, HEADS, Q // HEADS).all(2).all(0)
        assert bool(same[head])
        changed[:, read[0]] += 5.0
        assert not torch.equal(
            fitted(changed).view(-1, HEADS, 8)[:, head], fitted(x).view(-1, HEADS, 8)[:, head]
        )


@pytest.mark.parametrize("form", ["corrected", "corrected network"])
def test_a_corrected_map_is_both_side_by_side(form: str) -> None:
    fitted, x = make(form, dtype=torch.float64), rows()
    assert isinstance(fitted, Corrected)

    torch.testing.assert_close(fitted(x), fitted.base(x) + fitted.correction(x))
    assert not torch.allclose(fitted(x), fitted.base(x))
    torch.testing.assert_close(fitted.bias, fitted.base.bias + fitted.correction.bias)
    assert fitted.parameters == fitted.base.parameters + fitted.correction.parameters


def test_a_network_is_torchs_own_layers_one_after_another() -> None:
    fitted, x = make("network", dtype=torch.float64), rows()
    assert isinstance(fitted, Mlp)
    sizes = ((P, 16), (16, 16), (16, Q), (P, Q))
    layers = [torch.nn.Linear(*size, dtype=torch.float64) for size in sizes]
    parts = (
        (fitted.inner, fitted.inner_bias),
        (fitted.middle, fitted.middle_bias),
        (fitted.outer, fitted.bias),
        (fitted.direct, torch.zeros(Q)),
    )
    with torch.no_grad():
        for layer, (weight, bias) in zip(layers, parts, strict=True):
            layer.weight.copy_(weight.mT)
            layer.bias.copy_(bias)
        relu = torch.nn.ReLU()
        network = torch.nn.Sequential(layers[0], relu, layers[1], relu, layers[2])
        normed = (x - fitted.mean) / fitted.scale
        bent, straight = network(normed), layers[3](normed)

    torch.testing.assert_close(fitted(x), bent + straight)
    assert fitted.parameters == sum(e.numel() for e in network.parameters()) + 2 * P + P * Q
    between = (fitted(x[:1]) + fitted(x[1:2])) / 2
    assert not torch.allclose(fitted(x[:2].mean(0, keepdim=True)), between)  # it is no line


@pytest.mark.parametrize("form", FORMS)
def test_in_single_precision_it_is_the_same_and_in_single_precision(form: str) -> None:
    double, x = make(form, dtype=torch.float64), rows()

    single = double.float()

    assert single.bias.dtype == torch.float32
    assert single.parameters == double.parameters
    assert all(each.dtype == torch.float32 for each in tensors_of(single))
    torch.testing.assert_close(single(x.float()).double(), double(x), rtol=1e-3, atol=1e-3)
    assert single(x.float().view(4, 5, P)).shape == (4, 5, Q)  # leading axes are kept


def tensors_of(fitted: Map) -> list[Tensor]:
    if isinstance(fitted, Corrected):
        return [*tensors_of(fitted.base), *tensors_of(fitted.correction)]
    found = [getattr(fitted, name) for name in fitted.__slots__]
    return [each for each in found if each.is_floating_point()]


@pytest.mark.parametrize("form", LINEAR)
def test_r2_of_every_form_is_scikit_learns(form: str) -> None:
    fitted, (x, y) = linear(form, seed=3), sample()

    found = r2(fitted, Moments.of(x, y), heads=HEADS)

    for head, mine in enumerate(found):
        columns = slice(head * 8, head * 8 + 8)
        expected = r2_score(y[:, columns], fitted(x)[:, columns], multioutput="variance_weighted")
        assert float(mine) == pytest.approx(expected, abs=1e-9)
    assert found.std() > 0


@pytest.mark.parametrize("form", LINEAR)
def test_a_gain_moves_outputs_away_from_their_mean_and_leaves_the_mean(form: str) -> None:
    x, y = sample()
    moments = Moments.of(x, y)
    made: dict[str, Linear] = {
        "affine": Ridge(0.1).solve(moments),
        "low rank": ReducedRank(4, 0.1).solve(moments),
        "per head": made_per_head(moments),
    }
    fitted = made[form]

    wide = widen(fitted, 1.25, moments)

    assert type(wide) is type(fitted)
    torch.testing.assert_close(
        wide(x) - moments.mean_y, 1.25 * (fitted(x) - moments.mean_y), rtol=1e-8, atol=1e-8
    )
    torch.testing.assert_close(wide(moments.mean_x), moments.mean_y)
    assert widen(fitted, 1.0, moments) is fitted
    assert float(r2(wide, moments, heads=HEADS).mean()) < float(
        r2(fitted, moments, heads=HEADS).mean()
    )


def made_per_head(moments: Moments) -> PerHead:
    from kvtransfer.fitting.columns import Heads

    owners = torch.arange(HEADS).repeat_interleave(P // HEADS)
    heads = Heads(target=HEADS, source=owners, count=torch.full((P,), HEADS))
    return Headwise(0.1).solve(moments, heads)


@pytest.mark.parametrize("rank", [1, 5, 20])
def test_a_damped_cut_under_a_metric_is_the_svd_of_what_counts(rank: int) -> None:
    moments = Moments.of(*sample())
    whole = Ridge(0.1).solve(moments)
    random = torch.Generator().manual_seed(1)
    root = torch.randn(HEADS, 8, 8, generator=random, dtype=torch.float64)
    metric = root @ root.mT + 0.01 * torch.eye(8, dtype=torch.float64)
    damping = 7.0

    found = reduce_rank(whole, moments, rank, damping=damping, metric=metric)

    left = torch.linalg.cholesky(moments.xx + damping * torch.eye(P, dtype=torch.float64)).mT
    right = torch.block_diag(*torch.linalg.cholesky(metric))
    u, s, vh = torch.linalg.svd(left @ whole.weight @ right)
    best = u[:, :rank] * s[:rank] @ vh[:rank]
    expected = torch.linalg.solve(left, best) @ torch.linalg.inv(right)
    torch.testing.assert_close(found.down @ found.up, expected, rtol=1e-6, atol=1e-8)
    for other in (
        reduce_rank(whole, moments, rank, damping=damping),
        reduce_rank(whole, moments, rank, metric=metric),
    ):
        assert not torch.allclose(other.down @ other.up, expected, rtol=1e-3)


# On the disk


def mapping_of(base: KVMapping, form: str) -> KVMapping:
    """Maps of one form in the shapes of the test pair."""
    layers = (
        LayerMap((0, 2), make(form, p=64), make(form, p=64, seed=1)),
        LayerMap((1,), make(form, seed=2), make(form, seed=3)),
    )
    return replace(base, layers=layers, shuffled=())


@pytest.fixture(params=FORMS)
def stored(request: pytest.FixtureRequest, make_mapping: Callable[..., KVMapping]) -> KVMapping:
    return mapping_of(make_mapping(), request.param)


def pairs(one: KVMapping, other: KVMapping) -> list[tuple[Tensor, Tensor]]:
    """Their tensors, and none left over."""
    found = []
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        assert mine.sources == theirs.sources
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert type(a) is type(b)
            found += list(zip(tensors_of(a), tensors_of(b), strict=True))
    return found


def test_every_form_comes_back_from_float32_bit_for_bit(
    stored: KVMapping, source: LanguageModel, tmp_path: Path
) -> None:
    stored.save_pretrained(tmp_path / "m")

    loaded = KVMapping.from_pretrained(tmp_path / "m")

    assert all(torch.equal(a, b) for a, b in pairs(loaded, stored))
    assert loaded.parameters == stored.parameters
    cache = prefill(source, torch.arange(24)[None])
    ours, theirs = loaded(cache), stored(cache)
    assert all(map(torch.equal, (*ours.keys, *ours.values), (*theirs.keys, *theirs.values)))


def int8_step(matrix: Tensor) -> Tensor:
    """Half a step of 127 to the largest of a column, in which rows are of one size."""
    rows = matrix.square().mean(-1, keepdim=True).sqrt()
    half: Tensor = rows * (matrix / rows).abs().amax(-2, keepdim=True) / 127 / 2 * 1.001
    return half


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_every_form_comes_back_from_less_as_close_as_its_step(
    stored: KVMapping, tmp_path: Path, dtype: Literal["bfloat16", "int8"]
) -> None:
    stored.save_pretrained(tmp_path / "m", dtype=dtype)

    found = pairs(KVMapping.from_pretrained(tmp_path / "m"), stored)

    for ours, theirs in found:
        if theirs.ndim == 1:
            assert torch.equal(ours, theirs)
            continue
        step = {
            "bfloat16": theirs.abs() * 2**-8,
            "int8": int8_step(theirs),
        }[dtype]
        assert bool(((ours - theirs).abs() <= step).all())
        assert not torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_rounded_is_what_a_stay_on_the_disk_makes_of_it(
    stored: KVMapping, tmp_path: Path, dtype: Dtype
) -> None:
    stored.save_pretrained(tmp_path / "m", dtype=dtype)
    loaded = KVMapping.from_pretrained(tmp_path / "m")

    rounded = stored.rounded(dtype)

    assert all(torch.equal(a, b) for a, b in pairs(rounded, loaded))
    assert all(torch.equal(a, b) for a, b in pairs(rounded, stored)) is (dtype == "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_bytes_of_a_mapping_are_those_of_its_tensors_on_the_disk(
    stored: KVMapping, tmp_path: Path, dtype: Dtype
) -> None:
    stored.save_pretrained(tmp_path / "m", dtype=dtype)

    tensors = load_file(tmp_path / "m" / "tensors.safetensors")

    assert stored.nbytes(dtype) == sum(
        each.numel() * each.element_size() for each in tensors.values()
    )
    assert stored.nbytes("int8") < stored.nbytes("bfloat16") < stored.nbytes()


def test_the_control_counts_for_nothing_in_the_bytes_of_a_mapping(
    make_mapping: Callable[..., KVMapping], tmp_path: Path
) -> None:
    mapping = make_mapping()
    mapping.save_pretrained(tmp_path / "m")

    tensors = load_file(tmp_path / "m" / "tensors.safetensors")

    maps = [each for name, each in tensors.items() if name.startswith("maps.")]
    assert len(maps) < len(tensors)
    assert mapping.nbytes() == sum(each.numel() * each.element_size() for each in maps)
    assert mapping.rounded("int8").shuffled == mapping.shuffled


KEYS = "maps.0.keys"


@pytest.mark.parametrize(
    ("form", "edit", "says"),
    [
        (
            "per head",
            lambda t: t[f"{KEYS}.reads"].view(-1)[:1].fill_(64),
            "4 heads choose among 64",
        ),
        (
            "per head",
            lambda t: t[f"{KEYS}.reads"].view(-1)[:1].fill_(-1),
            "4 heads choose among 64",
        ),
        (
            "per head",
            lambda t: t.update({f"{KEYS}.reads": t[f"{KEYS}.reads"].float()}),
            f"{KEYS}.reads is torch.float32",
        ),
        (
            "per head",
            lambda t: t.update({f"{KEYS}.reads": t[f"{KEYS}.reads"][:3].clone()}),
            "of shape (3, 9)",
        ),
        (
            "per head",
            lambda t: t.update({f"{KEYS}.weight": t[f"{KEYS}.weight"][:, :8].clone()}),
            f"{KEYS}.weight has shape (4, 8, 8), the specs ask for (4, 9, 8)",
        ),
        ("network", lambda t: t.pop(f"{KEYS}.middle"), f"lacks the tensor {KEYS}.middle"),
        (
            "network",
            lambda t: t.update({f"{KEYS}.scale": torch.ones(3)}),
            "scale of a network has shape (3,), the specs ask for (64,)",
        ),
        (
            "network",
            lambda t: t.update({f"{KEYS}.inner": torch.tensor(1.0)}),
            "of a network has shape",
        ),
        (
            "network",
            lambda t: t.update({f"{KEYS}.middle": torch.zeros(16, 16, dtype=torch.int8)}),
            f"lacks the tensor {KEYS}.middle.scale",
        ),
        (
            "corrected",
            lambda t: t.update({f"{KEYS}.correction.weight": torch.zeros(64, 32)}),
            f"{KEYS} corrects a PerHead by a Affine",
        ),
        (
            "corrected",
            lambda t: t.update({f"{KEYS}.base.correction.bias": torch.zeros(32)}),
            f"lacks the tensor {KEYS}.base.base.bias",
        ),
        (
            "corrected",
            lambda t: t.pop(f"{KEYS}.base.bias"),
            f"lacks the tensor {KEYS}.base.bias",
        ),
        (
            "corrected",
            lambda t: t.update({f"{KEYS}.correction.up": torch.zeros(4, 32)}),
            f"{KEYS}.correction.up has shape (4, 32), the specs ask for (5, 32)",
        ),
    ],
)
def test_tensors_that_fit_no_map_are_refused_though_the_checksum_is_right(
    make_mapping: Callable[..., KVMapping],
    tmp_path: Path,
    form: str,
    edit: Callable[[dict[str, Tensor]], object],
    says: str,
) -> None:
    mapping_of(make_mapping(), form).save_pretrained(tmp_path / "m")
    path, config = tmp_path / "m" / "tensors.safetensors", tmp_path / "m" / "config.json"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sha256": digest}))

    with pytest.raises(ArtifactError) as caught:
        KVMapping.from_pretrained(tmp_path / "m")
    assert says in caught.value.message
    assert caught.value.hint


def test_every_head_has_scales_of_its_own(
    make_mapping: Callable[..., KVMapping], tmp_path: Path
) -> None:
    mapping = mapping_of(make_mapping(), "per head")
    first = mapping.layers[0].keys
    assert isinstance(first, PerHead)
    first.weight[1] *= 1e-4  # which one scale for all heads would round to nothing

    mapping.save_pretrained(tmp_path / "m", dtype="int8")

    loaded = KVMapping.from_pretrained(tmp_path / "m").layers[0].keys
    assert isinstance(loaded, PerHead)
    assert torch.equal(loaded.reads, first.reads)
    torch.testing.assert_close(loaded.weight[1], first.weight[1], rtol=0.3, atol=3e-6)
