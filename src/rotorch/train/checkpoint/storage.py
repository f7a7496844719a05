"""Checkpoint files under `torch.distributed.checkpoint`: its planners assign tensors to ranks, this moves the bytes.

torch's own file format keeps its index in a pickle and its tensors in zip files of pickles, and a reader needs a whole
chunk in memory to take a row of it. Here a rank's file is safetensors, the index is our manifest (JSON), and both
directions go through a buffer of `_BUFFER_BYTES`. Loading runs no foreign code.

[Note: one error for all]
    Everything that can fail while saving happens inside the steps that `torch.distributed.checkpoint` runs on all
    ranks, which turns an exception on one rank into one on every rank. No rank waits for a rank that has given up.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import math
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    Metadata,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rotorch.core.errors import ConfigError
from rotorch.shard.sharded_weight import ChunkedTensor
from rotorch.train.checkpoint.commit import commit_to
from rotorch.train.checkpoint.manifest import (
    ITEM_BYTES,
    MANIFEST,
    DamagedCheckpoint,
    FileEntry,
    Manifest,
    StoredChunk,
    TensorEntry,
    errors_as_damage,
    fill_problem,
)
from rotorch.train.checkpoint.store import AnyPath, creating

DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
}
"""torch's dtypes by the names that safetensors gives them."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_BUFFER_BYTES = 1 << 24


# ---------------------------------------------------------------- safetensors, streamed


@dataclass(frozen=True)
class LazyTensor:
    """One tensor of a safetensors file that is being written; `get` is called once, when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    get: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes it takes in the file."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Written:
    """A safetensors file as it was written: the first byte of each tensor, in the order given, its size and digest."""

    starts: tuple[int, ...]
    file: FileEntry


def write_safetensors(path: AnyPath, entries: Sequence[LazyTensor]) -> Written:
    """Writes one safetensors file, tensor by tensor, and returns when it is on the disk, or in the store.

    Holds one tensor at a time as `get` gives it, and a buffer for the part of it that has to be copied.

    Raises:
        OSError: if the disk is full or fails.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, starts = 0, []
    for entry in entries:
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, position + entry.num_bytes],
        }
        starts.append(position)
        position += entry.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with creating(path) as stream:
        for block in _blocks(text, entries):
            stream.write(block)
            digest.update(block)
    first = 8 + len(text)
    file = FileEntry(num_bytes=first + position, sha256=digest.hexdigest())
    return Written(tuple(first + start for start in starts), file)


def _blocks(header: bytes, entries: Sequence[LazyTensor]) -> Iterator[bytes | memoryview]:
    yield len(header).to_bytes(8, "little")
    yield header
    for entry in entries:
        tensor = entry.get().detach()
        if tuple(tensor.shape) != entry.shape or tensor.dtype != DTYPES[entry.dtype]:
            raise AssertionError(f"{entry.name}: is {tensor.dtype} {tensor.shape}, not {entry.dtype} {entry.shape}")
        for rows in _row_blocks(tensor):
            yield memoryview(rows.contiguous().cpu().view(-1).view(torch.uint8).numpy())


def _row_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Cuts a tensor into parts of at most about `_BUFFER_BYTES`: rows of dim 0, or rows of a row that is larger."""
    if not tensor.numel():
        return
    if tensor.dim() == 0:
        tensor = tensor.view(1)
    row_bytes = tensor[0].numel() * tensor.element_size()
    if row_bytes <= _BUFFER_BYTES or tensor.dim() == 1:
        yield from tensor.split(max(1, _BUFFER_BYTES // row_bytes))
        return
    for row in range(tensor.shape[0]):
        yield from _row_blocks(tensor[row])


def _read_box(
    stream: io.BufferedReader,
    chunk: StoredChunk,
    dtype: torch.dtype,
    *,
    offsets: Sequence[int],
    into: Tensor,
    file: AnyPath,
) -> None:
    """Fills `into` with the box of its shape that starts at `offsets` in `chunk`; reads the chunk's rows in blocks."""
    target = into.view(1) if into.dim() == 0 else into
    _read_rows(stream, chunk.start, chunk.sizes or (1,), dtype, offsets=offsets or (0,), into=target, file=file)


def _read_rows(
    stream: io.BufferedReader,
    start: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
    *,
    offsets: Sequence[int],
    into: Tensor,
    file: AnyPath,
) -> None:
    """Reads a tensor of `sizes`, one dim or more, whose bytes begin at `start`."""
    row_elements = math.prod(sizes[1:])
    row_bytes = row_elements * dtype.itemsize
    if row_bytes > _BUFFER_BYTES and len(sizes) > 1:
        for row in range(into.shape[0]):
            row_start = start + (offsets[0] + row) * row_bytes
            _read_rows(stream, row_start, sizes[1:], dtype, offsets=offsets[1:], into=into[row], file=file)
        return
    rows = max(1, _BUFFER_BYTES // max(1, row_bytes))
    buffer = memoryview(bytearray(min(rows, into.shape[0]) * row_bytes))
    for row in range(0, into.shape[0], rows):
        count = min(rows, into.shape[0] - row)
        stream.seek(start + (offsets[0] + row) * row_bytes)
        if stream.readinto(buffer[: count * row_bytes]) != count * row_bytes:
            error = DamagedCheckpoint if isinstance(file, Path) else ConfigError
            raise error(f"checkpoint: {file}: truncated while it was read")
        block = torch.frombuffer(buffer, dtype=dtype, count=count * row_elements).view(count, *sizes[1:])
        for dim, begin in enumerate(offsets[1:], start=1):
            block = block.narrow(dim, begin, into.shape[dim])
        into.narrow(0, row, count).copy_(block)


# ---------------------------------------------------------------- planners


_Key = tuple[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""Name, offsets and sizes of a chunk."""


class ChunksSavePlanner(DefaultSavePlanner):
    """torch's planner for a flat dict of `ChunkedTensor`s and plain tensors; replicated ones are spread over ranks.

    A context: within it one save may be made.

    Rank 0 gets the plans of all ranks, a few objects for each chunk. Python's collector of cycles would look through
    all of them time and again while they come in: four fifths of the time that a plan takes with 140,000 chunks. So it
    rests from this rank's own plan to the plan of all.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._rests = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._collect_again()

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        if self.is_coordinator:
            self.rest_of_collector()
        return plan

    def rest_of_collector(self) -> None:
        """Lets the collector of cycles rest until there is a plan of all ranks, or this context is left."""
        self._rests = self._rests or gc.isenabled()
        gc.disable()

    def _collect_again(self) -> None:
        if self._rests:
            self._rests = False
            gc.enable()

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._collect_again()
        return super().finish_plan(new_plan)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Gives each chunk to that of its holders which has least to write so far.

        torch's does the same, and then numbers and lists all chunks. The list is the manifest's here, and is written
        when the files are.
        """
        holders: dict[_Key, list[int]] = {}
        tensors: dict[str, list[WriteItem]] = {}
        for number, plan in enumerate(all_plans):
            for item in plan.items:
                held_by = holders.setdefault(_key(item), [])
                if not held_by:
                    tensors.setdefault(item.index.fqn, []).append(item)
                held_by.append(number)
        for name, items in tensors.items():
            if problem := fill_problem(name, shape=_data(items[0]).size, chunks=[_data(item).chunk for item in items]):
                raise AssertionError(problem)
        writers: dict[_Key, int] = {}
        loads = [0] * len(all_plans)
        for item in (item for items in tensors.values() for item in items):
            writers[_key(item)] = writer = min(holders[_key(item)], key=loads.__getitem__)
            loads[writer] += _num_bytes(item)
        plans = [
            replace(plan, items=[item for item in plan.items if writers[_key(item)] == number])
            for number, plan in enumerate(all_plans)
        ]
        return plans, Metadata({})

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index) if isinstance(found, ChunkedTensor) else super().lookup_object(index)


class ChunksLoadPlanner(LoadPlanner):
    """Fills a flat dict of `ChunkedTensor` and plain tensors in place.

    `DefaultLoadPlanner` would do, but it first walks the dict and puts None for every value that is not a tensor.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._tensors = state_dict
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None, "a CheckpointReader always has metadata"
        self._plan = create_default_local_load_plan(self._tensors, self._metadata)
        # Rank 0 collects every rank's plan, and has nothing to change in one: it would hold all of them for nothing.
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return self._plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("a checkpoint holds tensors only")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        found = self._tensors[read_item.dest_index.fqn]
        tensor = found.__get_tensor_shard__(read_item.dest_index) if isinstance(found, ChunkedTensor) else found
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        return None


# ---------------------------------------------------------------- writing


@dataclass(frozen=True)
class _TargetFile:
    """File that a rank writes to: sent by rank 0 with the plan."""

    file: AnyPath


@dataclass(frozen=True)
class _Stored:
    """File that holds one chunk: each rank reports it to rank 0."""

    entry: tuple[str, tuple[int, ...]]
    """dtype and whole shape of its tensor."""
    chunk: StoredChunk
    file: FileEntry


class CheckpointWriter(StorageWriter):
    """Writes a checkpoint: whole or not at all (`commit.py` says how).

    Args:
        directory: the final `.../checkpoints/step-00000100`, the same on all ranks.
        manifest: everything but tensors and files; only rank 0's is used.
        copies: further files to take along, by the name they get.
        names: of tensors that some rank has to save, for which each relies on others.
    """

    def __init__(
        self, directory: AnyPath, *, manifest: Manifest, copies: dict[str, Path], names: Collection[str] = ()
    ) -> None:
        self._commit = commit_to(directory)
        self._writes_to: AnyPath = directory
        self._manifest = manifest
        self._copies = copies
        self._names = names

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        planned = {item.index.fqn for plan in plans for item in plan.items}
        if missing := [name for name in self._names if name not in planned]:
            raise AssertionError(f"no rank saves {missing[0]!r}: its holders are numbered wrongly")
        self._writes_to = self._commit.begin(sum(_num_bytes(item) for plan in plans for item in plan.items))
        suffix = self._commit.file_suffix()
        names = [f"rank-{rank:05d}{suffix}.safetensors" for rank in range(len(plans))]
        return [
            replace(plan, storage_data=_TargetFile(self._writes_to / name))
            for plan, name in zip(plans, names, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        target: _TargetFile = plan.storage_data
        # Wide elements first, so that every tensor of the file begins at a multiple of its element size.
        items = sorted(plan.items, key=lambda i: (-_dtype(i).itemsize, i.index.fqn, _box(i)))
        done: Future[list[WriteResult]] = Future()
        if not items:
            done.set_result([])
            return done
        written = write_safetensors(target.file, [_entry(item, planner) for item in items])
        results = []
        for item, start in zip(items, written.starts, strict=True):
            offsets, sizes = _box(item)
            stored = _Stored(
                (DTYPE_NAMES[_dtype(item)], tuple(item.tensor_data.size)),
                StoredChunk(offsets=offsets, sizes=sizes, file=target.file.name, start=start),
                written.file,
            )
            results.append(WriteResult(item.index, _num_bytes(item), stored))
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        chunks: dict[str, list[StoredChunk]] = {}
        kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
        files: dict[str, FileEntry] = {}
        for result in (r for of_rank in results for r in of_rank):
            stored: _Stored = result.storage_data
            chunks.setdefault(result.index.fqn, []).append(stored.chunk)
            kinds[result.index.fqn] = stored.entry
            files[stored.chunk.file] = stored.file
        suffix = self._commit.file_suffix()
        renamed: dict[str, str] = {}
        for name, source in self._copies.items():
            stem, ending = os.path.splitext(name)
            written_as = f"{stem}{suffix}{ending}"
            files[written_as] = _copied(source, self._writes_to / written_as)
            if written_as != name:
                renamed[name] = written_as
        tensors = {
            name: TensorEntry(dtype=kinds[name][0], shape=kinds[name][1], chunks=tuple(chunks[name]))
            for name in sorted(chunks)
        }
        manifest = self._manifest.model_copy(
            update={"tensors": tensors, "files": dict(sorted(files.items())), "renamed": renamed}
        )
        content = manifest.to_bytes()
        with creating(self._writes_to / MANIFEST) as stream:
            stream.write(content)
        self._commit.finish()

    def abort(self) -> None:
        """Rank 0, after a failed save: removes what was written of it."""
        self._commit.abort()


def _copied(source: Path, copy: AnyPath) -> FileEntry:
    """Copies a file, and says what was written."""
    digest, num_bytes = hashlib.sha256(), 0
    with source.open("rb") as stream, creating(copy) as into:
        while block := stream.read(_BUFFER_BYTES):
            into.write(block)
            digest.update(block)
            num_bytes += len(block)
    return FileEntry(num_bytes=num_bytes, sha256=digest.hexdigest())


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "a checkpoint holds tensors only"
    return item.tensor_data


def _dtype(item: WriteItem) -> torch.dtype:
    return _data(item).properties.dtype


def _box(item: WriteItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    chunk = _data(item).chunk
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _key(item: WriteItem) -> _Key:
    return item.index.fqn, _box(item)


def _num_bytes(item: WriteItem) -> int:
    return math.prod(_box(item)[1]) * _dtype(item).itemsize


def _entry(item: WriteItem, planner: SavePlanner) -> LazyTensor:
    offsets, sizes = _box(item)
    name = item.index.fqn
    if sizes != tuple(item.tensor_data.size):
        name += "[" + ",".join(f"{o}:{o + s}" for o, s in zip(offsets, sizes, strict=True)) + "]"

    def get() -> Tensor:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor), "a checkpoint holds tensors only"
        return tensor

    return LazyTensor(name, DTYPE_NAMES[_dtype(item)], sizes, get)


# ---------------------------------------------------------------- reading


class CheckpointReader(StorageReader):
    """Reads boxes of a checkpoint's tensors; each rank reads the rows it needs through a buffer."""

    def __init__(self, directory: AnyPath, *, manifest: Manifest) -> None:
        self._directory = directory
        self._tensors = manifest.tensors
        self._chunks = {(name, c.offsets): c for name, entry in self._tensors.items() for c in entry.chunks}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata({name: _storage_metadata(entry) for name, entry in self._tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[StoredChunk, ReadItem]]] = {}
        for item in plan.items:
            offset = item.storage_index.offset
            chunk = self._chunks[item.storage_index.fqn, tuple(offset if offset is not None else ())]
            by_file.setdefault(chunk.file, []).append((chunk, item))
        for name, reads in by_file.items():
            path = self._directory / name
            with errors_as_damage(path), path.open("rb") as stream:
                for chunk, item in sorted(reads, key=lambda read: read[0].start):
                    target = planner.resolve_tensor(item).detach()
                    dtype = DTYPES[self._tensors[item.storage_index.fqn].dtype]
                    _read_box(stream, chunk, dtype, offsets=item.storage_offsets, into=target, file=path)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _storage_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
    return TensorStorageMetadata(TensorProperties(DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)


@contextmanager
def without_dcp_notices() -> Iterator[None]:
    """Silences what torch says when one process saves or loads on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
