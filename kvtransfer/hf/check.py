"""Compare two models by name, from their configs and tokenizers alone."""

import hashlib
from dataclasses import replace

from kvtransfer.geometry.compat import CompatReport, compare
from kvtransfer.hf.locate import locate
from kvtransfer.hf.spec import read_spec


def check(source: str, target: str) -> CompatReport:
    """Can ``source``'s cache be used by ``target``?

    Args:
        source: The model that makes the cache: a folder, hub id, ``.gguf`` file or zoo alias.
        target: The model that is to read it.

    Raises:
        ModelNotFound: one of them cannot be found.
        UnsupportedModel: one of them is no decoder.
    """
    specs = read_spec(source), read_spec(target)
    places = locate(source), locate(target)
    if places[0].path == places[1].path and places[0].gguf_file == places[1].gguf_file:
        # One place holds one set of weights, so they are the same without being read.
        place = f"{places[0].path}/{places[0].gguf_file}"
        same = hashlib.sha256(place.encode()).hexdigest()[:16]
        specs = replace(specs[0], weights=same), replace(specs[1], weights=same)
    return compare(*specs)
