"""Tokenizers of three kinds, each trained on a little prose: they cut the same text differently."""

import json
from itertools import islice

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvtransfer.fitting.texts import builtin

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def trimming() -> PreTrainedTokenizerBase:
    """As GPT-2 and Llama 3: bytes, and offsets from which a last step takes the spaces off."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(islice(builtin("fit"), 400, 600), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


def gemma() -> PreTrainedTokenizerBase:
    """As Gemma: nothing put before a text, and bytes for characters that have no piece."""
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    bpe.normalizer = normalizers.Replace(" ", "▁")
    bpe.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=["<unk>", "<bos>", "<eos>", *BYTES],
        limit_alphabet=80,
        show_progress=False,
    )
    bpe.train_from_iterator(islice(builtin("fit"), 200), trainer)
    plain = json.loads(bpe.to_str())
    # Pieces, not special tokens: what spells "<0x41>" in a text is seven characters.
    plain["added_tokens"] = [one for one in plain["added_tokens"] if one["content"] not in BYTES]
    whole = Tokenizer.from_str(json.dumps(plain))
    return PreTrainedTokenizerFast(tokenizer_object=whole, bos_token="<bos>", eos_token="<eos>")


def unigram() -> PreTrainedTokenizerBase:
    """As the first Llama: a space put before every text, and bytes to fall back on. No marks."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=700, unk_token="<unk>", show_progress=False)
    trained.train_from_iterator(islice(builtin("fit"), 200), trainer)
    pieces = dict.fromkeys(["<unk>", *BYTES], -20.0)
    pieces |= {piece: value for piece, value in json.loads(trained.to_str())["model"]["vocab"]}
    whole = Tokenizer(models.Unigram(list(pieces.items()), unk_id=0, byte_fallback=True))
    whole.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    whole.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=whole)
