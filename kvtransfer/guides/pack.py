"""Guides that were prepared once, by name: restored without a forward pass of any of them."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from kvtransfer.errors import ArtifactError, require
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.guides import durable, shelf
from kvtransfer.guides.card import card, row_of
from kvtransfer.guides.guide import Guides
from kvtransfer.guides.maker import Maker
from kvtransfer.guides.packed import PackedGuide, Prepared, Told
from kvtransfer.guides.prepare import Progress, cross, prepare, reader_of
from kvtransfer.hf.model import LanguageModel, usable_device
from kvtransfer.hf.repository import snapshot, upload
from kvtransfer.report import Provenance, to_json


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GuidePack(Mapping[str, PackedGuide]):
    """Guides and their caches by name, and the identity of the model that can read them.

    >>> pack = GuidePack.build(model, [("harbour", "The tide comes in twice a day, …")])
    >>> pack.save_pretrained("pack")
    >>> prefix = GuidePack.from_pretrained("pack")["harbour"].restore(model)
    """

    maker: Maker
    guides: Mapping[str, PackedGuide]
    provenance: Mapping[str, Any]

    def __getitem__(self, name: str) -> PackedGuide:
        """The guide of that name.

        Raises:
            ArtifactError: there is none.
        """
        if name not in self.guides:
            held = ", ".join(self.guides) or "none at all"
            raise ArtifactError(f"this pack has no guide {name!r}", hint=f"it holds {held}")
        return self.guides[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.guides)

    def __len__(self) -> int:
        return len(self.guides)

    def __contains__(self, name: object) -> bool:
        return name in self.guides

    def get(self, name: str, default: Any = None) -> Any:
        """The guide of that name, or ``default``."""
        return self.guides.get(name, default)

    def __repr__(self) -> str:
        return f"GuidePack({len(self)} guides for {self.maker.spec.name}, {self.maker.spec.dtype})"

    @classmethod
    def build(
        cls,
        model: LanguageModel,
        guides: Guides,
        *,
        chat: bool = False,
        into: str | Path | None = None,
        progress: Progress = lambda tokens: None,
    ) -> "GuidePack":
        """Read every guide once, from position 0, with the tokenizer's opening before it.

        Args:
            model: Reads them, and can read the pack.
            guides: Guides, or names and texts: pairs, or a dict.
            chat: Read each as the system message of a conversation, by the chat template.
            into: A folder that each guide is written to as it is read, so that no more than one is
                in memory; what is returned lies there. None keeps all of them in memory.
            progress: Told the number of tokens after each guide.

        Raises:
            TextError: there are none, two have one name, or one has no tokens.
            CacheLayoutError: one is longer than the model's positions.
            SeamError: the chat template does not keep a guide as system message.
            WrongKind: these are no guides, or there is no model.
            ArtifactError: ``into`` cannot be written, or holds something that is no pack.
        """
        maker = Maker.of(model)
        made = prepare(model, maker, guides, chat=chat, progress=progress)
        return cls._of(maker, made, into)

    def transferred(
        self,
        mapping: KVMapping,
        *,
        target: LanguageModel | None = None,
        dtype: str | None = None,
        device: str = "cpu",
        into: str | Path | None = None,
        progress: Progress = lambda tokens: None,
    ) -> "GuidePack":
        """The same guides for the mapping's target; neither model reads them.

        Args:
            mapping: From the model of this pack.
            target: The model that the mapping goes to; needed only where the mapping starts with
                layers of it.
            dtype: That the pack is to be read in, where no ``target`` says it; None for this
                pack's own.
            device: Where maps are computed, where no ``target`` says it.
            into: As of :meth:`build`.
            progress: Told the number of tokens after each guide.

        Raises:
            IncompatibleModels: the mapping is from another model, to another one than ``target``,
                or needs it.
            CacheLayoutError: the target cuts text into other tokens.
            DeviceError: there is no such dtype, or no such device.
            WrongKind: this is no mapping, or no model.
            ArtifactError: as :meth:`build`.
        """
        opens = "KVMapping.from_pretrained(name) opens one"
        require("mapping", mapping, KVMapping, "a KVMapping", hint=opens)
        place = usable_device(device, "float32")
        maker = reader_of(mapping, target, dtype or self.maker.spec.dtype)
        guides = self.guides.values()
        made = cross(guides, mapping, maker, target, device=place, progress=progress)
        return self._of(maker, made, into)

    @classmethod
    def _of(
        cls, maker: Maker, guides: Iterable[PackedGuide], into: str | Path | None
    ) -> "GuidePack":
        """The pack of guides that are made when they are asked for, in memory or in a folder."""
        empty = cls(maker=maker, guides={}, provenance=Provenance.here(seed=0).to_dict())
        if into is None:
            return replace(empty, guides={each.name: each for each in guides})
        empty._write(into, guides)
        return cls.from_pretrained(into)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the pack as a folder, replacing a pack that was there in one step.

        Raises:
            ArtifactError: the place cannot be written, or holds something that is no pack.
        """
        self._write(folder, self.guides.values())

    def _write(self, folder: str | Path, guides: Iterable[PackedGuide]) -> None:
        """Write these guides as a pack of this one's model; they are taken one at a time."""
        rows: list[str] = []

        def volume(guide: PackedGuide) -> shelf.Volume:
            rows.append(row_of(guide))
            return shelf.Volume(
                name=guide.name, tokens=guide.tokens, told=guide.head(), tensors=guide.tensors()
            )

        head = {"model": self.maker.to_dict(), "provenance": dict(self.provenance)}
        place = Path(folder).expanduser()
        shelf.save(place, head, map(volume, guides), lambda: card(self.maker.spec, rows))

    @classmethod
    def from_pretrained(cls, name: str | Path, *, revision: str | None = None) -> "GuidePack":
        """Open a pack in a folder or on the hub. A guide's numbers are read when they are needed.

        Args:
            name: A folder, or the id of a repository on the hub.
            revision: Of the repository.

        Raises:
            ArtifactError: it is missing, malformed, or of another format.
        """
        folder = Path(name).expanduser()
        if not folder.is_dir():
            folder = snapshot(str(name), revision=revision, what="guide pack")
        config = shelf.load(folder)
        maker = Maker.from_dict(config["model"])

        sure: set[str] = set()

        def tell(entry: shelf.Entry) -> Told:
            return Told.of(shelf.told_of(folder, entry, sure=entry["file"] in sure))

        def read(entry: shelf.Entry) -> Prepared:
            found = shelf.tensors_of(folder, entry)
            sure.add(entry["file"])
            return Prepared.of(found, maker)

        guides = {
            entry["name"]: PackedGuide.read(
                entry["name"],
                tokens=entry["tokens"],
                maker=maker,
                tell=partial(tell, entry),
                read=partial(read, entry),
            )
            for entry in config["guides"]
        }
        return cls(maker=maker, guides=guides, provenance=config["provenance"])

    def push_to_hub(self, name: str, *, private: bool = False, token: str | None = None) -> str:
        """Upload the pack to a repository on the hub, which is made where there is none.

        Returns:
            The address of the commit.

        Raises:
            ArtifactError: the hub cannot be reached, or refuses.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return upload(Path(folder), name, private=private, token=token, ignore=(durable.LOCK,))

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        maker = self.maker
        return {
            "model": {
                "name": maker.spec.name,
                "fingerprint": maker.spec.identity,
                "revision": maker.revision,
                "tokenizer": maker.spec.tokenizer,
                "dtype": maker.spec.dtype,
                "layers": len(maker.spec.layers),
                "positions": maker.spec.positions,
                "transformers": maker.transformers,
            },
            "guides": [
                {
                    "name": guide.name,
                    "tokens": guide.tokens,
                    "bytes": guide.nbytes,
                    "made": dict(guide.made),
                    "text": guide.text,
                }
                for guide in self.guides.values()
            ],
            "provenance": dict(self.provenance),
        }

    def to_json(self) -> str:
        """Stable text: two packs can be diffed."""
        return to_json(self.to_dict())

    def __rich__(self) -> Table:
        spec = self.maker.spec
        table = Table(
            "guide",
            "tokens",
            "MB",
            "made",
            "begins",
            title=f"{len(self)} guides for {spec.name} ({spec.dtype}, {spec.identity})",
        )
        for guide in self.guides.values():
            begins = " ".join(guide.text.split())
            table.add_row(
                escape(guide.name),
                str(guide.tokens),
                f"{guide.nbytes / 1e6:.1f}",
                escape(guide.described),
                escape(begins if len(begins) <= BEGINNING else begins[: BEGINNING - 1] + "…"),
            )
        return table


BEGINNING = 40
"""Letters of a guide that are shown."""
