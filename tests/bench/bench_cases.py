"""A model small enough for a bench that proves its structure, and what is left running after one."""

import json
import os
from datetime import datetime
from pathlib import Path

TINY = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "attention_dropout": 0.0,
}


def write_run(directory: Path) -> Path:
    """Writes a run of the tiny model."""
    (directory / "config.json").write_text(json.dumps(TINY))
    file = directory / "tiny.toml"
    file.write_text(
        '[model]\nconfig = "config.json"\n[data]\nsequence_length = 16\n'
        '[train]\nsteps = 5\nmicro_batch = 2\ndevice = "cpu"\n[optimizer]\nlr = 1e-2\n'
    )
    return file


def assert_origin(record: dict) -> None:
    """Holds that a record says when, where and by what source it was made, and how busy the machine was."""
    assert datetime.fromisoformat(record["date"]).tzinfo is not None
    assert record["command"] and "torch" in record["versions"] and "commit" in record
    assert record["machine"]["cpu"] and record["machine"]["cores"] >= 1
    assert len(record["machine"]["load_average"]) == len(record["load_average_after"]) == 3


def children() -> set[str]:
    """Process ids of this process's children."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
