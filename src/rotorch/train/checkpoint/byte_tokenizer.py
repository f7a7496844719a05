"""The tokenizer of a byte-level run as files of Hugging Face: exports of it open with `AutoTokenizer`.

Ids 0 to 255 are the bytes, 256 ends a text (`train/data/tokens.py`). In a `tokenizer.json` that is a BPE without merges
over the alphabet of GPT-2's byte level, which has one character for each byte.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|endoftext|>"


def byte_tokenizer() -> Tokenizer:
    """The tokenizer; text that spells `END` becomes id 256, as transformers has it of special tokens."""
    vocabulary = {_character(byte): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer


def tokenizer_config(*, longest: int | None) -> dict[str, Any]:
    """Contents of the `tokenizer_config.json` beside it.

    Args:
        longest: tokens that the model takes, if that is limited.
    """
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    return {**config, "clean_up_tokenization_spaces": False, **({"model_max_length": longest} if longest else {})}


def _character(byte: int) -> str:
    """GPT-2's character for a byte: itself where it is printable, else one of those from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(other not in printable for other in range(byte)))
