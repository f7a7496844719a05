"""Ways to spoil the files of a run that is well, for `bad_inputs.py`: each returns a change of a directory."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def written(name: str, content: bytes | str) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def pipe(name: str) -> Callable[[Path], object]:
    return lambda directory: ((directory / name).unlink(missing_ok=True), os.mkfifo(directory / name))


def link(name: str, target: str) -> Callable[[Path], object]:
    return lambda directory: ((directory / name).unlink(missing_ok=True), (directory / name).symlink_to(target))


def directory_at(name: str) -> Callable[[Path], object]:
    return lambda directory: ((directory / name).unlink(missing_ok=True), (directory / name).mkdir())


def socket_at(name: str) -> Callable[[Path], object]:
    def spoil(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        before = Path.cwd()
        os.chdir(directory)  # names of sockets are short
        try:
            with socket.socket(socket.AF_UNIX) as end:
                end.bind(name)
        finally:
            os.chdir(before)

    return spoil


def encoded(encoding: str) -> Callable[[Path], object]:
    def spoil(directory: Path) -> None:
        file = directory / "run.toml"
        file.write_bytes(file.read_text().encode(encoding))

    return spoil


def int32_weight(directory: Path) -> None:
    """A published model in `weights`, whose last norm is of whole numbers."""
    _published(directory, norm=np.ones(16, np.int32))


def nan_weight(directory: Path) -> None:
    """A published model in `weights`, whose last norm is not a number."""
    _published(directory, norm=np.full(16, np.nan, np.float32))


def _published(directory: Path, *, norm: np.ndarray) -> None:
    (directory / "weights").mkdir()
    (directory / "weights" / "config.json").write_text(json.dumps(LLAMA))
    sizes = {
        "model.embed_tokens": (257, 16),
        "lm_head": (257, 16),
        "model.norm": (16,),
        **{f"model.layers.0.{name}_layernorm": (16,) for name in ("input", "post_attention")},
        **{f"model.layers.0.self_attn.{name}_proj": (16, 16) for name in "qo"},
        **{f"model.layers.0.self_attn.{name}_proj": (8, 16) for name in "kv"},
        **{f"model.layers.0.mlp.{name}_proj": (32, 16) for name in ("gate", "up")},
        "model.layers.0.mlp.down_proj": (16, 32),
    }
    values = {f"{name}.weight": np.ones(size, np.float32) for name, size in sizes.items()}
    values["model.norm.weight"] = norm
    save_file(values, directory / "weights" / "model.safetensors", metadata={"format": "pt"})


def both(*spoils: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda directory: [spoil(directory) for spoil in spoils]


def weights_with(spoil: Callable[[Path], object]) -> Callable[[Path], object]:
    """A published model in `weights`, in which something is spoilt."""
    return lambda directory: (int32_weight(directory), spoil(directory))


LLAMA = {
    **{"model_type": "llama", "vocab_size": 257, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
}


def config_json(**changes: object) -> Callable[[Path], object]:
    return written("config.json", json.dumps({**LLAMA, **changes}))
