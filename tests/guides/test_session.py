"""A session's cache is always of all its tokens, and as right as the maps that carried it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.errors import (
    CacheLayoutError,
    IncompatibleModels,
    KVTransferError,
    ModelNotFound,
    TextError,
)
from kvtransfer.fitting.affine import Affine
from kvtransfer.fitting.fit import capture_texts
from kvtransfer.fitting.layer_map import LayerMap
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.fitting.texts import builtin
from kvtransfer.geometry.join import behind
from kvtransfer.guides.drift import RePrefill
from kvtransfer.guides.seat import How
from kvtransfer.guides.session import Session
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import generate, prefill
from tests.evaluation.conftest import identity
from tests.theorems.compare import cache_error, is_still, relative_error, snapshot
from tests.theorems.prose import prose
from tests.theorems.twins import silenced, twin_of

SETTINGS = FitSettings(tokens=1024, chunk=64, batch=16, layers=1)
NAMES = ("one", "two")


@dataclass(frozen=True, slots=True, eq=False)
class Twins:
    """Two models of one function and two caches, and the maps between them, exact and shuffled."""

    models: dict[str, LanguageModel]
    exact: list[KVMapping]
    shuffled: list[KVMapping]
    started: list[KVMapping]


@pytest.fixture(scope="module")
def twins(tiny: Callable[..., LanguageModel]) -> Twins:
    one = silenced(tiny("llama", num_hidden_layers=3))
    pair = one, twin_of(one)

    def fitted(settings: FitSettings) -> list[KVMapping]:
        found = []
        for source, target in (pair, pair[::-1]):
            captured = capture_texts(source, target, builtin("fit"), settings)
            found.append(fit_captured(captured, source, target, settings).mapping)
        return found

    exact = fitted(SETTINGS)
    return Twins(
        dict(zip(NAMES, pair, strict=True)),
        exact,
        [replace(mapping, layers=mapping.shuffled) for mapping in exact],
        fitted(replace(SETTINGS, start=1)),
    )


def converse(session: Session, how: How, *, turns: int = 8) -> Iterator[Session]:
    """Feed a stretch, let the other model go on, and so forth; yields after each switch."""
    ids = prose(session.model, 12 * turns)[0]
    names = list(session._models)
    for turn, stretch in enumerate(ids.split(12), 1):
        session.feed(stretch)
        session.switch_to(names[turn % 2], how=how)
        assert session.current == names[turn % 2]
        yield session


def check(session: Session) -> None:
    """What is always so."""
    ids, cache = session.ids, session.cache
    if cache is None:
        assert len(ids) == 0
        return
    assert cache.tokens == len(ids)
    assert torch.equal(cache.positions, torch.arange(len(ids))[None])
    assert cache.model == session.model.spec.identity


@pytest.mark.parametrize("how", ["whole", "new"])
@pytest.mark.parametrize(
    ("architecture", "config"), [("llama", {}), ("mistral", {"sliding_window": 8})]
)
def test_a_mapping_that_changes_nothing_never_drifts(
    tiny: Callable[..., LanguageModel], architecture: str, config: dict[str, Any], how: How
) -> None:
    model = tiny(architecture, num_hidden_layers=2, **config)
    session = Session({"one": model, "two": model}, [identity(model)])

    for met in converse(session, how):
        check(met)
        assert met.drift().kl < 1e-6
        assert met.drift().top1_agreement == 1
        assert met.cache is not None
        assert cache_error(met.cache, prefill(model, met.ids[None])) < 1e-4
        assert met.cache.approximate == f"mapped from {model.spec.name}"


@pytest.mark.parametrize("how", ["whole", "new"])
def test_exact_maps_between_twins_do_not_drift_and_shuffled_ones_do(twins: Twins, how: How) -> None:
    right, wrong = (
        [met.drift(tokens=4).kl for met in converse(Session(twins.models, mappings), how)]
        for mappings in (twins.exact, twins.shuffled)
    )

    assert max(right) < 1e-5
    assert min(wrong) > 0.01


def test_of_new_tokens_alone_no_token_is_mapped_twice(twins: Twins) -> None:
    drifts = {}
    for how in ("whole", "new"):
        session = Session(twins.models, twins.shuffled)
        for met in converse(session, how):
            drifts[how] = met.deviation()

    assert drifts["new"] < 0.8 * drifts["whole"]


@pytest.mark.parametrize("how", ["whole", "new"])
def test_a_mapping_with_a_start_has_its_first_layers_exact_at_every_switch(
    twins: Twins, how: How
) -> None:
    session = Session(twins.models, twins.started)

    for met in converse(session, how, turns=5):
        check(met)
        assert met.drift().kl < 1e-5


@pytest.mark.parametrize("seed", range(2))
def test_what_was_kept_stays_bit_for_bit_and_the_rest_is_as_of_a_whole_map(
    twins: Twins, seed: int
) -> None:
    """Also where maps read the token before, which for the first new token is a kept one."""
    one, two = twins.models.values()
    mappings = [reading_before(*ends, seed=seed) for ends in ((one, two), (two, one))]
    session = Session(twins.models, mappings)
    ids = prose(one, 40)[0]
    session.feed(ids[:10])
    session.switch_to("two")
    session.feed(ids[10:20])
    kept = session.cache
    session.switch_to("one")
    session.feed(ids[20:])
    theirs = session.cache
    assert kept is not None
    assert theirs is not None

    switch = session.switch_to("two")

    found = session.cache
    assert found is not None
    assert (switch.kept, switch.mapped, switch.read) == (20, 19, 1)
    assert is_still(found.prefix(20), snapshot(kept))
    whole = mappings[0](theirs.prefix(39))
    for block, wanted in zip(
        (*found.keys, *found.values), (*whole.keys, *whole.values), strict=True
    ):
        assert relative_error(block[:, :, 20:39], wanted[:, :, 20:]) < 1e-5
    bare = mappings[0](behind(theirs, 20)).values[0][:, :, 0]
    assert relative_error(found.values[0][:, :, 20], bare) > 0.1


def reading_before(source: LanguageModel, target: LanguageModel, *, seed: int) -> KVMapping:
    """A random map of a layer's own features and those of the token before."""
    random = torch.Generator().manual_seed(seed)

    def layer(index: int) -> LayerMap:
        width = source.spec.layers[index].kv_heads * source.spec.layers[index].key_dim
        maps = [
            Affine(torch.randn(2 * width, width, generator=random) / width**0.5, torch.zeros(width))
            for _ in range(2)
        ]
        return LayerMap((index,), maps[0], maps[1], before=(index,))

    return replace(
        identity(target),
        source=source.spec,
        layers=tuple(map(layer, range(len(target.spec.layers)))),
        shuffled=(),
    )


def test_reading_it_all_again_is_a_prefill_bit_for_bit(twins: Twins) -> None:
    session = Session(twins.models, twins.shuffled)
    *_, session = converse(session, "whole", turns=3)
    assert session.drift().kl > 0.01

    switch = session.switch_to(session.current, how="prefill")

    own = prefill(session.model, session.ids[None])
    assert session.cache is not None
    assert is_still(session.cache, snapshot(own))
    assert session.cache.approximate is None
    assert (session.drift().kl, session.deviation()) == (0, 0)
    assert (switch.kept, switch.mapped, switch.read) == (0, 0, 36)


def test_right_back_nothing_is_mapped(twins: Twins) -> None:
    session = Session(twins.models, twins.shuffled)
    session.feed(prose(session.model, 20)[0])
    session.switch_to("two")

    switch = session.switch_to("one")

    assert (switch.kept, switch.mapped, switch.read) == (20, 0, 0)
    assert session.drift().kl == 0
    assert session.switch_to("two", how="whole").mapped == 19
    assert session.drift().kl > 0.01


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("feed"), st.integers(1, 9)),
        st.tuples(st.just("generate"), st.integers(1, 4)),
        st.tuples(st.just("close a stream"), st.integers(0, 3)),
        st.tuples(st.just("too much"), st.just(600)),
        st.tuples(st.sampled_from(("whole", "new", "prefill")), st.sampled_from((0, 1))),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25)
@given(operations=OPERATIONS)
def test_the_cache_is_of_all_tokens_seen_whatever_is_done(
    twins: Twins, operations: list[tuple[str, int]]
) -> None:
    session = Session(twins.models, twins.exact)
    seen = session.ids
    for operation, number in operations:
        held = session.cache
        before = None if held is None else snapshot(held)
        try:
            operate(session, operation, number)
        except KVTransferError:
            assert torch.equal(session.ids, seen)
        check(session)
        assert torch.equal(session.ids[: len(seen)], seen)
        assert held is None or before is None or is_still(held, before)
        seen = session.ids
    if len(seen):
        assert session.cache is not None
        assert cache_error(session.cache, prefill(session.model, seen[None])) < 1e-3


def operate(session: Session, operation: str, number: int) -> None:
    if operation in ("feed", "too much"):
        session.feed((torch.arange(number) * 7 + len(session.ids)) % 500 + 3)
    elif operation == "generate":
        session.generate(max_new_tokens=number)
    elif operation == "close a stream":
        stream = session.stream(max_new_tokens=8)
        for _ in range(number):
            next(stream, None)
        stream.close()  # type: ignore[attr-defined]
    else:
        session.switch_to(NAMES[number], how=operation)  # type: ignore[arg-type]


def test_it_writes_what_the_model_alone_would_and_goes_on_from_there(twins: Twins) -> None:
    one = twins.models["one"]
    session = Session(twins.models, twins.exact)
    ids = prose(one, 30)[0]

    session.feed(ids[:12])
    session.switch_to("two")
    session.feed(ids[12:])
    text = session.generate(max_new_tokens=6)

    alone = [*generate(one, ids[-1:], prefill(one, ids[None, :-1]), max_new_tokens=6)]
    assert session.ids[30:].tolist() == alone
    assert text == one.decode(alone)
    assert session.text == one.decode(session.ids)
    more = session.generate(max_new_tokens=2)
    again = [*generate(one, ids[-1:], prefill(one, ids[None, :-1]), max_new_tokens=8)]
    assert session.ids[30:].tolist() == again
    assert more == one.decode(again[6:])


def test_what_predicted_a_feed_is_what_a_prefix_predicts(twins: Twins) -> None:
    session = Session(twins.models)
    ids = prose(session.model, 24)[0]
    session.feed(ids[:10])

    found = session.feed_scored(ids[10:])

    with torch.no_grad():
        wanted = session.model.module(ids[None]).logits[0, 9:-1]
    assert relative_error(found, wanted) < 1e-5
    assert not found.requires_grad
    check(session)


def test_texts_are_tokenized_one_by_one_and_opened_once(twins: Twins) -> None:
    session = Session(twins.models)
    encode = session.model.encode

    session.feed("The tide comes in")
    session.feed(" twice a d")
    session.feed("ay.")

    parts = [encode(text) for text in ("The tide comes in", " twice a d", "ay.")]
    assert torch.equal(session.ids, torch.cat(parts))
    assert session.text == "The tide comes in twice a day."


def test_a_forward_that_fails_leaves_what_was_written_before(twins: Twins) -> None:
    session = Session(twins.models)
    session.feed(prose(session.model, 10)[0])
    decoder: Any = session.model.module.base_model
    layer = decoder.layers[1]
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:  # layer 0 has kept its token by then
            raise RuntimeError("out of memory")

    handle = layer.register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            session.generate(max_new_tokens=6)
        calls[:] = [1, 1]
        with pytest.raises(RuntimeError, match="out of memory"):
            session.feed("more")
    finally:
        handle.remove()

    assert len(session.ids) == 12
    check(session)
    assert session.cache is not None
    assert cache_error(session.cache, prefill(session.model, session.ids[None])) < 1e-4
    assert session.generate(max_new_tokens=2)


def test_while_a_stream_is_open_nothing_else_is_done(twins: Twins) -> None:
    session = Session(twins.models, twins.exact)
    session.feed(prose(session.model, 10)[0])
    stream, late = session.stream(max_new_tokens=8), session.stream(max_new_tokens=8)
    next(stream)

    for act in (
        lambda: session.feed("x"),
        lambda: session.switch_to("two"),
        lambda: session.drift(),
        lambda: next(late),
    ):
        with pytest.raises(CacheLayoutError, match="stream"):
            act()
    assert "".join(stream)
    assert len(session.ids) == 18
    with pytest.raises(CacheLayoutError, match="went on since"):
        next(session_stream_of_the_past(session))


def session_stream_of_the_past(session: Session) -> Iterator[str]:
    stream = session.stream(max_new_tokens=2)
    session.feed("x")
    return stream


@pytest.mark.parametrize(
    "policy", [RePrefill(kl=0.01), RePrefill(deviation=0.05), RePrefill(every=1)], ids=repr
)
def test_beyond_the_bound_the_receiver_reads_all_of_it_and_drifts_no_more(
    twins: Twins, policy: RePrefill
) -> None:
    drifting = Session(twins.models, twins.shuffled, policy=policy)

    for met in converse(drifting, "whole", turns=4):
        check(met)
        assert met.drift().kl == 0
        assert met.cache is not None
        assert met.cache.approximate is None

    right = Session(
        twins.models, twins.exact, policy=replace(policy, every=None, kl=policy.kl or 1)
    )
    for met in converse(right, "whole", turns=4):
        assert met.cache is not None
        assert met.cache.approximate is not None


def test_every_third_time_counts_what_was_added_in_a_row(twins: Twins) -> None:
    session = Session(twins.models, twins.shuffled, policy=RePrefill(every=3))

    exact = [
        met.cache is not None and met.cache.approximate is None
        for met in converse(session, "whole", turns=7)
    ]

    assert exact == [False, False, True, False, False, True, False]


def test_the_record_of_a_switch_says_what_the_policy_saw(twins: Twins) -> None:
    session = Session(twins.models, twins.shuffled, policy=RePrefill(kl=99.0, deviation=99.0))
    session.feed(prose(session.model, 20)[0])

    switch = session.switch_to("two")

    assert switch.drift is not None
    assert switch.drift == session.drift()
    assert switch.deviation == pytest.approx(session.deviation())
    assert (switch.kept, switch.mapped, switch.read) == (0, 19, 1)
    assert str(switch.drift).startswith(f"KL {switch.drift.kl:.3f}, NLL")


def test_drift_is_of_what_is_said_to_come_next_too(twins: Twins) -> None:
    session = Session(twins.models, twins.shuffled)
    ids = prose(session.model, 40)[0]
    session.feed(ids[:24])
    session.switch_to("two")

    found = session.drift(ids[24:])
    own = prefill(session.model, ids[None, :24])

    assert found.tokens == 16
    assert session.drift(ids[24:], own=own) == found
    assert len(session.ids) == 24
    logits = session.feed_scored(ids[24:]).log_softmax(-1)
    assert found.nll == pytest.approx(float(-logits.gather(1, ids[24:, None]).mean()), rel=1e-4)
    with pytest.raises(CacheLayoutError, match="own cache of 24 tokens, and 40"):
        session.drift(own=own)


def stranger(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama", seed=9, num_hidden_layers=3)


BAD: dict[str, tuple[Callable[[Session], Any], type[Exception], str]] = {
    "unknown name": (lambda s: s.switch_to("three"), ModelNotFound, "one of one, two"),
    "no mapping": (lambda s: s.switch_to("two"), IncompatibleModels, "one to two"),
    "empty text": (lambda s: s.feed(""), TextError, "nothing to read"),
    "no ids": (lambda s: s.feed([]), TextError, "nothing to read"),
    "unknown ids": (lambda s: s.feed([3, 99_999]), CacheLayoutError, "knows 512"),
    "too long": (lambda s: s.feed([5] * 600), CacheLayoutError, "at most 512"),
    "writing too much": (lambda s: s.generate(max_new_tokens=600), CacheLayoutError, "at most 512"),
    "writing nothing": (lambda s: s.generate(max_new_tokens=0), ValueError, "at least 1"),
    "no tokens scored": (lambda s: s.drift(tokens=0), ValueError, "at least 1"),
    "no layers": (lambda s: s.deviation(layers=0), ValueError, "0 layers"),
    "too many layers": (lambda s: s.deviation(layers=9), ValueError, "9 layers"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_changes_nothing(twins: Twins, name: str) -> None:
    act, kind, said = BAD[name]
    session = Session(twins.models)
    session.feed("The tide comes in.")
    ids = session.ids

    with pytest.raises(kind, match=said):
        act(session)

    assert torch.equal(session.ids, ids)
    assert session.current == "one"
    check(session)


@pytest.mark.parametrize(
    "act",
    [
        lambda s: s.generate(max_new_tokens=4),
        lambda s: s.stream(max_new_tokens=4),
        lambda s: s.drift(),
        lambda s: s.deviation(),
        lambda s: s.feed_scored("x"),
    ],
)
def test_before_anything_was_fed_there_is_nothing_to_go_on_from(
    twins: Twins, act: Callable[[Session], Any]
) -> None:
    with pytest.raises(CacheLayoutError, match="nothing was fed"):
        act(Session(twins.models))
    session = Session(twins.models)
    session.switch_to("two")
    assert session.current == "two"


def test_a_session_is_of_models_and_mappings_that_go_together(
    twins: Twins, tiny: Callable[..., LanguageModel]
) -> None:
    other = stranger(tiny)
    fewer = twins.exact[:1]
    with pytest.raises(IncompatibleModels, match="mapping 2 goes"):
        Session(twins.models, [*fewer, identity(other)])
    with pytest.raises(ValueError, match="needs a model"):
        Session({})
    odd = replace(other, spec=replace(other.spec, tokenizer="another"))
    with pytest.raises(IncompatibleModels, match="cut or begin text"):
        Session({"one": twins.models["one"], "odd": odd})


def test_a_model_with_fewer_positions_refuses_before_it_maps(
    tiny: Callable[..., LanguageModel],
) -> None:
    long, short = tiny("llama"), tiny("llama", max_position_embeddings=32)
    session = Session({"long": long, "short": short})
    session.feed(prose(long, 40)[0])

    with pytest.raises(CacheLayoutError, match="reads at most 32"):
        session.switch_to("short")

    assert session.current == "long"
    check(session)


@pytest.mark.parametrize(
    "given",
    [{}, {"kl": -1.0}, {"kl": float("nan")}, {"every": 0}, {"kl": 0.1, "tokens": 0}],
    ids=repr,
)
def test_a_policy_without_a_sensible_bound_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bound|at least 1"):
        RePrefill(**given)
