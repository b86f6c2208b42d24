"""Unequal geometry is mapped, not refused.

Each pair here computes one function from caches of other shapes, or of keys that were turned by
other rotations. An exact linear map between content keys exists both ways, and so fitting must
find it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from kvtransfer.errors import CacheLayoutError, IncompatibleModels
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.geometry.compat import Verdict, compare
from kvtransfer.hf.model import LanguageModel, wrap
from kvtransfer.hf.run import prefill, score

from .compare import cache_error, relative_error
from .prose import prose
from .twins import Attention, attentions, silenced, twin_of

Tiny = Callable[..., LanguageModel]
Pair = tuple[LanguageModel, LanguageModel]

WIDTH = 16
"""Of a head, before anything is changed."""


def halves(pairs: Sequence[int], width: int) -> list[int]:
    """Where a head's dims go if pair i becomes ``pairs[i]`` of ``width`` dims, paired by halves."""
    return [*pairs, *(width // 2 + pair for pair in pairs)]


GEOMETRY = {"layers", "kv_heads", "head_dim", "rope", "cache_format", "dtype", "tokenizer"}

FASTEST = halves([0, 1], WIDTH)
"""Two pairs that a twin exchanges if no query reads them, so that rotations cannot be ignored."""


def default(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A model, and one of other geometry to which its weights can be moved."""

    model: tuple[str, dict[str, Any]]
    other: tuple[str, dict[str, Any]]
    mapped: set[str]
    """The topics of GEOMETRY that a comparison must find unequal."""
    places: Sequence[int] = tuple(range(WIDTH))
    """Where the other keeps each dim of a head. What is left over there, no query reads."""
    silent: Sequence[int] = ()
    """Dims of the model that no query may read, as the other turns them at another speed."""
    stretch: float = 1.0
    """By how much the other's tables stretch queries and keys."""
    shaped_alike: bool = True


REBUILT: dict[str, Rebuilt] = {
    # Frequency i of 16 is θ^(-i/16): every second one is one of the 8 that 16 dims have.
    "twice the width": Rebuilt(
        ("llama", {}),
        ("llama", {"head_dim": 32}),
        {"head_dim", "rope"},
        halves(range(0, 16, 2), 32),
        shaped_alike=False,
    ),
    "twice the width, half of it rotated": Rebuilt(
        ("glm", {"partial_rotary_factor": 1.0}),
        ("glm", {"head_dim": 32, "partial_rotary_factor": 0.5}),
        {"head_dim"},
        shaped_alike=False,
    ),
    # 10000^(-i/8) is 100^(-2i/8).
    "another theta": Rebuilt(
        ("llama", {"rope_parameters": default(10_000.0)}),
        ("llama", {"rope_parameters": default(100.0)}),
        {"rope"},
        halves([0, 2, 4, 6, 1, 3, 5, 7], WIDTH),
        silent=halves([4, 5, 6, 7], WIDTH),
    ),
    # 10000^(-i/8) / 10 is 10000^(-(i + 2)/8).
    "another type": Rebuilt(
        ("llama", {"rope_parameters": default(10_000.0)}),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 10.0}},
        ),
        {"rope"},
        halves([6, 7, 0, 1, 2, 3, 4, 5], WIDTH),
        silent=FASTEST,
    ),
    "another temperature": Rebuilt(
        ("llama", {"rope_parameters": default(10_000.0)}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 10_000.0,
                    "factor": 1.0,
                    "attention_factor": 1.7,
                    "original_max_position_embeddings": 512,
                }
            },
        ),
        {"rope"},
        silent=FASTEST,
        stretch=1.7,
    ),
    "rotations that no query reads": Rebuilt(
        ("glm", {"rope_parameters": default(10_000.0), "partial_rotary_factor": 0.5}),
        (
            "glm",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500_000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "partial_rotary_factor": 0.5,
            },
        ),
        {"rope"},
        silent=range(8),
    ),
    "another pairing": Rebuilt(
        ("llama", {"rope_parameters": default(10_000.0), "rms_norm_eps": 1e-6}),
        ("helium", {"rope_parameters": default(10_000.0), "rms_norm_eps": 1e-6}),
        {"rope"},
        [*range(0, WIDTH, 2), *range(1, WIDTH, 2)],
        silent=FASTEST,
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Two models that compute one function, in ways that their caches tell apart."""

    pair: Pair
    mapped: set[str]
    shaped_alike: bool = False


def take_over(module: Any, other: Any) -> None:
    """Give ``module`` the other's parameters, where they have one shape."""
    given = dict(other.named_parameters())
    for name, parameter in module.named_parameters():
        if name in given and given[name].shape == parameter.shape:
            parameter.copy_(given[name])


def rebuild(tiny: Tiny, how: Rebuilt) -> Case:
    model, other = (tiny(architecture, **config) for architecture, config in (how.model, how.other))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for attention in attentions(model.module, model.spec.layers):
            for part in attention.queries.parts:
                part[:, list(how.silent)] = 0
        take_over(other.module, model.module)
        for own, given in zip(
            attentions(other.module, other.spec.layers),
            attentions(model.module, model.spec.layers),
            strict=True,
        ):
            move_heads(own, given, list(how.places), random)
            width = own.keys.weight.shape[1]
            for part in own.queries.parts:
                part.mul_((width / WIDTH) ** 0.5 / how.stretch**2)
    return Case(
        (rewrapped(model), twin_of(rewrapped(other))), how.mapped, shaped_alike=how.shaped_alike
    )


def move_heads(
    own: Attention, given: Attention, places: list[int], random: torch.Generator
) -> None:
    """Put dim i of each head at ``places[i]``; other dims mix these, and nobody reads them."""
    width = own.keys.weight.shape[1]
    spare = [dim for dim in range(width) if dim not in places]
    mix = torch.randn(len(spare), len(places), generator=random) / len(places) ** 0.5
    for name in ("queries", "keys", "values"):
        read_on = name != "queries"
        for mine, theirs in zip(getattr(own, name).parts, getattr(given, name).parts, strict=True):
            mine[:, places] = theirs
            mine[:, spare] = torch.einsum("ij,hj...->hi...", mix, theirs) if read_on else 0.0
    for reader in range(len(own.queries.weight)):
        columns = own.read_by(reader)
        columns[:, places] = given.read_by(reader)
        columns[:, spare] = 0


def rewrapped(model: LanguageModel) -> LanguageModel:
    """The same module, whose weights have changed since it was wrapped."""
    return wrap(model.module, model.tokenizer)


def more_heads(tiny: Tiny) -> Case:
    """Every KV head twice, once for each of its readers."""
    model = silenced(tiny(attention_bias=True))
    other = tiny(attention_bias=True, num_key_value_heads=4)
    with torch.no_grad():
        take_over(other.module, model.module)
        for own, given in zip(
            attentions(other.module, other.spec.layers),
            attentions(model.module, model.spec.layers),
            strict=True,
        ):
            for name in ("keys", "values"):
                for mine, theirs in zip(
                    getattr(own, name).parts, getattr(given, name).parts, strict=True
                ):
                    mine.copy_(theirs.repeat_interleave(2, dim=0))
    return Case((model, twin_of(rewrapped(other))), {"kv_heads"})


def one_more_layer(tiny: Tiny) -> Case:
    """A layer that reads what the next one reads, and adds nothing."""
    model, other = silenced(tiny()), tiny(num_hidden_layers=5)
    source: Any = model.module.base_model
    target: Any = other.module.base_model
    with torch.no_grad():
        take_over(other.module, model.module)
        for own, given in enumerate((0, 1, 1, 2, 3)):
            target.layers[own].load_state_dict(source.layers[given].state_dict())
        target.layers[1].self_attn.o_proj.weight.zero_()
        target.layers[1].mlp.down_proj.weight.zero_()
    return Case((model, twin_of(rewrapped(other))), {"layers"})


CASES: dict[str, Callable[[Tiny], Case]] = {
    "more heads": more_heads,
    "one more layer": one_more_layer,
}


@pytest.fixture(scope="module", params=[*CASES, *REBUILT])
def case(request: pytest.FixtureRequest, tiny: Tiny) -> Case:
    if request.param in CASES:
        return CASES[request.param](tiny)
    return rebuild(tiny, REBUILT[request.param])


@pytest.fixture(scope="module", params=["there", "back"])
def ends(request: pytest.FixtureRequest, case: Case) -> Pair:
    """Source and target."""
    return case.pair if request.param == "there" else case.pair[::-1]


def test_both_compute_one_function(case: Case) -> None:
    model, other = case.pair
    ids = prose(model, 48)

    assert relative_error(score(other, ids), score(model, ids)) < 1e-4


def test_a_comparison_names_what_is_mapped(case: Case, ends: Pair) -> None:
    source, target = ends

    report = compare(source.spec, target.spec)

    assert report.verdict == "map"
    unequal = {finding.topic for finding in report.findings if finding.verdict is Verdict.MAPPED}
    assert unequal & GEOMETRY == case.mapped


def test_a_mapped_prefix_is_the_native_one(ends: Pair) -> None:
    source, target = ends
    prefix, live = prose(source, 60).split([48, 12], dim=1)
    native = prefill(target, prefix)

    found = fit(
        source, target, builtin("fit"), FitSettings(tokens=2048, chunk=64, layers=1, batch=16)
    )

    mapped = found.mapping(prefill(source, prefix))
    assert relative_error(score(target, live, mapped), score(target, live, native)) < 1e-4
    assert cache_error(mapped, native) < 1e-4
    for row in found.layers:
        assert min(row.r2_keys, row.r2_values) > 1 - 1e-6


def test_the_raw_cache_is_refused_by_name(ends: Pair) -> None:
    source, target = ends
    prefix, live = prose(source, 60).split([48, 12], dim=1)

    with pytest.raises(IncompatibleModels, match="map it first"):
        score(target, live, prefill(source, prefix))


def test_a_raw_cache_passed_off_as_the_targets_is_of_no_use(case: Case, ends: Pair) -> None:
    source, target = ends
    prefix, live = prose(source, 60).split([48, 12], dim=1)
    raw = replace(prefill(source, prefix), model=target.spec.weights, rotations=None)

    if case.shaped_alike:
        native = score(target, live, prefill(target, prefix))
        assert relative_error(score(target, live, raw), native) > 0.1
    else:
        with pytest.raises(CacheLayoutError, match=r"in the cache|this cache has"):
            score(target, live, raw)
