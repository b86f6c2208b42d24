"""A guide as system message: the prompt begins with exactly its ids, or an error says why not."""

import pytest
import torch
from hypothesis import given, settings
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from kvtransfer.errors import SeamError
from kvtransfer.guides.chat import split_chat
from kvtransfer.hf.locate import locate
from kvtransfer.hf.spec import load_tokenizer
from tests.guides.test_seam import TEXTS, encode
from tests.hf.trained import trimming

GUIDE, LIVE = "Be brief. The code is 4821.", "Which code is it?"

TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerBase:
    return load_tokenizer(locate("smollm2-135m"))


@pytest.fixture
def plain() -> PreTrainedTokenizerBase:
    """A tokenizer that opens every text with a begin of sequence, and has no template yet."""
    found = trimming()
    backend = found.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return found


def rendered(tokenizer: PreTrainedTokenizerBase, guide: str, live: str) -> torch.Tensor:
    """What transformers makes of the conversation."""
    messages = [{"role": "system", "content": guide}, {"role": "user", "content": live}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return encode(tokenizer, str(text))


@settings(max_examples=40)
@given(guide=TEXTS.filter(str.strip), live=TEXTS)
def test_the_prompt_is_the_templates_own_and_begins_with_the_guide_alone(
    smollm2: PreTrainedTokenizerBase, guide: str, live: str
) -> None:
    joint = split_chat(smollm2, guide, live)

    assert torch.equal(joint.ids, rendered(smollm2, guide, live))
    assert joint.moved is None
    assert guide in joint.hidden_text
    assert torch.equal(joint.hidden, encode(smollm2, joint.hidden_text))
    # Whatever the user says, the guide's part is the same: it can be made once.
    assert torch.equal(joint.hidden, split_chat(smollm2, guide, "Something else").hidden)
    assert joint.text.endswith("<|im_start|>assistant\n")


def test_another_guide_has_another_hidden_part(smollm2: PreTrainedTokenizerBase) -> None:
    one, other = (split_chat(smollm2, guide, LIVE).hidden for guide in (GUIDE, "Be long."))

    assert not torch.equal(one, other)


@pytest.mark.parametrize("written", ["", "{{ bos_token }}"], ids=["without", "with"])
def test_there_is_one_begin_of_sequence(plain: PreTrainedTokenizerBase, written: str) -> None:
    plain.chat_template = written + TURNS

    joint = split_chat(plain, GUIDE, LIVE)

    assert joint.hidden[0] == plain.bos_token_id
    assert int((joint.ids == plain.bos_token_id).sum()) == 1
    assert joint.text.removeprefix("<s>").startswith(f"[system]{GUIDE}[/]\n[user]")
    assert joint.text.endswith("[assistant]")


def test_a_template_that_wants_a_users_turn_hides_all_before_the_users_words(
    plain: PreTrainedTokenizerBase,
) -> None:
    plain.chat_template = (
        "{% if messages|length < 2 %}{{ raise_exception('alone') }}{% endif %}"
        "[INST] <<SYS>>{{ messages[0].content }}<</SYS>> {{ messages[1].content }} [/INST]"
    )

    joint = split_chat(plain, GUIDE, LIVE, seam="back-off")

    assert f"<<SYS>>{GUIDE}<</SYS>>" in joint.hidden_text
    assert LIVE in joint.text[joint.cut :]


TEMPLATES = {
    "none": (None, GUIDE, "no chat template"),
    "refuses": ("{{ raise_exception('System role not supported') }}", GUIDE, "not supported"),
    "broken": ("{{ messages[7].content.nothing }}", GUIDE, "refuses system and user"),
    "drops the system": (
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", GUIDE, "out",
    ),
    "trims": (
        "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}",
        GUIDE + "\n", "not as it is",
    ),
    "moves the system": (
        "{% for m in messages | reverse %}[{{ m.content }}]{% endfor %}", GUIDE, "behind what",
    ),
    "drops the user": ("{{ messages[0].content }}", GUIDE, "drops what the user says"),
    "counts the user's letters": (
        "{{ messages[1].content|length }}" + TURNS, GUIDE, "otherwise for another message",
    ),
    "begins twice": ("{{ bos_token }}{{ bos_token }}" + TURNS, GUIDE, "begins the prompt twice"),
    "empty": (TURNS, " \n", "guide is empty"),
    "merges": ("{% for m in messages %}{{ m.content }}{% endfor %}", "Return the fun",
               "no exact token boundary"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_does_to_a_guide_is_said(plain: PreTrainedTokenizerBase, name: str) -> None:
    plain.chat_template, guide, says = TEMPLATES[name]

    with pytest.raises(SeamError, match=says) as caught:
        split_chat(plain, guide, "ction object")

    assert caught.value.hint
