"""A restored guide is the model's own cache, costs no forward pass, and is no other model's."""

import gc
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn

from kvtransfer.errors import (
    ArtifactError,
    CacheLayoutError,
    DeviceError,
    IncompatibleModels,
    KVTransferError,
    SeamError,
    TextError,
    WrongKind,
)
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides import shelf
from kvtransfer.guides.graft import Graft
from kvtransfer.guides.guide import Guide
from kvtransfer.guides.pack import GuidePack
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import generate, prefill, score
from kvtransfer.steering.chain import chain
from kvtransfer.steering.interventions import Bank, Lag, Scale

Tiny = Callable[..., LanguageModel]

GUIDES = [
    ("harbour", "The tide comes in twice a day, and the harbour empties twice."),
    ("a/b ö 🦜|", "At low water the boats lie on the sand."),
    ("x", "x"),
]
LIVE = torch.tensor([[5, 6, 7, 8]])

ROPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
}


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> LanguageModel:
    return tiny("qwen3", seed=1)


@pytest.fixture(scope="module")
def pack(model: LanguageModel) -> GuidePack:
    return GuidePack.build(model, GUIDES)


@pytest.fixture
def folder(pack: GuidePack, tmp_path: Path) -> Path:
    pack.save_pretrained(tmp_path / "pack")
    return tmp_path / "pack"


@contextmanager
def counted(module: nn.Module) -> Iterator[list[str]]:
    """The names of the parts that ran."""
    ran: list[str] = []
    hooks = [
        part.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
        for name, part in module.named_modules()
        if "rotary" not in name
    ]
    try:
        yield ran
    finally:
        for hook in hooks:
            hook.remove()


def same_bits(one: KVCache, other: KVCache) -> bool:
    pairs = zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


# What a pack gives back


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {}),
        ("llama", ROPES["yarn"]),
        ("gpt_neox", {"num_key_value_heads": None}),
        (
            "gemma3_text",
            {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        ),
        ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}),
    ],
)
def test_what_is_restored_is_the_models_own_cache_bit_for_bit(
    tiny: Tiny, tmp_path: Path, architecture: str, config: dict[str, Any]
) -> None:
    model = tiny(architecture, **config)
    GuidePack.build(model, GUIDES).save_pretrained(tmp_path / "pack")

    found = GuidePack.from_pretrained(tmp_path / "pack")

    assert list(found) == [name for name, _ in GUIDES]
    for name, text in GUIDES:
        ids = model.encode(text)[None]
        own, restored = prefill(model, ids), found[name].restore(model)
        assert torch.equal(found[name].ids, ids[0])
        assert same_bits(own, restored)
        assert torch.equal(score(model, LIVE, own), score(model, LIVE, restored))


def test_restoring_runs_no_part_of_the_model_and_reading_on_it_runs_all(
    model: LanguageModel, folder: Path
) -> None:
    with counted(model.module) as ran:
        guide = GuidePack.from_pretrained(folder)["harbour"]
        prefix = guide.restore(model)
        with guide.graft(model) as cache:
            assert cache.get_seq_length() == guide.tokens
    assert ran == []

    with counted(model.module) as ran:
        score(model, LIVE, prefix)
    assert len(ran) > len(model.spec.layers)


def test_restoring_copies_nothing(model: LanguageModel, folder: Path) -> None:
    guide = GuidePack.from_pretrained(folder)["harbour"]

    one, other = guide.restore(model), guide.restore(model)

    for a, b in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True):
        assert a.data_ptr() == b.data_ptr()


def test_only_the_guide_that_is_asked_for_is_read(model: LanguageModel, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    others = [entry["file"] for entry in config["guides"] if entry["name"] != "x"]
    for each in others:
        (folder / "guides" / each).unlink()

    found = GuidePack.from_pretrained(folder)

    assert found["x"].restore(model).tokens == 1
    with pytest.raises(ArtifactError, match="is gone"):
        found["harbour"].restore(model)


def test_generate_after_a_graft_is_generate_after_the_text(
    model: LanguageModel, pack: GuidePack
) -> None:
    text = dict(GUIDES)["harbour"]
    joint = torch.cat((model.encode(text)[None], LIVE), dim=1)
    ones = torch.ones_like(joint)
    keywords: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "attention_mask": ones}
    module: Any = model.module
    expected = module.generate(joint, **keywords)[0, joint.shape[1] :]

    graft = pack["harbour"].graft(model)
    for _ in range(2):  # each use is a fresh one
        with graft as cache:
            found = module.generate(LIVE, cache=cache, **keywords)[0, LIVE.shape[1] :]
        assert torch.equal(found, expected)

    plain = list(generate(model, LIVE[0], graft.prefix, max_new_tokens=8))
    assert plain == expected.tolist()[: len(plain)]
    batch = pack["harbour"].graft(model, batch=3)
    logits = score(model, LIVE.expand(3, -1), batch.prefix)
    torch.testing.assert_close(logits[2:], score(model, LIVE, graft.prefix), atol=1e-4, rtol=0)


def test_a_guide_is_edited_once_or_at_every_step_and_stays_as_it_is(
    model: LanguageModel, pack: GuidePack
) -> None:
    graft = pack["harbour"].graft(model)
    plain = list(graft.stream(" At high", max_new_tokens=8))
    halve = Scale(0.3, "values")

    once, always = graft.edited(halve), graft.edited(halve, every_step=True)

    ids = graft.joined(" At high").live
    for edited, prefix, edit in ((once, halve(graft.prefix), None), (always, graft.prefix, halve)):
        expected = list(generate(model, ids, prefix, max_new_tokens=8, edit=edit))
        text = "".join(edited.stream(" At high", max_new_tokens=8))
        assert text == model.decode(expected) != "".join(plain)
        mask = torch.ones(1, edited.prefix.tokens + len(ids), dtype=torch.long)
        module: Any = model.module
        with edited as cache:
            out = module.generate(
                ids[None], cache=cache, attention_mask=mask, do_sample=False, max_new_tokens=8
            )
        assert out[0, len(ids) :].tolist()[: len(expected)] == expected
    assert list(graft.stream(" At high", max_new_tokens=8)) == plain


def test_edits_at_every_step_are_read_one_after_another(
    model: LanguageModel, pack: GuidePack
) -> None:
    graft = pack["harbour"].graft(model)
    quieter, behind = Scale(0.3, "values"), Lag(1)

    def text(edited: Graft) -> str:
        return "".join(edited.stream(" At high", max_new_tokens=8))

    both = graft.edited(quieter, every_step=True).edited(behind, every_step=True)

    assert text(both) == text(graft.edited(chain(quieter, behind), every_step=True))
    assert text(both) != text(graft.edited(behind, every_step=True))
    with pytest.raises(WrongKind, match="what the edit made is None"):
        graft.edited(lambda cache: None)  # type: ignore[arg-type, return-value]


def test_no_pack_can_say_that_a_guide_hides_tokens(model: LanguageModel, pack: GuidePack) -> None:
    held = pack["harbour"].prepared

    with pytest.raises(CacheLayoutError, match="hidden in 3 of 4 layers cannot be saved in a pack"):
        replace(held, cache=Bank((1,))(held.cache)).tensors()
    assert len(held.tensors()) == 2 + 2 * 4


def test_streamed_text_is_what_the_joint_text_would_be_followed_by(
    model: LanguageModel, pack: GuidePack
) -> None:
    name, text = GUIDES[0]
    prompt = " At high water 🦜"
    ids = model.encode(text + prompt)
    expected = model.decode(list(generate(model, ids, max_new_tokens=12)))

    pieces = list(pack[name].graft(model).stream(prompt, max_new_tokens=12))

    assert expected.startswith("".join(pieces))
    assert expected.removeprefix("".join(pieces)).strip("\ufffd") == ""


TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def talking(tiny: Tiny) -> Iterator[LanguageModel]:
    """A model whose tokenizer has a chat template."""
    model = tiny("llama", seed=6)
    tokenizer = model.tokenizer
    tokenizer.chat_template = TEMPLATE
    yield model
    tokenizer.chat_template = None


def test_a_guide_may_be_a_system_message(talking: LanguageModel, tmp_path: Path) -> None:
    text, said = GUIDES[0][1], "When?"
    GuidePack.build(talking, GUIDES[:1], chat=True).save_pretrained(tmp_path / "pack")
    guide = GuidePack.from_pretrained(tmp_path / "pack")["harbour"]
    prompt = f"[system] {text}\n[user] {said}\n[assistant]"
    whole = talking.encode(prompt)
    expected = talking.decode(list(generate(talking, whole, max_new_tokens=8)))

    graft = guide.graft(talking)

    assert guide.text == text
    assert torch.equal(guide.ids, whole[: guide.tokens])
    assert talking.decode(guide.ids) == f"[system] {text}\n"
    assert expected.startswith("".join(graft.stream(said, max_new_tokens=8)))
    assert "as system message" in guide.described
    talking.tokenizer.chat_template = TEMPLATE.replace("[{{", "<{{")
    with pytest.raises(SeamError, match="where it was read"):
        list(graft.stream(said, max_new_tokens=8))


def test_more_tokens_than_there_is_room_for_are_refused_before_any_is_written(
    model: LanguageModel, pack: GuidePack
) -> None:
    with (
        counted(model.module) as ran,
        pytest.raises(CacheLayoutError, match="at most 512") as found,
    ):
        list(pack["harbour"].graft(model).stream(" At", max_new_tokens=1000))
    assert ran == []
    assert "ask for 4" in str(found.value.hint)
    with pytest.raises(ValueError, match="a batch of 0"):
        pack["harbour"].graft(model, batch=0)


def test_names_and_texts_with_brackets_print(model: LanguageModel) -> None:
    odd = GuidePack.build(model, [("[/nope]", "[INST] Be brief. [/INST] ok")])
    console = Console(width=200, file=io.StringIO(), record=True)

    console.print(odd)

    printed = console.export_text()
    assert "[/nope]" in printed
    assert "[INST] Be brief. [/INST] ok" in printed


# Which model may read it


def test_another_model_is_refused_with_both_values(
    model: LanguageModel, pack: GuidePack, tiny: Tiny
) -> None:
    def refused(other: LanguageModel) -> str:
        with pytest.raises(IncompatibleModels) as caught:
            pack["harbour"].restore(other)
        return caught.value.message

    weights, other = model.spec.identity, tiny("qwen3", seed=2)
    assert f"fingerprint {weights}" in refused(other)
    assert str(other.spec.identity) in refused(other)
    assert "layers 4, and" in refused(tiny("qwen3", seed=1, num_hidden_layers=3))
    assert "has 3" in refused(tiny("qwen3", seed=1, num_hidden_layers=3))
    turned = tiny("qwen3", seed=1, rope_parameters={"rope_type": "default", "rope_theta": 5e3})
    assert "theta=10000.0" in refused(turned)
    assert "theta=5000.0" in refused(turned)
    spelt = replace(model, spec=replace(model.spec, tokenizer="other"))
    assert f"tokenizer {model.spec.tokenizer}, and" in refused(spelt)
    assert refused(spelt).endswith("has other")


def test_another_revision_is_refused_where_both_are_known(
    model: LanguageModel, tiny: Tiny, tmp_path: Path
) -> None:
    mine = tiny("qwen3", seed=1)
    mine.module.config._commit_hash = "1111"
    GuidePack.build(mine, GUIDES).save_pretrained(tmp_path / "pack")
    found = GuidePack.from_pretrained(tmp_path / "pack")
    other = tiny("qwen3", seed=1)
    other.module.config._commit_hash = "2222"

    assert found["x"].restore(mine)
    assert found["x"].restore(model)  # no commit is known of it
    with pytest.raises(IncompatibleModels, match=r"revision 1111, and .* has 2222"):
        found["x"].restore(other)


def test_another_dtype_is_refused_unless_it_may_be_cast(tiny: Tiny, pack: GuidePack) -> None:
    half = tiny("qwen3", seed=1)
    module: Any = half.module
    module.to(torch.bfloat16)
    half = replace(half, spec=replace(half.spec, dtype="bfloat16"))

    with pytest.raises(CacheLayoutError, match=r"in float32, .* runs in bfloat16"):
        pack["harbour"].restore(half)

    cast = pack["harbour"].restore(half, cast=True)
    assert cast.dtype == torch.bfloat16
    assert cast.note == "cast from float32 to bfloat16"
    score(half, LIVE, cast)
    assert pack["harbour"].prepared.cache.dtype == torch.float32


def test_numbers_that_were_written_to_are_refused(model: LanguageModel, folder: Path) -> None:
    guide = GuidePack.from_pretrained(folder)["harbour"]
    guide.restore(model).values[1].zero_()

    with pytest.raises(CacheLayoutError, match="written to in place"):
        guide.restore(model)
    assert GuidePack.from_pretrained(folder)["harbour"].restore(model).values[1].abs().max() > 0


def test_a_pack_is_a_mapping_of_its_guides(pack: GuidePack) -> None:
    assert isinstance(pack, Mapping)
    assert list(pack) == list(pack.keys()) == [name for name, _ in GUIDES]
    assert [guide.text for guide in pack.values()] == [text for _, text in GUIDES]
    assert {name: guide.text for name, guide in pack.items()} == dict(GUIDES)
    assert pack.get("harbour") is pack["harbour"]
    assert pack.get("nowhere") is None
    with pytest.raises(ArtifactError, match="no guide 'nowhere'"):
        pack["nowhere"]


def test_names_and_texts_may_be_a_dict_pairs_or_a_generator(model: LanguageModel) -> None:
    made = [
        GuidePack.build(model, given)
        for given in (dict(GUIDES), GUIDES, (each for each in GUIDES), [Guide(*GUIDES[0], ())])
    ]

    assert [list(each) for each in made[:3]] == [[name for name, _ in GUIDES]] * 3
    assert list(made[3]) == ["harbour"]
    for each in made[1:]:
        assert same_bits(each["harbour"].restore(model), made[0]["harbour"].restore(model))


def alive() -> int:
    """Caches in memory."""
    gc.collect()
    return sum(type(each) is KVCache for each in gc.get_objects())


def test_a_pack_that_is_made_into_a_folder_holds_one_guide_at_a_time(
    model: LanguageModel, pack: GuidePack, mapping: KVMapping, tmp_path: Path
) -> None:
    before = alive()
    counts: dict[str, list[int]] = {}

    def counting(name: str) -> Callable[[int], None]:
        return lambda tokens: counts.setdefault(name, []).append(alive() - before)

    many = {f"{i}": text for i, (_, text) in enumerate(GUIDES * 2)}
    GuidePack.build(model, many, progress=counting("in memory"))
    before = alive()
    made = GuidePack.build(model, many, into=tmp_path / "pack", progress=counting("into"))
    before = alive()
    mapped = made.transferred(mapping, into=tmp_path / "to", progress=counting("mapped"))

    # Each is counted while it is made: one more for every guide that was kept.
    def growth(name: str) -> int:
        return counts[name][-1] - counts[name][0]

    assert growth("in memory") == len(many) - 1
    assert growth("into") == 0
    assert growth("mapped") == len(many) - 1  # the pack that is read keeps what it has mapped
    assert list(made) == list(many)
    assert made.to_dict() == GuidePack.from_pretrained(tmp_path / "pack").to_dict()
    assert same_bits(made["0"].restore(model), pack["harbour"].restore(model))
    assert list(mapped) == list(many)
    card = (tmp_path / "pack" / "README.md").read_text(encoding="utf-8")
    assert card.count("| own, by ") == len(many)


def test_what_is_no_guide_leaves_the_pack_that_was_there(
    model: LanguageModel, folder: Path
) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    with pytest.raises(TextError, match="no tokens"):
        GuidePack.build(model, [("a", "text"), ("b", "")], into=folder)
    with pytest.raises(TextError, match="no tokens"):
        GuidePack.build(model, [("a", "text"), ("b", "")], into=folder / "new")

    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert not (folder / "new").exists()


@pytest.mark.parametrize("kept", [0, 7, 0.5, -1])
def test_a_truncated_guide_is_refused_when_it_is_opened(
    model: LanguageModel, folder: Path, kept: float
) -> None:
    """Mapped into memory, it would end the process where its numbers are missing."""
    path = file_of(folder, "harbour")
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept == 0.5 else int(kept)])
    guide = GuidePack.from_pretrained(folder)["harbour"]

    for read in (lambda: guide.restore(model), lambda: guide.text, lambda: guide.ids):
        with pytest.raises(ArtifactError, match=path.name):
            read()
    path.write_bytes(content)
    assert GuidePack.from_pretrained(folder)["harbour"].text == GUIDES[0][1]


# What cannot be a pack


@pytest.mark.parametrize(
    ("guides", "error", "message"),
    [
        ([], TextError, "there are no guides"),
        ([("a", "")], TextError, "guide 'a' has no tokens"),
        ([("a", "x"), ("a", "y")], TextError, "two guides are called 'a'"),
        ([("", "x")], TextError, "a guide is called ''"),
        (
            [("ok", "x"), ("long", "sand " * 600)],
            CacheLayoutError,
            "guide 'long' has .* at most 512",
        ),
    ],
)
def test_what_is_no_guide_is_refused_before_any_is_read(
    model: LanguageModel,
    guides: list[tuple[str, str]],
    error: type[KVTransferError],
    message: str,
) -> None:
    with counted(model.module) as ran, pytest.raises(error, match=message):
        GuidePack.build(model, guides)
    assert ran == []


def test_a_guide_that_fills_the_model_up_to_one_token_is_read(model: LanguageModel) -> None:
    ids = model.encode("sand " * 600)[:511]
    text = model.decode(ids)
    assert len(model.encode(text)) == 511

    prefix = GuidePack.build(model, [("long", text)])["long"].restore(model)

    score(model, LIVE[:, :1], prefix)
    with pytest.raises(CacheLayoutError, match="513 tokens"):
        score(model, LIVE[:, :2], prefix)


def test_a_name_that_is_not_there_is_answered_with_those_that_are(pack: GuidePack) -> None:
    with pytest.raises(ArtifactError, match="no guide 'tide'") as caught:
        pack["tide"]
    assert "harbour, a/b ö 🦜|, x" in str(caught.value)
    assert "harbour" in pack
    assert "tide" not in pack


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | changes), encoding="utf-8")


def signed(folder: Path, **changes: Any) -> None:
    """An edit with the config's own checksum set right."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    edited(folder, **changes, sha256=shelf.digest(config))


def another_theta(folder: Path) -> None:
    model = shelf.load(folder)["model"]
    model["config"]["rope_parameters"]["rope_theta"] = 5e5
    edited(folder, model=model)


def file_of(folder: Path, name: str) -> Path:
    (entry,) = (each for each in shelf.load(folder)["guides"] if each["name"] == name)
    return folder / "guides" / str(entry["file"])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)


def another_name(folder: Path) -> None:
    entries = shelf.load(folder)["guides"]
    edited(folder, guides=[entry | {"name": "edited"} for entry in entries])


def a_guide_with(**changes: Any) -> Callable[[Path], None]:
    """An edit of a guide in the list, with the list's own checksum set right."""

    def edit(folder: Path) -> None:
        first, *rest = shelf.load(folder)["guides"]
        guides = [first | changes, *rest]
        signed(folder, guides=guides)

    return edit


def another_head(folder: Path) -> None:
    path = file_of(folder, "harbour")
    save_file(load_file(path), path, metadata={"text": "x", "made": '{"how": "found"}'})
    a_guide_with(crc32=zlib.crc32(path.read_bytes()))(folder)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a bit flipped": (lambda f: flip(file_of(f, "harbour")), "has checksum"),
    "truncated": (lambda f: file_of(f, "harbour").write_bytes(b"12345678"), "has checksum"),
    "a file gone": (lambda f: file_of(f, "harbour").unlink(), "is gone"),
    "no config": (lambda f: (f / "config.json").unlink(), "holds no guide pack"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
    "an edited name": (another_name, "has checksum"),
    "words for a number": (a_guide_with(tokens="x"), "tokens 'x' of the guide 'harbour'"),
    "a name that is none": (a_guide_with(name=5), "name 5"),
    "another folder's file": (a_guide_with(file="../../config.json"), "is gone"),
    "another checksum": (a_guide_with(crc32=1), "says 00000001"),
    "an unknown making": (another_head, "head of a guide's file is malformed"),
    "a later format": (
        lambda f: edited(f, format=7),
        "is in format 7; this version reads format 1",
    ),
    "another kind": (lambda f: edited(f, kind="kv_mapping"), "describes a 'kv_mapping'"),
    "another theta": (another_theta, "has checksum"),
    "no guides": (lambda f: signed(f, guides={}), "no list of guides"),
    "no model": (lambda f: signed(f, model={"spec": 1}), "a pack's model is malformed"),
    "no provenance": (lambda f: signed(f, provenance=5), "provenance"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_broken_is_refused_by_name(model: LanguageModel, folder: Path, kind: str) -> None:
    breaks, message = BROKEN[kind]
    breaks(folder)

    with pytest.raises(ArtifactError, match=message) as caught:
        GuidePack.from_pretrained(folder)["harbour"].graft(model)
    assert caught.value.hint


def test_a_bit_flipped_in_the_words_is_refused_before_they_are_told(folder: Path) -> None:
    path = file_of(folder, "harbour")
    held = path.read_bytes()
    where = held.index(dict(GUIDES)["harbour"].encode()[:12])
    path.write_bytes(held[:where] + bytes([held[where] ^ 1]) + held[where + 1 :])
    guide = GuidePack.from_pretrained(folder)["harbour"]

    for ask in (lambda: guide.text, lambda: guide.made, lambda: repr(guide)):
        with pytest.raises(ArtifactError, match="has checksum"):
            ask()


def test_another_models_file_in_a_packs_folder_is_refused(
    tiny: Tiny, model: LanguageModel, folder: Path
) -> None:
    """Its name and checksum are right: the shapes give it away."""
    path = file_of(folder, "harbour")
    tensors = load_file(path)
    tensors["keys.2"] = tensors["keys.2"][:, :1].contiguous()
    save_file(tensors, path)
    entries = shelf.load(folder)["guides"]
    entries[0]["crc32"] = zlib.crc32(path.read_bytes())
    signed(folder, guides=entries)

    with pytest.raises(ArtifactError, match="layer 2: 1 heads"):
        GuidePack.from_pretrained(folder)["harbour"].restore(model)


# From one model to another


@pytest.fixture(scope="module")
def mapping(model: LanguageModel, tiny: Tiny) -> KVMapping:
    target = tiny("llama", seed=3, num_hidden_layers=3, **ROPES["yarn"])
    settings = FitSettings(tokens=512, chunk=64, layers=1)
    return fit(model, target, builtin("fit"), settings).mapping


def test_a_mapped_pack_holds_what_the_mapping_makes_and_says_so(
    model: LanguageModel, tiny: Tiny, mapping: KVMapping, folder: Path, tmp_path: Path
) -> None:
    target = tiny("llama", seed=3, num_hidden_layers=3, **ROPES["yarn"])

    with counted(model.module) as ran, counted(target.module) as ran_too:
        GuidePack.from_pretrained(folder).transferred(mapping).save_pretrained(tmp_path / "to")
    assert ran == ran_too == []

    found = GuidePack.from_pretrained(tmp_path / "to")
    for name, text in GUIDES:
        expected = mapping(prefill(model, model.encode(text)[None]))
        restored = found[name].restore(target)
        pairs = zip(
            (*expected.keys, *expected.values), (*restored.keys, *restored.values), strict=True
        )
        for a, b in pairs:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        assert found[name].made["how"] == "mapped"
        assert restored.approximate == expected.approximate == f"mapped from {model.spec.name}"
        assert found[name].made["source_identity"] == model.spec.identity
    score(target, LIVE, found["harbour"].restore(target))
    with pytest.raises(IncompatibleModels):
        found["harbour"].restore(model)


def test_a_packs_dtype_goes_with_it_unless_another_is_asked_for(
    mapping: KVMapping, pack: GuidePack
) -> None:
    assert pack.transferred(mapping)["x"].prepared.cache.dtype == torch.float32
    half = pack.transferred(mapping, dtype="bfloat16")["x"]
    assert half.prepared.cache.dtype == torch.bfloat16
    with pytest.raises(DeviceError, match="no dtype 'foo'"):
        pack.transferred(mapping, dtype="foo")


def test_an_older_digest_without_added_tokens_is_the_same_tokenizer(
    model: LanguageModel, pack: GuidePack
) -> None:
    ordinary = str(model.spec.tokenizer).partition("+")[0]
    maker = replace(pack.maker, spec=replace(pack.maker.spec, tokenizer=ordinary))

    maker.check(model)
    with pytest.raises(IncompatibleModels, match="tokenizer"):
        replace(maker, spec=replace(maker.spec, tokenizer="f" + ordinary)).check(model)


def test_a_mapping_from_another_model_does_not_move_a_pack(tiny: Tiny, mapping: KVMapping) -> None:
    other = GuidePack.build(tiny("qwen3", seed=5), GUIDES)

    with pytest.raises(IncompatibleModels, match="made by a model with fingerprint"):
        other.transferred(mapping)


def test_a_mapping_with_a_start_needs_its_target(
    model: LanguageModel, tiny: Tiny, pack: GuidePack
) -> None:
    target = tiny("llama", seed=3, num_hidden_layers=3)
    settings = FitSettings(tokens=512, chunk=64, layers=1, start=1)
    begun = fit(model, target, builtin("fit"), settings).mapping

    with pytest.raises(IncompatibleModels, match="starts with 1 layers"):
        pack.transferred(begun)

    found = pack.transferred(begun, target=target)["harbour"].restore(target)
    own = prefill(target, model.encode(dict(GUIDES)["harbour"])[None])
    torch.testing.assert_close(found.keys[1], own.keys[1], atol=1e-5, rtol=1e-5)


# The hub


def test_what_is_neither_a_folder_nor_on_the_hub_is_refused() -> None:
    with pytest.raises(ArtifactError, match="no guide pack at nobody/nothing"):
        GuidePack.from_pretrained("nobody/nothing")


def test_a_hub_that_cannot_be_reached_is_said(pack: GuidePack) -> None:
    with pytest.raises(ArtifactError, match="nobody/nothing cannot be written on the hub"):
        pack.push_to_hub("nobody/nothing")
