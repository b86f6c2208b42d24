"""Compare two models by name: from their configs and tokenizers alone, or with their weights."""

import hashlib
from dataclasses import replace

from kvtransfer.geometry.compat import CompatReport, compare
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.hf.locate import locate
from kvtransfer.hf.model import load
from kvtransfer.hf.spec import read_spec


def check(source: str, target: str, *, weights: bool = False) -> CompatReport:
    """Can ``source``'s cache be used by ``target``?

    Args:
        source: The model that makes the cache: a folder, hub id, ``.gguf`` file or zoo alias.
        target: The model that is to read it.
        weights: Load both: their fingerprints are compared, and what positions do to their keys
            is measured.

    Raises:
        ModelNotFound: one of them cannot be found.
        UnsupportedModel: one of them is no decoder; or, of loaded weights, its cache cannot be
            read, or its rotation is not what its config says.
    """
    if weights:
        specs = load(source).spec, load(target).spec
        return compare(*specs)
    specs = read_spec(source), read_spec(target)
    places = locate(source), locate(target)
    if places[0].path == places[1].path and places[0].gguf_file == places[1].gguf_file:
        specs = _same_weights(*specs, place=f"{places[0].path}/{places[0].gguf_file}")
    return compare(*specs)


def _same_weights(
    source: ModelSpec, target: ModelSpec, *, place: str
) -> tuple[ModelSpec, ModelSpec]:
    """One place holds one set of weights, so they are the same without being read."""
    same = hashlib.sha256(place.encode()).hexdigest()[:16]
    return replace(source, weights=same), replace(target, weights=same)
