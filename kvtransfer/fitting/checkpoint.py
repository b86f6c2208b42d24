"""What a killed capture goes on from: a folder that holds one state, whole at every moment.

A state is an artifact of its own, named by where it is in the text. The next one is written beside
it, takes its name in one step, and only then is the old one removed; so whenever a process dies,
at least one whole state is there, and the latest counts.
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtransfer import artifact
from kvtransfer.errors import ArtifactError
from kvtransfer.fitting.gathering import Gathering, Wanted
from kvtransfer.fitting.workspace import Workspace
from kvtransfer.geometry.spec import ModelSpec

KIND = "fit_checkpoint"
MAKER = "kvtransfer fit … --checkpoint DIR"
STATE = "state-"


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a gathering is to go on: whatever comes before is passed over, and compared."""

    folder: Path
    turn: int
    batches: int
    digest: str

    def reached(self, gathering: Gathering) -> bool:
        """Whether the next batch is to be read.

        Raises:
            ArtifactError: what was passed over is not what was read before.
        """
        if gathering.turn > self.turn or gathering.batches > self.batches:
            return True
        if gathering.batches < self.batches:
            return False
        if gathering.digest != self.digest:
            raise ArtifactError(
                f"{self.folder} is of another text: the first {self.batches} batches have digest "
                f"{gathering.digest[:12]}, those it holds {self.digest[:12]}",
                hint="give the text of the fit that was killed, or remove the folder to begin anew",
            )
        return True

    def require_reached(self, gathering: Gathering) -> None:
        """Raise ArtifactError if the text ended before the place was come to."""
        if not self.reached(gathering):
            raise ArtifactError(
                f"{self.folder} is of a longer text: it holds {self.batches} batches, and this one "
                f"fills {gathering.batches}",
                hint="give the text of the fit that was killed, or remove the folder to begin anew",
            )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """States of one capture, in a folder of their own."""

    folder: Path
    of: Mapping[str, Any]
    """What a state must be of to be gone on from: models, settings, and passes."""

    @classmethod
    def of_capture(
        cls, workspace: Workspace, source: ModelSpec, target: ModelSpec, wanted: Wanted
    ) -> "Checkpoint | None":
        """That of a capture; None where none was asked for.

        Raises:
            ArtifactError: the folder holds something else.
        """
        if workspace.checkpoint is None:
            return None
        models = {
            f"{name} {field}": getattr(spec, field)
            for name, spec in (("source", source), ("target", target))
            for field in ("identity", "dtype")
        }
        near = "stretch" if workspace.moments == "device" else "batch"
        of = models | wanted.to_dict() | {"passes": workspace.passes, "summed by": near}
        refuse_foreign(workspace.checkpoint)
        return cls(workspace.checkpoint, of)

    def resume(self, gathering: Gathering) -> Resumed | None:
        """Put ``reading`` where the last state was; None where there is none.

        Raises:
            ArtifactError: it is of other models or settings, or damaged.
        """
        states = _states(self.folder)
        if not states:
            return None
        config, tensors = artifact.load(states[-1], kind=KIND, maker=MAKER)
        artifact.require(config, ("of", "reading"), states[-1])
        for name, ours in self.of.items():
            theirs = config["of"].get(name)
            if theirs != ours:
                raise ArtifactError(
                    f"{self.folder} is of a fit with {name} {theirs!r}, and this one has {ours!r}",
                    hint="go on as the fit that was killed began, or remove the folder to begin "
                    "anew",
                )
        plain = config["reading"]
        gathering.restore(plain, tensors)
        return Resumed(states[-1], plain["turn"], plain["batches"], plain["digest"])

    def save(self, gathering: Gathering) -> None:
        """Write the state of ``reading``, and remove the one before.

        Raises:
            ArtifactError: it cannot be written.
        """
        plain, tensors = gathering.state()
        fresh = self.folder / f"{STATE}{plain['turn']}-{plain['batches']:09d}"
        artifact.save(
            fresh,
            kind=KIND,
            config={"of": dict(self.of), "reading": plain},
            tensors=tensors,
            card=f"# A fit in progress\n\nGo on with `{MAKER}`, as it began.\n",
        )
        _clear(self.folder, but=fresh)


def remove(folder: Path) -> None:
    """Remove what checkpoints left, and the folder where it is empty then."""
    _clear(folder)
    with suppress(OSError):
        folder.rmdir()


def refuse_foreign(folder: Path) -> None:
    """Raise ArtifactError unless ``folder`` is new, empty, or holds states of fits."""
    if folder.is_file():
        raise ArtifactError(f"{folder} is a file", hint="name a folder for checkpoints")
    others = [each.name for each in folder.glob("*") if not _ours(each)]
    if others:
        raise ArtifactError(
            f"{folder} holds {others[0]}, which is no checkpoint of a fit",
            hint="name a new or empty folder (--checkpoint)",
        )


def _states(folder: Path) -> list[Path]:
    """Whole states, the latest last."""
    return sorted(folder.glob(f"{STATE}*"))


def _ours(path: Path) -> bool:
    """Whether this is a state, or what is left of one that was being written."""
    return path.name.startswith((STATE, f".{STATE}"))


def _clear(folder: Path, *, but: Path | None = None) -> None:
    for each in folder.glob("*") if folder.is_dir() else ():
        if each != but and _ours(each):
            # Half a state must not look like one, should this be interrupted.
            gone = each.with_name(f".{each.name.lstrip('.')}")
            each.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
