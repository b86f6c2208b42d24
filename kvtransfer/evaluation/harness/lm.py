"""lm-eval's model of one condition: a prefix from the source, read on by the target.

Importing this registers it as ``kvtransfer``, and needs the extra ``lm-eval``.
"""

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import TaskError, UnsupportedModel
from kvtransfer.evaluation.harness.contexts import Context, Contexts, require_given
from kvtransfer.evaluation.harness.described import Described
from kvtransfer.evaluation.harness.extra import require_lm_eval
from kvtransfer.evaluation.harness.options import checked_batch_size, require_blind
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.geometry.join import stack
from kvtransfer.hf.call import cache_keyword
from kvtransfer.hf.graft import grafted
from kvtransfer.hf.model import LanguageModel, load
from kvtransfer.hf.run import score

require_lm_eval()

from accelerate.utils.memory import (  # noqa: E402
    clear_device_cache,
    should_reduce_batch_size,
)
from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.models.utils import resolve_max_length  # noqa: E402

LogLikelihood = tuple[float, bool]
"""Of a continuation: its log-likelihood in nats, and whether each token is the likeliest."""


@register_model("kvtransfer")
class KVTransferLM(HFLM):  # type: ignore[misc]  # lm-eval is untyped
    """The target on a prefix that the source has read, for lm-eval.

    >>> from lm_eval import simple_evaluate
    >>> lm = KVTransferLM(source="smollm2-24l", target="smollm2-135m", mapping="…")
    >>> simple_evaluate(lm, tasks=["kvtransfer_guides"], task_manager=manager())

    A context without its last token is read by the source and mapped once for all requests that
    share it; its last token and the continuation are read by the target. So it goes for
    log-likelihoods and generation. A rolling log-likelihood has one token of context in all
    windows but a text's last, and nothing to hide there.

    Args:
        source: Makes the cache: a name, or a model. Not needed for ``own`` and ``none``.
        target: Reads it. Not needed for ``source``.
        mapping: From the one to the other: a folder or a name, or a mapping.
        condition: ``mapped``; ``own``, the target's own cache; ``source``, the source alone;
            ``none``, where all of a context but its last token (and the target's opening) is
            hidden away: the floor; ``raw``, the source's cache as it is; ``zeroed``, ``unrotated``
            and ``shuffled``, controls that should fail.
        device: Both run on.
        dtype: Both run in; as their weights were saved for ``auto``.
        batch_size: Continuations, or texts, that are run at a time; as many as memory allows, up
            to ``max_batch_size``, for ``auto``.
        max_batch_size: See there.
        max_length: Tokens that are read at most, earlier ones being cut off; as many as all models
            that were given can read, so that every condition reads the same, if not given.
        add_bos_token, prefix_token_id, truncation: As lm-eval's ``hf``.
        backend: ``causal``; ``seq2seq`` is refused.

    Raises:
        IncompatibleModels: the condition lacks a model or mapping, or the mapping is for others.
        UnsupportedModel: a model whose cache holds no keys and values per token.
        ValueError: there is no such condition or size.
    """

    def __init__(
        self,
        source: LanguageModel | str | None = None,
        target: LanguageModel | str | None = None,
        mapping: KVMapping | str | None = None,
        condition: str = "mapped",
        *,
        device: str | None = None,
        dtype: str | None = "auto",
        batch_size: int | str | None = 1,
        max_batch_size: int | None = 64,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        truncation: bool = False,
        backend: str = "default",
    ) -> None:
        if backend == "seq2seq":
            raise UnsupportedModel(
                "backend=seq2seq: an encoder keeps no cache that goes on, and none is transferred",
                hint="leave backend out, and name models that only decode",
            )
        # Before anything is loaded.
        require_given(condition, source=source, target=target, mapping=mapping)
        size = checked_batch_size(batch_size)
        if max_length is not None and max_length < 1:
            raise ValueError(f"max_length is {max_length}; at least 1 token is read")
        place, kind = device or "cpu", None if dtype == "auto" else dtype
        ends = [
            load(each, device=place, dtype=kind) if isinstance(each, str) else each
            for each in (source, target)
        ]
        if isinstance(mapping, str):
            mapping = KVMapping.from_pretrained(mapping)
        self._contexts = Contexts.under(condition, source=ends[0], target=ends[1], mapping=mapping)
        self._arm = Described(condition, ends[0], ends[1], mapping)
        reader = self._contexts.reader
        with _unwarned():
            super().__init__(
                pretrained=reader.module,
                backend="causal",  # wrapping it has refused every other
                # It is given a padding token, and the caller's has none.
                tokenizer=copy.deepcopy(reader.tokenizer),
                batch_size=size,
                max_batch_size=max_batch_size or 64,
                add_bos_token=add_bos_token,
                prefix_token_id=prefix_token_id,
                truncation=truncation,
            )
        self._fits = int(self.max_batch_size)  # until memory has said otherwise
        given = [each for each in ends if each is not None]
        self._max_length = max_length or min(
            resolve_max_length(each.module.config, each.tokenizer) for each in given
        )

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> "KVTransferLM":
        """As lm-eval makes one from ``source=…,target=…``."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "KVTransferLM":
        """As lm-eval makes one from its command line.

        Raises:
            ValueError: there is no such argument.
        """
        given = arg_dict | {k: v for k, v in (additional_config or {}).items() if v is not None}
        known = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(
                f"the model kvtransfer takes no {', '.join(unknown)}; it takes {', '.join(known)}"
            )
        for name in ("source", "target", "mapping"):  # a name of digits alone comes as a number
            if name in given:
                given[name] = str(given[name])
        return cls(**given)

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[LogLikelihood]:
        """Answers in the order of the requests; each context is read once."""
        from tqdm import tqdm

        groups: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            kept = tuple(self._cut(context, continuation))
            groups.setdefault(kept, {}).setdefault(tuple(continuation), []).append(index)
        answers: dict[int, LogLikelihood] = {}
        with tqdm(
            total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests"
        ) as bar:
            for ids, endings in groups.items():
                run = partial(self._score, self._contexts(ids))
                # Longest first: memory is found wanting at once, and rows of a batch are alike.
                rows = sorted(endings, key=len, reverse=True)
                found = self._batched(rows, run)
                for ending, answer in zip(rows, found, strict=True):
                    for index in endings[ending]:
                        answers[index] = answer
                        if (asked := requests[index][0]) is not None:
                            self.cache_hook.add_partial("loglikelihood", asked, answer)
                        bar.update()
        return [answers[index] for index in range(len(requests))]

    def _cut(self, context: list[int], continuation: list[int]) -> list[int]:
        """What is left of a context where it and its continuation are too long, as ``hf`` cuts."""
        if not context or not continuation or len(continuation) > self.max_length:
            raise TaskError(
                f"a continuation of {len(continuation)} tokens after a context of {len(context)}, "
                f"where {self.max_length} are read at most",
                hint="both need a token at least, and a continuation has to fit: max_length=…",
            )
        return context[-(self.max_length + 1 - len(continuation)) :]

    def _score(self, context: Context, rows: Sequence[tuple[int, ...]]) -> list[LogLikelihood]:
        """The answers for some continuations of one context, in one batch."""
        reader, read = self._contexts.reader, len(context.live)
        # Filled up to the right, where no scored token can see it.
        longest = max(map(len, rows))
        live = torch.zeros(len(rows), read + longest - 1, dtype=torch.long)
        live[:, :read] = context.live
        for row, ending in zip(live, rows, strict=True):
            row[read : read + len(ending) - 1] = torch.tensor(ending[:-1], dtype=torch.long)
        prefix = None if context.prefix is None else context.prefix.expand(len(rows))
        logits = score(reader, live, prefix, mask=torch.ones_like(live))[:, read - 1 :]
        return [
            _answer(row[: len(ending)], torch.tensor(ending, device=row.device))
            for row, ending in zip(logits, rows, strict=True)
        ]

    def _model_generate(
        self, context: Tensor, max_length: int, stop: list[str], **options: Any
    ) -> Int[Tensor, "b t"]:
        """As ``hf``, on prefixes: prompts in, prompts and what was written after them out."""
        require_blind(options, self.model.generation_config)
        mask = options.pop("attention_mask", torch.ones_like(context))
        prompts = [
            tuple(ids[kept.bool()].long().tolist()) or (self.prefix_token_id,)
            for ids, kept in zip(context, mask, strict=True)
        ]
        new = max_length - context.shape[1]
        read = [self._contexts(prompt) for prompt in prompts]
        # Prompts of one batch have as many live tokens: no padding stands behind a prefix.
        alike: dict[tuple[bool, int], list[int]] = {}
        for index, each in enumerate(read):
            alike.setdefault((each.prefix is None, len(each.live)), []).append(index)
        written: dict[int, Tensor] = {}
        for members in alike.values():
            run = partial(self._write, new=new, stop=stop, options=options)
            found = self._batched([read[index] for index in members], run)
            written |= dict(zip(members, found, strict=True))
        rows = [written[index] for index in range(len(prompts))]
        tail = torch.nn.utils.rnn.pad_sequence(
            rows, batch_first=True, padding_value=self.tokenizer.pad_token_id
        )
        return torch.cat((context.long(), tail.to(context.device)), dim=1)

    def _write(
        self, some: Sequence[Context], *, new: int, stop: list[str], options: Mapping[str, Any]
    ) -> list[Tensor]:
        """What is written after each context, in one batch."""
        live = torch.stack([each.live for each in some]).to(self.device)
        shown, most = torch.ones_like(live), live.shape[1] + new
        prefixes = [each.prefix for each in some if each.prefix is not None]
        if not prefixes:
            out = super()._model_generate(live, most, stop, attention_mask=shown, **options)
            return list(out[:, live.shape[1] :])
        prefix = stack(prefixes)
        shown = torch.cat((prefix.mask.to(shown), shown), dim=1)
        module: Any = self.model
        with grafted(self._contexts.reader, prefix) as cache:
            held = {cache_keyword(module.forward): cache}
            out = super()._model_generate(live, most, stop, attention_mask=shown, **held, **options)
        return list(out[:, live.shape[1] :])

    def _batched(self, rows: Sequence[Any], run: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        """``run`` over rows, so many at a time; half as many where memory runs out, for auto."""
        done: list[Any] = []
        while len(done) < len(rows):
            size = self._fits if self.batch_size == "auto" else int(self.batch_size)
            try:
                done += run(rows[len(done) : len(done) + size])
            except RuntimeError as error:
                if self.batch_size != "auto" or size == 1 or not should_reduce_batch_size(error):
                    raise
                self._fits = size // 2
                clear_device_cache(garbage_collection=True)
        return done

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """How many ``hf`` is to hand over at a time for ``auto``; halved here where need be."""
        return int(self.max_batch_size)

    @property
    def identity(self) -> str:
        """A digest of everything that answers depend on: condition, models, mapping, sizes."""
        sizes = [self.max_length, self.add_bos_token, self.custom_prefix_token_id, self.truncation]
        return self._arm.identity(*sizes)

    def set_cache_hook(self, cache_hook: Any) -> None:
        """Keep the answers of a ``--use_cache`` database apart: lm-eval's key names no model.

        Each :attr:`identity` has a table of its own there.
        """
        if (held := cache_hook.dbdict) is not None:
            held.tablename = f"kvtransfer-{self.identity}"
            held.conn.execute(
                f'CREATE TABLE IF NOT EXISTS "{held.tablename}" (key TEXT PRIMARY KEY, value BLOB)'
            )
            held.conn.commit()
        super().set_cache_hook(cache_hook)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes beside its results."""
        reader = self._contexts.reader
        return {
            "model_num_parameters": reader.module.num_parameters(),
            "model_dtype": str(reader.dtype),
            "model_revision": reader.revision or "",
            "model_sha": reader.revision or "",
        } | self._arm.to_dict()


def _answer(logits: Float[Tensor, "s v"], ending: Int[Tensor, " s"]) -> LogLikelihood:
    sure = logits.float().log_softmax(-1)
    likely = sure.gather(-1, ending[:, None]).sum()
    return float(likely), bool((logits.argmax(-1) == ending).all())


@contextmanager
def _unwarned() -> Iterator[None]:
    """Without lm-eval's advice against models that were loaded outside: ours all are."""
    logger = logging.getLogger("lm_eval.models.huggingface")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
