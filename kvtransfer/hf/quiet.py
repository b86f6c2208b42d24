"""Keep transformers' own bars and advice off a terminal that is ours."""

import os

import transformers


def quiet() -> None:
    """Silence progress bars and everything below an error, for this process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
