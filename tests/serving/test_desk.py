"""Which guide a request may have: by names alone, of this model, on these very ids."""

import copy
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtransfer.errors import (
    ArtifactError,
    CacheLayoutError,
    GuideRefused,
    IncompatibleModels,
    SeamError,
)
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides.pack import GuidePack
from kvtransfer.guides.packed import PackedGuide, Prepared, Told
from kvtransfer.hf.model import LanguageModel
from kvtransfer.serving.asked import Asked
from kvtransfer.serving.content import Content
from kvtransfer.serving.desk import Desk, Offer
from kvtransfer.serving.library import Library
from kvtransfer.serving.request import completion

Tiny = Callable[..., LanguageModel]

GUIDES = {
    "harbour": "The tide comes in twice a day, and the harbour empties twice.",
    "a/b ö 🦜": "At low water the boats lie on the sand.",
}
PARAMS = {"pack": "own", "guide": "harbour"}
ASKED = Asked("own", "harbour")


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> LanguageModel:
    return tiny("qwen3", seed=1)


@pytest.fixture(scope="module")
def made(model: LanguageModel, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    GuidePack.build(model, GUIDES).save_pretrained(folder / "own")
    source = tiny("llama", seed=5)
    another = GuidePack.build(source, GUIDES)
    another.save_pretrained(folder / "another")
    settings = FitSettings(tokens=256, chunk=64, layers=1)
    mapped = another.transferred(fit(source, model, builtin("fit"), settings).mapping)
    mapped.save_pretrained(folder / "mapped")
    # As of a fit with the same settings on another text: all that is said of it is the same.
    otherwise = {
        name: given(guide, guide.prepared.cache.map(lambda block: 1.001 * block))
        for name, guide in mapped.items()
    }
    replace(mapped, guides=otherwise).save_pretrained(folder / "mapped-otherwise")
    return folder


def given(guide: PackedGuide, cache: KVCache) -> PackedGuide:
    """The guide with another cache."""
    return PackedGuide.given(
        guide.name,
        Told(text=guide.text, made=guide.made),
        Prepared(ids=guide.ids, cache=cache),
        tokens=guide.tokens,
        maker=guide.maker,
    )


@pytest.fixture
def packs(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "packs")
    return tmp_path / "packs"


@pytest.fixture
def desk(packs: Path, model: LanguageModel) -> Desk:
    return Desk(Library(packs), model.spec)


def prompt_of(packs: Path, guide: str = "harbour") -> list[int]:
    return [*GuidePack.from_pretrained(packs / "own")[guide].ids.tolist(), 5, 6]


# Names


@pytest.mark.parametrize(
    "pack",
    [
        "..",
        ".",
        "",
        "../own",
        "own/",
        "/own",
        "own/../own",
        "..\\own",
        "C:\\own",
        "~",
        "own\0",
        "own\n",
        ".hidden",
        "-own",
        "ö",
        "a" * 101,
        "%2e%2e",
        7,
        None,
        ["own"],
        {"own": 1},
    ],
    ids=repr,
)
def test_a_name_that_could_be_a_place_is_none(pack: Any) -> None:
    with pytest.raises(GuideRefused, match="no pack can be called"):
        Asked.of({"pack": pack, "guide": "harbour"})


def test_an_absolute_path_of_a_pack_that_is_there_is_no_name(packs: Path) -> None:
    with pytest.raises(GuideRefused, match="no pack can be called"):
        Asked.of({"pack": str(packs / "own"), "guide": "harbour"})
    assert Library(packs).guide(ASKED).name == "harbour"


@pytest.mark.parametrize(
    "params",
    [
        {"pack": "own"},
        {"pack": "own", "guide": "harbour", "file": "/etc/passwd"},
        {"kv_file": "/etc/passwd"},
        ["own", "harbour"],
        "own",
        7,
        {1: 2},
    ],
    ids=repr,
)
def test_other_parameters_are_refused(params: Any) -> None:
    with pytest.raises(GuideRefused, match="not pack and guide"):
        Asked.of(params)


@pytest.mark.parametrize("guide", ["", "x" * 1001, 7, None, ["harbour"]], ids=repr)
def test_a_guide_has_a_name(guide: Any) -> None:
    with pytest.raises(GuideRefused, match="no guide can be called"):
        Asked.of({"pack": "own", "guide": guide})


@pytest.mark.parametrize("params", [None, {}])
def test_who_names_no_guide_asks_none(params: Any, desk: Desk) -> None:
    assert Asked.of(params) is None
    assert desk.decide("r", params, [1, 2], None) is None
    assert desk.leave("r") is None


# Places


def test_a_guides_name_is_no_path_and_may_look_like_one(packs: Path) -> None:
    library = Library(packs)

    assert library.guide(Asked("own", "a/b ö 🦜")).tokens > 0
    for name in ("../harbour", "harbour.safetensors", "../../another/guides"):
        with pytest.raises(GuideRefused, match="has no guide"):
            library.guide(Asked("own", name))


@pytest.mark.parametrize("linked", ["pack", "config.json", "guides", "guide"])
def test_links_out_of_the_folder_are_not_followed(packs: Path, tmp_path: Path, linked: str) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(packs / "own", outside)
    library = Library(packs)
    guide = next((packs / "own" / "guides").glob("*.safetensors"))
    inner, outer = {
        "pack": (packs / "own", outside),
        "config.json": (packs / "own" / "config.json", outside / "config.json"),
        "guides": (packs / "own" / "guides", outside / "guides"),
        "guide": (guide, outside / "guides" / guide.name),
    }[linked]
    shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
    inner.symlink_to(outer)

    with pytest.raises(GuideRefused, match="leads out of the folder"):
        library.guide(ASKED)
    # The same numbers are served where they are copied, or linked from inside the folder.
    outside.rename(packs / "copied")
    inner.unlink()
    assert library.guide(Asked("copied", "harbour")).tokens > 0
    (packs / "linked").symlink_to(packs / "copied")
    assert library.guide(Asked("linked", "harbour")).tokens > 0


def test_a_pack_that_is_not_there_is_refused(packs: Path) -> None:
    with pytest.raises(GuideRefused, match="no pack 'nothing'"):
        Library(packs).guide(Asked("nothing", "harbour"))
    with pytest.raises(ArtifactError, match="no folder of packs"):
        Library(packs / "nowhere")


# Models


def test_a_pack_of_another_model_is_refused_by_its_fingerprint(
    packs: Path, model: LanguageModel, desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    sibling = replace(model.spec, weights="0123456789abcdef")

    assert desk.offer(ASKED).ids
    with pytest.raises(IncompatibleModels, match=r"fingerprint .* has 0123456789abcdef"):
        Desk(Library(packs), sibling).offer(ASKED)
    with pytest.raises(IncompatibleModels):
        desk.offer(Asked("another", "harbour"))
    with caplog.at_level(logging.ERROR):
        assert desk.decide("r", {"pack": "another", "guide": "harbour"}, [1], None) is None
    assert "this pack is for" in caplog.text
    assert "cannot read this guide" in str(desk.leave("r"))


def test_a_pack_in_another_dtype_is_refused(packs: Path, model: LanguageModel) -> None:
    half = replace(model.spec, dtype="bfloat16")

    with pytest.raises(CacheLayoutError, match="in float32"):
        Desk(Library(packs), half).offer(ASKED)


# Prompts


def test_a_prompt_goes_on_where_the_guide_ends(packs: Path, desk: Desk) -> None:
    prompt = prompt_of(packs)
    offer = desk.decide("r", PARAMS, prompt, None)

    assert offer is not None and list(offer.ids) == prompt[:-2]
    assert desk.take("r", len(offer.ids)) is offer
    assert desk.leave("r") == PARAMS | {"tokens": len(offer.ids), "loaded": len(offer.ids)}
    assert desk.leave("r") is None


@pytest.mark.parametrize("short", [0, 1, 5])
def test_a_prompt_no_longer_than_the_guide_is_refused(packs: Path, desk: Desk, short: int) -> None:
    ids = prompt_of(packs)[:-2]

    with pytest.raises(GuideRefused, match=rf"prompt has {len(ids) - short} tokens"):
        desk.offer(ASKED).require_matched(ids[: len(ids) - short], None)
    desk.offer(ASKED).require_matched([*ids, 5], None)


@pytest.mark.parametrize("place", [0, 3, -3])
def test_one_other_id_is_refused_by_its_place(packs: Path, desk: Desk, place: int) -> None:
    prompt = prompt_of(packs)
    place %= len(prompt)
    prompt[place] += 1

    with pytest.raises(
        GuideRefused, match=rf"token {place} is {prompt[place]}, .*{prompt[place] - 1}"
    ):
        desk.offer(ASKED).require_matched(prompt, None)


@pytest.mark.parametrize("prompt", [None, []])
def test_a_prompt_without_ids_is_refused(desk: Desk, prompt: Any) -> None:
    assert desk.decide("r", PARAMS, prompt, None) is None
    assert "refused" in str(desk.leave("r"))


def test_a_request_that_computes_otherwise_is_refused(packs: Path, desk: Desk) -> None:
    assert desk.decide("r", PARAMS, prompt_of(packs), None, unfit="an adapter") is None
    assert "an adapter" in str(desk.leave("r"))


def test_an_answer_stays_until_the_request_leaves(packs: Path, desk: Desk) -> None:
    prompt = prompt_of(packs)
    first = desk.decide("r", PARAMS, prompt, None)
    shutil.rmtree(packs / "own")

    assert first is not None and desk.decide("r", PARAMS, prompt, None) is first
    desk.fail("r")
    assert desk.decide("r", PARAMS, prompt, None) is None
    assert "could not be loaded" in str(desk.leave("r"))
    assert desk.decide("r", PARAMS, prompt, None) is None
    assert "there is no pack 'own'" in str(desk.leave("r"))


# Salts


def test_only_what_is_approximate_needs_a_salt_and_each_its_own(packs: Path, desk: Desk) -> None:
    def offer(pack: str, guide: str = "harbour") -> Offer:
        return desk.offer(Asked(pack, guide))

    salts = [offer(pack, guide).salt for pack in ("mapped", "mapped-otherwise") for guide in GUIDES]
    assert offer("own").salt is None
    assert None not in salts and len(set(salts)) == 4

    shutil.copytree(packs / "mapped", packs / "copy")
    GuidePack.from_pretrained(packs / "mapped").save_pretrained(packs / "saved-again")
    assert offer("copy").salt == offer("saved-again").salt == offer("mapped").salt


def test_an_approximate_guide_needs_its_salt(packs: Path, desk: Desk) -> None:
    offer, other = (desk.offer(Asked(name, "harbour")) for name in ("mapped", "mapped-otherwise"))
    prompt = prompt_of(packs)

    offer.require_matched(prompt, offer.salt)
    for wrong in (None, "", "mine", other.salt, str(offer.salt) + "0"):
        with pytest.raises(GuideRefused, match="cache_salt") as caught:
            offer.require_matched(prompt, wrong)
        assert str(offer.salt) in str(caught.value.hint)
    desk.offer(ASKED).require_matched(prompt, "anything")


# Files


def test_a_damaged_guide_is_refused_and_one_that_was_mended_is_not(packs: Path, desk: Desk) -> None:
    prompt = prompt_of(packs)
    files = list((packs / "own" / "guides").glob("*.safetensors"))
    whole = {path: path.read_bytes() for path in files}
    for path in files:
        path.write_bytes(whole[path][:-1])

    with pytest.raises(ArtifactError):
        desk.offer(ASKED)
    assert desk.decide("r", PARAMS, prompt, None) is None
    assert "cannot read this guide" in str(desk.leave("r"))
    for path in files:
        path.write_bytes(whole[path])
    assert desk.offer(ASKED).ids


def test_a_pack_that_was_saved_anew_is_read_anew(
    packs: Path, desk: Desk, model: LanguageModel
) -> None:
    before = desk.offer(ASKED)
    assert desk.offer(ASKED) is before
    GuidePack.build(model, {"harbour": "Another text."}).save_pretrained(packs / "own")

    after = desk.offer(ASKED)
    assert after.ids != before.ids and after.digest != before.digest


def test_a_copy_in_memory_outlives_its_file(packs: Path) -> None:
    content = Content.of(Library(packs).guide(ASKED))
    keys = content.prepared.cache.keys[0].clone()
    for path in (packs / "own" / "guides").glob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))

    assert torch.equal(content.prepared.cache.keys[0], keys)
    with pytest.raises(ArtifactError):
        Content.of(Library(packs).guide(ASKED))


@pytest.mark.parametrize("wrong", ["positions", "numbers"])
def test_what_no_prefix_is_made_of_is_refused(model: LanguageModel, wrong: str) -> None:
    guide = GuidePack.build(model, GUIDES)["harbour"]
    cache = guide.prepared.cache
    bad = {
        "positions": replace(cache, positions=cache.positions + 1),
        "numbers": cache.map(lambda block: block.masked_fill(block == block.max(), torch.nan)),
    }[wrong]
    Content.of(guide)
    with pytest.raises((GuideRefused, CacheLayoutError), match=r"of positions 1|not all finite"):
        Content.of(given(guide, bad))


# What a client sends


def test_the_request_that_is_written_is_one_that_gets_its_guide(
    packs: Path, desk: Desk, model: LanguageModel, tmp_path: Path
) -> None:
    name = named(model, tmp_path)

    for pack in ("own", "mapped"):
        body = completion(packs / pack, "harbour", " Then", model=name, max_tokens=3)
        found = desk.decide(
            pack, body["kv_transfer_params"], body["prompt"], body.get("cache_salt")
        )
        assert found is not None and found.asked.pack == pack
        assert model.decode(body["prompt"]) == GUIDES["harbour"] + " Then"
    assert "cache_salt" not in completion(
        packs / "own", "harbour", " Then", model=name, max_tokens=3
    )


def test_a_guide_without_a_seam_to_the_prompt_is_said(
    packs: Path, model: LanguageModel, tmp_path: Path
) -> None:
    name = named(model, tmp_path)

    with pytest.raises(SeamError, match="the live text is empty") as caught:
        completion(packs / "own", "harbour", "", model=name, max_tokens=3)
    assert "back-off" not in str(caught.value.hint)


def test_a_system_message_is_asked_for_as_its_template_writes_it(
    model: LanguageModel, tmp_path: Path
) -> None:
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    chatty = replace(model, tokenizer=tokenizer)
    pack = GuidePack.build(chatty, GUIDES, chat=True)
    pack.save_pretrained(tmp_path / "packs" / "chat")

    body = completion(
        tmp_path / "packs" / "chat", "harbour", "When?", model=named(chatty, tmp_path), max_tokens=3
    )
    assert model.decode(body["prompt"]) == (
        f"system: {GUIDES['harbour']}\nuser: When?\nassistant: "
    )
    desk = Desk(Library(tmp_path / "packs"), chatty.spec)
    assert desk.decide("r", body["kv_transfer_params"], body["prompt"], None) is not None


def named(model: LanguageModel, folder: Path) -> str:
    """A folder with the model's config and tokenizer, and no weights."""
    model.module.config.save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")
