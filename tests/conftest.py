"""What all tests share: no network, one thread, a real tokenizer, and tiny random models."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel, wrap

torch.set_num_threads(1)

# The same examples on every run, and no deadline: a busy machine makes any of them slow now and
# then, and that is no finding.
settings.register_profile(
    "kvtransfer",
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvtransfer")

VOCABULARY = 512
END = "<|end|>"

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Ten times the usual: scores then have a spread of several nats, so attention matters.
    "initializer_range": 0.2,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level BPE, trained here: every text has ids, and they decode to that text again."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(islice(builtin("fit"), 400), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END)


@pytest.fixture(scope="session")
def tiny(tokenizer: PreTrainedTokenizerBase) -> Callable[..., LanguageModel]:
    """Makes a random float32 model: ``tiny("qwen3", seed=1, num_hidden_layers=2)``."""

    def make(architecture: str = "llama", *, seed: int = 0, **config: Any) -> LanguageModel:
        described = AutoConfig.for_model(architecture, **(SIZES | config))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            module = AutoModelForCausalLM.from_config(described, dtype=torch.float32).eval()
            with torch.no_grad():
                for parameter in module.parameters():
                    # Fresh norms are all one and fresh biases all zero, which hides mistakes.
                    if parameter.ndim == 1:
                        parameter += 0.2 * torch.randn_like(parameter)
        return wrap(module, tokenizer)

    return make
