"""Commit of a checkpoint, which becomes whole at once: on a disk by renaming its directory, in a store by its manifest.

[Note: whole in a store]
    Stores cannot rename directories. There files are written under the checkpoint's final name, and the manifest last:
    a directory without a manifest is left over from an interrupted save. If a step is saved again, its files get other
    names beside the old files, the tokenizer's too (listed in the manifest's `renamed`). The new manifest,
    which appears all at once, names the new files, and then the old files are removed. So at every moment either the
    old or the new checkpoint is whole.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
from pathlib import Path
from typing import Protocol

from rotorch.core.errors import RankFailure
from rotorch.core.quantities import format_bytes
from rotorch.train.checkpoint.directories import (
    candidates,
    fsync,
    make_directory,
    remove_leftovers,
    remove_unlisted,
    replace_directory,
)
from rotorch.train.checkpoint.manifest import MANIFEST
from rotorch.train.checkpoint.store import AnyPath, StorePath

_LOG = logging.getLogger(__name__)


class Commit(Protocol):
    """Commit of one checkpoint: its files become a checkpoint all at once. Used by rank 0."""

    def begin(self, needed_bytes: int) -> AnyPath:
        """Makes room; returns the directory that all ranks write to.

        Raises:
            RankFailure: if there is not enough room.
        """

    def file_suffix(self) -> str:
        """Returns the text inserted into file names, before their ending; call it after `begin`."""

    def finish(self) -> None:
        """Makes this the checkpoint; called once the manifest is written."""

    def abort(self) -> None:
        """Removes the files of a checkpoint after a failure."""


def commit_to(directory: AnyPath) -> Commit:
    """Returns the `Commit` of a checkpoint to `directory`."""
    return _InStore(directory) if isinstance(directory, StorePath) else _OnDisk(directory)


class _OnDisk:
    """Commit by renaming: files lie in a temporary directory, which gets its final name when all are on the disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._temporary: Path | None = None

    def begin(self, needed_bytes: int) -> Path:
        parent = self._directory.parent
        make_directory(parent)
        remove_leftovers(parent)
        free = shutil.disk_usage(parent).free
        if needed_bytes > free:
            raise RankFailure(
                f"checkpoint: {parent}: {format_bytes(needed_bytes)} needed, {format_bytes(free)} free; nothing was "
                "written, earlier checkpoints are untouched. Free some room, or keep fewer checkpoints"
            )
        self._temporary = parent / f".{self._directory.name}.tmp-{os.getpid()}"
        self._temporary.mkdir()
        return self._temporary

    def file_suffix(self) -> str:
        return ""

    def finish(self) -> None:
        assert self._temporary is not None, "begin comes first"
        fsync(self._temporary)
        replace_directory(self._temporary, self._directory)
        self._temporary = None

    def abort(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None


class _InStore:
    """Commit by the manifest: files have their final names (see [Note: whole in a store])."""

    def __init__(self, directory: StorePath) -> None:
        self._directory = directory
        self._suffix: str | None = None

    def begin(self, needed_bytes: int) -> StorePath:
        parent = self._directory.parent
        remove_leftovers(parent)
        for path in candidates(parent):
            remove_unlisted(path)
        is_there = (self._directory / MANIFEST).exists()
        self._suffix = f"-{secrets.token_hex(4)}" if is_there else ""
        return self._directory

    def file_suffix(self) -> str:
        assert self._suffix is not None, "begin comes first"
        return self._suffix

    def finish(self) -> None:
        self._suffix = None
        try:
            remove_unlisted(self._directory)
        except OSError as error:  # the new checkpoint is whole; the next `begin` removes what is left
            _LOG.warning(
                "checkpoint: %s: cannot be removed, left to the next save: %s",
                error.filename or self._directory,
                error.strerror or error,
            )

    def abort(self) -> None:
        if self._suffix is None:
            return
        self._suffix = None
        try:
            remove_unlisted(self._directory)
        except OSError:  # the store is gone; the next save that reaches it removes what is left
            return
