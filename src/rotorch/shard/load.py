"""Flyweight loading: each rank reads only its slices of a checkpoint, and reports all misfits in one line."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Weight
from rotorch.process.host_memory import give_back_freed_memory
from rotorch.shard.safetensors_files import open_safetensors
from rotorch.shard.sharded_weight import Chunk, ShardedWeight
from rotorch.shard.stored import Stored, kind_of

_NAMES_SHOWN = 100  # of each kind; beyond that it is another model


def load_directory(directory: str, *, weights: Mapping[str, ShardedWeight]) -> None:
    """Reads this rank's part of each weight from safetensors whose names are the model's own. Every rank alone.

    Raises:
        ConfigError: no such directory, no or corrupt files, missing, extra or mis-shaped tensors (all of them listed).
    """
    root = Path(directory)
    if not root.is_dir():
        raise ConfigError(f"load: {directory!r} is not a directory. Write a Hugging Face model directory")
    with open_safetensors(root) as stored:
        load_stored(stored, weights=weights, source=directory)


@torch.no_grad()
def load_stored(
    stored: Mapping[str, Stored],
    *,
    weights: Mapping[str, ShardedWeight],
    source: str,
    buffers: Mapping[str, Tensor] | None = None,
    may_lack: Sequence[str] = (),
    may_have: Sequence[str] = (),
) -> None:
    """Reads this rank's part of each weight, one chunk at a time, after all were found to fit. Every rank alone.

    A tied weight may be stored under any of its names. Real numbers are converted to the weight's dtype; integers,
    bools and complex numbers are not weights.

    Args:
        stored: the checkpoint's tensors by the model's names.
        weights: this rank's weights, by name.
        source: the checkpoint's path, for messages.
        buffers: the module's persistent buffers, whole on every rank.
        may_lack: name patterns (`classifier.*`) of weights that the checkpoint need not have; they stay as they are.
        may_have: name patterns of tensors that the model need not have.

    Raises:
        ConfigError: missing, extra or mis-shaped tensors, or tensors of another kind of number, all of them listed,
            before anything is read; or a tensor that turns out damaged, not finite, or beyond the weight's dtype.
    """
    buffers = buffers or {}
    found = check_fit(
        stored,
        weights=[held.weight for held in weights.values()],
        dtypes={name: held.local.dtype for name, held in weights.items()},
        source=source,
        buffers=buffers,
        may_lack=may_lack,
        may_have=may_have,
    )
    give_back_freed_memory()  # of the check
    for name, held in weights.items():
        if (there := found[name]) is not None:
            for chunk in held.chunks:
                out = chunk.of_local(held.local)
                stored[there].read(_box(chunk), out=out)
                if not is_finite(out):
                    raise ConfigError(_why_not_finite(stored[there], chunk, name=there, dtype=out.dtype, source=source))
    for name, buffer in buffers.items():
        if (there := found[name]) is not None:
            stored[there].read(stored[there].whole, out=buffer)


def check_fit(
    stored: Mapping[str, Stored],
    *,
    weights: Sequence[Weight],
    dtypes: Mapping[str, torch.dtype],
    source: str,
    buffers: Mapping[str, Tensor],
    may_lack: Sequence[str] = (),
    may_have: Sequence[str] = (),
) -> dict[str, str | None]:
    """Returns the stored name of each weight and buffer, None if it may be missing. Reads no tensor.

    Arguments and errors are those of `load_stored`; `dtypes` are the weights' own, by name.
    """
    names = {weight.name: (weight.name, *weight.aliases) for weight in weights}
    shapes = {weight.name: weight.shape for weight in weights}
    found = {name: next((n for n in those if n in stored), None) for name, those in names.items()}
    found |= {name: name if name in stored else None for name in buffers}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers.items()}
    dtypes = {**dtypes, **{name: buffer.dtype for name, buffer in buffers.items()}}
    known = {n for those in names.values() for n in those} | set(buffers)
    missing = [name for name, there in found.items() if there is None and not _any_matches(may_lack, name)]
    extra = [name for name in sorted(set(stored) - known) if not _any_matches(may_have, name)]
    problems = [f"missing: {_listed(missing)}"] * bool(missing) + [f"unknown: {_listed(extra)}"] * bool(extra)
    problems += [
        f"shape of {there}: {stored[there].shape} in the file, {shapes[name]} in the model"
        for name, there in found.items()
        if there is not None and stored[there].shape != shapes[name]
    ]
    others = [
        f"{there} ({stored[there].dtype} in the file, {dtypes[name]} in the model)"
        for name, there in found.items()
        if there is not None and kind_of(stored[there].dtype) != kind_of(dtypes[name])
    ]
    if others:
        problems.append(
            f"of a dtype that is not converted: {_listed(others)}. Write a model that is not quantised, or convert "
            "these tensors to the model's dtype with what scales them"
        )
    if problems:
        raise ConfigError(f"load: {source!r} does not fit the model. {'; '.join(problems)}")
    return found


def is_finite(tensor: Tensor) -> bool:
    """True if a tensor has neither NaN nor infinity. Allocates no mask of its size."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    least, most = torch.aminmax(tensor)
    return bool(torch.isfinite(least)) and bool(torch.isfinite(most))


def _why_not_finite(stored: Stored, chunk: Chunk, *, name: str, dtype: torch.dtype, source: str) -> str:
    """Message with the position of the first such value: stored so, or too large for the weight's dtype."""
    there = torch.empty(chunk.sizes, dtype=torch.float64)
    stored.read(_box(chunk), out=there)
    where = (~torch.isfinite(there.to(dtype))).nonzero()[0].tolist()
    value = float(there[tuple(where)])
    element = f"{name}{[offset + place for offset, place in zip(chunk.offsets, where, strict=True)] if where else ''}"
    if math.isfinite(value):
        return (
            f"load: {source!r}: {element} is {value:.6g}, and {dtype} ends at {torch.finfo(dtype).max:.6g}. "
            "Make the model in bfloat16 or float32"
        )
    return (
        f"load: {source!r}: {element} is {value} in the file: a model with such weights gives no loss. "
        "Write a model whose weights are finite"
    )


def _box(chunk: Chunk) -> tuple[range, ...]:
    return tuple(range(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))


def _any_matches(patterns: Iterable[str], name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _listed(names: Sequence[str]) -> str:
    """Names, all of them unless there are too many to read."""
    rest = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
