"""Edits are functions from cache to cache: they compose, and change nothing but what they name."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtransfer.errors import IncompatibleModels, RotationError, SteeringError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.hidden import filled
from kvtransfer.geometry.rotation import Rotation
from kvtransfer.steering.chain import chain
from kvtransfer.steering.edit import PARTS, Edit, Intervention, Part, require_one_of
from kvtransfer.steering.interventions import (
    Ablate,
    Bank,
    ForgetRotation,
    Interpolate,
    Lag,
    Replace,
    Scale,
    Shuffle,
)

TOKENS, DEPTH, HEADS = 6, 3, 2


def made(seed: int, *, tokens: int = TOKENS, start: int = 0, batch: int = 1) -> KVCache:
    random = torch.Generator().manual_seed(seed)
    keys, values = (
        tuple(torch.randn(batch, HEADS, tokens, 8, generator=random) for _ in range(DEPTH))
        for _ in range(2)
    )
    positions = torch.arange(start, start + tokens).expand(batch, -1)
    angles = positions[..., None] * torch.tensor([1.0, 0.5, 0.2, 0.1])
    turned = Rotation(angles.cos(), angles.sin())
    return KVCache(
        keys=keys,
        values=values,
        positions=positions,
        keys_are="cached",
        rotations=(turned, turned, None),
        model="abc",
    )


@pytest.fixture
def cache() -> KVCache:
    return made(0)


@pytest.fixture
def donor() -> KVCache:
    return made(1)


def same(a: KVCache, b: KVCache) -> bool:
    hidden = (filled(a.hidden, a.keys), filled(b.hidden, b.keys))
    return all(map(torch.equal, (*a.keys, *a.values, *hidden[0]), (*b.keys, *b.values, *hidden[1])))


def changed(a: KVCache, b: KVCache) -> dict[str, set[tuple[int, int, int]]]:
    """Layer, head and token of every key and value that is another."""
    return {
        name: {
            (layer, int(head), int(token))
            for layer, (one, other) in enumerate(
                zip(getattr(a, name), getattr(b, name), strict=True)
            )
            for head, token in (one != other).any(dim=-1)[0].nonzero()
        }
        for name in ("keys", "values")
    }


def every(layers: range, heads: range, tokens: range) -> set[tuple[int, int, int]]:
    return {(layer, head, token) for layer in layers for head in heads for token in tokens}


ALL = every(range(DEPTH), range(HEADS), range(TOKENS))


@pytest.mark.parametrize("part", ["keys", "values", "both"])
def test_zeroing_a_part_zeroes_that_part_and_no_other(cache: KVCache, part: Part) -> None:
    before = cache.map(torch.clone)

    edited = Ablate(part)(cache)

    for name in ("keys", "values"):
        found, original = getattr(edited, name), getattr(cache, name)
        if part in (name, "both"):
            assert not any(block.any() for block in found)
            assert [block.shape for block in found] == [block.shape for block in original]
        else:
            assert all(map(torch.equal, found, original))
    assert edited.model == cache.model
    assert same(cache, before)


def test_zeroing_keys_and_then_values_is_zeroing_both(cache: KVCache) -> None:
    assert same(chain(Ablate("keys"), Ablate("values"))(cache), Ablate()(cache))


def test_forgetting_the_rotation_leaves_content_keys_that_say_they_are_cached(
    cache: KVCache,
) -> None:
    edited = ForgetRotation()(cache)

    assert edited.keys_are == "cached"
    assert all(map(torch.equal, edited.keys, cache.content().keys))
    assert all(map(torch.equal, edited.values, cache.values))
    torch.testing.assert_close(edited.keys[0][:, :, 0], cache.keys[0][:, :, 0])  # position 0
    assert not torch.allclose(edited.keys[0][:, :, 5], cache.keys[0][:, :, 5], atol=0.1)


def test_content_keys_have_no_rotation_to_forget(cache: KVCache) -> None:
    with pytest.raises(RotationError, match="no rotation to forget"):
        ForgetRotation()(cache.content())


def test_no_steps_are_no_change_and_steps_go_left_to_right(cache: KVCache) -> None:
    def double(each: KVCache) -> KVCache:
        return each.map(lambda block: 2 * block)

    def add_one(each: KVCache) -> KVCache:
        return replace(each, values=tuple(block + 1 for block in each.values))

    assert chain()(cache) is cache
    assert torch.equal(chain(double, add_one)(cache).values[0], 2 * cache.values[0] + 1)
    assert torch.equal(chain(add_one, double)(cache).values[0], 2 * (cache.values[0] + 1))


def test_composition_is_associative(cache: KVCache, donor: KVCache) -> None:
    f, g, h = Scale(0.5), Interpolate(donor, 0.3), Lag(2)

    assert chain(f, chain(g, h)) == chain(chain(f, g), h) == chain(f, g, h)
    assert same(chain(chain(f, g), h)(cache), h(g(f(cache))))
    assert not same(chain(f, g, h)(cache), chain(h, g, f)(cache))


CHANGING: dict[str, Callable[[KVCache], Intervention]] = {
    "ablate": lambda donor: Ablate(),
    "scale": lambda donor: Scale(2.0),
    "replace": lambda donor: Replace(donor),
    "interpolate": lambda donor: Interpolate(donor, 0.5),
    "shuffle": lambda donor: Shuffle(order=(5, 0, 1, 2, 3, 4)),
    "lag": lambda donor: Lag(TOKENS),
}
"""Edits of every kind; of these, a lag of all tokens leaves the first alone."""


@pytest.mark.parametrize("name", CHANGING)
def test_an_edit_changes_the_layers_heads_and_tokens_that_are_chosen_and_no_bit_else(
    name: str, cache: KVCache, donor: KVCache
) -> None:
    whole: Any = CHANGING[name](donor)
    if name == "shuffle":
        whole = Shuffle(order=(2, 0, 1))
    some = replace(whole, layers=(1,), heads=(1,), tokens=(-3, None))
    before = cache.map(torch.clone)

    found = changed(some(cache), cache)

    first = 1 if name == "lag" else 0
    expected = every(range(1, 2), range(1, 2), range(TOKENS - 3 + first, TOKENS))
    assert found == {"keys": expected, "values": expected}
    assert same(cache, before)


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_part_changes_alone(name: str, part: Part, cache: KVCache, donor: KVCache) -> None:
    edit: Any = replace(CHANGING[name](donor), part=part)  # type: ignore[type-var]

    found = changed(edit(cache), cache)

    other = "values" if part == "keys" else "keys"
    assert found[part] == {each for each in ALL if name != "lag" or each[2] > 0}
    assert found[other] == set()


@pytest.mark.parametrize(
    "edit",
    [Scale(1.0), Lag(0), Shuffle(order=tuple(range(TOKENS))), Bank("all"), Ablate(layers=())],
    ids=str,
)
def test_strength_none_is_no_change_bit_for_bit(edit: Intervention, cache: KVCache) -> None:
    assert same(edit(cache), cache)


def test_an_interpolation_has_its_two_ends(cache: KVCache, donor: KVCache) -> None:
    assert same(Interpolate(donor, 0.0)(cache), cache)
    assert same(Interpolate(donor, 1.0)(cache), donor)
    assert same(Replace(donor)(cache), donor)
    half = Interpolate(donor, 0.5)(cache)
    torch.testing.assert_close(half.values[1], (cache.values[1] + donor.values[1]) / 2)


def test_replacing_some_layers_gives_those_of_the_donor_and_leaves_the_others(
    cache: KVCache, donor: KVCache
) -> None:
    edited = Replace(donor, layers=(0, 2))(cache)

    for layer, origin in enumerate((donor, cache, donor)):
        assert torch.equal(edited.keys[layer], origin.keys[layer])
        assert torch.equal(edited.values[layer], origin.values[layer])


def test_of_a_longer_donor_the_first_tokens_are_taken(cache: KVCache) -> None:
    longer = made(1, tokens=TOKENS + 3)

    assert same(Replace(longer)(cache), longer.prefix(TOKENS))


def test_one_donor_serves_all_rows() -> None:
    rows, donor = made(0, batch=3), made(1)

    assert same(Replace(donor)(rows), donor.expand(3))


def test_a_donor_from_elsewhere_is_turned_to_the_positions_of_the_cache(cache: KVCache) -> None:
    donor = made(1, start=40)

    edited = Replace(donor)(cache)

    assert cache.rotations is not None
    here = donor.content().rotated(cache.rotations)
    for found, wanted in zip(edited.keys, here.keys, strict=True):
        torch.testing.assert_close(found, wanted)
    as_cached = Replace(donor, space="cached")(cache)
    assert all(map(torch.equal, as_cached.keys, donor.keys))
    assert not torch.allclose(as_cached.keys[0], edited.keys[0], atol=0.1)


def test_moved_tokens_are_turned_to_where_they_now_stand(cache: KVCache) -> None:
    order = (5, 4, 3, 2, 1, 0)

    edited = Shuffle(order=order)(cache)

    content = cache.content()
    for layer in range(DEPTH):
        torch.testing.assert_close(
            edited.content().keys[layer], content.keys[layer][:, :, list(order)]
        )
        assert torch.equal(edited.values[layer], cache.values[layer][:, :, list(order)])
    as_cached = Shuffle(order=order, space="cached")(cache)
    assert torch.equal(as_cached.keys[0], cache.keys[0][:, :, list(order)])
    assert not torch.allclose(as_cached.keys[0], edited.keys[0], atol=0.1)


def test_a_lag_holds_what_stood_before(cache: KVCache) -> None:
    edited = Lag(2)(cache)

    assert torch.equal(edited.values[0][:, :, 2:], cache.values[0][:, :, :-2])
    assert torch.equal(edited.values[0][:, :, :2], cache.values[0][:, :, :1].expand(-1, -1, 2, -1))


def test_a_seed_gives_one_order_in_all_layers_and_another_seed_another(cache: KVCache) -> None:
    first, again, other = Shuffle(3)(cache), Shuffle(3)(cache), Shuffle(4)(cache)

    assert same(first, again)
    assert not same(first, other)
    orders = [
        [int((values[0, 0] == row).all(dim=-1).nonzero()) for row in moved[0, 0]]
        for values, moved in zip(cache.values, first.values, strict=True)
    ]
    assert orders[0] == orders[1] == orders[2] != list(range(TOKENS))


def test_removing_hides_and_leaves_the_numbers(cache: KVCache) -> None:
    edited = Ablate("removed", layers=(1,), heads=(0,), tokens=(2, 4))(cache)

    assert all(map(torch.equal, (*edited.keys, *edited.values), (*cache.keys, *cache.values)))
    gone = filled(edited.hidden, edited.keys)
    assert {
        (layer, *map(int, at)) for layer in range(DEPTH) for at in gone[layer][0].nonzero()
    } == {
        (1, 0, 2),
        (1, 0, 3),
    }
    again = Ablate("removed", layers=(2,))(edited)
    assert again.hidden is not None and again.hidden[1] is not None
    assert bool(again.hidden[1].any())


def test_a_bank_is_hidden_from_the_other_layers(cache: KVCache) -> None:
    assert same(Bank((1,))(cache), Ablate("removed", layers=(0, 2))(cache))
    assert same(Bank(())(cache), Ablate("removed")(cache))
    assert Bank("all")(cache) is cache


def test_a_bank_may_be_of_some_heads_and_tokens(cache: KVCache) -> None:
    bank = Bank((1,), heads=(0,), tokens=(0, 2))

    expected = Ablate("removed", layers=(0, 2), heads=(0,), tokens=(0, 2))
    assert same(bank(cache), expected(cache))
    assert str(bank) == "Bank((1,), heads=(0,), tokens=(0, 2))"
    assert bank == Bank([1], heads=(0,), tokens=(0, 2))


def test_what_a_donor_hides_goes_where_the_donor_goes(cache: KVCache, donor: KVCache) -> None:
    blind = Ablate("removed", tokens=(0, 2))(donor)

    whole = Replace(blind, layers=(1,))(Ablate("removed", tokens=(0, 1))(cache))
    mixed = Interpolate(blind, 0.5, layers=(1,))(Ablate("removed", tokens=(3, 4))(cache))

    shown = [gone[0, 0].tolist() for gone in filled(whole.hidden, whole.keys)]
    assert shown[1] == [True, True, False, False, False, False]
    assert shown[0] == shown[2] == [True, False, False, False, False, False]
    assert filled(mixed.hidden, mixed.keys)[1][0, 0].tolist() == [
        True,
        True,
        False,
        True,
        False,
        False,
    ]


def test_only_layers_that_are_chosen_need_to_see_a_token_that_moves(cache: KVCache) -> None:
    bank = Bank((1,))(cache)

    moved = Lag(2, layers=(1,))(bank)

    assert torch.equal(moved.values[1][:, :, 2:], cache.values[1][:, :, :-2])
    with pytest.raises(SteeringError, match="none of the 6 chosen tokens are seen"):
        Lag(2)(bank)


def test_a_donor_with_another_table_at_the_same_positions_is_turned_to_the_cache(
    cache: KVCache,
) -> None:
    """Tables that depend on the length of the text give one position other angles."""
    content, tables = cache.content(), cache.rotations
    assert tables is not None
    slower = tuple(
        None if table is None else Rotation(table.cos, table.sin * 0.5) for table in tables
    )
    stretched = content.rotated(slower)

    taken = Replace(stretched)(cache)

    torch.testing.assert_close(taken.keys, cache.keys)
    assert not torch.allclose(stretched.keys[0], cache.keys[0], atol=0.1)


def test_removing_from_no_layer_is_no_change(cache: KVCache) -> None:
    assert Ablate("removed", layers=())(cache) is cache


def test_hidden_tokens_take_no_part_in_a_shuffle(cache: KVCache) -> None:
    blind = Ablate("removed", tokens=(0, 3))(cache)

    moved = Shuffle(order=(2, 1, 0))(blind)

    assert torch.equal(moved.values[0][:, :, :3], cache.values[0][:, :, :3])
    assert torch.equal(moved.values[0][:, :, 3], cache.values[0][:, :, 5])


def test_an_edited_cache_says_so_and_in_which_order(cache: KVCache) -> None:
    edited = chain(Scale(0.5, "values"), Lag(1, layers="mid"))(cache)

    assert edited.approximate == "edited by Scale(0.5, values); edited by Lag(1, layers=mid)"
    assert "edited by Scale" in repr(edited)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda donor: Scale(float("nan")), "factor is nan"),
        (lambda donor: Scale(True), "factor is True"),
        (lambda donor: Interpolate(donor, float("nan")), "alpha is nan"),
        (lambda donor: Interpolate(donor, float("inf")), "alpha is inf"),
        (lambda donor: Lag(-1), "a lag of -1"),
        (lambda donor: Scale(2.0, layers=(7,)), "no layer 7 in a model of 3"),
        (lambda donor: Scale(2.0, layers="middle"), "no layers are called 'middle'"),
        (lambda donor: Scale(2.0, layers="1-1/32"), "'1-1/32' is empty"),
        (lambda donor: Bank("9"), "no layer 9"),
        (lambda donor: Scale(2.0, heads=(2,)), "no KV head 2 in layer 0, which has 2"),
        (lambda donor: Scale(2.0, tokens=(6, None)), "choose none of the 6"),
        (lambda donor: Shuffle(order=(0, 0, 1, 2, 3, 4)), "is none of 6 tokens"),
        (lambda donor: Shuffle(2**70), "a seed of 1180591620717411303424"),
        (lambda donor: Scale(10**400), "factor is 1000"),
        (lambda donor: Replace(donor.prefix(3)), "a donor of 1 rows and 3 tokens"),
        (lambda donor: Replace(donor.expand(2)), "a donor of 2 rows"),
        (
            lambda donor: Replace(
                replace(donor, keys=donor.keys[:2], values=donor.values[:2], rotations=None)
            ),
            "the donor has 2 layers",
        ),
    ],
)
def test_bad_input_is_a_named_error(
    edit: Callable[[KVCache], Edit], words: str, cache: KVCache, donor: KVCache
) -> None:
    with pytest.raises(SteeringError, match=words) as caught:
        edit(donor)(cache)
    assert caught.value.hint


def test_a_word_that_is_none_of_those_known_is_named() -> None:
    with pytest.raises(SteeringError, match="part is 'all'"):
        require_one_of("part", "all", PARTS)


def test_a_donor_of_another_model_is_refused(cache: KVCache, donor: KVCache) -> None:
    with pytest.raises(IncompatibleModels, match="for xyz, and this is one for abc"):
        Replace(replace(donor, model="xyz"))(cache)


def test_keys_that_nobody_knows_how_to_turn_are_moved_as_cached_or_not_at_all(
    cache: KVCache,
) -> None:
    unknown = replace(cache, rotations=None)

    with pytest.raises(RotationError, match="no record of the rotation"):
        Lag(1)(unknown)
    assert torch.equal(Lag(1, space="cached")(unknown).keys[0][:, :, 1:], cache.keys[0][:, :, :-1])


def test_any_function_from_cache_to_cache_is_a_step(cache: KVCache) -> None:
    quiet = chain(lambda each: each.map(lambda block: block / 2), Lag(0))

    assert torch.equal(quiet(cache).values[0], cache.values[0] / 2)
