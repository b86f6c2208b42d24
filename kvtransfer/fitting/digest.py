"""Tell one mapping from another by what it computes."""

import hashlib
import json

from kvtransfer.fitting.mapping import KVMapping


def digest(mapping: KVMapping) -> str:
    """A digest of the maps, what they read, and the models at both ends.

    Where a mapping lies, and what it is called, has no part in it; every number has.
    """
    told = {
        "source": mapping.source.identity,
        "target": mapping.target.identity,
        "features": mapping.features,
        "start": mapping.start,
        "layers": [[list(layer.sources), list(layer.before)] for layer in mapping.layers],
    }
    found = hashlib.sha256(json.dumps(told).encode())
    for group, layers in (("maps", mapping.layers), ("shuffled", mapping.shuffled)):
        for index, layer in enumerate(layers):
            for name, numbers in sorted(layer.pack(f"{group}.{index}", "float32").items()):
                found.update(f"{name}{tuple(numbers.shape)}".encode())
                found.update(numbers.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]
