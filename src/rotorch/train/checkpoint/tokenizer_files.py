"""The files that belong to a published model beside its weights, and travel with checkpoints to what is exported."""

from __future__ import annotations

from pathlib import Path

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""What a Hugging Face tokenizer consists of; the first is all that is needed to tokenise."""

GENERATION_CONFIG = "generation_config.json"
COMPANIONS = (*TOKENIZER_FILES, GENERATION_CONFIG)


def companions(*, tokenizer: Path | None, pretrained: Path | None) -> dict[str, Path]:
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
