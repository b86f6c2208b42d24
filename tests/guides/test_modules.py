"""Modules are read once, stand where their schema says, and are exact where they claim to be."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import processors
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, SchemaError
from kvtransfer.geometry.join import stack
from kvtransfer.guides.modules import Modules
from kvtransfer.guides.schema import Schema
from kvtransfer.hf.graft import grafted
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import generate, prefill, score

from ..theorems.compare import cache_error, relative_error
from ..theorems.ropes import LONGROPE
from .test_schema import TRIP

LIVE = torch.tensor([[50, 61, 72, 83]])
PLAN: Mapping[str, Mapping[str, str]] = {"plan": {"who": "Mo", "days": "4"}}


@pytest.fixture(scope="module")
def model(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama", num_hidden_layers=2)


def opened(model: LanguageModel) -> LanguageModel:
    """The same model with a tokenizer that opens every text with token 0."""
    tokenizer = deepcopy(model.tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    return replace(model, tokenizer=tokenizer)


def schema(*texts: str, **parameters: int) -> Schema:
    """Modules a, b, c, … with these texts, and with parameters where they have them."""
    layout = [
        {"module": name, "text": text}
        | {"parameters": {each: n for each, n in parameters.items() if f"{{{each}}}" in text}}
        for name, text in zip("abcdefg", texts, strict=False)
    ]
    return Schema.from_dict({"name": "s", "layout": layout})


@contextmanager
def counted(model: LanguageModel) -> Iterator[list[list[int]]]:
    """The tokens of every forward pass."""
    read: list[list[int]] = []

    def count(module: object, given: object, named: dict[str, Tensor], out: object) -> None:
        read.append(named["input_ids"][0].tolist())

    hook = model.module.base_model.register_forward_hook(count, with_kwargs=True)
    try:
        yield read
    finally:
        hook.remove()


@pytest.mark.parametrize("opens", [False, True], ids=["nothing opens", "opened"])
def test_a_module_is_read_once_and_a_prompt_reads_its_arguments_alone(
    model: LanguageModel, opens: bool
) -> None:
    model = opened(model) if opens else model

    with counted(model) as read:
        modules = Modules.build(model, Schema.from_dict(TRIP))
        built = list(read)
        read.clear()
        for city in ("paris", "rome"):
            modules.assemble("persona", city)
        assert read == []
        modules.assemble("persona", "rome", "plan", arguments=PLAN)

    texts = ["You plan.\n", "The Seine.\n", "The Tiber, {sic}.\n"]
    assert built == [
        *([[0]] if opens else []),
        *(model.encode(text).tolist() for text in texts),
        [*model.encode(" stays ").tolist(), *model.encode(" days.").tolist()],
    ]
    assert read == [model.encode("Mo").tolist(), model.encode("4").tolist()]


def test_every_token_stands_where_the_schema_says(model: LanguageModel) -> None:
    modules = Modules.build(model, Schema.from_dict(TRIP))
    sizes = {name: len(place.ids) for name, place in modules.places.items()}
    city = max(sizes["paris"], sizes["rome"])
    who, stays = len(model.encode("Mo")), len(model.encode(" stays "))

    prefix = modules.assemble("plan", "paris", "persona", arguments=PLAN)  # in any order
    ids = modules.ids("persona", "paris", "plan", arguments=PLAN)

    begins = sizes["persona"] + city
    expected = [
        *range(sizes["persona"] + sizes["paris"]),
        *range(begins, begins + who),
        *range(begins + 2, begins + 2 + stays),
        *range(begins + 2 + stays, begins + 2 + stays + 1),
        *range(begins + 2 + stays + 3, begins + 2 + stays + 3 + len(model.encode(" days."))),
    ]
    assert prefix.positions[0].tolist() == expected
    assert len(ids) == prefix.tokens
    assert model.decode(ids) == "You plan.\nThe Seine.\nMo stays 4 days."
    assert modules.places["paris"].start == modules.places["rome"].start
    console = Console(width=100)
    with console.capture() as capture:
        console.print(modules)
    assert "who (≤ 2), days (≤ 3)" in capture.get()


ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "rotary": ("llama", {}),
    "windows": ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "learned": ("gpt2", {}),
    "learned, counted": ("opt", {}),
    "alibi": ("bloom", {}),
    "chunks": ("llama4_text", {"attention_chunk_size": 8}),
}
TEXT = "The tide comes in twice a day, and the boats go out with it."


@pytest.mark.parametrize("name", ALONE)
def test_a_single_module_is_the_plain_prefix(tiny: Callable[..., LanguageModel], name: str) -> None:
    architecture, config = ALONE[name]
    model = tiny(architecture, num_hidden_layers=2, **config)

    found = Modules.build(model, schema(TEXT)).assemble("a")

    plain = prefill(model, model.encode(TEXT)[None])
    assert all(map(torch.equal, (*found.keys, *found.values), (*plain.keys, *plain.values)))
    assert torch.equal(found.positions, plain.positions)
    assert found.approximate is None


def test_behind_what_opens_every_text_it_is_that_prefix_too(model: LanguageModel) -> None:
    model = opened(model)
    ids = torch.cat((model.opening, model.encode(TEXT)))

    found = Modules.build(model, schema(TEXT)).assemble("a")

    assert cache_error(found, prefill(model, ids[None])) < 1e-5
    assert found.approximate is None


def test_an_argument_at_the_end_is_read_as_if_it_were_text(model: LanguageModel) -> None:
    modules = Modules.build(model, schema(TEXT + "{more}", more=9))
    whole = torch.cat((model.encode(TEXT), model.encode(" And back.")))

    found = modules.assemble("a", arguments={"a": {"more": " And back."}})

    assert cache_error(found, prefill(model, whole[None])) < 1e-5
    assert found.approximate is None
    empty = modules.assemble("a", arguments={"a": {"more": ""}})
    assert empty.tokens == len(model.encode(TEXT))


def test_what_a_prompt_is_not_is_said(model: LanguageModel) -> None:
    modules = Modules.build(model, schema("One. ", "Two {x} three. ", "Four.", x=4))

    both = modules.assemble("a", "b", arguments={"b": {"x": "2"}})
    skipped = modules.assemble("a", "c")

    assert both.approximate == (
        "b never saw what stands before; text of b was read without the arguments before it; "
        f"{4 - len(model.encode('2'))} positions before its end are empty"
    )
    assert skipped.approximate is not None
    assert skipped.approximate.startswith("c never saw what stands before; ")
    assert modules.assemble("c").approximate is None  # a prefix that stands somewhere else


def joint(model: LanguageModel, ids: Tensor, positions: Tensor) -> Tensor:
    """The logits of one run over tokens at these positions; the mask keeps it one text."""
    module: Any = model.module
    with torch.no_grad():
        logits = module(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
    assert isinstance(logits, Tensor)
    return logits


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "cohere"])
def test_live_tokens_stand_behind_the_last_module(
    tiny: Callable[..., LanguageModel], architecture: str
) -> None:
    """With one layer nothing is lost by reading modules apart, so all that is left is place."""
    errors = []
    for layers in (1, 2):
        model = tiny(architecture, num_hidden_layers=layers)
        modules = Modules.build(model, Schema.from_dict(TRIP))
        prefix = modules.assemble("persona", "paris", "plan", arguments=PLAN)
        ids = modules.ids("persona", "paris", "plan", arguments=PLAN)[None]
        end = int(prefix.positions.max()) + 1
        assert end > prefix.tokens
        positions = torch.cat((prefix.positions, torch.arange(end, end + 4)[None]), dim=1)
        live = score(model, LIVE, prefix)
        right = joint(model, torch.cat((ids, LIVE), dim=1), positions)[:, -4:]
        errors.append(relative_error(live, right))
        if layers == 1:
            closed = torch.arange(positions.shape[1])[None]
            wrong = joint(model, torch.cat((ids, LIVE), dim=1), closed)[:, -4:]
            assert relative_error(live, wrong) > 1e-3
            with grafted(model, prefix) as cache:
                mask = torch.cat((prefix.mask, torch.ones_like(LIVE)), dim=1)
                module: Any = model.module
                out = module.generate(
                    LIVE, cache=cache, attention_mask=mask, do_sample=False, max_new_tokens=4
                )
            own = list(generate(model, LIVE[0], prefix, max_new_tokens=4))
            assert out[0, 4:].tolist()[: len(own)] == own

    assert errors[0] < 1e-5
    assert errors[1] > 1e-3


def test_prompts_of_different_modules_make_a_batch(model: LanguageModel) -> None:
    modules = Modules.build(model, Schema.from_dict(TRIP))
    prompts = [
        modules.assemble("persona", "rome"),
        modules.assemble("persona", "plan", arguments=PLAN),
    ]

    together = score(model, LIVE.expand(2, -1), stack(prompts))

    for row, prompt in enumerate(prompts):
        alone = score(model, LIVE, prompt)
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("names", "arguments", "says"),
    [
        ((), {}, "a prompt of no modules"),
        (("rom",), {}, "no module 'rom'"),
        (("persona", "persona"), {}, "'persona' is named 2 times"),
        (("paris", "rome"), {}, "'paris' and 'rome' are alternatives of the union 'city'"),
        (("plan",), {}, "a parameter 'who', and no argument"),
        (("plan",), {"plan": {"who": "Mo"}}, "a parameter 'days', and no argument"),
        (
            ("plan",),
            {"plan": {"who": "Somebody else", "days": "4"}},
            r"'who' of module 'plan' has \d+ tokens, and there is room for 2: 'Somebody else'",
        ),
        (("plan",), {"plan": {"whom": "Mo"}}, "module 'plan' has no parameter 'whom'"),
        (("persona",), {"persona": {"x": "Mo"}}, "module 'persona' has no parameter 'x'"),
        (("persona",), PLAN, "arguments for module 'plan', which is not in the prompt"),
    ],
)
def test_a_prompt_follows_its_schema(
    model: LanguageModel, names: tuple[str, ...], arguments: Any, says: str
) -> None:
    modules = Modules.build(model, Schema.from_dict(TRIP))

    for act in (modules.assemble, modules.ids):
        with pytest.raises(SchemaError, match=says) as caught:
            act(*names, arguments=arguments)
        assert caught.value.hint


def test_a_prompt_of_nothing_but_an_empty_argument_is_refused(model: LanguageModel) -> None:
    modules = Modules.build(model, schema("{x}", "Text.", x=3))

    with pytest.raises(SchemaError, match="no tokens"):
        modules.assemble("a", arguments={"a": {"x": ""}})
    assert modules.assemble("a", "b", arguments={"a": {"x": ""}}).positions[0, 0] == 3


WINDOWS = {"sliding_window": 12, "sliding_window_pattern": 2}


@pytest.mark.parametrize(
    ("architecture", "config", "says"),
    [
        ("gemma3_text", WINDOWS, r"layer \d sees 12 columns, of \d+ positions"),
        ("llama4_text", {"attention_chunk_size": 12}, "sees 12 columns"),
        ("bloom", {}, "its attention counts columns"),
        ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}, "counts columns"),
    ],
)
def test_positions_that_stay_empty_are_refused_where_columns_are_counted(
    tiny: Callable[..., LanguageModel], architecture: str, config: dict[str, Any], says: str
) -> None:
    model = tiny(architecture, num_hidden_layers=2, **config)
    with pytest.raises(CacheLayoutError, match=f"module 'plan': .*{says}") as caught:
        Modules.build(model, schema_of_gaps())
    assert "leave no gap" in str(caught.value.hint)

    if architecture == "llama4_text":  # a chunk ends where it ends, so nothing may be moved
        with pytest.raises(CacheLayoutError, match="module 'b': "):
            Modules.build(model, schema(TEXT, "And so on. "))
        return
    modules = Modules.build(model, schema(TEXT, "And so on. ", "To the end."))
    assert modules.assemble("a", "b").tokens > 12  # no gap
    with pytest.raises(CacheLayoutError, match=says):
        modules.assemble("a", "c")
    with pytest.raises(CacheLayoutError, match=r"module 'b': .*"):  # behind what opens every text
        Modules.build(opened(model), schema(TEXT, "And so on."))


def schema_of_gaps() -> Schema:
    return Schema.from_dict(
        {
            "name": "gaps",
            "layout": [{"module": "plan", "text": "Stay {days} days.", "parameters": {"days": 20}}],
        }
    )


def test_a_gap_within_a_window_is_seen_through_until_text_goes_beyond_it(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("mistral", num_hidden_layers=2, sliding_window=64)
    modules = Modules.build(model, schema("One. ", "Two. ", "Three."))
    prefix = modules.assemble("a", "c")
    room = 64 - int(prefix.positions.max()) - 1

    assert score(model, LIVE.repeat(1, 20)[:, :room], prefix).shape[1] == room
    with pytest.raises(CacheLayoutError, match="sees 64 columns, of 65 positions"):
        score(model, LIVE.repeat(1, 20)[:, : room + 1], prefix)
    with grafted(model, prefix) as cache, pytest.raises(CacheLayoutError, match="of 65 positions"):
        model.module(LIVE.repeat(1, 20)[:, : room + 1], cache=cache)
    batch = stack([modules.assemble("a"), prefix])
    with pytest.raises(CacheLayoutError, match="of 65 positions"):
        score(model, LIVE.repeat(2, 20)[:, : room + 1], batch)


def test_a_schema_must_fit_the_model(tiny: Callable[..., LanguageModel]) -> None:
    short = tiny("llama", num_hidden_layers=1, max_position_embeddings=24)
    with pytest.raises(CacheLayoutError, match="at most 24"):
        Modules.build(short, schema(TEXT * 3))
    changing = tiny("llama", num_hidden_layers=1, rope_parameters=LONGROPE)
    with pytest.raises(CacheLayoutError, match=r"beyond 128 the RoPE of .* has another table"):
        Modules.build(changing, schema("Some {x}.", x=200))
