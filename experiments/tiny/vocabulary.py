"""The tokenizer that both tiny models share: byte-level BPE, digits one by one."""

from collections.abc import Iterable
from random import Random

from passages import passage
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SIZE = 2048
END = "<|endoftext|>"
PASSAGES = 1000
"""Made-up passages beside the documents, so that their words are tokens as well."""


def train_tokenizer(documents: tuple[str, ...], *, positions: int) -> PreTrainedTokenizerFast:
    """Learn the merges; the same documents give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )


def _texts(documents: tuple[str, ...]) -> Iterable[str]:
    rng = Random("vocabulary")
    yield from documents
    for _ in range(PASSAGES):
        yield passage(rng, documents).text
