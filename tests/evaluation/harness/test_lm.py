"""Through the adapter, a model on its own cache is lm-eval's ``hf``, whatever the order."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing

from kvtransfer.errors import CacheLayoutError, IncompatibleModels, TaskError, UnsupportedModel
from kvtransfer.evaluation.harness.lm import KVTransferLM
from kvtransfer.hf.model import LanguageModel, wrap

from ..conftest import identity
from .conftest import CONTEXT, OTHER, PAIRS, asked, crossing, forwards, likelihoods, plain

Tiny = Callable[..., LanguageModel]
TOLERANCE = 1e-4


def scores(lm: HFLM, pairs: tuple[tuple[str, str], ...] = PAIRS) -> list[tuple[float, bool]]:
    return list(lm.loglikelihood(likelihoods(pairs), disable_tqdm=True))


def require_alike(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    np.testing.assert_allclose(
        [likely for likely, _ in found], [likely for likely, _ in expected], atol=TOLERANCE, rtol=0
    )


def furthest(one: list[tuple[float, bool]], other: list[tuple[float, bool]]) -> float:
    return max(abs(a - b) for (a, _), (b, _) in zip(one, other, strict=True))


ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "a window": ("mistral", {"sliding_window": 8}),
    "positions in the embeddings": ("gpt2", {"n_positions": 512}),
    "positions in the scores": ("bloom", {}),
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_own_is_what_hf_gives_and_a_mapping_that_changes_nothing_is_own(
    tiny: Tiny, kind: str
) -> None:
    architecture, config = ARCHITECTURES[kind]
    model = tiny(architecture, num_hidden_layers=2, **config)
    expected = scores(plain(model, batch_size=3))

    own = scores(KVTransferLM(target=model, condition="own", batch_size=3))
    mapped = scores(KVTransferLM(model, model, identity(model), batch_size=2))

    require_alike(own, expected)
    require_alike(mapped, expected)


def test_what_should_not_be_own_is_not(model: LanguageModel) -> None:
    own = scores(KVTransferLM(target=model, condition="own"))

    for condition in ("none", "zeroed", "unrotated", "shuffled"):
        lm = KVTransferLM(model, model, identity(model), condition)
        assert furthest(scores(lm), own) > 0.05


def test_none_is_hf_on_the_last_token_alone(model: LanguageModel) -> None:
    found = scores(KVTransferLM(target=model, condition="none"), PAIRS[:1])

    last = int(model.encode(CONTEXT)[-1])
    whole = model.encode(PAIRS[0][0] + PAIRS[0][1])[len(model.encode(CONTEXT)) - 1 :]
    assert int(whole[0]) == last
    with torch.no_grad():
        likely = model.module(whole[None, :-1]).logits[0].log_softmax(-1)
    expected = float(likely.gather(-1, whole[1:, None]).sum())
    assert found[0][0] == pytest.approx(expected, abs=TOLERANCE)


def test_the_opening_of_a_text_is_part_of_its_context(tiny: Tiny) -> None:
    model = tiny("llama", num_hidden_layers=2)
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", 0)]
    )
    opened = wrap(model.module, tokenizer)
    assert opened.opening.tolist() == [0]

    own = scores(KVTransferLM(target=opened, condition="own"))
    none = scores(KVTransferLM(target=opened, condition="none"), PAIRS[:1])

    require_alike(own, scores(plain(opened)))
    assert furthest(none, own[:1]) > 0.05
    ids = model.encode(CONTEXT)
    ending = model.encode(PAIRS[0][0] + PAIRS[0][1])[len(ids) :]
    live = torch.cat((opened.opening, ids[-1:], ending))
    with torch.no_grad():
        likely = model.module(live[None, :-1]).logits[0, 1:].log_softmax(-1)
    expected = float(likely.gather(-1, ending[:, None]).sum())
    assert none[0][0] == pytest.approx(expected, abs=TOLERANCE)


def test_the_source_alone_is_hf_on_the_source_whatever_the_targets_tokens_are(
    model: LanguageModel, sibling: LanguageModel
) -> None:
    alone = scores(KVTransferLM(sibling, model, condition="source"))

    require_alike(alone, scores(plain(sibling)))
    require_alike(alone, scores(KVTransferLM(source=sibling, condition="source")))
    assert furthest(alone, scores(plain(model))) > 0.05


def test_contexts_are_cut_at_the_left_as_hf_cuts_them(model: LanguageModel) -> None:
    whole = scores(plain(model))
    expected = scores(plain(model, max_length=30))

    require_alike(scores(KVTransferLM(target=model, condition="own", max_length=30)), expected)
    mapped = KVTransferLM(model, model, identity(model), max_length=30)
    require_alike(scores(mapped), expected)
    assert furthest(whole, expected) > 0.05


def test_all_conditions_read_as_much_as_the_shorter_model_can(tiny: Tiny) -> None:
    short = tiny("llama", num_hidden_layers=2, max_position_embeddings=20)
    long = tiny("llama", num_hidden_layers=2)

    lengths = [
        KVTransferLM(*ends, condition=condition).max_length
        for ends in ((short, long), (long, short))
        for condition in ("own", "source", "none", "raw")
    ]

    assert set(lengths) == {20}
    assert KVTransferLM(target=long, condition="own").max_length == 512


@settings(max_examples=12)
@given(data=st.data(), batch=st.sampled_from([1, 2, 3, 5, 64, "auto"]))
def test_order_and_batch_size_change_nothing(
    model: LanguageModel, sibling: LanguageModel, data: st.DataObject, batch: int | str
) -> None:
    order = data.draw(st.permutations(range(len(PAIRS))))
    reference = scores(KVTransferLM(model, model, identity(model)))

    lm = KVTransferLM(model, model, identity(model), batch_size=batch)
    found = scores(lm, tuple(PAIRS[index] for index in order))

    require_alike(found, [reference[index] for index in order])


def test_each_context_is_read_once_by_the_source_and_its_choices_in_one_go(
    model: LanguageModel, sibling: LanguageModel
) -> None:
    lm = KVTransferLM(model, sibling, crossing(model, sibling), batch_size=16)
    lengths = sorted(len(model.encode(text)) - 1 for text in (CONTEXT, OTHER, PAIRS[-1][0]))

    with forwards(model) as read, forwards(sibling) as went_on:
        scores(lm)

    assert sorted(read) == [(1, length) for length in lengths]
    # Those three, and the contexts of one token: that of an empty text, and "e".
    assert len(went_on) == 5
    assert max(rows for rows, _ in went_on) == 3  # four requests, two of them of the same ids


def test_a_rolling_likelihood_is_what_hf_gives(model: LanguageModel) -> None:
    texts = [asked("loglikelihood_rolling", text) for text in (CONTEXT * 3, OTHER, "e")]
    expected = plain(model, max_length=24, batch_size=2).loglikelihood_rolling(texts)

    for batch in (2, "auto"):
        lm = KVTransferLM(model, model, identity(model), max_length=24, batch_size=batch)
        np.testing.assert_allclose(lm.loglikelihood_rolling(texts), expected, rtol=1e-5)


PROMPTS = (CONTEXT, "e", OTHER, OTHER + " at ten", CONTEXT)
UNTIL = {"until": ["\n\n\n"], "max_gen_toks": 8}


def written(lm: HFLM, prompts: tuple[str, ...] = PROMPTS, **options: Any) -> list[str]:
    requests = [asked("generate_until", prompt, UNTIL | options) for prompt in prompts]
    return list(lm.generate_until(requests, disable_tqdm=True))


@pytest.mark.parametrize("kind", ["llama", "a window", "positions in the embeddings"])
def test_what_is_written_is_what_hf_writes(tiny: Tiny, kind: str) -> None:
    architecture, config = ARCHITECTURES[kind]
    model = tiny(architecture, num_hidden_layers=2, **config)
    expected = written(plain(model))

    for batch in (1, 3, "auto"):
        assert written(KVTransferLM(target=model, condition="own", batch_size=batch)) == expected
    assert written(KVTransferLM(model, model, identity(model), batch_size=4)) == expected
    assert written(KVTransferLM(target=model, condition="none")) != expected


def test_a_stop_ends_what_is_written_as_it_does_in_hf(model: LanguageModel) -> None:
    whole = written(plain(model))[0]
    stop = whole[3:5]

    assert written(KVTransferLM(target=model, condition="own"), until=[stop])[0] == whole[:3]


def test_nothing_to_go_on_from_begins_as_a_likelihood_does(model: LanguageModel) -> None:
    end = model.tokenizer.eos_token

    found = written(KVTransferLM(target=model, condition="own"), ("",))

    assert found == written(plain(model), (end,))


def test_what_is_drawn_depends_on_the_seed_alone(model: LanguageModel) -> None:
    drawn = []
    for lm in (plain(model), KVTransferLM(model, model, identity(model))):
        torch.manual_seed(7)
        drawn.append(written(lm, PROMPTS[:1], do_sample=True, temperature=1.5))

    assert drawn[0] == drawn[1]
    assert drawn[0] != written(plain(model), PROMPTS[:1])


@pytest.mark.parametrize(
    "options", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"num_beams": 2}], ids=str
)
def test_options_that_look_at_the_prompt_are_refused(
    model: LanguageModel, options: dict[str, Any]
) -> None:
    with pytest.raises(TaskError, match=next(iter(options))) as caught:
        written(KVTransferLM(target=model, condition="own"), **options)

    assert "--gen_kwargs" in str(caught.value.hint)


def test_auto_takes_fewer_rows_where_memory_runs_out(model: LanguageModel) -> None:
    lm = KVTransferLM(target=model, condition="own", batch_size="auto")
    expected = scores(lm)
    one = KVTransferLM(target=model, condition="own", batch_size=4)

    def full(part: object, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if (named["input_ids"] if "input_ids" in named else given[0]).shape[0] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    hook = model.module.base_model.register_forward_pre_hook(full, with_kwargs=True)
    try:
        require_alike(scores(lm), expected)
        with pytest.raises(torch.OutOfMemoryError):
            scores(one)
    finally:
        hook.remove()


def test_it_is_registered_and_made_from_arguments_as_text() -> None:
    lm = get_model("kvtransfer").create_from_arg_string(
        "source=tiny-4l,target=tiny-6l,mapping=tiny-4l-to-tiny-6l", {"device": "cpu"}
    )

    info = lm.get_model_info()
    assert (info["source"], info["target"], info["condition"]) == ("tiny-4l", "tiny-6l", "mapped")
    assert info["mapping"] == "tiny-4l → tiny-6l"
    assert len(info["mapping_digest"]) == 16
    assert info["model_num_parameters"] > 0


def test_the_callers_tokenizer_is_left_as_it_was(tiny: Tiny) -> None:
    model = tiny("llama", num_hidden_layers=2)

    KVTransferLM(target=model, condition="own")

    assert model.tokenizer.pad_token is None


def test_what_is_missing_or_does_not_fit_is_named(
    model: LanguageModel, sibling: LanguageModel
) -> None:
    for arguments, lacking in (
        ({"target": model}, "source"),
        ({"source": model}, "target"),
        ({"source": model, "target": model}, "mapping"),
        ({"condition": "source", "target": model}, "source"),
        ({"condition": "raw", "target": model}, "source"),
        ({"condition": "own", "source": model}, "target"),
    ):
        with pytest.raises(IncompatibleModels, match=f"needs a {lacking}") as caught:
            KVTransferLM(**arguments)
        assert f"{lacking}=" in str(caught.value.hint)
    with pytest.raises(IncompatibleModels):
        KVTransferLM(sibling, model, identity(model))
    with pytest.raises(CacheLayoutError, match="heads"):
        scores(KVTransferLM(model, sibling, condition="raw"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"condition": "magic"}, "no condition 'magic'; there are none, own, mapped"),
        ({"batch_size": "many"}, "a positive number or auto"),
        ({"batch_size": "0"}, "a positive number or auto"),
        ({"max_length": -1}, "at least 1 token"),
        ({"peft": "somewhere"}, "takes no peft; it takes source, target"),
        ({"trust_remote_code": True}, "takes no trust_remote_code"),
    ],
    ids=str,
)
def test_arguments_that_mean_nothing_are_a_mistake(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        KVTransferLM.create_from_arg_obj({"target": "tiny-4l", "condition": "own"} | given)


def test_encoders_with_decoders_are_refused(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')

    with pytest.raises(UnsupportedModel, match="seq2seq"):
        KVTransferLM(target="tiny-4l", condition="own", backend="seq2seq")
    with pytest.raises(UnsupportedModel, match="t5"):
        KVTransferLM(target=str(tmp_path), condition="own")


def test_a_continuation_that_cannot_be_scored_is_named(model: LanguageModel) -> None:
    lm = KVTransferLM(target=model, condition="own", max_length=4)

    for pair in ((CONTEXT, ""), (CONTEXT, OTHER)):
        with pytest.raises(TaskError, match="where 4 are read at most"):
            scores(lm, (pair,))
