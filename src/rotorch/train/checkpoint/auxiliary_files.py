"""Auxiliary files of a published model, beside its weights: checkpoints keep them, and exports get them."""

from __future__ import annotations

from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""Files of a Hugging Face tokenizer; the first is enough to tokenise."""

GENERATION_CONFIG = "generation_config.json"
AUXILIARY_FILES = (*TOKENIZER_FILES, GENERATION_CONFIG)


def auxiliary_files(*, tokenizer: Path | None, pretrained: Path | None) -> dict[str, Path]:
    """Returns the files to take along, by the name that each gets.

    Args:
        tokenizer: a `tokenizer.json`, which is taken alone, or the directory of one, of which all files are taken.
        pretrained: the directory that the model started from, which knows how text is generated with it.
    """
    found: dict[str, Path] = {}
    if tokenizer is not None and tokenizer.is_dir():
        found |= {name: tokenizer / name for name in TOKENIZER_FILES if (tokenizer / name).is_file()}
    elif tokenizer is not None:
        found[TOKENIZER_FILES[0]] = tokenizer
    if pretrained is not None and (pretrained / GENERATION_CONFIG).is_file():
        found[GENERATION_CONFIG] = pretrained / GENERATION_CONFIG
    return found
