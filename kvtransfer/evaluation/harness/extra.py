"""lm-eval is asked for when a task is run, and not before."""

from importlib.util import find_spec

from kvtransfer.errors import KVTransferError


def require_lm_eval() -> None:
    """Raise, before any work is done for it, where tasks could not be run.

    Raises:
        KVTransferError: lm-eval, or what it runs transformers' models with, is not installed.
    """
    for package in ("lm_eval", "accelerate"):
        if find_spec(package) is None:
            raise KVTransferError(
                f"tasks are run by lm-eval, and {package} is not installed",
                hint="pip install 'lm-eval>=0.4.13' 'accelerate>=1.1'",
            )
