"""What a result carries beside its numbers: intervals, and where it came from."""

import io
import json
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from kvtransfer.errors import ArtifactError

PACKAGES = ("kvtransfer", "torch", "transformers", "numpy", "scikit-learn")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval and the count it rests on.

    ``low`` and ``high`` are None where no interval is meant.
    """

    value: float
    low: float | None
    high: float | None
    n: int

    def __format__(self, spec: str) -> str:
        """``f"{estimate:.2f}"``: value, and the interval in brackets where there is one."""
        text = format(self.value, spec)
        if self.low is None or self.high is None:
            return text
        return f"{text} [{format(self.low, spec)}, {format(self.high, spec)}]"

    def __str__(self) -> str:
        return f"{self:.3g}"

    def to_dict(self) -> dict[str, float | int | None]:
        """The JSON shape that scripts rely on."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Versions, commit, command, seed and time: what is needed to repeat a number."""

    command: str
    commit: str | None
    date: str
    python: str
    machine: str
    packages: dict[str, str]
    seed: int

    @classmethod
    def here(cls, *, seed: int) -> "Provenance":
        """Of this process, now."""
        return cls(
            command=shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            commit=_commit(),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            python=platform.python_version(),
            machine=f"{platform.system()} {platform.machine()}",
            packages={name: found for name in PACKAGES if (found := _version(name))},
            seed=seed,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def plain(estimate: Estimate | None) -> dict[str, float | int | None] | None:
    """An estimate for JSON, or null where there is none."""
    return None if estimate is None else estimate.to_dict()


def to_json(document: Any) -> str:
    """Stable text: sorted keys, so that two reports can be diffed; NaN is refused."""
    return json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)


@runtime_checkable
class Reported(Protocol):
    """What prints as a table and has stable JSON."""

    def __rich__(self) -> Any:
        """The table."""

    def to_json(self) -> str:
        """Stable text."""


def write_report(report: Reported, folder: Path) -> None:
    """Write ``report.json`` and ``report.txt`` to ``folder``, each whole or not at all.

    Raises:
        ArtifactError: the folder cannot be written.
    """
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (
            ("report.json", report.to_json()),
            ("report.txt", console.export_text()),
        ):
            part = folder / f".{name}.part"
            part.write_text(text + "\n", encoding="utf-8")
            part.replace(folder / name)
    except OSError as error:
        raise ArtifactError(
            f"{folder} cannot be written: {error.strerror or error}", hint="choose another --out"
        ) from error


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of a source checkout, marked where files differ; None when installed."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None
