"""A checkpoint as a Hugging Face directory: one process, one tensor in memory at a time, whole or not at all.

Names and shapes are those in which the family is published: experts that the model stacks are written one by one.
Of a model with adapters these alone, as peft keeps them, or merged into the weights beside them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from rotorch.core.errors import ConfigError, RankFailure
from rotorch.core.phase_line import tell_phase
from rotorch.core.quantities import format_bytes
from rotorch.models.hf import config_from_dict, longest_sequence
from rotorch.models.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapters_of,
    is_adapter,
    merged_weight,
    name_in_peft,
    without_adapters,
)
from rotorch.models.published import Published, as_published
from rotorch.shard.materialize import on_meta
from rotorch.train.checkpoint.auxiliary_files import AUXILIARY_FILES
from rotorch.train.checkpoint.byte_tokenizer import byte_tokenizer, tokenizer_config
from rotorch.train.checkpoint.directories import check, find_checkpoint, fsync, make_directory
from rotorch.train.checkpoint.manifest import BUFFER, MANIFEST, MODEL, Manifest
from rotorch.train.checkpoint.storage import (
    DTYPES,
    CheckpointReader,
    ChunksLoadPlanner,
    LazyTensor,
    without_dcp_notices,
    write_safetensors,
)
from rotorch.train.checkpoint.store import AnyPath, creating
from rotorch.train.data.tokens import BYTES

_CONFIG_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def export_checkpoint(
    checkpoint: AnyPath | str,
    out_dir: Path | str,
    *,
    dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    merge: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Writes a checkpoint's model as a directory that `AutoModelForCausalLM.from_pretrained` loads.

    Of a model with adapters it writes what `PeftModel.from_pretrained(base, directory)` loads, unless they are to be
    merged.

    The directory gets `config.json`, the weights as safetensors (several files and an index where one would be larger
    than `max_shard_bytes`; tied weights once, as transformers expects), and the files of the run's tokenizer (that of
    bytes is made here) and of the model that it started from, if it had one.
    It is written beside `out_dir` and renamed when it is whole. Needs no process group, and memory for one weight
    (merging for a few).

    Args:
        checkpoint: a checkpoint's directory, or a run's (then its latest).
        out_dir: directory to write; must not exist or be empty, unless `force`.
        dtype: "float32", "bfloat16" or "float16" to convert floating-point weights; None keeps what was trained.
        max_shard_bytes: the largest safetensors file, unless one weight is larger.
        merge: add what adapters add to the weights beside them, and write a whole model. Weights without adapters, and
            those whose adapter adds nothing, come out as they were loaded.
        force: replace what is in `out_dir`.

    Returns:
        Plain JSON values: `path`, `checkpoint`, `step`, `num_tensors`, `num_bytes`, `files`.

    Raises:
        ConfigError: if the checkpoint is damaged or not of a Hugging Face model, `out_dir` is not empty, or there are
            no adapters to merge.
        RankFailure: if writing failed (disk full); nothing is left behind.
    """
    checkpoint, out_dir = find_checkpoint(checkpoint), Path(out_dir)
    target = _target_dtype(dtype)
    if max_shard_bytes < 1:
        raise ConfigError(f"export: max_shard_bytes={max_shard_bytes}: write a positive number of bytes")
    if out_dir.exists() and not out_dir.is_dir():
        raise ConfigError(f"export: {out_dir}: a file is in the way")
    if not force and out_dir.is_dir() and any(out_dir.iterdir()):
        raise ConfigError(f"export: {out_dir}: not empty. Write another directory, or --force to replace it")
    tell_phase(f"checking {checkpoint}")
    manifest = check(checkpoint)
    if manifest.model.config is None:
        raise ConfigError(
            f"export: {checkpoint}: holds a {manifest.model.name} without a Hugging Face config. "
            "Read its rank-*.safetensors instead"
        )
    if merge and manifest.model.adapters is None:
        raise ConfigError(f"export: {checkpoint}: has no adapters to merge. Leave --merge out")
    temporary = out_dir.parent / f".{out_dir.name}.tmp-{os.getpid()}"
    try:
        tell_phase(f"writing {out_dir}")
        _make(temporary, out_dir)
        entries = _entries(CheckpointReader(checkpoint, manifest=manifest), manifest, dtype=target, merged=merge)
        if manifest.model.adapters is not None and not merge:
            files = _write_adapters(temporary, manifest, entries)
        else:
            files = _write(temporary, checkpoint, manifest, entries, max_shard_bytes=max_shard_bytes)
        fsync(temporary)
        _put_in_place(temporary, out_dir)
    except FileNotFoundError as error:
        if not (checkpoint / MANIFEST).exists():
            raise RankFailure(_removed(checkpoint)) from None
        raise RankFailure(f"export: {error.filename}: {error.strerror}; nothing was left") from None
    except OSError as error:
        raise RankFailure(f"export: {error.filename or out_dir}: {error.strerror or error}; nothing was left") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return {
        "path": str(out_dir),
        "checkpoint": str(checkpoint),
        "step": manifest.step,
        "num_tensors": len(entries),
        "num_bytes": sum(files.values()),
        "files": files,
    }


def _make(temporary: Path, out_dir: Path) -> None:
    try:
        make_directory(out_dir.parent)
        temporary.mkdir()
    except OSError as error:
        raise ConfigError(
            f"export: {out_dir}: {error.strerror or error}. Write another directory, in one that can be written to"
        ) from None


def _removed(checkpoint: AnyPath) -> str:
    return (
        f"export: {checkpoint}: was removed while it was read; nothing was left. Export the run's newest one again, or "
        "give the run that is writing them a larger train.keep"
    )


def _target_dtype(name: str | None) -> str | None:
    if name is None:
        return None
    for short, long in _CONFIG_DTYPES.items():
        if name == long:
            return short
    raise ConfigError(f"export: dtype {name!r}: write one of {', '.join(_CONFIG_DTYPES.values())}")


def _entries(reader: CheckpointReader, manifest: Manifest, *, dtype: str | None, merged: bool) -> list[LazyTensor]:
    """Entries to write: all weights and buffers; of a model with adapters these alone, unless `merged`."""
    stored = {name: (p + name, entry) for p in (MODEL, BUFFER) for name, entry in manifest.names(p).items()}
    config = manifest.model.adapters

    def read(name: str) -> Tensor:
        tensor = torch.empty(stored[name][1].shape, dtype=DTYPES[stored[name][1].dtype])
        try:
            with without_dcp_notices():
                dcp.load({stored[name][0]: tensor}, storage_reader=reader, planner=ChunksLoadPlanner(), no_dist=True)
        except CheckpointException as error:  # no Exception itself
            (cause, _), *_ = error.failures.values()
            raise cause from None
        return tensor

    def value(name: str) -> Tensor:
        beside = adapters_of(name)
        if config is None or beside is None or beside[0] not in stored:
            return read(name)
        return merged_weight(read(name), read(beside[0]), read(beside[1]), config=config)

    written: dict[str, str] = {}  # names in the files, of names in the checkpoint
    for name in stored:
        if config is None:
            written[name] = name
        elif is_adapter(name) != merged:
            written[name] = without_adapters(name) if merged else name_in_peft(name)
    entries = []
    for name, called in written.items():
        entry = stored[name][1]
        to = dtype if dtype and DTYPES[entry.dtype].is_floating_point else entry.dtype
        entries.append(LazyTensor(called, to, entry.shape, lambda name=name, to=to: value(name).to(DTYPES[to])))
    return entries if config is not None and not merged else _as_published(entries, manifest)


def _as_published(entries: list[LazyTensor], manifest: Manifest) -> list[LazyTensor]:
    """Returns the tensors as the model's family publishes them; unchanged if transformers does not have the class.

    What several are made of is in memory while they are written, one after another.
    """
    import transformers

    kind = getattr(transformers, manifest.model.name, None)
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        return entries
    by_name = {entry.name: entry for entry in entries}
    with on_meta():
        module = kind(config_from_dict(manifest.model.config or {}, source="the checkpoint", checks_keys=False))
        held = {e.name: torch.empty(e.shape, dtype=DTYPES[e.dtype]) for e in entries}
    made: list[LazyTensor] = []
    latest: dict[int, Mapping[str, Tensor]] = {}

    def value(number: int, published: Published, name: str) -> Tensor:
        if number not in latest:
            latest.clear()
            latest[number] = published.make([by_name[source].get() for source in published.sources])
        return latest[number][name]

    for number, published in enumerate(as_published(held, module=module)):
        dtype = by_name[published.sources[0]].dtype
        for name, shape in published.shapes.items():
            made.append(LazyTensor(name, dtype, shape, partial(value, number, published, name)))
    return made


def _write_adapters(directory: Path, manifest: Manifest, entries: list[LazyTensor]) -> dict[str, int]:
    """Writes what peft writes; returns the files' sizes by name.

    Without a tokenizer: where there is one, peft cuts the base model's vocabulary to its size.
    """
    config = dict(manifest.model.adapters or {})
    model = manifest.run.get("model")
    config["base_model_name_or_path"] = model.get("init") if isinstance(model, dict) else None
    config["inference_mode"] = True  # as peft writes it: loaded to be used, unless asked otherwise
    if manifest.model.name.endswith("ForCausalLM"):
        config["task_type"] = "CAUSAL_LM"
    _check_room(directory, entries)
    write_safetensors(directory / ADAPTER_WEIGHTS, entries)
    _write_json(directory / ADAPTER_CONFIG, config)
    return _sizes(directory)


def _write(
    directory: Path, checkpoint: AnyPath, manifest: Manifest, entries: list[LazyTensor], *, max_shard_bytes: int
) -> dict[str, int]:
    """Writes everything into `directory`; returns the files' sizes by name."""
    needed = _check_room(directory, entries)
    shards = list(_shards(entries, max_shard_bytes=max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(directory / name, shard)
        weight_map.update((entry.name, name) for entry in shard)
    if len(shards) > 1:
        index = {"metadata": {"total_size": needed}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(directory / "model.safetensors.index.json", index)
    _write_json(directory / "config.json", _config(manifest, entries))
    for name in AUXILIARY_FILES:
        if (lies_as := manifest.file_of(name)) is not None:
            with (checkpoint / lies_as).open("rb") as source, creating(directory / name) as copy:
                shutil.copyfileobj(source, copy)
    if manifest.file_of("tokenizer.json") and not manifest.file_of("tokenizer_config.json"):
        _write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    if not manifest.file_of("tokenizer.json") and _is_of_bytes(manifest):
        byte_tokenizer().save(str(directory / "tokenizer.json"))
        longest = longest_sequence(config_from_dict(manifest.model.config or {}, source="it", checks_keys=False))
        _write_json(directory / "tokenizer_config.json", tokenizer_config(longest=longest))
    return _sizes(directory)


def _is_of_bytes(manifest: Manifest) -> bool:
    data = manifest.run.get("data")
    return isinstance(data, dict) and data.get("tokenizer") == BYTES


def _sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(directory.iterdir())}


def _check_room(directory: Path, entries: list[LazyTensor]) -> int:
    """Returns the bytes that entries need; raises `OSError` if the disk has fewer."""
    needed, free = sum(e.num_bytes for e in entries), shutil.disk_usage(directory).free
    if needed > free:
        raise OSError(28, f"{format_bytes(needed)} needed, {format_bytes(free)} free", str(directory))
    return needed


def _shards(entries: list[LazyTensor], *, max_shard_bytes: int) -> Iterator[list[LazyTensor]]:
    shard: list[LazyTensor] = []
    for entry in entries:
        if shard and sum(e.num_bytes for e in shard) + entry.num_bytes > max_shard_bytes:
            yield shard
            shard = []
        shard.append(entry)
    yield shard


def _config(manifest: Manifest, entries: list[LazyTensor]) -> dict[str, Any]:
    """The model's config, with the dtype of what was written: that of most bytes."""
    by_dtype: dict[str, int] = {}
    for entry in entries:
        by_dtype[entry.dtype] = by_dtype.get(entry.dtype, 0) + entry.num_bytes
    config = dict(manifest.model.config or {})
    config.pop("torch_dtype", None)
    config["dtype"] = _CONFIG_DTYPES.get(max(by_dtype, key=lambda d: by_dtype[d]), "float32")
    config["use_cache"] = True  # switched off for training only
    return config


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with path.open("x", encoding="utf-8") as stream:
        json.dump(content, stream, indent=2)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())


def _put_in_place(temporary: Path, final: Path) -> None:
    aside = final.parent / f".{final.name}.old-{os.getpid()}"
    if final.exists():
        os.rename(final, aside)
    os.rename(temporary, final)
    fsync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)
