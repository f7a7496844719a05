"""Description of a checkpoint: one `manifest.json`, written last, and the check of a directory against it.

[Note: a checkpoint on disk]
    RUN_DIR/checkpoints/step-00000100/
        rank-00000.safetensors ...   the tensors that each rank wrote: an ordinary safetensors file, no pickle
        tokenizer.json ...           if the run has one, and other files of the model that it started from
        manifest.json                everything else, with the size and sha256 of every other file and of itself
    A save is written to `.step-00000100.tmp-<pid>` beside it and renamed when all of it, the manifest last, has
    reached the disk. So a directory called `step-*` is whole, one that begins with a dot is not to be trusted, and a
    byte that changed later is found by its digest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from rotorch.core.errors import ConfigError, FinalFailure
from rotorch.core.quantities import format_bytes
from rotorch.core.small_files import read_small
from rotorch.train.checkpoint.store import AnyPath

FORMAT = "rotorch checkpoint"
VERSION = 2
"""2: `train.precision` of the run is named as today (see `_as_of_today`)."""
MANIFEST = "manifest.json"
MODEL, BUFFER, OPTIMIZER, RNG, OBJECT = "model/", "buffer/", "optimizer/", "rng/", "object/"

ITEM_BYTES = {
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1},
}
"""Bytes per element of each dtype, by the names that safetensors gives them."""

_READ_BYTES = 1 << 22

LookAt = Callable[[str, int, memoryview], None]
"""Is given a file's name, the place of a block's first byte in it, and the block."""

# Six million chunks of some 180 bytes. A model of 405 billion weights has 1,100 tensors; with two moments, each in
# slices on a thousand ranks, that is 3.4 million. 100,000 tensors that are not cut, with moments, take a tenth of it.
_MOST_BYTES = 1 << 30


class NewerFormat(ConfigError):
    """The checkpoint is whole, but written by a later rotorch."""


class DamagedCheckpoint(ConfigError):
    """Bytes of the checkpoint are missing or differ from the written ones."""


_BAD_SECTOR = {errno.EIO, errno.EBADMSG, getattr(errno, "EUCLEAN", errno.EIO)}
"""What a disk says of a sector that it cannot read, and a file system of one that is not as it was written."""


@contextmanager
def errors_as_damage(file: AnyPath) -> Iterator[None]:
    """Reports data that a disk cannot give back as damage. A store's same error may be transient, and stays as it is.

    Raises:
        DamagedCheckpoint: instead of that `OSError`; others pass.
    """
    try:
        yield
    except OSError as error:
        if not isinstance(file, Path) or error.errno not in _BAD_SECTOR:
            raise
        raise DamagedCheckpoint(f"checkpoint: {file}: damaged ({error.strerror or error} where it was read)") from None


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StoredChunk(_Strict):
    """A box of a tensor and where its bytes lie: `file`, from byte `start`, row-major."""

    offsets: tuple[int, ...] = Field(strict=False)
    sizes: tuple[int, ...] = Field(strict=False)
    file: str
    start: int = Field(ge=0)


class TensorEntry(_Strict):
    """One whole tensor: dtype (a name of `ITEM_BYTES`), shape, and the chunks that fill it."""

    dtype: str
    shape: tuple[int, ...] = Field(strict=False)
    chunks: tuple[StoredChunk, ...] = Field(strict=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class FileEntry(_Strict):
    """One file beside the manifest: its size and the sha256 of its contents, in hex."""

    num_bytes: int = Field(ge=0)
    sha256: str


class ModelEntry(_Strict):
    """Model of a checkpoint: class, Hugging Face config (None for a plain module), further names of tied weights.

    With adapters also what peft's `adapter_config.json` says.
    """

    name: str
    config: dict[str, JsonValue] | None
    config_sha256: str | None
    aliases: dict[str, list[str]] = Field(default_factory=dict)
    adapters: dict[str, JsonValue] | None = None


class OptimizerEntry(_Strict):
    """Optimizer of a checkpoint: class, hyperparameters per group, kind of each key of its state (see `state.py`)."""

    name: str
    groups: list[dict[str, JsonValue]]
    kinds: dict[str, str]


class Manifest(_Strict):
    """Everything of a checkpoint but its tensors.

    `renamed`: files beside the tensors' that lie under another name than their own, by their own; see
    [Note: whole in a store] in `commit.py`.
    """

    format: str = FORMAT
    version: int = VERSION
    step: int = Field(ge=0)
    tokens: int = Field(ge=0)
    seed: int
    parallel: str
    num_ranks: int = Field(ge=1)
    versions: dict[str, str]
    model: ModelEntry
    optimizer: OptimizerEntry | None
    schedule: dict[str, JsonValue]
    data: dict[str, JsonValue]
    run: dict[str, JsonValue]
    tensors: dict[str, TensorEntry] = Field(default_factory=dict)
    files: dict[str, FileEntry] = Field(default_factory=dict)
    renamed: dict[str, str] = Field(default_factory=dict)

    @property
    def precision(self) -> str | None:
        """The precision of the run's passes; None if it was written by no run of `rotorch train`."""
        section = self.run.get("train")
        found = section.get("precision") if isinstance(section, dict) else None
        return found if isinstance(found, str) else None

    @property
    def digest(self) -> str:
        """The sha256 of all that it says, in hex."""
        return _digest(self.model_dump(mode="json"))

    def names(self, prefix: str) -> dict[str, TensorEntry]:
        """The tensors whose name begins with `prefix`, by the rest of their name."""
        return {name.removeprefix(prefix): entry for name, entry in self.tensors.items() if name.startswith(prefix)}

    def file_of(self, name: str) -> str | None:
        """Under which name a file such as `tokenizer.json` lies in the directory, or None if it has none."""
        lies_as = self.renamed.get(name, name)
        return lies_as if lies_as in self.files else None

    def to_bytes(self) -> bytes:
        """The contents of `manifest.json`.

        Raises:
            FinalFailure: if there would be more of them than `read_manifest` takes.
        """
        content = self.to_json().encode()
        if len(content) > _MOST_BYTES:
            num_chunks = sum(len(entry.chunks) for entry in self.tensors.values())
            raise FinalFailure(
                f"checkpoint: {MANIFEST} would have {format_bytes(len(content))} for {len(self.tensors)} tensors in "
                f"{num_chunks} chunks, and at most {format_bytes(_MOST_BYTES)} could be read again. Write a layout "
                "that cuts each weight over fewer ranks"
            )
        return content

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        content = self.model_dump(mode="json")
        return manifest_text({**content, "digest": _digest(content)})


def manifest_text(content: dict[str, JsonValue]) -> str:
    """The one text that says `content`: with it also a byte between two values that is not as written is found."""
    return json.dumps(content, indent=1) + "\n"


def json_digest(content: JsonValue) -> str:
    """The sha256 of a JSON value, in hex, the same for every order of keys."""
    return _digest(content)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


# ---------------------------------------------------------------- reading


def read_manifest(path: AnyPath) -> Manifest:
    """Reads the manifest of the checkpoint directory `path`; checks format, version, digest, and that it makes sense.

    Raises:
        NewerFormat: if a later rotorch wrote it.
        DamagedCheckpoint: if any byte of it is not as it was written; names the file.
        ConfigError: if it is missing or foreign; names the file and the reason.
    """
    file = path / MANIFEST
    try:
        with errors_as_damage(file):
            text = read_small(file, most_bytes=_MOST_BYTES, what="a manifest")
        raw = json.loads(text)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(_why_no_manifest(path)) from None
    except OSError as error:
        raise ConfigError(f"checkpoint: {file}: cannot be read: {error.strerror or error}") from error
    except DamagedCheckpoint:
        raise
    except ConfigError as error:
        raise ConfigError(f"checkpoint: {error}") from None
    except (ValueError, RecursionError):
        raise DamagedCheckpoint(f"checkpoint: {file}: damaged (not valid JSON)") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ConfigError(f"checkpoint: {file}: written by another program (no format {FORMAT!r})")
    is_as_written = text == manifest_text(raw).encode()
    if raw.pop("digest", None) != _digest(raw) or not is_as_written:  # before the version: that may be the damage
        raise DamagedCheckpoint(f"checkpoint: {file}: damaged (its contents do not match its own digest)")
    version = raw.get("version")
    if isinstance(version, int) and version > VERSION:
        raise NewerFormat(
            f"checkpoint: {file}: format version {version}, and this rotorch reads up to {VERSION}. Use a newer rotorch"
        )
    raw = _as_of_today(raw)
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"checkpoint: {file}: cannot be used: {where}: {first['msg']}") from None
    if problem := _nonsense(manifest):
        raise ConfigError(f"checkpoint: {file}: cannot be used: {problem}")
    return manifest


def _as_of_today(raw: dict[str, Any]) -> dict[str, Any]:
    """A manifest's contents in today's words: in version 1 `train.precision` of "bfloat16" was autocast."""
    if raw.get("version") != 1:
        return raw
    run, names = raw.get("run"), {"bfloat16": "autocast_bfloat16", "param_bfloat16": "bfloat16"}
    section = run.get("train") if isinstance(run, dict) else None
    if isinstance(run, dict) and isinstance(section, dict) and section.get("precision") in names:
        run = {**run, "train": {**section, "precision": names[section["precision"]]}}
    return {**raw, "version": VERSION, "run": run}


def _why_no_manifest(path: AnyPath) -> str:
    if not path.exists():
        return f"checkpoint: {path}: no such directory"
    if not path.is_dir():
        return f"checkpoint: {path}: not a directory. Write a directory like RUN_DIR/checkpoints/step-00000100"
    if (path / ".metadata").exists():
        return f"checkpoint: {path}: a torch.distributed.checkpoint of another program (.metadata, but no {MANIFEST})"
    found = f"checkpoint: {path}: not a checkpoint of rotorch (no {MANIFEST})"
    if (path / "config.json").exists():
        found += ", but a model of Hugging Face. `rotorch init` writes a run that starts from it"
    return found


def _nonsense(manifest: Manifest) -> str | None:
    """Names impossible entries of a manifest: paths that leave the directory, boxes out of bounds."""
    for name in manifest.files:
        if Path(name).name != name or name in (".", "..", MANIFEST):
            return f"file name {name!r} leaves the checkpoint's directory"
    for name, lies_as in manifest.renamed.items():
        if lies_as not in manifest.files:
            return f"{name!r} lies in the unlisted file {lies_as!r}"
    for name, entry in manifest.tensors.items():
        if entry.dtype not in ITEM_BYTES:
            return f"tensor {name!r} has unknown dtype {entry.dtype!r}"
        if problem := fill_problem(name, shape=entry.shape, chunks=entry.chunks):
            return problem
        for chunk in entry.chunks:
            num_elements = math.prod(chunk.sizes)
            if chunk.file not in manifest.files:
                return f"tensor {name!r} lies in the unlisted file {chunk.file!r}"
            if chunk.start + num_elements * ITEM_BYTES[entry.dtype] > manifest.files[chunk.file].num_bytes:
                return f"tensor {name!r} lies past the end of {chunk.file!r}"
    return None


class Box(Protocol):
    """A part of a tensor."""

    @property
    def offsets(self) -> Sequence[int]: ...

    @property
    def sizes(self) -> Sequence[int]: ...


def fill_problem(name: str, *, shape: Sequence[int], chunks: Sequence[Box]) -> str | None:
    """Says why chunks do not fill a tensor, each element once; None if they do."""
    filled = 0
    for chunk in chunks:
        boxes = list(zip(chunk.offsets, chunk.sizes, shape, strict=False))
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape) == len(boxes):
            return f"tensor {name!r} has a chunk of other rank than its shape"
        if any(o < 0 or s < 0 or o + s > whole for o, s, whole in boxes):
            return f"tensor {name!r} has a chunk outside its shape {list(shape)}"
        filled += math.prod(chunk.sizes)
    if filled != math.prod(shape):
        return f"tensor {name!r} has {math.prod(shape)} elements, its chunks {filled}"
    return f"tensor {name!r} has chunks that overlap" if _overlap(chunks) else None


def _overlap(chunks: Sequence[Box]) -> bool:
    """True if two boxes have an element in common; sweeps along the dim in which most of them differ."""
    boxes = [chunk for chunk in chunks if all(chunk.sizes)]
    if len(boxes) < 2:
        return False
    dims = range(len(boxes[0].sizes))
    dim = max(dims, key=lambda d: len({box.offsets[d] for box in boxes}), default=0)
    if not dims:
        return True
    under_way: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        under_way = [other for other in under_way if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        for other in under_way:
            if all(
                a < b + m and b < a + n
                for a, n, b, m in zip(box.offsets, box.sizes, other.offsets, other.sizes, strict=True)
            ):
                return True
        under_way.append(box)
    return False


def check_sizes(path: AnyPath, manifest: Manifest) -> None:
    """Holds every file against the size that the manifest says. Reads no contents.

    Raises:
        DamagedCheckpoint: if one is missing, or of another size.
        ConfigError: if one cannot be looked at; says which and why.
    """
    for name, entry in manifest.files.items():
        try:
            num_bytes = (path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            raise DamagedCheckpoint(f"checkpoint: {path / name}: missing") from None
        except OSError as error:
            raise ConfigError(f"checkpoint: {path / name}: cannot be read: {error.strerror or error}") from error
        if num_bytes != entry.num_bytes:
            what = "truncated" if num_bytes < entry.num_bytes else "changed"
            raise DamagedCheckpoint(
                f"checkpoint: {path / name}: {what} ({num_bytes} bytes instead of {entry.num_bytes})"
            )


def check_contents(
    path: AnyPath, manifest: Manifest, *, share: int = 0, num_shares: int = 1, look: LookAt | None = None
) -> None:
    """Reads every `num_shares`-th file from `share` on; raises `DamagedCheckpoint` unless each has its digest.

    What is read is also given to `look`: the file's name, the block's first byte, and the block.
    """
    check_sizes(path, manifest)
    for name in sorted(manifest.files)[share::num_shares]:
        if file_digest(path / name, look=look) != manifest.files[name].sha256:
            raise DamagedCheckpoint(
                f"checkpoint: {path / name}: damaged (its contents do not match the digest in {MANIFEST})"
            )


def file_digest(file: AnyPath, *, look: LookAt | None = None) -> str:
    """The sha256 of a file's contents, in hex; `look` is given them as in `check_contents`.

    Raises:
        DamagedCheckpoint: if a disk cannot give it back. ConfigError: if it cannot be read for another reason.
    """
    digest, start = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_READ_BYTES))
    try:
        with errors_as_damage(file), file.open("rb") as stream:
            while num_bytes := stream.readinto(buffer):
                digest.update(buffer[:num_bytes])
                if look is not None:
                    look(file.name, start, buffer[:num_bytes])
                start += num_bytes
    except OSError as error:
        raise ConfigError(f"checkpoint: {file}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()
