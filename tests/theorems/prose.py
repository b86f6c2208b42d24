"""Token ids of real text that no fit here has seen."""

from functools import cache

import torch
from torch import Tensor

from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel


@cache
def _text() -> str:
    # The fits here read the first few thousand tokens of this split, and nothing near its end.
    return "\n\n".join(builtin("fit")[-40:])


def prose(model: LanguageModel, tokens: int, *, skip: int = 0) -> Tensor:
    """A batch of one: ``tokens`` ids, after leaving out the first ``skip``."""
    ids = model.encode(_text())[skip : skip + tokens]
    assert ids.shape == torch.Size([tokens])
    return ids[None]
