"""The card of a pack: what a person reads who finds the folder."""

from collections.abc import Sequence

from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.guides.packed import PackedGuide


def row_of(guide: PackedGuide) -> str:
    """A guide's row in the card's table."""
    name = guide.name.replace("|", "\\|").replace("\n", " ")
    return f"| {name} | {guide.tokens} | {guide.described} |"


def card(spec: ModelSpec, rows: Sequence[str]) -> str:
    """The card, in markdown.

    Args:
        spec: Of the model that can read the pack.
        rows: One a guide, by :func:`row_of`.
    """
    table = "\n".join(rows)
    return (
        f"# Guide pack for {spec.name}\n\n"
        f"The KV caches of {len(rows)} texts, for {spec.name} (weights and settings "
        f"{spec.identity}, {spec.dtype}) and for no other model. Made by kvtransfer.\n\n"
        f"| guide | tokens | made |\n|---|---|---|\n{table}\n\n"
        "```python\n"
        "from kvtransfer import GuidePack, load\n\n"
        f'model = load("{spec.name}", dtype="{spec.dtype}")\n'
        'prefix = GuidePack.from_pretrained("…")["…"].restore(model)  # no forward pass\n'
        "```\n"
    )
