"""Rotations come out of keys exactly, go back in, and are all that a position does to a key."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerBase

from kvtransfer.errors import RotationError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.rotation import Rotation
from kvtransfer.geometry.spec import Pairing
from kvtransfer.hf.cache import read
from kvtransfer.hf.call import call
from kvtransfer.hf.model import LanguageModel, wrap
from kvtransfer.hf.relocate import relocate
from kvtransfer.hf.run import prefill, score

from ..conftest import SIZES
from .compare import cache_error, is_still, relative_error, snapshot
from .prose import prose
from .ropes import LINEAR, LLAMA3, LONGROPE, YARN

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 64.0}
PROPORTIONAL = {
    "rope_type": "proportional",
    "rope_theta": 1_000_000.0,
    "partial_rotary_factor": 0.25,
}
IN_TURN = ["sliding_attention", "full_attention"] * 2
GEMMA4 = {
    "sliding_window": 8,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16,
    "global_head_dim": 32,
    "layer_types": IN_TURN,
}

Cut = Callable[[Tensor, LanguageModel, int], Tensor]
"""A layer's keys, of shape (b, t, h, d), out of what the hooked module returned."""


def alone(made: Tensor, model: LanguageModel, layer: int) -> Tensor:
    """The module makes keys and nothing else."""
    spec = model.spec.layers[layer]
    return made.reshape(*made.shape[:2], spec.kv_heads, spec.key_dim)


def heads_first(made: Tensor, model: LanguageModel, layer: int) -> Tensor:
    """Gemma 3's norm comes after the heads have moved forward."""
    return made.transpose(1, 2)


def after_queries(made: Tensor, model: LanguageModel, layer: int) -> Tensor:
    """All queries, all keys, all values: Phi-3, and Falcon with one KV head."""
    spec = model.spec.layers[layer]
    keys, values = spec.kv_heads * spec.key_dim, spec.kv_heads * spec.value_dim
    return alone(made[..., -keys - values : -values], model, layer)


def within_heads(made: Tensor, model: LanguageModel, layer: int) -> Tensor:
    """Query, key and value of one head, then those of the next: GPT-NeoX, Persimmon."""
    spec = model.spec.layers[layer]
    return made.view(*made.shape[:2], spec.kv_heads, 3, spec.key_dim)[..., 1, :]


def in_four_parts(made: Tensor, model: LanguageModel, layer: int) -> Tensor:
    """CodeGen was trained on four chips, each with queries, values and keys of its heads."""
    return alone(made.view(*made.shape[:2], 4, 3, -1)[..., 2, :].flatten(2), model, layer)


def to_unit_size(made: Tensor, model: LanguageModel, layer: int) -> Tensor:
    """A norm without weights commutes with the rotation, though it comes after it."""
    keys = alone(made, model, layer)
    if model.spec.architecture == "llama4_text" and model.spec.layers[layer].rotation is None:
        return keys
    eps = model.module.config.rms_norm_eps
    size: Tensor = (keys.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    return keys * size


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kind of rotation, and a small model that has it."""

    architecture: str = "llama"
    config: Mapping[str, Any]
    """Beside SIZES; ``...`` leaves one out."""
    made_by: str = "k_proj"
    """The last module before the rotation that sees keys."""
    cut: Cut = alone


def rope(**config: Any) -> Case:
    """A Llama with another RoPE."""
    return Case(config={"rope_parameters": config})


def partial(share: float) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": share,
        }
    }


CASES: dict[str, Case] = {
    # Every type of RoPE
    "default": rope(rope_type="default", rope_theta=10_000.0),
    "linear": rope(**LINEAR),
    "dynamic": Case(config={"rope_parameters": DYNAMIC, "max_position_embeddings": 128}),
    "llama3": rope(**LLAMA3),
    "yarn": rope(**YARN),
    "yarn-attention-factor": rope(**YARN, attention_factor=0.7),
    "longrope": rope(**LONGROPE),
    "proportional": Case(
        architecture="gemma4_text",
        config=GEMMA4
        | {"rope_parameters": {"sliding_attention": LINEAR, "full_attention": PROPORTIONAL}},
        made_by="k_norm",
    ),
    # Partial, and interleaved
    "partial": Case(architecture="phi", config={}),
    "partial-norm": Case(
        architecture="phi", config={"qk_layernorm": True}, made_by="k_layernorm", cut=heads_first
    ),
    "partial-yarn": Case(
        architecture="stablelm", config={"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}
    ),
    "partial-quarter": Case(architecture="nemotron", config=partial(0.25)),
    "interleaved": Case(architecture="cohere", config={}),
    "interleaved-yarn": Case(architecture="cohere", config={"rope_parameters": YARN}),
    "interleaved-dynamic": Case(
        architecture="ernie4_5",
        config={"rope_parameters": DYNAMIC, "max_position_embeddings": 128},
    ),
    "interleaved-partial": Case(architecture="glm", config={}),
    "interleaved-helium": Case(architecture="helium", config={}),
    "sine-first": Case(architecture="gptj", config={"rotary_dim": 8}),
    "backwards": Case(architecture="nanochat", config={}, cut=to_unit_size),
    # Tables by layer type, and layers without any
    "by-layer-type": Case(
        architecture="gemma3_text",
        config={"sliding_window": 8, "sliding_window_pattern": 2},
        made_by="k_norm",
        cut=heads_first,
    ),
    "by-layer-type-yarn": Case(
        architecture="olmo3",
        config={
            "sliding_window": 8,
            "layer_types": IN_TURN,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": YARN,
            },
        },
        made_by="k_norm",
    ),
    "by-layer-type-width": Case(architecture="gemma4_text", config=GEMMA4, made_by="k_norm"),
    "some-layers-without": Case(architecture="smollm3", config={}),
    "full-layers-without": Case(
        architecture="cohere2", config={"sliding_window": 8, "sliding_window_pattern": 2}
    ),
    # Norms before the rotation, and after it
    "norm-before": Case(architecture="qwen3", config={}, made_by="k_norm"),
    "norm-before-heads": Case(architecture="olmo2", config={}, made_by="k_norm"),
    "norm-after": Case(
        architecture="llama4_text",
        config={"attention_chunk_size": 16, "num_experts_per_tok": 1, "num_local_experts": 2},
        cut=to_unit_size,
    ),
    # Fused projections
    "fused": Case(architecture="phi3", config={}, made_by="qkv_proj", cut=after_queries),
    "fused-longrope": Case(
        architecture="phi3",
        config={
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": LONGROPE["original_max_position_embeddings"],
        },
        made_by="qkv_proj",
        cut=after_queries,
    ),
    "fused-by-head": Case(
        architecture="gpt_neox", config={}, made_by="query_key_value", cut=within_heads
    ),
    "fused-one-head": Case(
        architecture="falcon",
        config={"head_dim": ...},
        made_by="query_key_value",
        cut=after_queries,
    ),
    "fused-in-parts": Case(
        architecture="codegen",
        config={"rotary_dim": 8, "n_ctx": 8192},
        made_by="qkv_proj",
        cut=in_four_parts,
    ),
    # Attention sinks, mixtures of experts, YaRN in half-wide tables
    "sinks": Case(
        architecture="gpt_oss",
        config={
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN,
        },
    ),
}
LONG = 8192
DYNAMICS = ("dynamic", "interleaved-dynamic", "longrope", "fused-longrope")
"""Their table depends on the length, beyond 128 tokens."""

PLACES: dict[str, Tensor] = {
    **{f"at-{start}": start + torch.arange(48)[None] for start in (0, 1, 300, 5000)},
    "rows-apart": torch.stack((300 + torch.arange(48), 5000 + torch.arange(48))),
    "left-padded": torch.stack((torch.arange(-17, 31).clamp_min(0), torch.arange(48))),
}
"""Positions of each row's 48 tokens."""

FLOOR = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""What rounding leaves: the model turns keys in its own dtype, and keeps them in it."""


def opened(case: Case, dtype: torch.dtype, tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    """A random model with room for 8192 positions."""
    given = {**SIZES, "max_position_embeddings": LONG, **case.config}
    config = AutoConfig.for_model(
        case.architecture, **{name: value for name, value in given.items() if value is not ...}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim == 1:  # fresh norms and biases hide mistakes
                    parameter += 0.2 * torch.randn_like(parameter)
    return wrap(module, tokenizer)


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    chosen: str = request.param
    return CASES[chosen]


@pytest.fixture(scope="module")
def model(case: Case, tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    return opened(case, torch.float32, tokenizer)


@pytest.fixture(scope="module")
def coarse(case: Case, tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    """In bfloat16, as loading makes it: its rotary tables stay in float32."""
    return opened(case, torch.bfloat16, tokenizer)


def texts(model: LanguageModel, rows: int, tokens: int = 48) -> Tensor:
    return prose(model, rows * tokens).view(rows, tokens)


def prefill_at(
    model: LanguageModel, ids: Tensor, positions: Tensor, real: Tensor | None = None
) -> KVCache:
    """What the model itself caches of ``ids`` at ``positions``."""
    rotations = model.rotary(positions)
    cache = DynamicCache()
    mask = torch.ones_like(ids) if real is None else real.long()
    with torch.no_grad():
        call(model.module, ids, cache, positions, mask)
    return read(cache, positions, rotations=rotations, model=model.spec.weights)


def noted(
    model: LanguageModel, case: Case, run: Callable[[], KVCache]
) -> tuple[KVCache, list[Tensor]]:
    """What ``run`` returns, and each layer's keys before their rotation."""
    made: list[Tensor] = []

    def note(module: nn.Module, given: Any, output: Tensor) -> None:
        made.append(output)

    hooks = [
        part.register_forward_hook(note)
        for name, part in model.module.named_modules()
        if name.endswith(case.made_by)
    ]
    try:
        cache = run()
    finally:
        for hook in hooks:
            hook.remove()
    assert len(made) == len(cache)
    raw = [case.cut(output, model, layer) for layer, output in enumerate(made)]
    return cache, [keys.transpose(1, 2) for keys in raw]


@pytest.mark.parametrize("dtype", FLOOR, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("place", PLACES)
def test_content_keys_are_what_the_projection_made(
    request: pytest.FixtureRequest, case: Case, place: str, dtype: torch.dtype
) -> None:
    """The one test that would catch a wrong convention, not just a wrong inverse."""
    model: LanguageModel = request.getfixturevalue("model" if dtype == torch.float32 else "coarse")
    positions = PLACES[place]
    ids = texts(model, len(positions))
    real = torch.ones_like(ids, dtype=torch.bool)
    if place == "left-padded":
        real[0, :17] = False

    cache, made = noted(model, case, lambda: prefill_at(model, ids, positions, real))

    content = cache.content()
    assert content.dtype == dtype
    for layer, (cached, keys, raw) in enumerate(zip(cache.keys, content.keys, made, strict=True)):
        of_tokens = real[:, None, :, None].expand_as(keys)
        error = relative_error(keys.float()[of_tokens], raw.float()[of_tokens])
        assert error < FLOOR[dtype], f"layer {layer}"
        turn = model.spec.layers[layer].rotation
        assert torch.equal(
            keys[..., 0 if turn is None else turn.rotary_dim :],
            cached[..., 0 if turn is None else turn.rotary_dim :],
        )


def test_what_a_position_does_is_not_nothing(case: Case, model: LanguageModel) -> None:
    cache, made = noted(model, case, lambda: prefill_at(model, texts(model, 1), PLACES["at-300"]))

    turned = [
        relative_error(cached, raw) > 0.1 for cached, raw in zip(cache.keys, made, strict=True)
    ]
    assert turned == [layer.rotation is not None for layer in model.spec.layers]
    assert any(turned)


def test_the_other_pairing_would_give_other_keys(model: LanguageModel) -> None:
    cache = prefill(model, prose(model, 48))
    assert cache.rotations is not None
    wrong = replace(cache, rotations=tuple(map(with_the_other_pairing, cache.rotations)))

    for right, other, rotation in zip(
        cache.content().keys, wrong.content().keys, cache.rotations, strict=True
    ):
        assert rotation is None or relative_error(other, right) > 0.1


def with_the_other_pairing(rotation: Rotation | None) -> Rotation | None:
    if rotation is None:
        return None
    return replace(rotation, pairing="half" if rotation.pairing == "interleaved" else "interleaved")


@pytest.mark.parametrize(
    ("name", "rotary_dim"),
    [("partial", 8), ("interleaved-partial", 8), ("partial-quarter", 4), ("default", 16)],
)
def test_dims_beyond_the_rotary_ones_are_cached_as_they_were_made(
    tokenizer: PreTrainedTokenizerBase, name: str, rotary_dim: int
) -> None:
    model = opened(CASES[name], torch.float32, tokenizer)
    cache = prefill(model, prose(model, 48))

    content = cache.content()

    for cached, turned_back in zip(cache.keys, content.keys, strict=True):
        assert torch.equal(cached[..., rotary_dim:], turned_back[..., rotary_dim:])
        assert relative_error(cached[..., :rotary_dim], turned_back[..., :rotary_dim]) > 0.1


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("temperature", [1.0, 1.37], ids=["turned", "stretched"])
@given(
    pairs=st.integers(1, 8),
    passed=st.integers(0, 8),
    tokens=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
def test_undo_inverts_apply(
    pairing: Pairing, temperature: float, pairs: int, passed: int, tokens: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    angle = 100 * torch.rand(2, tokens, pairs, generator=random)
    rotation = Rotation(temperature * angle.cos(), temperature * angle.sin(), pairing)
    keys = torch.randn(2, 3, tokens, 2 * pairs + passed, generator=random)

    turned = rotation.apply(keys)

    assert relative_error(rotation.undo(turned), keys) < 1e-6
    assert torch.equal(turned[..., 2 * pairs :], keys[..., 2 * pairs :])
    assert torch.equal(rotation.undo(keys)[..., 2 * pairs :], keys[..., 2 * pairs :])
    norms = turned[..., : 2 * pairs].norm(dim=-1), keys[..., : 2 * pairs].norm(dim=-1)
    torch.testing.assert_close(norms[0], temperature * norms[1])


def test_taking_a_rotation_out_and_putting_it_back_changes_nothing(model: LanguageModel) -> None:
    cache = prefill(model, prose(model, 48))

    back = cache.content().rotated(model.rotary(cache.positions))

    assert cache_error(back, cache) < 1e-6


def test_keys_are_rotated_once_and_undone_once(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny()
    cache = prefill(model, prose(model, 8))
    before = snapshot(cache)

    with pytest.raises(RotationError, match="rotated already"):
        cache.rotated(model.rotary(cache.positions))
    with pytest.raises(RotationError, match="content keys already"):
        cache.content().content()
    assert is_still(cache, before)


# Tables that depend on the length


@pytest.fixture(params=DYNAMICS)
def dynamic(request: pytest.FixtureRequest) -> Case:
    chosen: str = request.param
    return CASES[chosen]


def test_beyond_the_switch_over_the_table_is_another(
    dynamic: Case, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = opened(dynamic, torch.float32, tokenizer)

    within, beyond = (model.rotary(torch.tensor([[7, last]]))[0] for last in (100, 5000))

    assert within is not None and beyond is not None
    assert relative_error(beyond.cos[:, :1], within.cos[:, :1]) > 0.01


def test_the_table_in_force_travels_with_the_cache(
    dynamic: Case, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = opened(dynamic, torch.float32, tokenizer)
    ids = prose(model, 48)
    far, made = noted(model, dynamic, lambda: prefill_at(model, ids, PLACES["at-5000"]))

    prefill(model, ids)  # sets the module's table back

    for keys, raw in zip(far.content().keys, made, strict=True):
        assert relative_error(keys, raw) < 1e-6


@pytest.mark.parametrize("tokens", [40, 200], ids=["within", "beyond"])
def test_a_text_is_read_alike_before_and_after_a_longer_one(
    dynamic: Case, tokenizer: PreTrainedTokenizerBase, tokens: int
) -> None:
    model = opened(dynamic, torch.float32, tokenizer)
    long, short = prose(model, 300 + tokens).split([300, tokens], dim=1)
    before, made = noted(model, dynamic, lambda: prefill(model, short))

    with torch.no_grad():
        model.module(long)
    after, made_after = noted(model, dynamic, lambda: prefill(model, short))

    assert cache_error(after, before) < 1e-6
    for cache, raws in ((before, made), (after, made_after)):
        for keys, raw in zip(cache.content().keys, raws, strict=True):
            assert relative_error(keys, raw) < 1e-6


# Moving


@pytest.mark.parametrize(("p", "q"), [(0, 100), (37, 5), (12, 12), (1, 4000)])
def test_layer_0_moves_from_p_to_q_as_if_read_there(
    case: Case, model: LanguageModel, p: int, q: int
) -> None:
    ids = prose(model, 24)
    here, there = (prefill_at(model, ids, start + torch.arange(24)[None]) for start in (p, q))

    if not can_move(case, 24, p, q):
        with pytest.raises(RotationError, match=r"crosses 128 tokens|sees chunks of"):
            relocate(model, here, q)
        return
    arrived = relocate(model, here, q)

    assert torch.equal(arrived.positions, there.positions)
    if model.spec.layers[0].rotation is not None:
        assert relative_error(arrived.keys[0], there.keys[0]) < 1e-5
        assert p == q or relative_error(here.keys[0], there.keys[0]) > 0.1
    assert torch.equal(arrived.values[0], there.values[0])


@pytest.mark.parametrize("start", [1, 40, 300])
def test_moved_as_a_whole_a_text_reads_the_same(
    case: Case, model: LanguageModel, start: int
) -> None:
    """Relative positions are all that attention sees."""
    prefix, live = prose(model, 60).split([48, 12], dim=1)
    here = prefill(model, prefix)

    if not can_move(case, 48, 0, start):
        with pytest.raises(RotationError, match=r"crosses 128 tokens|sees chunks of"):
            relocate(model, here, start)
        return
    there = relocate(model, here, start)

    assert relative_error(score(model, live, there), score(model, live, here)) < 1e-4
    unturned = replace(there, keys=here.keys)
    assert relative_error(score(model, live, unturned), score(model, live, here)) > 1e-2


def test_moved_far_a_text_reads_as_if_read_there(case: Case, model: LanguageModel) -> None:
    """Against its old place 1e-4 may be left: in float32 a table's angles near 4000 are off by
    that, whoever turns the keys."""
    prefix, live = prose(model, 60).split([48, 12], dim=1)
    here = prefill(model, prefix)
    there = prefill_at(model, prefix, 4000 + torch.arange(48)[None])

    if not can_move(case, 48, 0, 4000):
        with pytest.raises(RotationError, match=r"crosses 128 tokens|sees chunks of"):
            relocate(model, here, 4000)
        return
    arrived = relocate(model, here, 4000)

    assert relative_error(score(model, live, arrived), score(model, live, there)) < 1e-4


def can_move(case: Case, tokens: int, *starts: int) -> bool:
    """Whether a text of so many tokens can be moved between these places at all."""
    if len(set(starts)) > 1 and case.architecture == "llama4_text":
        return False  # it would be in other chunks
    ends = {start + tokens > 128 for start in starts}
    return len(ends) == 1 or case not in map(CASES.get, DYNAMICS)


def test_no_move_leads_across_a_switch_over(
    dynamic: Case, tokenizer: PreTrainedTokenizerBase
) -> None:
    model = opened(dynamic, torch.float32, tokenizer)

    with pytest.raises(RotationError, match=r"48 to one at 248 it crosses 128 tokens"):
        relocate(model, prefill(model, prose(model, 48)), 200)


def test_chunks_do_not_move(tokenizer: PreTrainedTokenizerBase) -> None:
    model = opened(CASES["norm-after"], torch.float32, tokenizer)

    with pytest.raises(RotationError, match="sees chunks of 16 positions"):
        relocate(model, prefill(model, prose(model, 24)), 4)


def test_where_queries_grow_with_their_position_a_text_does_not_move(
    tiny: Callable[..., LanguageModel],
) -> None:
    """Ministral 3 scales its queries by the logarithm of where they are."""
    scaled = YARN | {"original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}
    model = tiny("ministral3", rope_parameters=scaled)

    with pytest.raises(RotationError):
        relocate(model, prefill(model, prose(model, 48)), 100)


def test_under_other_text_only_layer_0_moves(tiny: Callable[..., LanguageModel]) -> None:
    """Deeper layers have seen what came before: there, moving a cache is an approximation."""
    model = tiny()
    before, ids = prose(model, 72).split([48, 24], dim=1)
    whole = prefill(model, torch.cat((before, ids), dim=1))

    arrived = relocate(model, prefill(model, ids), 48)

    assert relative_error(arrived.keys[0], whole.keys[0][:, :, 48:]) < 1e-5
    assert relative_error(arrived.keys[1], whole.keys[1][:, :, 48:]) > 0.1
