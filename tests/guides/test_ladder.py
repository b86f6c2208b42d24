"""A model that is right climbs the ladder; a planted fault is found on its rung, by its cause."""

import copy
import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from tokenizers import processors
from torch import Tensor

from kvtransfer.errors import (
    CacheLayoutError,
    KVTransferError,
    SeamError,
    TextError,
    UnsupportedModel,
)
from kvtransfer.guides.arms import ARMS, Arm, CachedArm, _comparable
from kvtransfer.guides.climb import climb, numbers
from kvtransfer.guides.guide import Choice, Guide
from kvtransfer.guides.ladder import Prompt, arms, reopened, spread, verify
from kvtransfer.guides.ladder_report import Climb
from kvtransfer.guides.rungs import RUNGS
from kvtransfer.hf.model import LanguageModel, wrap
from kvtransfer.hf.reader import Reader
from kvtransfer.hf.run import generate, prefill
from kvtransfer.hf.variants import attending, in_dtype
from tests.theorems.ropes import YARN

GUIDE = Guide(
    "code",
    "The harbour of Tellmouth changes its codes each spring. The north pier opens with 4821.",
    (Choice("\nQuestion: Which code opens it?\nAnswer: The code", (" 1", " 2"), 0),),
)
TOKENS = 24
SEEDS = (0, 1)


@pytest.fixture(scope="module")
def model(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama", num_hidden_layers=2)


Plant = Callable[[LanguageModel, Prompt, dict[str, Arm]], None]


def climbed(model: LanguageModel, plant: Plant = lambda *_: None, guide: Guide = GUIDE) -> Climb:
    """One guide's climb, with something changed in the arms first."""
    prompt = Prompt.of(model, guide)
    steps = spread(6, TOKENS)
    with reopened(model, [prompt]) as pack:
        made = arms(model, prompt, pack["code"], steps=steps, tokens=TOKENS, seeds=len(SEEDS))
    plant(model, prompt, made)
    found = climb(
        made, guide=guide.name, hidden=len(prompt.hidden), tokens=TOKENS, seeds=SEEDS, top_p=0.95
    )
    return Climb.of(found, dtype=model.dtype, attention="sdpa")


def statuses(climb: Climb, *pair: str) -> dict[str, str]:
    return {each.rung: each.status for each in climb.findings if each.pair == pair}


def test_a_model_that_is_right_climbs_to_the_top(model: LanguageModel) -> None:
    found = climbed(model)

    assert found.verdict.rung is None
    for pair in (("B2", "D"), ("D", "P")):
        assert set(statuses(found, *pair).values()) == {"equal"}
    for each in found.comparisons:
        rows = 1 + len(SEEDS)
        assert each.compared == rows * (6 if each.pair == ("A", "B") else TOKENS)
        assert each.equal == each.compared or not each.owed
        assert each.difference < 1e-4
        assert not each.partings
    assert "No rung separates" in found.verdict.sentence(found.noise)


def test_what_is_followed_is_what_the_model_writes(model: LanguageModel) -> None:
    """The greedy row is the text that generate writes on a graft, as far as it goes."""
    prompt = Prompt.of(model, GUIDE)
    with reopened(model, [prompt]) as pack:
        made = arms(model, prompt, pack["code"], steps=[0], tokens=TOKENS, seeds=1)
    followed: list[Tensor] = []

    class Watched(CachedArm):
        def follow(self, history: Tensor) -> Tensor:
            followed.append(history)
            return super().follow(history)

    on_guide = prefill(model, prompt.hidden[None])
    made["D"] = Watched.on(
        model, prompt.hidden, on_guide, prompt.live, uniform=numbers((0,), TOKENS)
    )
    climb(made, guide="code", hidden=len(prompt.hidden), tokens=TOKENS, seeds=(0,), top_p=0.95)

    written = list(generate(model, prompt.live, on_guide, max_new_tokens=TOKENS - 1))
    assert followed[-1][0, : len(written)].tolist() == written
    assert not torch.equal(followed[-1][0], followed[-1][1])  # the drawn row is another text


# Faults ------------------------------------------------------------------------------------------


class Shortened(Reader):
    """Hides the first token, as a mask does that is a column short on the left."""

    def mask(self, live: Tensor) -> Tensor:
        mask = super().mask(live)
        mask[:, 0] = 0
        return mask


class ShortenedLater(Reader):
    """The same, once it writes."""

    def mask(self, live: Tensor) -> Tensor:
        mask = super().mask(live)
        if live.shape[1] == 1:
            mask[:, 0] = 0
        return mask


def _on(
    model: LanguageModel,
    prompt: Prompt,
    kind: type[Reader] = Reader,
    change: Callable[[Any], Any] = lambda cache: cache,
    shift: int = 0,
) -> CachedArm:
    """An arm as D, with another reader, a changed cache, or live tokens further on."""
    reader = kind.over(model, change(prefill(model, prompt.hidden[None])))
    made = replace(reader, next=reader.next + shift)
    arm = CachedArm.over(made, prompt.live, uniform=numbers(SEEDS, TOKENS))
    arm.ids = torch.cat((prompt.hidden, prompt.live))
    return arm


def apart(model: LanguageModel, prompt: Prompt, made: dict[str, Arm]) -> None:
    """Guide and prompt tokenized apart, where the joint text has other tokens."""
    text = prompt.joint.text
    ways = ((model.encode(text[:cut]), model.encode(text[cut:])) for cut in range(60, len(text)))
    hidden, live = next(way for way in ways if not torch.equal(torch.cat(way), prompt.joint.ids))
    made["D"] = CachedArm.on(
        model, hidden, prefill(model, hidden[None]), live, uniform=numbers(SEEDS, TOKENS)
    )


def turned(model: LanguageModel, prompt: Prompt, made: dict[str, Arm]) -> None:
    """Keys turned three positions on, in a cache that says that they are not."""

    def shift(cache: Any) -> Any:
        moved = cache.content().rotated(model.rotary(cache.positions + 3))
        return replace(moved, rotations=None)

    made["P"] = _on(model, prompt, change=shift)


def late(model: LanguageModel, prompt: Prompt, made: dict[str, Arm]) -> None:
    """Live tokens two positions further on than the guide ends."""
    made["P"] = _on(model, prompt, shift=2)


def masked(model: LanguageModel, prompt: Prompt, made: dict[str, Arm]) -> None:
    made["P"] = _on(model, prompt, Shortened)


def masked_later(model: LanguageModel, prompt: Prompt, made: dict[str, Arm]) -> None:
    made["P"] = _on(model, prompt, ShortenedLater)


def perturbed(model: LanguageModel, prompt: Prompt, made: dict[str, Arm]) -> None:
    made["P"] = _on(model, prompt, change=lambda cache: cache.map(lambda block: block * 1.001))


def perturbed_deep(model: LanguageModel, prompt: Prompt, made: dict[str, Arm]) -> None:
    """The last layer's keys alone, by far less than any tolerance."""

    def change(cache: Any) -> Any:
        return replace(cache, keys=(*cache.keys[:-1], cache.keys[-1] * (1 + 1e-6)))

    made["P"] = _on(model, prompt, change=change)


def reseeded(model: LanguageModel, prompt: Prompt, made: dict[str, Arm]) -> None:
    made["P"].uniform = numbers((7, 8), TOKENS)


def all_shifted(model: LanguageModel, prompt: Prompt, made: dict[str, Arm]) -> None:
    """Every arm that reads the guide apart goes wrong alike: only B, in one go, tells."""
    for name in ("B2", "D", "P"):
        made[name] = _on(model, prompt, shift=2)


def uncached(model: LanguageModel, prompt: Prompt, made: dict[str, Arm]) -> None:
    """A model whose cached decoding is not what it computes without a cache."""
    whole = torch.cat((prompt.hidden, prompt.live))
    reader = ShortenedLater.over(model, None)
    made["B"] = CachedArm.over(reader, whole, uniform=numbers(SEEDS, TOKENS))


FAULTS: dict[str, tuple[Plant, tuple[str, str], str, str]] = {
    "tokenized apart": (apart, ("B", "D"), "token ids", "tokenization"),
    "keys turned on": (turned, ("D", "P"), "first logits", "positions"),
    "live tokens further on": (late, ("D", "P"), "first logits", "positions"),
    "a mask column missing": (masked, ("D", "P"), "first logits", "mask"),
    "one missing in decoding": (masked_later, ("D", "P"), "same history", "decoding"),
    "a perturbed cache": (perturbed, ("D", "P"), "first logits", "contents"),
    "a perturbed layer": (perturbed_deep, ("D", "P"), "first logits", "contents"),
    "another seed": (reseeded, ("D", "P"), "sampling", "sampling"),
    "all further on": (all_shifted, ("B", "D"), "first logits", "positions"),
    "a model that decodes wrongly": (uncached, ("A", "B"), "same history", "caching"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_on_its_rung(model: LanguageModel, name: str) -> None:
    plant, pair, rung, cause = FAULTS[name]

    found = climbed(model, plant)
    verdict = found.verdict

    assert (verdict.fault, verdict.pair, verdict.rung, verdict.cause) == (True, pair, rung, cause)
    assert rung in verdict.sentence(found.noise)
    lower = RUNGS[: RUNGS.index(rung)]
    assert all(statuses(found, *pair)[each] != "fault" for each in lower)


@pytest.mark.parametrize("name", ["keys turned on", "a mask column missing", "all further on"])
def test_in_half_precision_noise_passes_and_the_same_faults_do_not(
    model: LanguageModel, name: str
) -> None:
    half = in_dtype(model, "bfloat16")
    plant, pair, _, cause = FAULTS[name]

    right, wrong = climbed(half), climbed(half, plant)

    assert not right.verdict.fault
    # Noise there is: in float32 it would be a fault.
    assert max(each.difference for each in right.comparisons if not each.owed) > 1e-3
    assert (wrong.verdict.fault, wrong.verdict.pair, wrong.verdict.cause) == (True, pair, cause)


def test_where_draws_part_it_says_where_and_by_how_much(model: LanguageModel) -> None:
    """The figures of a parting, computed again by hand."""
    found = climbed(model, reseeded)
    partings = {
        p.seed: p for p in next(c for c in found.comparisons if c.pair == ("D", "P")).partings
    }
    assert partings.keys() <= set(SEEDS)
    assert partings
    for parting in partings.values():
        assert parting.tokens[0] != parting.tokens[1]
        # The logits are the same bits, so nothing but the draw differs.
        assert (parting.same_best, parting.overlap) == (True, 25)
        assert (parting.difference, parting.variation, parting.by_logits) == (0.0, 0.0, False)


def test_a_parting_of_logits_is_measured(model: LanguageModel) -> None:
    """Drawn with the same numbers from logits that differ: by_logits, and the distance is there."""
    found = climbed(model, masked)
    partings = [p for c in found.comparisons if c.pair == ("D", "P") for p in c.partings]

    assert partings
    for parting in partings:
        assert parting.by_logits
        assert parting.difference > 0.01
        assert 0 < parting.variation <= 1
        assert 0 <= parting.overlap <= 25
    assert {cause for _, cause in found.partings()} == {"mask"}


# Models and ways ---------------------------------------------------------------------------------

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("mistral", {"sliding_window": 64}),
    "windows in some layers": ("gemma3_text", {"sliding_window_pattern": 2, "sliding_window": 8}),
    "softcaps": ("gemma2", {"sliding_window": 8}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "partial rotation": ("gpt_neox", {}),
    "interleaved": ("glm4", {}),
    "layers without": ("smollm3", {}),
    "learned positions": ("gpt2", {}),
    "alibi": ("bloom", {}),
    "sinks": ("gpt_oss", {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_climb_it_too(tiny: Callable[..., LanguageModel], name: str) -> None:
    architecture, config = OTHERS[name]
    model = tiny(architecture, num_hidden_layers=2, **config)

    right, wrong = climbed(model), climbed(model, perturbed)

    assert not right.verdict.fault, right.verdict.sentence(right.noise)
    assert statuses(right, "D", "P")["same history"] == "equal"
    assert (wrong.verdict.pair, wrong.verdict.cause) == (("D", "P"), "contents")


def test_an_opening_stands_before_every_guide(
    model: LanguageModel, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = torch.tensor([3])
    monkeypatch.setattr(LanguageModel, "opening", property(lambda self: opening))

    prompt = Prompt.of(model, GUIDE)
    found = climbed(model)

    assert prompt.hidden[0] == 3
    assert prompt.hidden[1] != 3
    assert not found.verdict.fault
    assert {each.tokens for each in found.comparisons} == {
        (len(prompt.hidden) + len(prompt.live),) * 2
    }


def test_guides_are_system_messages_of_a_chat(
    tiny: Callable[..., LanguageModel],
) -> None:
    """Also where the template writes the begin of sequence: it stands there once in every arm."""
    model = tiny("llama", num_hidden_layers=2)
    opener = copy.deepcopy(model.tokenizer)
    end = int(opener.eos_token_id)
    opener.bos_token = opener.eos_token
    opener.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{opener.eos_token} $A", special_tokens=[(str(opener.eos_token), end)]
    )
    opener.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    spoken = replace(model, tokenizer=opener)

    prompt = Prompt.of(spoken, GUIDE, chat=True)
    report = verify(spoken, [GUIDE], tokens=4, seeds=1, recompute=1, attention=("sdpa",), chat=True)
    with pytest.raises(SeamError, match="no chat template"):
        verify(model, [GUIDE], tokens=4, chat=True)

    assert torch.cat((prompt.hidden, prompt.live)).tolist().count(end) == 1
    assert report, report.climbs[0].verdict
    assert statuses(report.climbs[0], "D", "P")["token ids"] == "equal"


# The whole of it ---------------------------------------------------------------------------------


def test_a_report_says_it_per_attention_and_dtype(model: LanguageModel) -> None:
    told: list[None] = []

    report = verify(
        model,
        [GUIDE, replace(GUIDE, name="short", text="The codes are old.", items=())],
        tokens=6,
        seeds=1,
        recompute=2,
        dtypes=("float32", "bfloat16"),
        progress=lambda: told.append(None),
    )

    assert report
    assert len(told) == 2 * 2 * 2 * 6
    document = report.to_dict()
    assert document["exact"] is True
    assert document["arms"].keys() == ARMS.keys()
    ways = [(each["dtype"], each["attention"]) for each in document["climbs"]]
    assert ways == [(d, a) for d in ("float32", "bfloat16") for a in ("eager", "sdpa")]
    for each in document["climbs"]:
        assert len(each["rungs"]) == len(RUNGS) * 4
        assert len(each["guides"]) == 2 * 4
    assert report.to_json() == report.to_json()
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report)
    text = console.export_text()
    assert all(rung in text for rung in RUNGS)
    assert "bfloat16, eager attention" in text
    assert model.module.config._attn_implementation == "sdpa"  # put back


def test_a_way_of_computing_that_the_model_does_not_have_is_left_out(
    tiny: Callable[..., LanguageModel],
) -> None:
    """GPT-OSS has no sdpa: its sinks are no part of torch's function."""
    model = tiny("gpt_oss", num_hidden_layers=2, num_local_experts=2, num_experts_per_tok=1)
    before = model.module.config._attn_implementation

    report = verify(model, [GUIDE], tokens=3, seeds=0, recompute=1)
    document = report.to_dict()
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report)

    assert report
    assert [each["attention"] for each in document["climbs"]] == ["eager"]
    assert document["verdict"] == "exact"
    (why,) = document["left_out"]
    assert why.startswith("float32, sdpa attention: ")
    assert "sdpa" in why.partition("attention: ")[2]
    text = console.export_text()
    assert "Left out: float32, sdpa attention" in text
    assert "Verdict: no fault in 1 way of computing, and 1 left out." in text
    assert model.module.config._attn_implementation == before
    with pytest.raises(UnsupportedModel, match="sdpa") as caught:  # nothing is left
        verify(model, [GUIDE], tokens=3, seeds=0, attention=("sdpa",))
    assert "eager, in float32" in str(caught.value.hint)


def test_a_dtype_that_overflows_is_left_out_and_the_others_are_climbed(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama", num_hidden_layers=2)
    with torch.no_grad():
        model.module.model.layers[0].self_attn.v_proj.weight *= 1e6  # beyond float16's 65,504
    again = wrap(model.module, model.tokenizer)

    report = verify(
        again, [GUIDE], tokens=3, seeds=0, attention=("sdpa",), dtypes=("float16", "bfloat16")
    )

    assert [(climb.dtype, climb.attention) for climb in report.climbs] == [("bfloat16", "sdpa")]
    (why,) = report.left_out
    assert why.startswith("float16")


def test_what_fails_only_where_a_guide_is_hidden_is_not_left_out(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no shortcoming of the model alone, and a report without it would hide it."""

    class Overflowing(CachedArm):
        @classmethod
        def on(cls, *given: Any, **named: Any) -> CachedArm:
            arm = CachedArm.on(*given, **named)
            arm.first = _comparable(arm.first * torch.inf)
            return arm

    monkeypatch.setattr("kvtransfer.guides.ladder.CachedArm", Overflowing)

    with pytest.raises(UnsupportedModel, match="not finite"):
        verify(model, [GUIDE], tokens=2, seeds=0)


def test_a_report_of_a_fault_is_not_true(model: LanguageModel) -> None:
    right = verify(model, [GUIDE], tokens=4, seeds=1, attention=("sdpa",))
    wrong = replace(right, climbs=(*right.climbs, climbed(model, masked)), spelt=_any_token())
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(wrong)
    text = console.export_text()

    assert right
    assert not wrong
    assert "FAULT (mask)" in text
    assert "Verdict: a FAULT in 1 of 2 ways of computing." in text
    assert (right.to_dict()["verdict"], wrong.to_dict()["verdict"]) == ("exact", "fault")
    assert not replace(right, climbs=())  # of nothing, nothing is shown
    assert "where runs part first" in text
    assert wrong.to_dict()["climbs"][-1]["verdict"]["cause"] == "mask"


class _any_token(dict[int, str]):
    def __missing__(self, token: int) -> str:
        return f"<{token}>"


def test_the_seam_moves_back_for_a_prompt_that_merges(model: LanguageModel) -> None:
    asked = Choice("ction object", (" a", " b"), 0)

    report = verify(
        model,
        [Guide("merging", "Return the fun", (asked,))],
        tokens=3,
        seeds=0,
        attention=("sdpa",),
    )

    assert report
    assert "the seam moved back" in report.notes[0]


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no guides": ({"guides": []}, TextError, "no guides"),
    "two of one name": ({"guides": [GUIDE, GUIDE]}, TextError, "code"),
    "too long": ({"tokens": 600}, CacheLayoutError, "guide 'code' .* 600 that are .* most 512"),
    "no tokens": ({"tokens": 0}, ValueError, "0 tokens"),
    "fewer than no seeds": ({"seeds": -1}, ValueError, "-1 seeds"),
    "nothing recomputed": ({"recompute": 0}, ValueError, "0 recomputed"),
    "an empty nucleus": ({"top_p": 0.0}, ValueError, "top-p"),
    "an unknown dtype": ({"dtypes": ("int4",)}, ValueError, "int4"),
    "an unknown attention": ({"attention": ("magic",)}, UnsupportedModel, "magic"),
    "no attention": ({"attention": ()}, ValueError, "attention"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_verified_is_refused(model: LanguageModel, name: str) -> None:
    changes, kind, says = BAD[name]
    options: dict[str, Any] = {"guides": [GUIDE], "tokens": 2, "seeds": 1} | changes

    with pytest.raises(kind, match=says) as caught:
        verify(model, options.pop("guides"), **options)

    if isinstance(caught.value, KVTransferError):
        assert caught.value.hint


def test_a_dtype_that_the_model_has_is_no_copy(model: LanguageModel) -> None:
    assert in_dtype(model, "float32") is model
    half = in_dtype(model, "bfloat16")
    assert half.dtype == torch.bfloat16
    assert model.dtype == torch.float32
    assert (half.spec.dtype, model.spec.dtype) == ("bfloat16", "float32")


def test_attention_is_put_back_when_the_run_fails(model: LanguageModel) -> None:
    with pytest.raises(RuntimeError, match="outside"), attending(model, "eager"):
        assert model.module.config._attn_implementation == "eager"
        raise RuntimeError("outside")

    assert model.module.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("count", "tokens", "steps"), [(1, 9, [0]), (3, 9, [0, 4, 8]), (9, 3, [0, 1, 2])]
)
def test_steps_are_spread_over_all(count: int, tokens: int, steps: list[int]) -> None:
    assert spread(count, tokens) == steps
