"""The paper's protocol: one text in chunks, the second half of each scored on the first."""

import json
from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from kvtransfer.evaluation.evaluate import evaluate
from kvtransfer.evaluation.report import EvalReport
from kvtransfer.evaluation.rivals import PLAIN
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel, load

from .conftest import identity

DOCUMENTS = builtin("heldout")[:60]


def cut(model: LanguageModel, length: int, count: int) -> list[Tensor]:
    """Chunks by transformers alone: documents with a blank line between, end to end."""
    first, *others = DOCUMENTS
    pieces = [first, *(f"\n\n{each}" for each in others)]
    ids = list(chain.from_iterable(model.tokenizer(each)["input_ids"] for each in pieces))
    return [torch.tensor(ids[i * length : (i + 1) * length]) for i in range(count)]


def second_half(model: LanguageModel, ids: Tensor) -> Tensor:
    """NLL of each of the last half of tokens, in one joint forward pass of transformers alone."""
    half = len(ids) // 2
    with torch.no_grad():
        logits = model.module(ids[None]).logits[0, half - 1 : -1]
    return functional.cross_entropy(logits, ids[half:], reduction="none")


@pytest.fixture(scope="module")
def long(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama", num_hidden_layers=2, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def papers(long: LanguageModel) -> EvalReport:
    return evaluate(
        long,
        long,
        identity(long),
        texts=DOCUMENTS,
        conditions=PLAIN,
        prefix=1024,
        continuation=1024,
        items=2,
        stream=True,
    )


def test_own_and_perplexity_are_those_of_joint_passes_over_whole_chunks(
    papers: EvalReport, long: LanguageModel
) -> None:
    tokens = torch.stack([second_half(long, ids) for ids in cut(long, 2048, 2)])

    assert papers.text is not None
    own = papers.text.columns["own"]["nll"]
    np.testing.assert_allclose(own, tokens.mean(dim=1), atol=1e-5)
    perplexity = papers.text.estimates("own")["perplexity"]
    assert perplexity is not None
    assert perplexity.value == pytest.approx(float(tokens.mean().exp()), rel=1e-5)
    np.testing.assert_allclose(papers.text.columns["mapped"]["nll"], own, atol=1e-4)
    assert abs(papers.text.columns["none"]["nll"] - own).max() > 1e-2


def test_the_report_says_which_chunks_were_read(papers: EvalReport) -> None:
    document = json.loads(papers.to_json())
    with (console := Console(width=120)).capture() as shown:
        console.print(papers)

    assert document["text"]["protocol"] == "chunks"
    assert document["text"]["prefix_tokens"] == document["text"]["continuation_tokens"] == 1024
    assert "more chunks than the first 2" in document["notes"][0]
    assert "1,024 tokens after 1,024 hidden, chunks of one text" in shown.get()


def test_a_text_that_was_read_whole_has_no_such_note(long: LanguageModel) -> None:
    (chunk,) = cut(long, 64, 1)
    whole = evaluate(
        long,
        long,
        identity(long),
        texts=[long.decode(chunk)],
        conditions=PLAIN,
        prefix=16,
        continuation=16,
        items=2,
        stream=True,
    )

    assert whole.text is not None and whole.text.n == 2
    assert whole.notes == ()


def test_on_the_tiny_pair_both_models_alone_are_what_transformers_says() -> None:
    source, target = load("tiny-4l", dtype="float32"), load("tiny-6l", dtype="float32")
    report = evaluate(
        source,
        target,
        KVMapping.from_pretrained("tiny-4l-to-tiny-6l"),
        texts=DOCUMENTS,
        conditions=PLAIN,
        prefix=128,
        continuation=128,
        items=6,
        stream=True,
    )

    assert report.text is not None
    columns = report.text.columns
    for name, model in (("own", target), ("source", source)):
        expected = [float(second_half(model, ids).mean()) for ids in cut(model, 256, 6)]
        np.testing.assert_allclose(columns[name]["nll"], expected, atol=1e-5)
    assert columns["own"]["nll"].mean() < columns["mapped"]["nll"].mean()
    assert columns["mapped"]["kl_to_own"].mean() < columns["none"]["kl_to_own"].mean()
