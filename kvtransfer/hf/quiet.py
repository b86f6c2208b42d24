"""Keep transformers' own bars and advice off a terminal that is ours."""

import os

import huggingface_hub
import transformers


def quiet() -> None:
    """Silence progress bars and everything below an error, for this process."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DATASETS_VERBOSITY", "critical")  # read when datasets is imported
    huggingface_hub.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
