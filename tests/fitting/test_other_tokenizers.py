"""A pair that cuts text into other tokens is fitted, measured and moved like any other."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from kvtransfer.errors import CacheLayoutError, SeamError, UnsupportedModel
from kvtransfer.evaluation.conditions import Pair, Reading, arms
from kvtransfer.evaluation.evaluate import evaluate
from kvtransfer.fitting.capture import capture
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.diagnose import diagnose
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.network_settings import NetworkSettings
from kvtransfer.fitting.probe import probe
from kvtransfer.fitting.refine import refine
from kvtransfer.fitting.refine_settings import RefineSettings
from kvtransfer.fitting.report import FitReport
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.fitting.transfer import transfer
from kvtransfer.fitting.trial import Trial
from kvtransfer.fitting.workspace import Workspace
from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides.guide import Choice, Expect, Guide
from kvtransfer.hf.aligned import Alignable, alignable_start, read_aligned
from kvtransfer.hf.model import LanguageModel, wrap
from kvtransfer.hf.run import prefill, score
from kvtransfer.hf.spans import paired_ids
from kvtransfer.measures.agreement import nll
from tests.hf.trained import gemma, trimming

from .test_checkpoint import Stopped, assert_equal, until

Tiny = Callable[..., LanguageModel]

SETTINGS = FitSettings(tokens=3_072, chunk=64, layers=2, features="both", strength=1e-2)


def renamed(model: LanguageModel) -> LanguageModel:
    """The same model and tokenizer, under another digest."""
    return replace(model, spec=replace(model.spec, tokenizer="0" * 12))


def begun(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Puts its begin of sequence before every text, as Gemma's and Llama's do."""
    mark = ("<bos>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[mark]
    )
    return tokenizer


def spelling(model: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> LanguageModel:
    """The model with another tokenizer, its embeddings made of the characters that tokens spell.

    So two such models have something in common, though they share no token.
    """
    table: Tensor = model.module.get_input_embeddings().weight.data  # type: ignore[assignment]
    letters = torch.randn(128, table.shape[1], generator=torch.Generator().manual_seed(0))
    for token in range(len(tokenizer)):
        characters = [ord(character) % 128 for character in tokenizer.decode([token])]
        table[token] = letters[characters].sum(0) if characters else 0.0
    return wrap(model.module, tokenizer)


@pytest.fixture(scope="module")
def reader(tiny: Tiny) -> LanguageModel:
    """Three layers, and a tokenizer that marks nothing."""
    return spelling(tiny("llama", seed=1, num_hidden_layers=3, vocab_size=1200), trimming())


@pytest.fixture(scope="module")
def writer(tiny: Tiny) -> LanguageModel:
    """Two layers, and a tokenizer that begins every text with a mark."""
    return spelling(tiny("qwen3", seed=2, num_hidden_layers=2, vocab_size=1200), begun(gemma()))


@pytest.fixture(scope="module")
def report(reader: LanguageModel, writer: LanguageModel) -> FitReport:
    return fit(reader, writer, builtin("fit"), SETTINGS)


def first_chunk(model: LanguageModel, length: int = 64) -> torch.Tensor:
    cut = chunks(builtin("heldout"), model.encode, length=length, opening=model.opening)
    return next(iter(cut))


def test_one_tokenizer_under_two_digests_gives_what_one_gives(
    source: LanguageModel, target: LanguageModel
) -> None:
    settings = replace(SETTINGS, tokens=1_024)
    alike = fit(source, target, builtin("fit"), settings)
    apart = fit(source, renamed(target), builtin("fit"), settings)
    ids = torch.stack([first_chunk(target), first_chunk(target, 128)[64:]])

    assert apart.left_out == 0
    assert [layer.sources for layer in apart.layers] == [layer.sources for layer in alike.layers]
    for one, other in zip(alike.mapping.layers, apart.mapping.layers, strict=True):
        for ours, theirs in ((one.keys, other.keys), (one.values, other.values)):
            torch.testing.assert_close(theirs.weight, ours.weight, rtol=1e-3, atol=1e-4)  # type: ignore[union-attr]
    made = transfer(alike.mapping, source, target, ids)
    again = transfer(apart.mapping, source, renamed(target), ids)
    for block, aligned in zip(
        (*made.keys, *made.values), (*again.keys, *again.values), strict=True
    ):
        torch.testing.assert_close(aligned, block, rtol=1e-3, atol=1e-3)


def test_where_tokenizers_agree_the_cache_is_the_sources_own(
    source: LanguageModel, target: LanguageModel
) -> None:
    ids = first_chunk(target)[None]
    read, own = read_aligned(source, target, ids), prefill(source, ids)

    assert read.keys_are == "cached"
    assert all(map(torch.equal, read.keys, own.keys))


def test_rows_that_differ_in_length_over_there_are_read_as_each_alone(
    reader: LanguageModel, writer: LanguageModel
) -> None:
    rows = torch.stack([first_chunk(writer), first_chunk(writer, 128)[64:]])
    theirs = [paired_ids(reader, writer, row)[0] for row in rows]
    together = read_aligned(reader, writer, rows)
    alone = [read_aligned(reader, writer, row[None]) for row in rows]

    assert len(theirs[0]) != len(theirs[1])
    assert (together.batch, together.tokens, together.keys_are) == (2, 64, "content")
    for i, each in enumerate(alone):
        for whole, part in zip(together.values, each.values, strict=True):
            assert torch.equal(whole[i : i + 1], part)


def error(made: KVCache, own: KVCache) -> dict[str, float]:
    wide, true = (cache.to(dtype=torch.float32).content() for cache in (made, own))
    return {
        kind: float(
            sum(
                (a - b).square().sum()
                for a, b in zip(getattr(wide, kind), getattr(true, kind), strict=True)
            )
        )
        for kind in ("keys", "values")
    }


def test_what_was_fitted_beats_its_control_on_held_out_text(
    report: FitReport, reader: LanguageModel, writer: LanguageModel
) -> None:
    cut = chunks(builtin("heldout"), writer.encode, length=64, opening=writer.opening)
    ids = torch.stack(list(islice(cut, 8)))
    own = prefill(writer, ids)
    mapped, control = (
        error(transfer(report.mapping, reader, writer, ids, shuffled=shuffled), own)
        for shuffled in (False, True)
    )

    assert report
    for kind in ("keys", "values"):
        assert mapped[kind] < 0.9 * control[kind]


GUIDES = (
    Guide(
        "harbour",
        "The harbour opens with the code 4821. Its master is named Marlow.",
        (
            Choice("\nWho is its master? It is", (" Quennell", " Marlow"), 1),
            Expect("\nThe master is named", "Marlow"),
        ),
    ),
)


def test_an_evaluation_leaves_out_what_other_tokens_do_not_compare(
    report: FitReport, reader: LanguageModel, writer: LanguageModel
) -> None:
    found = evaluate(
        reader,
        writer,
        report.mapping,
        texts=builtin("heldout"),
        guides=GUIDES,
        prefix=40,
        continuation=16,
        items=3,
    )
    document = json.loads(found.to_json())

    for part in ("text", "guides"):
        assert document[part]["missing"].keys() == {"source", "raw"}
        assert "reads other tokens" in document[part]["missing"]["source"]
        assert {"none", "own", "mapped", "zeroed", "unrotated", "shuffled"} == set(
            document[part]["conditions"]
        )
    assert "source" not in found.sentence().partition(";")[2]


def test_no_prefix_is_what_the_target_expects_before_any_text(
    report: FitReport, reader: LanguageModel, writer: LanguageModel
) -> None:
    ids = first_chunk(writer)
    pair = Pair(reader, writer, report.mapping)
    made, _ = arms(Reading.of(pair, ids[:31]), ("none", "own"))
    live, wanted = ids[None, 31:-1], ids[32:]
    whole = score(writer, torch.cat((writer.opening, live[0]))[None])[0, 1:]

    assert made["none"].prefix is not None
    assert made["none"].prefix.tokens == 1
    scored = score(writer, live, made["none"].prefix)[0]
    torch.testing.assert_close(nll(scored, wanted), nll(whole, wanted), rtol=1e-4, atol=1e-4)


def test_an_opening_is_what_a_tokenizer_puts_before_a_text(
    reader: LanguageModel, writer: LanguageModel, tiny: Tiny
) -> None:
    assert reader.opening.tolist() == tiny().opening.tolist() == []
    assert writer.opening.tolist() == [writer.tokenizer.bos_token_id]
    cut = list(islice(chunks(builtin("fit"), writer.encode, length=9, opening=writer.opening), 5))
    bare = torch.cat(list(islice(chunks(builtin("fit"), writer.encode, length=8), 5)))

    assert [len(each) for each in cut] == [9] * 5
    assert all(each[0] == writer.opening for each in cut)
    assert torch.equal(torch.cat([each[1:] for each in cut]), bare)
    with pytest.raises(ValueError, match="at least 2"):
        next(iter(chunks(["text"], writer.encode, length=1, opening=writer.opening)))


def test_a_source_that_expects_an_opening_reads_one(
    reader: LanguageModel, writer: LanguageModel
) -> None:
    """Whether or not the target's ids begin with a mark of their own."""
    text = "One line of text."
    bare = reader.encode(text)
    marked = torch.cat((torch.tensor([reader.tokenizer.bos_token_id]), bare))
    ids, index = paired_ids(writer, reader, bare)
    own = prefill(writer, torch.cat((writer.opening, ids))[None]).content()

    from_bare = read_aligned(writer, reader, bare[None])
    from_marked = read_aligned(writer, reader, marked[None])

    torch.testing.assert_close(from_bare.keys[1][:, :, 1:], own.keys[1][:, :, index[1:] + 1])
    torch.testing.assert_close(from_bare.keys[1][:, :, :1], own.keys[1][:, :, :1])
    torch.testing.assert_close(from_marked.keys[1][:, :, 2:], from_bare.keys[1][:, :, 1:])


ITEMS = 4
SEA = "🌊" * 300


def broken() -> Iterator[str]:
    """Prose, and a sea of characters of several tokens each, which chunks cut through."""
    for number, text in enumerate(builtin("fit")):
        yield SEA if number % 4 == 0 else text


def test_chunks_that_no_text_has_are_left_out_and_counted(
    reader: LanguageModel, writer: LanguageModel
) -> None:
    settings = replace(SETTINGS, tokens=1_024)
    found = fit(reader, writer, broken(), settings)
    sequences = Alignable(
        reader, writer, chunks(broken(), writer.encode, length=64, opening=writer.opening)
    )
    captured = capture(reader, writer, islice(sequences, 20), tokens=1_024)

    assert found.left_out > 0
    assert found.rows == captured.fit.rows == 1_024
    assert json.loads(found.to_json())["chunks_left_out"] == found.left_out
    assert found.mapping.settings["chunks_left_out"] == found.left_out
    # Nothing that could be read: the last of the reasons, and not a word about too little text.
    cut_through = [writer.encode("🌊")[1:]] * 3
    with pytest.raises(SeamError, match="no text has these"):
        list(Alignable(reader, writer, cut_through))


def test_a_capture_that_was_interrupted_goes_on_past_what_is_left_out(
    reader: LanguageModel, writer: LanguageModel, tmp_path: Path
) -> None:
    def sequences() -> Alignable:
        whole = chunks(broken(), writer.encode, length=64, opening=writer.opening)
        return Alignable(reader, writer, islice(whole, 400))

    expected, counted = sequences(), sequences()
    whole = capture(reader, writer, expected, tokens=1_024)
    workspace = Workspace(checkpoint=tmp_path / "c", every=2)
    with pytest.raises(Stopped):
        capture(reader, writer, until(sequences(), 14), tokens=1_024, workspace=workspace)
    found = capture(reader, writer, counted, tokens=1_024, workspace=workspace)

    assert_equal(found, whole)
    assert counted.left_out == expected.left_out > 0


def test_a_window_is_cut_where_the_source_can_read_it(
    reader: LanguageModel, writer: LanguageModel
) -> None:
    ids = writer.encode("the🌊🌊")
    last = len(writer.encode("the🌊"))

    assert len(ids) > last + 1
    assert alignable_start(reader, writer, ids, at_most=last) == last
    assert alignable_start(reader, writer, ids, at_most=last + 1) == last
    assert alignable_start(writer, writer, ids, at_most=last + 1) == last + 1
    with pytest.raises(SeamError):
        alignable_start(reader, writer, ids[last + 1 :], at_most=2)


def test_items_of_no_text_are_left_out_of_an_evaluation_with_a_note(
    report: FitReport, reader: LanguageModel, writer: LanguageModel
) -> None:
    found = evaluate(
        reader,
        writer,
        report.mapping,
        texts=broken(),
        conditions=["mapped"],
        prefix=40,
        continuation=8,
        items=ITEMS,
    )

    (note,) = found.notes
    assert "text items were left out" in note
    assert found.text is not None
    assert found.text.n == ITEMS


def test_a_cache_that_was_not_aligned_is_refused(
    report: FitReport, reader: LanguageModel, tmp_path: Path
) -> None:
    """Mapped as it is, it would hold a token for each of the source's, at the source's places."""
    cache = prefill(reader, reader.encode("Some text.")[None])
    report.mapping.save_pretrained(tmp_path / "mapping")
    card = (tmp_path / "mapping" / "README.md").read_text(encoding="utf-8")

    with pytest.raises(CacheLayoutError, match="cuts text into others") as caught:
        KVMapping.from_pretrained(tmp_path / "mapping")(cache)

    assert "transfer(mapping, source, target, ids)" in str(caught.value.hint)
    assert "target_cache = transfer(mapping, source, target, ids)" in card


def test_a_tokenizer_without_offsets_is_refused_as_the_fit_begins(
    source: LanguageModel, target: LanguageModel
) -> None:
    slow = replace(renamed(target), tokenizer=ByT5Tokenizer())

    with pytest.raises(UnsupportedModel, match="does not say which characters"):
        fit(source, slow, builtin("fit"), SETTINGS)


def test_every_way_to_fit_and_to_look_reads_aligned(
    report: FitReport, reader: LanguageModel, writer: LanguageModel
) -> None:
    network = NetworkSettings(hidden=8, epochs=1)
    few = replace(SETTINGS, tokens=512, layers=1, solver="mlp", network=network)
    bent = fit(reader, writer, builtin("fit"), few)
    tried = Trial(reader, writer, [first_chunk(writer)]).of(report.mapping)
    probed = probe(reader, writer, builtin("heldout"), tokens=256)
    short = RefineSettings(windows=4, prefix=33, continuation=16, heldout=2, every=4, rank=2)
    refined = refine(report.mapping, reader, writer, builtin("fit"), short)
    seen = diagnose(
        report.mapping, reader, writer, builtin("heldout"), prefix=33, continuation=8, items=2
    )

    assert bent.rows == 512
    assert bent.mapping.settings["chunks_left_out"] == 0
    assert tried.attention_error < 1
    assert probed.score.value > 0
    assert refined.best.kl <= refined.history[0].kl
    assert seen
