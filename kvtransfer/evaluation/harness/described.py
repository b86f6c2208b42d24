"""What a run of tasks was made with: for whoever reads the results, and for telling two apart."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from kvtransfer.evaluation.harness.contexts import NEEDS_MAPPING
from kvtransfer.fitting.digest import digest
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.hf.model import LanguageModel


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """A condition, and the models and mapping that were given for it."""

    condition: str
    source: LanguageModel | None
    target: LanguageModel | None
    mapping: KVMapping | None

    def to_dict(self) -> dict[str, Any]:
        """Names and digests, plain."""
        told: dict[str, Any] = {"condition": self.condition}
        for role, model in (("source", self.source), ("target", self.target)):
            told[role] = model and model.spec.name
            told[f"{role}_fingerprint"] = model and model.spec.identity
        used = self.mapping if self.condition in NEEDS_MAPPING else None
        ends = used and f"{used.source.name} → {used.target.name}"
        return told | {"mapping": ends, "mapping_digest": used and digest(used)}

    def identity(self, *sizes: object) -> str:
        """A digest of everything that answers depend on.

        Args:
            sizes: What decides how much is read of a text.
        """
        told = self.to_dict() | {"sizes": sizes}
        for role, model in (("source", self.source), ("target", self.target)):
            told[role] = model and (str(model.dtype), model.spec.tokenizer)  # its name is no part
        told["mapping"] = None
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
