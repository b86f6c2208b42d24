"""The exactness ladder: is a hidden guide read as if it stood in the prompt?

The same ids are read in five ways, from one that uses no cache to one whose guide comes out of a
saved pack, and compared rung by rung: token ids, first logits, logits on the same history, greedy
text, drawn text.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, DeviceError, TextError, UnsupportedModel
from kvtransfer.guides.arms import Arm, CachedArm, RecomputingArm
from kvtransfer.guides.chat import split_chat
from kvtransfer.guides.climb import Comparison, climb, numbers
from kvtransfer.guides.guide import Guide, Guides, guides_of
from kvtransfer.guides.ladder_report import Climb, LadderReport
from kvtransfer.guides.pack import GuidePack
from kvtransfer.guides.packed import PackedGuide
from kvtransfer.guides.seam import Joint, split
from kvtransfer.hf.fits import check_room, check_tables
from kvtransfer.hf.model import DTYPES, LanguageModel, require_model
from kvtransfer.hf.reader import Reader
from kvtransfer.hf.run import prefill
from kvtransfer.hf.variants import attending, in_dtype
from kvtransfer.report import Provenance

ATTENTION = ("eager", "sdpa")
"""Implementations that every model has, mostly."""

NO_PROMPT = "\n"
"""What follows a guide that comes without a question."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prompt:
    """A guide and what follows it, in the ids of their joint text."""

    name: str
    hidden: Int[Tensor, " p"]
    """The guide's, an opening before them."""
    live: Int[Tensor, " s"]
    joint: Joint

    @classmethod
    def of(cls, model: LanguageModel, guide: Guide, *, chat: bool = False) -> "Prompt":
        """The guide with its first question; where no token ends between, the seam moves back.

        Raises:
            SeamError: there is no place for a seam; or, of a chat, the template does not keep the
                guide as system message.
        """
        asked = guide.items[0].prompt if guide.items else NO_PROMPT
        put = split_chat if chat else split
        joint = put(model.tokenizer, guide.text, asked, seam="back-off")
        hidden = model.opened(joint.hidden)
        return cls(name=guide.name, hidden=hidden, live=joint.live, joint=joint)


def verify(
    model: LanguageModel,
    guides: Guides,
    *,
    tokens: int = 400,
    seeds: int = 4,
    attention: Sequence[str] = ATTENTION,
    dtypes: Sequence[str] | None = None,
    chat: bool = False,
    recompute: int = 8,
    top_p: float = 0.95,
    progress: Callable[[], None] = lambda: None,
) -> LadderReport:
    """Climb the ladder with every guide, per attention implementation and dtype.

    Args:
        model: To be verified. Its attention implementation is changed and put back; another
            dtype is that of a copy.
        guides: Each is hidden, and its first question asked; names and texts (pairs, or a dict) are
            guides without one.
        tokens: Written after each prompt. The end of sequence does not stop them.
        seeds: Drawn runs beside the greedy one: seeds 0 to seeds − 1.
        attention: Implementations, by transformers' names.
        dtypes: Names from DTYPES; that of ``model`` if not given.
        chat: Put the guide as system message and the question as the user's, by the chat template.
        recompute: Steps at which the whole sequence is read again (arm A), spread over all of
            them. All steps show exactly where A parts; the time grows with their number.
        top_p: Share of all chance in the nucleus that is drawn from.
        progress: Called after every step of every guide.

    Raises:
        TextError: there are no guides, or two have one name.
        SeamError: a guide and its question share no token boundary; or the chat template does not
            keep a guide as it is.
        CacheLayoutError: guide, question and tokens are more than the model has positions for, or
            its table changes on the way; the guide is named.
        UnsupportedModel: nothing is left to verify. An attention implementation that the model
            does not have, and a dtype in which its logits are not finite or that its device lacks,
            are left out, and the report says why. Or logits are not finite only where a guide is
            hidden.
    """
    require_model(model)
    _check_numbers(tokens, seeds, recompute, top_p)
    if not attention:
        raise ValueError("no attention implementation: name one at least, such as sdpa")
    names = tuple(dtypes or (str(model.dtype).removeprefix("torch."),))
    if unknown := set(names) - DTYPES.keys():
        raise ValueError(f"no dtype {', '.join(sorted(unknown))}; there are {', '.join(DTYPES)}")
    prompts = [Prompt.of(model, guide, chat=chat) for guide in guides_of(guides)]
    if not prompts:
        raise TextError("there are no guides to verify with", hint="give at least one")
    for prompt in prompts:
        _check_length(model, prompt, tokens)
    climbs: list[Climb] = []
    left_out: list[str] = []
    steps = spread(recompute, tokens)

    def compared(variant: LanguageModel, pack: GuidePack) -> Iterator[Comparison]:
        for prompt in prompts:
            packed = pack[prompt.name]
            yield from climb(
                arms(variant, prompt, packed, steps=steps, tokens=tokens, seeds=seeds),
                guide=prompt.name,
                hidden=len(prompt.hidden),
                tokens=tokens,
                seeds=tuple(range(seeds)),
                top_p=top_p,
                progress=progress,
            )

    for name in names:
        try:
            variant = in_dtype(model, name)
        except (DeviceError, UnsupportedModel) as error:
            left_out.append(f"{name}: {error.message}")
            continue
        for implementation in attention:
            with ExitStack() as stack:
                try:
                    stack.enter_context(attending(variant, implementation))
                    _require_finite(variant, prompts)
                    pack = stack.enter_context(reopened(variant, prompts))
                except UnsupportedModel as error:
                    left_out.append(f"{name}, {implementation} attention: {error.message}")
                    continue
                # What fails from here on is no shortcoming of the model: nothing hides it.
                found = list(compared(variant, pack))
            climbs.append(Climb.of(found, dtype=DTYPES[name], attention=implementation))
    if not climbs:
        raise UnsupportedModel(
            "; ".join(left_out),
            hint="choose others (--attention, --dtypes); the model comes with "
            f"{model.module.config._attn_implementation}, in {model.spec.dtype}",
        )
    return LadderReport(
        model=model.spec.name,
        climbs=tuple(climbs),
        left_out=tuple(left_out),
        guides=tuple(prompt.name for prompt in prompts),
        tokens=tokens,
        seeds=seeds,
        recomputed=len(steps),
        top_p=top_p,
        spelt=_spelt(model, climbs),
        notes=tuple(
            f"{prompt.name}: {prompt.joint.moved}" for prompt in prompts if prompt.joint.moved
        ),
        provenance=Provenance.here(seed=0),
    )


def arms(
    model: LanguageModel,
    prompt: Prompt,
    packed: PackedGuide,
    *,
    steps: Sequence[int],
    tokens: int,
    seeds: int,
) -> dict[str, Arm]:
    """The five of them, each with the prompt read, and all with the same numbers to draw by."""
    hidden, live = prompt.hidden, prompt.live
    whole = torch.cat((hidden, live))
    uniform = numbers(tuple(range(seeds)), tokens)
    nothing = Reader.over(model, None), Reader.over(model, None)
    return {
        "A": RecomputingArm.of(model, whole, steps=steps, uniform=uniform),
        "B": CachedArm.over(nothing[0], whole, uniform=uniform),
        "B2": CachedArm.over(nothing[1], hidden, live, uniform=uniform),
        "D": CachedArm.on(model, hidden, prefill(model, hidden[None]), live, uniform=uniform),
        "P": CachedArm.on(model, packed.ids, packed.restore(model), live, uniform=uniform),
    }


def spread(count: int, tokens: int) -> list[int]:
    """So many of the steps, the first and the last among them."""
    if count >= tokens:
        return list(range(tokens))
    return sorted({round(i * (tokens - 1) / max(count - 1, 1)) for i in range(count)})


@contextmanager
def reopened(model: LanguageModel, prompts: Sequence[Prompt]) -> Iterator[GuidePack]:
    """The prompts' guides, in a pack that was saved and opened again; the folder goes with it.

    Raises:
        UnsupportedModel: the model's keys and values are not finite.
    """
    texts = [(each.name, each.joint.hidden_text) for each in prompts]
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = GuidePack.build(model, texts, into=Path(folder) / "pack")
        except CacheLayoutError as error:  # of room there is enough: that was looked at before
            raise UnsupportedModel(error.message, hint=error.hint) from error
        yield made


def _require_finite(model: LanguageModel, prompts: Sequence[Prompt]) -> None:
    """Raise UnsupportedModel unless the model alone, with nothing hidden, reads the prompts."""
    for prompt in prompts:
        whole = torch.cat((prompt.hidden, prompt.live))
        RecomputingArm.of(model, whole, steps=(), uniform=numbers((), 1))


def _check_numbers(tokens: int, seeds: int, recompute: int, top_p: float) -> None:
    if tokens < 1 or seeds < 0 or recompute < 1:
        raise ValueError(
            f"{tokens} tokens, {seeds} seeds, {recompute} recomputed steps: at least 1, 0 and 1 "
            "are needed"
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"top-p is a share above 0, up to 1, not {top_p}")


def _check_length(model: LanguageModel, prompt: Prompt, tokens: int) -> None:
    """Raise CacheLayoutError, naming the guide, unless what is read and written has room."""
    hidden, live = len(prompt.hidden), len(prompt.live)
    try:
        check_room(model, hidden + live + tokens)
        check_tables(model, None, hidden, hidden + live + tokens)
    except CacheLayoutError as error:
        raise CacheLayoutError(
            f"the guide {prompt.name!r} ({hidden} tokens), what is asked after it ({live}) and "
            f"{tokens} that are written: {error.message}",
            hint="write fewer (--tokens), or shorten the guide",
        ) from error


def _spelt(model: LanguageModel, climbs: Iterable[Climb]) -> dict[int, str]:
    """The text of each token at which runs part."""
    tokens = {token for climb in climbs for one, _ in climb.partings() for token in one.tokens}
    return {token: str(model.tokenizer.decode([token])) for token in sorted(tokens)}
