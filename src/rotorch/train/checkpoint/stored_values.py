"""Numbers of a checkpoint that are not finite, found in the bytes that are held against their digests anyway."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from rotorch.shard.load import is_finite
from rotorch.train.checkpoint.manifest import MODEL, OPTIMIZER, DamagedCheckpoint, Manifest, StoredChunk
from rotorch.train.checkpoint.storage import DTYPES
from rotorch.train.checkpoint.store import AnyPath


class StoredValues:
    """Looks at the blocks of a checkpoint's files for weights, and what an optimizer keeps like them, gone astray.

    No run goes on from such values: every loss would be NaN.
    """

    def __init__(self, path: AnyPath, manifest: Manifest, *, names: Iterable[str]) -> None:
        """Will look at the tensors `names`; those of whole numbers have nothing to be found."""
        self._path = path
        self._first: tuple[str, str] | None = None
        self._by_file: dict[str, list[tuple[StoredChunk, str, torch.dtype]]] = {}
        for name in names:
            dtype = DTYPES[manifest.tensors[name].dtype]
            for chunk in manifest.tensors[name].chunks if dtype.is_floating_point else ():
                self._by_file.setdefault(chunk.file, []).append((chunk, name, dtype))
        for chunks in self._by_file.values():
            chunks.sort(key=lambda entry: -entry[0].start)

    def look(self, file: str, start: int, block: memoryview) -> None:
        """Takes the bytes of `file` from `start` on; the blocks of a file come one after another."""
        waiting, stop = self._by_file.get(file, []), start + len(block)
        while waiting and self._first is None:
            chunk, name, dtype = waiting[-1]
            begin, end = chunk.start, chunk.start + math.prod(chunk.sizes) * dtype.itemsize
            if begin >= stop:
                return
            # Elements begin at multiples of their size, and so do blocks: none lies in two of them.
            first, last = max(begin, start), min(end, stop)
            if first < last:
                values = torch.frombuffer(block[first - start : last - start], dtype=dtype)
                values = values.float() if dtype.itemsize == 1 else values
                if not is_finite(values):
                    at = int((~torch.isfinite(values)).nonzero()[0])
                    place = (first - begin) // dtype.itemsize + at
                    self._first = file, f"{_shown(name, chunk, place)} is {float(values[at])}"
            if end > stop:
                return
            waiting.pop()

    def check(self) -> None:
        """Raises `DamagedCheckpoint` if such a number was seen; names the file, the weight and the element."""
        if self._first is not None:
            file, what = self._first
            raise DamagedCheckpoint(f"checkpoint: {self._path / file}: {what}: a run does not go on from such values")


def _shown(name: str, chunk: StoredChunk, place: int) -> str:
    """An element as a person knows it: of which weight, and where in it."""
    index = []
    for size in reversed(chunk.sizes):
        place, own = divmod(place, size)
        index.append(own)
    element = [offset + own for offset, own in zip(chunk.offsets, reversed(index), strict=True)] or ""
    if name.startswith(OPTIMIZER):
        key, _, weight = name.removeprefix(OPTIMIZER).partition("/")
        return f"the optimizer's {key} of {weight!r}{element}"
    return f"the weight {name.removeprefix(MODEL)!r}{element}"
