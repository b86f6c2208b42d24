"""Where a fit keeps its sums while it reads, and how it goes on where it was killed."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from kvtransfer.errors import KVTransferError
from kvtransfer.fitting.pairs import Flat
from kvtransfer.fitting.sums import in_memory

FULLEST = 0.98
"""Share of a disk's free room that sums may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """What a fit may use besides its models. Nothing here changes what is fitted."""

    moments: Literal["cpu", "device"] | Path = "cpu"
    """Where the moments lie: in memory (``cpu``); there too, with each stretch of batches summed on
    the target's device in the dtype of the products first (``device``); or in files of this
    folder, of which the system holds as much in memory as there is room for. The files have no
    name from the beginning, so that nothing is left of them, however the fit ends."""
    passes: int = 1
    """Readings of the text; with two, keys are gathered in one and values in the other, so that
    half as much lies on the device at once. Costs the models' forwards once more, and the ids of
    the text are kept in between."""
    checkpoint: Path | None = None
    """A folder for what a killed fit goes on from; None for nothing."""
    every: int = 64
    """Batches between two checkpoints."""

    def __post_init__(self) -> None:
        if self.passes not in (1, 2):
            raise ValueError(f"passes must be 1 or 2, got {self.passes}")
        if self.every < 1:
            raise ValueError(f"batches between checkpoints must be positive, got {self.every}")
        if not isinstance(self.moments, Path) and self.moments not in ("cpu", "device"):
            raise ValueError(f"moments lie in cpu, device or a folder's Path, not {self.moments!r}")

    def near(self, device: torch.device) -> torch.device | None:
        """The device that sums stretches of batches; None where each batch goes home."""
        return device if self.moments == "device" else None

    def require_room(self, nbytes: int) -> None:
        """Raise KVTransferError unless ``nbytes`` of moments fit where they are to lie.

        Raises:
            KVTransferError: the folder cannot be written, or its disk has not the room.
        """
        if not isinstance(self.moments, Path):
            return
        try:
            self.moments.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.moments):
                free = shutil.disk_usage(self.moments).free
        except OSError as error:
            raise _unwritable(self.moments, error) from error
        if nbytes > FULLEST * free:
            raise KVTransferError(
                f"the moments take {nbytes / 1e9:.3f} GB, and the disk of {self.moments} has "
                f"{free / 1e9:.3f} GB left",
                hint="name a folder on a larger disk (--moments), or gather fewer layers (--band)",
            )

    def allocate(self, numbers: int) -> Flat:
        """So many float64 zeros.

        Raises:
            KVTransferError: the disk has not the room.
        """
        if not isinstance(self.moments, Path) or numbers == 0:
            return in_memory(numbers)
        try:
            handle, name = tempfile.mkstemp(dir=self.moments, prefix=".moments-")
            try:
                size = numbers * torch.float64.itemsize
                if hasattr(os, "posix_fallocate"):
                    # Room is taken now: a disk that fills up later would end the process.
                    os.posix_fallocate(handle, 0, size)
                else:
                    os.truncate(handle, size)
                return torch.from_file(name, shared=True, size=numbers, dtype=torch.float64)
            finally:
                os.close(handle)
                Path(name).unlink()
        except OSError as error:
            raise _unwritable(self.moments, error) from error


def _unwritable(folder: Path, error: OSError) -> KVTransferError:
    return KVTransferError(
        f"moments cannot be kept in {folder}: {error.strerror or error}",
        hint="name another folder (--moments), or keep them in memory (--moments cpu)",
    )
