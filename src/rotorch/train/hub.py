"""Names of the Hugging Face hub in a run file, `hf://owner/model` and `hf://datasets/owner/name`, as directories.

Files come by `huggingface_hub` into its own cache, before anything else is checked; a second run finds them there. What
follows knows directories only. `@revision` after the name takes another branch, tag or commit.
"""

from __future__ import annotations

import re
from pathlib import Path

from rotorch.core.errors import ConfigError
from rotorch.core.phase_line import tell_phase
from rotorch.run_config import RunConfig
from rotorch.run_data import DataSection

SCHEME = "hf://"
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja")
_DATA_FILES = ("*.txt", "*.jsonl", "*.ndjson", "*.parquet")
_NAME = re.compile(r"hf://(datasets/)?([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


def with_hub_files(config: RunConfig) -> RunConfig:
    """The run, with directories in place of names of the hub.

    Raises:
        ConfigError: a name is none, or its files cannot be had; names the key.
    """
    model, data = config.model, config.data
    described = model.config if isinstance(model.config, dict) else found(model.config, key="model.config")
    return config.model_copy(
        update={
            "model": model.model_copy(
                update={"config": described, "init": found(model.init, key="model.init")},
            ),
            "data": _of_data(data),
            "train": config.train.model_copy(
                update={
                    "eval": tuple(
                        text.model_copy(
                            update={"source": found(text.source, key=f"train.eval {text.name!r}", is_data=True)}
                        )
                        for text in config.train.eval
                    )
                }
            ),
        }
    )


def _of_data(data: DataSection) -> DataSection:
    sources = tuple(
        part.model_copy(update={"source": found(part.source, key=f"data.sources {part.name!r}", is_data=True)})
        for part in data.sources
    )
    changes = {
        "source": found(data.source, key="data.source", is_data=True),
        "tokenizer": found(data.tokenizer, key="data.tokenizer"),
        "sources": sources,
    }
    return data.model_copy(update=changes)


def found(name: str, *, key: str, is_data: bool = False) -> str:
    """The directory of a name of the hub; any other text as it is.

    Args:
        name: what the user wrote.
        key: the key, for messages.
        is_data: True for texts, which are datasets there.

    Raises:
        ConfigError: see `with_hub_files`.
    """
    if not name.startswith(SCHEME):
        return name
    match = _NAME.fullmatch(name)
    if match is None or bool(match[1]) != is_data:
        example = "hf://datasets/owner/name" if is_data else "hf://owner/name"
        raise ConfigError(f"{key} = {name!r}: is no name of the hub. Write one such as {example}, or a directory")
    from huggingface_hub import snapshot_download

    tell_phase(f"getting {name}")
    try:
        directory = snapshot_download(
            match[2],
            repo_type="dataset" if is_data else "model",
            revision=match[3],
            allow_patterns=list(_DATA_FILES if is_data else _MODEL_FILES),
        )
    except Exception as error:  # of its own, of the network's library, of the disk: a long list, and versions differ
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"{key} = {name!r}: cannot be had from the hub, and is not in its cache: {said[:_MOST_CHARS]}. Write the "
            "path of a directory that is here, or try again with a network"
        ) from error
    if not any(path.is_file() for path in Path(directory).rglob("*")):
        kinds = ", ".join(_DATA_FILES if is_data else _MODEL_FILES)
        raise ConfigError(f"{key} = {name!r}: has no file that rotorch reads ({kinds}). Write another name")
    return str(directory)


_MOST_CHARS = 200
