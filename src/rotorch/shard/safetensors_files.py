"""A directory of safetensors, one file or several with an index, as tensors of which boxes can be read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rotorch.core.errors import ConfigError
from rotorch.core.small_files import check_is_file, read_small
from rotorch.shard.stored import Box, Stored

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_MOST_INDEX_BYTES = 1 << 28

_MAPPED_BYTES = 1 << 26
"""Bytes after which a file is unmapped and mapped again: pages that were read count as this process's until then."""


@contextmanager
def open_safetensors(directory: Path) -> Iterator[dict[str, Stored]]:
    """Opens all tensors of a directory, by name. Every rank alone; reads headers only.

    Raises:
        ConfigError: no safetensors, an index that is not readable or names files that are not in the directory, a
            corrupt or truncated file; also for tensors that turn out to be unreadable within the block.
    """
    files: list[_File] = []
    try:
        stored: dict[str, Stored] = {}
        for path, promised in _files(directory).items():
            files.append(_File(path))
            names = files[-1].names()
            if lacking := sorted(set(promised or names) - set(names)):
                raise ConfigError(
                    f"load: {str(directory / INDEX)!r} says that {path.name} holds {', '.join(lacking)}, and it does "
                    "not. Write a whole directory"
                )
            for name in promised or names:
                if name in stored:
                    raise ConfigError(
                        f"load: {str(directory)!r} holds {name} in several files. Write a directory with one model"
                    )
                stored[name] = _Tensor(files[-1], name)
        yield stored
    finally:
        for file in files:
            file.close()


def _files(directory: Path) -> dict[Path, list[str] | None]:
    """The directory's files, each with the names of its tensors by the index (None where there is no index)."""
    if (directory / INDEX).exists():
        return dict(_indexed(directory))
    if (directory / SINGLE).exists():
        return {directory / SINGLE: None}
    found: dict[Path, list[str] | None] = dict.fromkeys(sorted(directory.glob("*.safetensors")))
    if not found:
        pickled = next(iter(sorted(directory.glob("*.bin"))), None)
        hint = f". {pickled.name} is a pickle, which is not read: convert it to safetensors" if pickled else ""
        raise ConfigError(
            f"load: no safetensors files in {str(directory)!r}{hint or '. Write a Hugging Face model directory'}"
        )
    return found


def _indexed(directory: Path) -> dict[Path, list[str]]:
    index = directory / INDEX
    try:
        weight_map = json.loads(read_small(index, most_bytes=_MOST_INDEX_BYTES, what="an index"))["weight_map"]
        pairs = [(str(name), str(file)) for name, file in weight_map.items()]
    except ConfigError as error:
        raise ConfigError(f"load: {error}") from None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"load: cannot read {str(index)!r}: {what}. Write a whole directory") from None
    files: dict[Path, list[str]] = {}
    for name, file in pairs:
        if Path(file).name != file or file in ("", ".", ".."):
            raise ConfigError(
                f"load: cannot read {str(index)!r}: it names {file!r}, which is not a file of this directory"
            )
        files.setdefault(directory / file, []).append(name)
    missing = sorted(path.name for path in files if not os.path.lexists(path))
    if missing:
        raise ConfigError(
            f"load: cannot read {str(directory)!r}: {', '.join(missing)} missing, which {INDEX} names. "
            "Write a whole directory"
        )
    return files


class _File:
    """One safetensors file, unmapped and mapped again now and then (see `_MAPPED_BYTES`)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped_bytes = 0  # at most: of tensors that were read from, since the file was mapped
        self._opened: Any = None
        self._open()

    def names(self) -> list[str]:
        return list(self._opened.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._opened.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        if not self.shape(name):
            return self._opened.get_tensor(name).dtype  # a number has no slices
        return self._opened.get_slice(name)[:0].dtype

    def read(self, name: str, box: Box, *, out: Tensor) -> None:
        """Copies a box of a tensor to `out`."""
        if self._mapped_bytes > _MAPPED_BYTES:
            self._open()
        try:
            if box:
                part = self._opened.get_slice(name)[tuple(slice(r.start, r.stop) for r in box)]
            else:
                part = self._opened.get_tensor(name)  # a number has no slices
            self._mapped_bytes += math.prod(self.shape(name)) * part.element_size()
            out.copy_(part)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"load: cannot read {name} in {str(self.path)!r}: {error}") from None

    def close(self) -> None:
        if self._opened is not None:
            self._opened.__exit__(None, None, None)
        self._opened = None

    def _open(self) -> None:
        self.close()
        self._mapped_bytes = 0
        try:
            check_is_file(self.path, what="a file of weights")
            self.path.open("rb").close()  # safetensors says of any file that does not open that it is missing
        except ConfigError as error:
            raise ConfigError(f"load: {error}") from None
        except OSError as error:
            where = f" (it is a link to {self.path.readlink()})" if self.path.is_symlink() else ""
            raise ConfigError(f"load: cannot read {str(self.path)!r}: {error.strerror}{where}") from None
        try:
            self._opened = safe_open(self.path, framework="pt").__enter__()
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"load: cannot read {str(self.path)!r}: it is no safetensors file, or a corrupt or truncated one "
                f"({error})"
            ) from None


@final
class _Tensor(Stored):
    """One tensor of a file."""

    def __init__(self, file: _File, name: str) -> None:
        self._file, self._name = file, name
        self.shape, self.dtype = file.shape(name), file.dtype(name)

    def read(self, box: Box, *, out: Tensor) -> None:
        self._file.read(self._name, box, out=out)
