"""The same model in another dtype, or with another attention implementation."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

from kvtransfer.errors import UnsupportedModel
from kvtransfer.hf.model import DTYPES, LanguageModel, usable_device, wrap
from kvtransfer.hf.spec import first_line


def in_dtype(model: LanguageModel, dtype: str) -> LanguageModel:
    """``model`` itself, if it is in ``dtype`` (one of DTYPES), or a copy that is.

    Raises:
        DeviceError: there is no such dtype, or the model's device lacks it.
    """
    usable_device(str(model.device), dtype)
    if model.dtype == DTYPES[dtype]:
        return model
    module = deepcopy(model.module).to(DTYPES[dtype])  # type: ignore[arg-type]
    return wrap(module, model.tokenizer)


@contextmanager
def attending(model: LanguageModel, implementation: str) -> Iterator[None]:
    """Let ``model`` compute attention by ``eager``, ``sdpa`` or another of transformers' ways.

    Raises:
        UnsupportedModel: it cannot.
    """
    module = model.module
    before = str(module.config._attn_implementation)
    try:
        module.set_attn_implementation(implementation)
    # Unknown names, kernels that are not installed and models without them each raise their own.
    except Exception as error:
        raise _unable(model, implementation, first_line(error)) from error
    try:
        if module.config._attn_implementation != implementation:
            raise _unable(model, implementation, f"it keeps to {before}")
        yield
    finally:
        module.set_attn_implementation(before)


def _unable(model: LanguageModel, implementation: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{model.spec.name} does not compute attention by {implementation!r}: {why}",
        hint=f"leave it out; the model comes with {model.module.config._attn_implementation}",
    )
