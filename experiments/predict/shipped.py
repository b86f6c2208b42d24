"""Record with the mappings that ship what a gate needs to judge them: they were fitted before.

    python -m experiments.predict.shipped

The cosines are of prose that no mapping here was fitted on (builtin, held out), in windows as long
as those of their fits, and of the maps as they are stored. Only config.json and README.md are
written; the tensors, and so their checksum, stay.
"""

import json
from itertools import islice
from pathlib import Path

from kvtransfer import KVMapping, load
from kvtransfer.artifact import CARD, CONFIG
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.gate import Gate
from kvtransfer.fitting.seen import LOOKED_AT, seen
from kvtransfer.fitting.storage import card
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.quiet import quiet
from kvtransfer.report import to_json

MAPPINGS = Path(__file__).parents[2] / "mappings"


def main() -> None:
    """Measure each, and write it down."""
    quiet()
    for folder in sorted(path.parent for path in MAPPINGS.glob("*/config.json")):
        mapping = KVMapping.from_pretrained(folder)
        ends = mapping.source, mapping.target
        source, target = (load(end.name, dtype=end.dtype) for end in ends)
        mapping.check_ends(source.spec, target.spec)
        windows = chunks(
            builtin("heldout"),
            target.encode,
            length=int(mapping.settings["chunk"]),
            opening=target.opening,
        )
        found = seen(mapping, source, target, list(islice(windows, LOOKED_AT)))
        path = folder / CONFIG
        config = json.loads(path.read_text(encoding="utf-8"))
        config["quality"] |= found
        path.write_text(to_json(config), encoding="utf-8")
        (folder / CARD).write_text(card(config), encoding="utf-8")
        print(folder.name, found, Gate().of(KVMapping.from_pretrained(folder)).said(), flush=True)


if __name__ == "__main__":
    main()
