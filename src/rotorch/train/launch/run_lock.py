"""Lock of a run's directories: a second run in the same directory is refused, by name of the first.

[Note: a lock that dies with its holder]
    The lock is `flock` on a file in the directory. The launcher takes it, or rank 0 under torchrun, and forked ranks
    inherit the open file, so the directory stays locked until the last process of the run has ended, however it ends:
    the kernel gives the lock up, and no dead run blocks a later one. No process unlocks explicitly, which would unlock
    for every process that has inherited the file. Linux passes flock on to NFS servers (v4, and v3 with lockd); a mount
    with `local_lock=flock` or `nolock` keeps it to one host, which cannot be detected from here.

    The file's text names the holder, for messages only. The holder removes the file before the lock ends, so a process
    that opens it must check afterwards that the name still refers to the locked file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from rotorch.comm.shared_file import has_ended, own_prefix
from rotorch.core.errors import ConfigError
from rotorch.core.small_files import read_small
from rotorch.run_config import RunConfig
from rotorch.train.checkpoint.directories import checkpoints_of, make_directory
from rotorch.train.checkpoint.store import is_url

_LOG = logging.getLogger(__name__)

LOCK = ".rotorch-lock"
"""The locked file of a directory."""

_MOST_BYTES = 1 << 16
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
_POLL_S = 0.05
_LOOKS = 10  # another process that only looks holds the lock for a moment
_LOOKS_AT_ENDED = 400  # ranks of a launcher that was killed take a while to give their memory back


@dataclass(frozen=True)
class Holder:
    """The process that uses a directory.

    Attributes:
        pid: the process that took the lock: a launcher, or rank 0 under torchrun.
        host: host that it runs on.
        since: time at which it took the lock, in UTC.
        process: tells it from processes of other spaces of process ids.
    """

    pid: int
    host: str
    since: str
    process: str

    @staticmethod
    def this() -> Holder:
        """This process, from now on."""
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return Holder(os.getpid(), platform.node(), now, own_prefix())

    @property
    def has_ended(self) -> bool:
        """True if it is known here to have ended."""
        return self.host == platform.node() and has_ended(self.process)

    def __str__(self) -> str:
        what = "processes that it has started still run" if self.has_ended else f"since {self.since}"
        return f"process {self.pid} on {self.host}, {what}"


class DirectoryInUse(ConfigError):
    """Another run uses the directory."""


def directories_of(config: RunConfig) -> dict[str, Path]:
    """The directories that a run writes, by the key of the configuration that names them; no stores."""
    found = {"train.out": config.train.out, "train.checkpoint_dir": config.train.saves_in}
    return {key: Path(where) for key, where in found.items() if not is_url(where)}


@contextmanager
def lock_directories(directories: dict[str, Path], *, seen_with: frozenset[Path]) -> Iterator[None]:
    """Holds the locks of directories, and makes missing directories. One process of a run.

    Args:
        directories: by the key of the configuration that names them.
        seen_with: their contents, by `contents`, before the run was checked.

    Raises:
        DirectoryInUse: another run has one of them, or had it since the run was checked.
    """
    with ExitStack() as held:
        seen: list[Path] = []
        for key, directory in directories.items():
            if any(directory.exists() and directory.samefile(other) for other in seen):
                continue  # two names of one directory
            held.enter_context(_locked(directory, key=key))
            seen.append(directory)
        if changed := sorted(contents(directories) ^ seen_with):
            raise DirectoryInUse(
                f"train.out: another run has just written or removed {changed[0]}. Give the same command again"
            )
        yield


def contents(directories: dict[str, Path]) -> frozenset[Path]:
    """Paths in the directories and in their `checkpoints/`, without the locks."""
    found: set[Path] = set()
    for directory in directories.values():
        for parent in (directory, checkpoints_of(directory)):
            with suppress(OSError):
                found.update(path for path in parent.iterdir() if path.name != LOCK)
    return frozenset(found)


def check_not_in_use(directories: dict[str, Path]) -> None:
    """Raises `DirectoryInUse` if another run has one of the directories now. Writes nothing."""
    for key, directory in directories.items():
        try:
            descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_NONBLOCK)  # it may be a pipe
        except OSError:  # nobody has locked it, or the checks that follow say what is wrong with it
            continue
        try:
            _lock(descriptor, fcntl.LOCK_SH, directory=directory, key=key)
        finally:
            os.close(descriptor)


@contextmanager
def _locked(directory: Path, *, key: str) -> Iterator[None]:
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    launcher, descriptor = os.getpid(), _take(directory, key=key)
    try:
        yield
    finally:
        if os.getpid() == launcher:  # else a rank ends
            release(descriptor, directory=directory)
            with suppress(OSError):  # there is something in it, as there should be
                while directory != existing:
                    directory.rmdir()
                    directory = directory.parent


def lock_again(directory: Path, *, key: str = "train.out") -> int | None:
    """The lock of a directory that somebody has removed while the run that this process belongs to had it.

    Returns:
        The open file, for `release`; None if the run still has the lock.

    Raises:
        DirectoryInUse: another run has it now.
    """
    holder = _holder(directory)
    if holder is not None and holder.host == platform.node() and holder.pid in (os.getpid(), os.getppid()):
        return None
    return _take(directory, key=key)


def release(descriptor: int, *, directory: Path) -> None:
    """Gives a lock up, with its file; leaves a file of that name alone that is another one."""
    if _is_named(directory / LOCK, descriptor):
        (directory / LOCK).unlink(missing_ok=True)
    os.close(descriptor)


def _take(directory: Path, *, key: str) -> int:
    make_directory(directory)
    descriptor = _open_locked(directory / LOCK, directory=directory, key=key)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(Holder.this())).encode(), 0)
    return descriptor


def _open_locked(file: Path, *, directory: Path, key: str) -> int:
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor, fcntl.LOCK_EX, directory=directory, key=key)
        except BaseException:
            os.close(descriptor)
            raise
        if _is_named(file, descriptor):
            return descriptor
        os.close(descriptor)  # its holder has removed it meanwhile


def _is_named(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(file.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _lock(descriptor: int, kind: int, *, directory: Path, key: str) -> None:
    looks = 0
    while True:
        try:
            return fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                if kind == fcntl.LOCK_EX:
                    _LOG.warning(
                        "%s: %s: this file system has no locks (%s): see to it that no other run writes there",
                        key,
                        directory,
                        error.strerror,
                    )
                return
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        holder, looks = _holder(directory), looks + 1
        if looks > (_LOOKS_AT_ENDED if holder is not None and holder.has_ended else _LOOKS):
            raise DirectoryInUse(
                f"{key}: {directory} is used by another run ({holder or 'whose process is not known'}). Wait until it "
                f"is done, or end it, or write another {key}=..."
            )
        time.sleep(_POLL_S)


def _holder(directory: Path) -> Holder | None:
    try:
        found = json.loads(read_small(directory / LOCK, most_bytes=_MOST_BYTES, what="a lock"))
        return Holder(**{field.name: found[field.name] for field in fields(Holder)})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # it is just being written, or not ours
