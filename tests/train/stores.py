"""A store for tests: files on the disk, but without renaming, and a file appears when it is closed, whole."""

import os
import signal

import fsspec
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem


class Opener(LocalFileOpener):
    """Writes beside the file, and gives it its name at the end."""

    def close(self):
        if not self.closed:
            super().close()
            if "w" in self.mode:
                self.fs.counted()
                self.commit()


class Objects(LocalFileSystem):
    """`objects:///path`. At the `kill_at`-th thing that is done to it, the process dies before it is done."""

    protocol = "objects"
    cachable = True
    kill_at, count = 0, 0

    @classmethod
    def counted(cls):
        cls.count += 1
        if cls.count == cls.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("objects://"))

    def _open(self, path, mode="rb", block_size=None, **kwargs):
        if "w" not in mode:
            return super()._open(path, mode, block_size, **kwargs)
        self.counted()
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return Opener(path, mode, fs=self, autocommit=False)

    def rm_file(self, path):
        self.counted()
        super().rm_file(path)

    def rm(self, path, recursive=False, maxdepth=None):
        for found in self.find(path):
            self.rm_file(found)

    def isdir(self, path):
        return bool(self.find(path)) and super().isdir(path)

    def mv(self, *args, **kwargs):
        raise AssertionError("a store does not rename")

    mv_file = mv


def url_of(directory):
    """The URL of a directory in the store."""
    fsspec.register_implementation("objects", Objects, clobber=True)
    return f"objects://{directory}"
