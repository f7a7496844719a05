"""`rotorch inspect`: the contents of a checkpoint in plain values. No torch, so that it answers at once."""

from __future__ import annotations

import math
from typing import Any

from rotorch.core.quantities import format_bytes
from rotorch.train.checkpoint.directories import find_checkpoint
from rotorch.train.checkpoint.manifest import (
    BUFFER,
    MODEL,
    OPTIMIZER,
    RNG,
    Manifest,
    check_contents,
    check_sizes,
    read_manifest,
)
from rotorch.train.checkpoint.store import AnyPath


def inspect_checkpoint(path: AnyPath | str, *, contents: bool = False) -> dict[str, Any]:
    """Describes a checkpoint as plain JSON values: step, layout, versions, bytes by kind, every file and tensor.

    One process. Takes a checkpoint's directory, or a run's (then its latest).

    Args:
        path: the directory.
        contents: check not only sizes of files, but every byte of them.

    Raises:
        ConfigError: if it is no whole checkpoint; names the file and the reason.
    """
    path = find_checkpoint(path)
    manifest = read_manifest(path)
    (check_contents if contents else check_sizes)(path, manifest)
    return {**_description(path, manifest), "checked": "every byte" if contents else "sizes of files"}


def _description(path: AnyPath, manifest: Manifest) -> dict[str, Any]:
    """The fields of `rotorch inspect --json`."""
    groups = {"weights": MODEL, "buffers": BUFFER, "optimizer": OPTIMIZER, "rng": RNG}
    tensors = {
        name: {"dtype": e.dtype, "shape": list(e.shape), "bytes": e.num_bytes, "num_chunks": len(e.chunks)}
        for name, e in manifest.tensors.items()
    }
    num_bytes = {g: sum(e.num_bytes for e in manifest.names(p).values()) for g, p in groups.items()}
    total = sum(entry.num_bytes for entry in manifest.files.values())
    return {
        "path": str(path),
        "format_version": manifest.version,
        "step": manifest.step,
        "tokens": manifest.tokens,
        "seed": manifest.seed,
        "parallel": manifest.parallel,
        "num_ranks": manifest.num_ranks,
        "versions": manifest.versions,
        "model": manifest.model.name,
        "model_type": (manifest.model.config or {}).get("model_type"),
        "num_parameters": sum(math.prod(e.shape) for e in manifest.names(MODEL).values()),
        "optimizer": manifest.optimizer.name if manifest.optimizer else None,
        "schedule": manifest.schedule,
        "data": manifest.data,
        "bytes": num_bytes,
        "total_bytes": total,
        "total": format_bytes(total),
        "files": {name: entry.num_bytes for name, entry in manifest.files.items()},
        "tensors": tensors,
    }
