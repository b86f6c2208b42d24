"""Which model made a guide's cache, and whether another one is the same."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from kvtransfer.errors import ArtifactError, CacheLayoutError, IncompatibleModels
from kvtransfer.geometry.spec import ModelSpec, same_model
from kvtransfer.hf.model import DTYPES, LanguageModel, require_model
from kvtransfer.hf.rotary import Rotary, config_from_dict, rotary_from_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """The model that can read a pack: the one that made it, or the one that it was mapped to."""

    spec: ModelSpec
    """Among others its weights' fingerprint, tokenizer, dtype, layers and rotations."""
    config: Mapping[str, Any]
    """Its transformers config, from which its rotations can be had without its weights."""
    revision: str | None = None
    """The commit on the hub that it was loaded from, where it was."""
    transformers: str = version("transformers")
    """The version that ran it."""

    @classmethod
    def of(cls, model: LanguageModel) -> "Maker":
        """A model that is loaded."""
        require_model(model)
        return cls(spec=model.spec, config=model.config, revision=model.revision)

    def rotary(self) -> Rotary:
        """Its rotations.

        Raises:
            ArtifactError: this transformers cannot make sense of its config.
        """
        config = config_from_dict(dict(self.config))
        try:
            return rotary_from_config(config, self.spec)
        except Exception as error:  # each architecture trips over nonsense in its own way
            raise ArtifactError(
                f"no rotations can be had from the saved config of {self.spec.name}: "
                f"{type(error).__name__}: {' '.join(str(error).split())}",
                hint="the file was edited, or written by another version of transformers",
            ) from error

    def check(self, model: LanguageModel, *, cast: bool = False) -> None:
        """Raise unless ``model`` reads caches of this one.

        Args:
            model: Is to read them.
            cast: Whether another dtype is allowed.

        Raises:
            IncompatibleModels: its weights, tokenizer, revision, layers or rotations are others.
            CacheLayoutError: its dtype is another, and that is not allowed.
        """
        require_model(model)
        self.check_spec(model.spec, revision=model.revision, cast=cast)

    def check_spec(
        self, spec: ModelSpec, *, revision: str | None = None, cast: bool = False
    ) -> None:
        """As :meth:`check`, of a model that something else runs.

        Args:
            spec: Of the model, its weights' fingerprint with it.
            revision: The commit on the hub that it was loaded from, where it was.
            cast: Whether another dtype is allowed.

        Raises: as :meth:`check`.
        """
        for topic, mine, given in self._differences(spec, revision):
            raise IncompatibleModels(
                f"this pack is for {self.spec.name} with {topic} {mine}, and {spec.name} has "
                f"{given}",
                hint="build a pack with this model, or take this one to it: kvtransfer pack "
                "transfer DIR --mapping M --out DIR2",
            )
        if self.spec.dtype != spec.dtype and not cast:
            raise CacheLayoutError(
                f"this pack is in {self.spec.dtype}, {spec.name} runs in {spec.dtype}",
                hint=f"load the model with --dtype {self.spec.dtype}, or cast the pack (--cast)",
            )

    def _differences(
        self, given: ModelSpec, revision: str | None
    ) -> Iterator[tuple[str, str, str]]:
        """What is known of both and not the same: topic, mine, the model's."""
        mine = self.spec
        if len(mine.layers) != len(given.layers):
            yield "layers", str(len(mine.layers)), str(len(given.layers))
        for index, (one, other) in enumerate(zip(mine.layers, given.layers, strict=False)):
            if one != other:
                yield f"layer {index}", str(one), str(other)
        if mine.positions != given.positions:
            yield "positions", mine.positions, given.positions
        if not same_model(str(mine.identity), str(given.identity)):
            yield "fingerprint", str(mine.identity), str(given.identity)
        if not _same_tokenizer(mine.tokenizer, given.tokenizer):
            yield "tokenizer", str(mine.tokenizer), str(given.tokenizer)
        if None not in (self.revision, revision) and self.revision != revision:
            yield "revision", str(self.revision), str(revision)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "spec": self.spec.to_dict(),
            "config": dict(self.config),
            "revision": self.revision,
            "transformers": self.transformers,
        }

    @classmethod
    def from_dict(cls, described: Any) -> "Maker":
        """The inverse of :meth:`to_dict`.

        Raises:
            ArtifactError: a field is missing, unknown or of the wrong kind.
        """
        try:
            spec, config = described["spec"], dict(described["config"])
            revision, ran = described["revision"], str(described["transformers"])
            hash(spec["dtype"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"a pack's model is malformed: {type(error).__name__}: {error}",
                hint="the file was edited or written by another version; make it anew",
            ) from error
        made = ModelSpec.from_dict(spec)
        if made.dtype not in DTYPES:
            raise ArtifactError(
                f"a pack in {made.dtype!r}", hint=f"one of {', '.join(DTYPES)}; make it anew"
            )
        return cls(spec=made, config=config, revision=revision, transformers=ran)


def _same_tokenizer(one: str | None, other: str | None) -> bool:
    """Whether two digests can be one tokenizer's; older ones leave the added tokens out."""
    if one is None or other is None:
        return True
    if "+" in one and "+" in other:
        return one == other
    return one.partition("+")[0] == other.partition("+")[0]
