"""Checkpoints of a run as directories: the latest whole one, retention, and leftovers. No torch.

See [Note: a checkpoint on disk] in `manifest.py` for the meaning of names, and [Note: whole in a store] in `commit.py`.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from rotorch.core.errors import ConfigError
from rotorch.train.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    NewerFormat,
    check_contents,
    check_sizes,
    read_manifest,
)
from rotorch.train.checkpoint.store import AnyPath, StorePath, as_path

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"\.?step-(\d{8,})(\.old)?")


def checkpoints_of(run_dir: AnyPath | str) -> AnyPath:
    """The directory of a run's checkpoints."""
    return as_path(run_dir) / "checkpoints"


def step_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def latest(run_dir: AnyPath | str, *, or_refuse: bool = False) -> AnyPath | None:
    """Returns the newest whole checkpoint of a run, or None if it has none.

    Whole means: a manifest that agrees with itself, and every file there with its size (`check` reads the contents
    too). One that is not whole, and what a save that was cut off has left, is skipped with a word.

    Args:
        run_dir: of the run.
        or_refuse: it is wrong input if there are checkpoints, and none is whole.

    Raises:
        NewerFormat: if the newest one was written by a later rotorch.
        ConfigError: with `or_refuse`.
    """
    parent = checkpoints_of(run_dir)
    for path in leftovers(parent):
        if not stands_in(path):
            _LOG.warning("checkpoint: skipping %s, left by a save that was cut off", path)
    return _newest_whole(candidates(parent), or_refuse=or_refuse)


def one_before(path: AnyPath) -> AnyPath | None:
    """Returns the newest whole checkpoint of an earlier step beside `path`, or None; skips others with a word."""
    return _newest_whole([other for other in candidates(path.parent) if step_of(other) < step_of(path)])


def _newest_whole(paths: list[AnyPath], *, or_refuse: bool = False) -> AnyPath | None:
    found: AnyPath | None = None
    broken: list[ConfigError] = []
    for path in reversed(paths):
        try:
            check_sizes(path, read_manifest(path))
        except NewerFormat:
            raise
        except ConfigError as error:
            broken.append(error)
        else:
            found = path
            break
    if found is None and broken and or_refuse:
        raise ConfigError(
            f"{broken[0]}. No whole checkpoint is there: give back its files, or remove {paths[-1].parent}, and the "
            "run begins anew"
        )
    for error in broken:
        _LOG.warning("%s (skipped; looking for the one before)", error)
    return found


def find_checkpoint(path: AnyPath | str) -> AnyPath:
    """Returns `path` if it is a checkpoint, or the latest one if it is a run's directory.

    Raises:
        ConfigError: if it is neither.
    """
    path = as_path(path)
    if not (path / MANIFEST).exists() and checkpoints_of(path).is_dir():
        newest = latest(path)
        if newest is None:
            raise ConfigError(f"checkpoint: {path}: a run without a whole checkpoint")
        return newest
    return path


def check(path: AnyPath | str) -> Manifest:
    """Reads a whole checkpoint and compares every byte with its digests. Returns its manifest.

    Raises:
        ConfigError: if it is missing, foreign, from a later version, cut off or damaged; names the file and the reason.
    """
    path = as_path(path)
    manifest = read_manifest(path)
    check_contents(path, manifest)
    return manifest


def prune(parent: AnyPath, *, keep: int, just_written: AnyPath, damaged: Collection[int] = ()) -> None:
    """Removes all but the newest `keep` whole checkpoints, never `just_written`. A failure is only logged.

    Whole is what has a manifest and files of its sizes, but for the steps in `damaged`: those stay, and do not count.
    """
    try:
        whole = [path for path in _whole(candidates(parent)) if step_of(path) not in damaged or path == just_written]
    except OSError as error:  # the save has succeeded; the next one removes more
        _LOG.warning("checkpoint: %s: cannot be looked through for old ones: %s", parent, error.strerror)
        return
    others = [path for path in whole if path != just_written]
    for path in others[: max(0, len(others) - (keep - 1))]:
        try:
            remove_directory(path)
        except OSError as error:
            _LOG.warning("checkpoint: %s: cannot be removed: %s", path, error.strerror)


def _whole(paths: list[AnyPath]) -> list[AnyPath]:
    whole = []
    for path in paths:
        try:
            check_sizes(path, read_manifest(path))
        except ConfigError:
            continue  # not ours to judge, and it does not count as one to go back to
        whole.append(path)
    return whole


def candidates(parent: AnyPath) -> list[AnyPath]:
    """Directories that claim to be checkpoints, by step."""
    found: list[AnyPath] = [p for p in parent.glob("step-*") if _NAME.fullmatch(p.name) and p.is_dir()]
    if isinstance(parent, StorePath):
        return sorted((p for p in found if (p / MANIFEST).exists()), key=step_of)
    found += [p for p in leftovers(parent) if stands_in(p)]
    return sorted(found, key=step_of)


def step_of(path: AnyPath) -> int:
    """The step of a checkpoint, by its directory's name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, f"{path} was matched before"
    return int(match[1])


# ---------------------------------------------------------------- coming and going


def fsync(path: Path) -> None:
    """Returns when a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Makes a directory, and those above it; when it returns, the names of those that were missing are on the disk."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in missing:
        with suppress(PermissionError):  # what may be written to need not be readable, and so cannot be synced
            fsync(path.parent)


def replace_directory(temporary: Path, final: Path) -> None:
    """Gives the finished directory `temporary` the name `final`; what had that name before is removed afterwards.

    A kill in between leaves the earlier one as `.step-*.old`, which `stands_in` finds.
    """
    aside = final.parent / f".{final.name}.old"
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(final, aside)
    os.rename(temporary, final)
    fsync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def remove_directory(path: AnyPath) -> None:
    """Removes a checkpoint, its name or its manifest first, so that half of it never looks whole."""
    if isinstance(path, StorePath):
        (path / MANIFEST).unlink()
        path.remove_below()
        return
    hidden = path.parent / f".{path.name}.gone-{os.getpid()}"
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def leftovers(parent: AnyPath) -> list[AnyPath]:
    """Directories of saves, replacements and removals that were cut off."""
    if isinstance(parent, StorePath):
        found = [p for p in parent.glob("step-*") if _NAME.fullmatch(p.name)]
        return sorted(p for p in found if not (p / MANIFEST).exists())
    return sorted(p for p in parent.glob(".step-*") if p.is_dir() and not p.is_symlink())


def stands_in(path: AnyPath) -> Path | None:
    """Returns the missing `step-*` of a `.step-*.old`, if a save was cut off while it replaced the directory."""
    if isinstance(path, StorePath) or not path.name.endswith(".old") or not _NAME.fullmatch(path.name):
        return None
    final = path.parent / path.name.removeprefix(".").removesuffix(".old")
    return None if final.exists() else final


def remove_leftovers(parent: AnyPath) -> None:
    """Removes what was cut off, with a word, and gives a checkpoint that was being replaced its name back."""
    for path in leftovers(parent):
        if final := stands_in(path):
            os.rename(path, final)
            continue
        _LOG.warning("checkpoint: removing %s, left by a save that was cut off", path)
        if isinstance(path, StorePath):
            path.remove_below()
        else:
            shutil.rmtree(path, ignore_errors=True)


def remove_unlisted(directory: AnyPath) -> None:
    """Removes files of a checkpoint's directory of a store that are not in its manifest: all, if it has none."""
    try:
        listed = {MANIFEST, *read_manifest(directory).files}
    except ConfigError:
        if (directory / MANIFEST).exists():
            return  # damaged, or of another rotorch: not ours to judge
        listed = set()
    for path in directory.iterdir():
        if path.name not in listed:
            path.unlink()
