"""Everything kvtransfer raises on purpose.

KVTransferError
├── ModelNotFound        no model, config or tokenizer under that name
├── UnsupportedModel     a model whose cache cannot be read as keys and values
├── IncompatibleModels   no map between these two caches can exist
├── CacheLayoutError     a cache is not shaped the way its spec promises
├── RotationError        rotating what is rotated, or the reverse, or without a table
├── TextError            a text or guide file is missing, empty, broken or too short
├── TaskError            a benchmark task is unknown, lacks its data, or measures no right answers
├── PersonaError         a persona's file is missing, broken, or lacks what a battery needs
├── SchemaError          a schema of prompt modules is malformed, or a prompt does not follow it
├── SeamError            prefix and live text do not meet at a token boundary
├── SteeringError        an edit of a cache names what is not there, or is no number
├── UnderdeterminedFit   fewer tokens than the map has unknowns
├── BudgetError          no map is as small, or as quick, as was asked
├── GuideRefused         a request to an engine may not have the guide that it names
├── ArtifactError        a saved file is missing, malformed, or for another model
├── WrongKind            an argument is of another kind than is needed; a TypeError, too
└── DeviceError          the device is absent or lacks the dtype

Programming mistakes stay ValueError and TypeError.
"""


class KVTransferError(Exception):
    """Base class: catching it catches every failure this package foresees."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n  hint: {hint}")
        self.message, self.hint = message, hint


class ModelNotFound(KVTransferError):
    """No model, config or tokenizer under that name."""


class UnsupportedModel(KVTransferError):
    """A model whose cache cannot be read as keys and values."""


class IncompatibleModels(KVTransferError):
    """No map between these two caches can exist."""


class CacheLayoutError(KVTransferError):
    """A cache is not shaped the way its spec promises."""


class RotationError(KVTransferError):
    """Rotating what is rotated, or the reverse, or without a table."""


class TextError(KVTransferError):
    """A text or guide file is missing, empty, broken or too short."""


class TaskError(KVTransferError):
    """A benchmark task is unknown, lacks its data, or measures no right answers."""


class PersonaError(KVTransferError):
    """A persona's file is missing, broken, or lacks what a battery needs."""


class SchemaError(KVTransferError):
    """A schema of prompt modules is malformed, or a prompt does not follow it."""


class SeamError(KVTransferError):
    """Prefix and live text do not meet at a token boundary."""


class SteeringError(KVTransferError):
    """An edit of a cache names what is not there, or is no number."""


class UnderdeterminedFit(KVTransferError):
    """Fewer tokens than the map has unknowns."""

    def __init__(self, rows: int, features: int, *, hint: str) -> None:
        super().__init__(
            f"{rows} rows cannot determine {features} coefficients and a bias per output",
            hint=f"at least {features + 1} rows are needed: {hint}",
        )
        self.rows, self.features = rows, features


class BudgetError(KVTransferError):
    """No map is as small, or as quick, as was asked."""


class GuideRefused(KVTransferError):
    """A request to an engine may not have the guide that it names."""


class ArtifactError(KVTransferError):
    """A saved file is missing, malformed, or for another model."""


class WrongKind(KVTransferError, TypeError):
    """An argument is of another kind than is needed: a path where an opened thing is, say."""

    def __init__(self, what: str, given: object, wanted: str, *, hint: str) -> None:
        kind = type(given).__name__
        # Of a model or a tensor its kind says more than pages of numbers would.
        plain = given is None or isinstance(given, str | int | float)
        shown = f"{repr(given)[:40]} ({kind})" if plain else f"of kind {kind}"
        super().__init__(f"{what} is {shown}, not {wanted}", hint=hint)


def require(
    what: str, given: object, kind: type | tuple[type, ...], wanted: str, *, hint: str
) -> None:
    """Raise WrongKind unless ``given`` is of ``kind``; True and False are no numbers here."""
    if not isinstance(given, kind) or isinstance(given, bool):
        raise WrongKind(what, given, wanted, hint=hint)


class DeviceError(KVTransferError):
    """The device is absent or lacks the dtype."""
