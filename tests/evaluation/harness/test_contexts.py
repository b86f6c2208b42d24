"""What stands hidden and what is read live are together the context, also in other tokens."""

from collections.abc import Callable

import pytest
import torch

from kvtransfer.errors import IncompatibleModels
from kvtransfer.evaluation.harness.contexts import Contexts
from kvtransfer.fitting.transfer import transfer
from kvtransfer.hf.model import LanguageModel
from tests.hf.trained import trimming

from .conftest import CONTEXT, OTHER, crossing, forwards

Tiny = Callable[..., LanguageModel]


@pytest.fixture(scope="module")
def foreign(tiny: Tiny) -> LanguageModel:
    """With another tokenizer than all others here."""
    from kvtransfer.hf.model import wrap

    model = tiny("llama", seed=1, num_hidden_layers=3, vocab_size=1200)
    return wrap(model.module, trimming())


def test_all_but_the_last_token_is_hidden_where_tokens_are_the_same(model: LanguageModel) -> None:
    ids = model.encode(CONTEXT)
    contexts = Contexts.under("own", source=None, target=model, mapping=None)

    found = contexts(ids.tolist())

    assert found.live.tolist() == ids[-1:].tolist()
    assert found.prefix is not None
    assert found.prefix.tokens == len(ids) - 1


def test_the_source_reads_other_tokens_as_far_as_it_can(
    model: LanguageModel, foreign: LanguageModel
) -> None:
    mapping = crossing(foreign, model)
    contexts = Contexts.under("mapped", source=foreign, target=model, mapping=mapping)

    for text in (CONTEXT, OTHER):
        ids = model.encode(text)
        found = contexts(ids.tolist())

        assert found.prefix is not None
        hidden = found.prefix.tokens
        assert torch.equal(found.live, ids[hidden:])
        expected = transfer(mapping, foreign, model, ids[None, :hidden])
        for (keys, values), (k, v) in zip(found.prefix, expected, strict=True):
            torch.testing.assert_close(keys, k)
            torch.testing.assert_close(values, v)


def test_the_floor_reads_what_the_others_read_live(
    model: LanguageModel, foreign: LanguageModel
) -> None:
    ids = model.encode(CONTEXT + " 🦜")[:-1].tolist()  # ends within a character
    given = {"source": foreign, "target": model, "mapping": crossing(foreign, model)}

    mapped, none = (Contexts.under(name, **given)(ids) for name in ("mapped", "none"))  # type: ignore[arg-type]

    assert torch.equal(mapped.live, none.live)
    assert len(none.live) > 1
    assert none.prefix is None


def test_a_cache_as_it_is_means_nothing_in_other_tokens(
    model: LanguageModel, foreign: LanguageModel
) -> None:
    contexts = Contexts.under("raw", source=foreign, target=model, mapping=None)

    with pytest.raises(IncompatibleModels, match="reads other tokens"):
        contexts(model.encode(CONTEXT).tolist())


def test_one_token_hides_nothing(model: LanguageModel) -> None:
    contexts = Contexts.under("none", source=None, target=model, mapping=None)

    assert contexts([5]).prefix is None
    assert contexts([5]).live.tolist() == [5]


def test_the_last_context_is_kept_and_no_other(model: LanguageModel) -> None:
    contexts = Contexts.under("own", source=None, target=model, mapping=None)
    one, other = [3, 4, 5], [3, 4, 6]

    with forwards(model) as read:
        assert contexts(one) is contexts(one)
        assert len(read) == 1
        contexts(other)
        contexts(one)

    assert len(read) == 3
