"""One folder of packs, and nothing outside it."""

from pathlib import Path

from kvtransfer import artifact
from kvtransfer.errors import ArtifactError, GuideRefused
from kvtransfer.guides import shelf
from kvtransfer.guides.pack import GuidePack
from kvtransfer.guides.packed import PackedGuide
from kvtransfer.serving.asked import Asked

Mark = tuple[int, int, int]
"""Tells one save of a pack from the next: a save puts a new config.json in the old one's place."""


class Library:
    """The folder that an operator has chosen, each pack a folder in it."""

    def __init__(self, folder: str | Path) -> None:
        """
        Args:
            folder: That holds the packs.

        Raises:
            ArtifactError: there is no such folder.
        """
        self.folder = Path(folder).expanduser().resolve()
        if not self.folder.is_dir():
            raise ArtifactError(
                f"no folder of packs at {folder}",
                hint="make it, and put packs in it: kvtransfer pack build … --out FOLDER/NAME",
            )

    def guide(self, asked: Asked) -> PackedGuide:
        """A guide, opened anew; its numbers are read when they are asked for.

        Raises:
            GuideRefused: there is no such pack or guide, or it lies outside the folder.
            ArtifactError: the pack is malformed.
        """
        place = self._place(asked.pack)
        guides = place / shelf.GUIDES
        for part in (guides, *guides.glob("*")):
            self._require_inside(part, asked.pack)
        pack = GuidePack.from_pretrained(place)
        if asked.guide not in pack:
            raise GuideRefused(f"the pack {asked.pack!r} has no guide {asked.guide[:100]!r}")
        return pack[asked.guide]

    def mark(self, pack: str) -> Mark:
        """What changes whenever the pack is saved anew.

        Raises:
            GuideRefused: there is no such pack.
        """
        found = (self._place(pack) / artifact.CONFIG).stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _place(self, pack: str) -> Path:
        """The folder of a pack that is there."""
        place = self.folder / pack
        config = place / artifact.CONFIG
        if not config.is_file():
            raise GuideRefused(f"there is no pack {pack!r}")
        self._require_inside(config, pack)
        return place

    def _require_inside(self, part: Path, pack: str) -> None:
        """Raise GuideRefused if a part of a pack is elsewhere, once all links are followed."""
        if not part.resolve().is_relative_to(self.folder):
            raise GuideRefused(
                f"the pack {pack!r} leads out of the folder of packs",
                hint="copy it there; links to other places are not followed",
            )
