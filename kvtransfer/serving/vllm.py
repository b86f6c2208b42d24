"""A KV connector for vLLM 0.32: guides out of packs, into the engine's paged cache.

vLLM finds it by ``--kv-transfer-config`` (docs/serving.md), and builds it twice. In the scheduler
it says how many tokens of a request it has; in the worker it writes them, through the writer that
the engine's attention has for its own keys and values, so that it knows no layout of any backend.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import __version__
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger

from kvtransfer.errors import ArtifactError, UnsupportedModel
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.hf.saved import saved_spec
from kvtransfer.serving.asked import Asked
from kvtransfer.serving.content import Content
from kvtransfer.serving.desk import Desk
from kvtransfer.serving.library import Library

log = init_logger(f"vllm.{__name__}")

VERSION = "0.32."
"""The interface is marked experimental: a connector is written for one version."""

LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Tokens ``start`` to ``end`` of a guide, into these blocks of a request."""

    asked: Asked
    digest: str
    start: int
    end: int
    blocks: list[int]

    def touched(self, size: int) -> set[int]:
        """The blocks that are written to, where one holds ``size`` tokens."""
        return set(self.blocks[self.start // size : -(-self.end // size)])


class Loads(KVConnectorMetadata):  # type: ignore[misc]  # vllm lives in an environment of its own
    """What the worker is to write before a step."""

    def __init__(self, loads: list[Load]) -> None:
        self.loads = loads


class GuideConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Hands guides to the engine; each side of it is one of the two halves below.

    Raises:
        ArtifactError: the server was not told of a folder of packs.
        UnsupportedModel: the model, or how it is run, is not one that guides can be written for.
        ModelNotFound: the model's files are broken.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        folder = vllm_config.kv_transfer_config.get_from_extra_config("packs", None)
        if not isinstance(folder, str):
            raise ArtifactError(
                f"kv_connector_extra_config has packs {folder!r}",
                hint='name the folder that holds them: {"packs": "/srv/packs"}',
            )
        library = Library(folder)
        self._size = int(vllm_config.cache_config.block_size)
        self._library = library
        self._pending: list[Load] = []
        self._loading: dict[str, set[int]] = {}
        self._failed: set[int] = set()
        if role == KVConnectorRole.SCHEDULER:
            reader = reader_of(vllm_config)
            self._desk = Desk(library, reader)
            log.info("guides out of %s for %s (%s)", library.folder, reader.name, reader.identity)

    # The scheduler's half

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens of the request's guide come after those that the engine has itself."""
        offer = self._desk.decide(
            request.request_id,
            request.kv_transfer_params,
            request.prompt_token_ids,
            request.cache_salt,
            unfit=_unfit(request),
        )
        return (0 if offer is None else max(0, len(offer.ids) - num_computed_tokens)), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The engine has made room for that many of them: have them written before the step."""
        if not num_external_tokens:
            return
        offer = self._desk.take(request.request_id, num_external_tokens)
        load = Load(
            asked=offer.asked,
            digest=offer.digest,
            start=len(offer.ids) - num_external_tokens,
            end=len(offer.ids),
            blocks=list(blocks.get_block_ids()[0]),
        )
        self._pending.append(load)
        self._loading[request.request_id] = load.touched(self._size)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """What the worker is told; it travels to another process."""
        loads, self._pending = self._pending, []
        return Loads(loads)

    def update_connector_output(self, connector_output: Any) -> None:
        """Learn which loads failed. The engine reads those tokens itself."""
        failed = connector_output.invalid_block_ids or set()
        for request, touched in self._loading.items():
            if touched & failed:
                self._desk.fail(request)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Tell the client what became of its guide, as ``kv_transfer_params`` of the response."""
        self._loading.pop(request.request_id, None)
        return False, self._desk.leave(request.request_id)

    # The worker's half

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Write what the scheduler asked for, before the model's forward pass."""
        for load in self._get_connector_metadata().loads:
            try:
                self._write(load, forward_context.no_compile_layers)
            # Whatever it is, it must not end the engine: the tokens can be computed.
            except Exception as error:
                log.error("a guide could not be loaded, the engine reads it itself: %s", error)
                self._failed |= load.touched(self._size)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that were not written since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: all layers are written before the first is run."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: packs are built beforehand."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def _write(self, load: Load, layers: dict[str, Any]) -> None:
        content = Content.of(self._library.guide(load.asked))
        if content.digest != load.digest:
            raise ArtifactError(
                f"the guide {load.asked.guide!r} of {load.asked.pack!r} changed since the request "
                "was matched with it"
            )
        cache = content.prepared.cache
        caching = {int(LAYER.findall(name)[-1]): layer for name, layer in _caching(layers)}
        if sorted(caching) != list(range(len(cache))):
            raise UnsupportedModel(
                f"the engine caches layers {sorted(caching)}, the guide has {len(cache)}"
            )
        positions = torch.arange(load.start, load.end)
        blocks = torch.tensor(load.blocks)
        slots = blocks[positions // self._size] * self._size + positions % self._size
        for index, layer in caching.items():
            keys, values = (
                block[0, :, load.start : load.end]
                .transpose(0, 1)
                .contiguous()
                .to(layer.kv_cache.device)
                for block in cache[index]
            )
            where = slots.to(layer.kv_cache.device)
            layer.impl.do_kv_cache_update(layer, keys, values, layer.kv_cache, where)


def _caching(layers: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and layers of those that have a cache."""
    for name, layer in layers.items():
        if getattr(layer, "kv_cache", None) is not None:
            yield name, layer


def _unfit(request: Any) -> str | None:
    """What the request changes of what the model computes, or hides of what it reads."""
    if request.lora_request is not None:
        return "an adapter"
    if request.mm_features:
        return "images or sound"
    return "embeddings" if request.prompt_embeds is not None else None


def reader_of(config: Any) -> ModelSpec:
    """The model that the engine runs, told from the files that it loads.

    Raises:
        UnsupportedModel: it is run in a way that guides are not written for.
        ModelNotFound: its files are broken.
    """
    for wrong, instead in _objections(config):
        raise UnsupportedModel(f"guides are not served where {wrong}", hint=instead)
    model = config.model_config
    spec = saved_spec(
        model.model, revision=model.revision, dtype=str(model.dtype).removeprefix("torch.")
    )
    if kinds := {layer.kind for layer in spec.layers} - {"full"}:
        raise UnsupportedModel(
            f"guides are not served where layers are {' and '.join(sorted(kinds))}",
            hint="only layers that see every token are written to",
        )
    return spec


def _objections(config: Any) -> Iterator[tuple[str, str]]:
    """What of an engine's settings no guide was tried with, and what to do about it."""
    model, parallel = config.model_config, config.parallel_config
    if not __version__.startswith(VERSION):
        yield f"vLLM is {__version__}", f"this connector is written for {VERSION}x"
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        yield (
            "a failed load ends the request",
            'set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
        )
    if model.hf_overrides or model.hf_config_path:
        yield "the model's config is overridden", "save the model with that config"
    if model.quantization is not None:
        yield f"weights are quantised ({model.quantization})", "serve the model that read the pack"
    if config.load_config.load_format not in ("auto", "safetensors"):
        yield f"weights are loaded as {config.load_config.load_format}", "serve safetensors"
    if config.cache_config.cache_dtype != "auto":
        yield (
            f"the cache is in {config.cache_config.cache_dtype}",
            "leave --kv-cache-dtype at auto",
        )
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")
    if any(getattr(parallel, size) > 1 for size in (*sizes, "decode_context_parallel_size")):
        yield "a model is spread over several workers", "run one worker a replica"
    if config.speculative_config is not None:
        yield "a second model speculates", "leave speculation out"
    if config.weight_transfer_config is not None:
        yield "weights are exchanged while the engine runs", "leave the transfer of weights out"
