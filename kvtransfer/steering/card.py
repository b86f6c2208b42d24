"""What a person reads in the folder of a steering vector."""

from collections.abc import Mapping
from typing import Any

from kvtransfer.geometry.spec import ModelSpec


def card(config: Mapping[str, Any], norms: tuple[float, float]) -> str:
    """The README of a saved vector.

    Args:
        config: As it is saved.
        norms: Length of the keys and of the values.
    """
    spec, made_by = ModelSpec.from_dict(config["model"]), config["provenance"]
    rows = {
        **config["made"],
        "token": f"{config['at']} (from a prompt's end)",
        "length of keys, values": f"{norms[0]:.4g}, {norms[1]:.4g}",
        "weights": f"`{spec.identity}`",
        "made by": f"`{made_by.get('command', '')}`",
        "commit": made_by.get("commit", ""),
        "date": made_by.get("date", ""),
    }
    lines = [
        f"# A steering vector for the KV caches of {spec.name}",
        "",
        f"What to add to the keys and values of one token in {len(spec.layers)} layers "
        "(cache steering, arXiv:2507.08799).",
        "",
        "```python",
        "from kvtransfer import CacheVector, Steer, prefill",
        "",
        'steer = Steer(CacheVector.from_pretrained("this folder"), 2.0)',
        "steered = steer(prefill(model, ids))  # once; decoding on it costs nothing more",
        "```",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
        *(f"**Note.** {note}\n" for note in config["notes"]),
        "How much is too much depends on model and prompt: `kvtransfer steer sweep` shows it.",
        "",
    ]
    return "\n".join(lines)
