"""Files as a power cut would leave them: the order in which they are written, synced and given their names."""

import os
from pathlib import Path


class Disk:
    """Records calls of this process, from now on.

    Attributes:
        events: ("fsync", path, what the file held then, or None of a directory), ("rename", source, target),
            ("mkdir", path) and ("remove", path), in order.
    """

    def __init__(self, monkeypatch):
        self.events = []
        fsync = os.fsync

        def synced(descriptor):
            fsync(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self.events.append(("fsync", path, None if path.is_dir() else path.read_bytes()))

        monkeypatch.setattr(os, "fsync", synced)
        for name, kind in (
            ("rename", "rename"),
            ("replace", "rename"),
            ("mkdir", "mkdir"),
            ("unlink", "remove"),
            ("rmdir", "remove"),
        ):
            monkeypatch.setattr(os, name, self._noted(kind, getattr(os, name)))

    def _noted(self, kind, function):
        def call(*arguments, **options):
            function(*arguments, **options)
            paths = arguments if kind == "rename" else arguments[:1]
            self.events.append((kind, *(Path(os.fsdecode(path)).absolute() for path in paths)))

        return call

    def check(self, final):
        """Holds what got the name `final`: all of it was on the disk before, and its name is before anything goes."""
        number = max(n for n, event in enumerate(self.events) if event[0] == "rename" and event[2] == final)
        source = self.events[number][1]
        before, after = self.events[:number], self.events[number + 1 :]
        last_synced = {event[1]: (n, event[2]) for n, event in enumerate(before) if event[0] == "fsync"}
        places = {}
        for file in [final] if final.is_file() else [path for path in final.rglob("*") if path.is_file()]:
            where = source / file.relative_to(final)
            assert where in last_synced, f"{file.name} was given its name before it was on the disk"
            places[where], content = last_synced[where]
            assert content == file.read_bytes(), f"{file.name} was written to after it was synced"
        assert places
        if final.is_dir():
            assert source in last_synced, "files were on the disk, but perhaps not their names"
            assert last_synced[source][0] > max(places.values())
        assert after[:1] == [("fsync", final.parent, None)], "the new name was not on the disk before what came next"

    def check_made_directories(self):
        """Holds that the names of new directories got onto the disk."""
        for number, event in enumerate(self.events):
            if event[0] == "mkdir" and event[1].is_dir():  # and not renamed or removed since
                later = [path for kind, path, *_ in self.events[number:] if kind == "fsync"]
                assert event[1].parent in later, f"the name of {event[1]} is perhaps not on the disk"
