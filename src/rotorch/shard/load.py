"""Flyweight loading: each rank reads only its slices of a directory of safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rotorch.core.errors import ConfigError
from rotorch.shard.held import HeldWeight


def _files(directory: Path) -> dict[str, Path]:
    """Maps each tensor name to the file that holds it."""
    index = directory / "model.safetensors.index.json"
    try:
        if index.exists():
            return {
                name: directory / Path(file).name for name, file in json.loads(index.read_text())["weight_map"].items()
            }
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"load: no safetensors files in {str(directory)!r}. Write a Hugging Face model directory")
        names = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                names.update(dict.fromkeys(opened.keys(), file))
        return names
    except ConfigError:
        raise
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"load: cannot read {str(directory)!r}: {error}") from None


@torch.no_grad()
def load_directory(directory: str, *, weights: Mapping[str, HeldWeight]) -> None:
    """Reads what this rank holds of each weight from safetensors, never more than one slice at a time.

    Every rank alone.

    Names are the model's own; a tied weight may be stored under any of its names. Values are converted to the
    weight's dtype.

    Raises:
        ConfigError: no such directory, no or corrupt files, missing, extra or mis-shaped tensors (all of them listed).
    """
    root = Path(directory)
    if not root.is_dir():
        raise ConfigError(f"load: {directory!r} is not a directory. Write a Hugging Face model directory")
    where = _files(root)
    stored = {
        name: next((n for n in (name, *held.weight.aliases) if n in where), None) for name, held in weights.items()
    }
    missing = [name for name, found in stored.items() if found is None]
    known = {n for name, held in weights.items() for n in (name, *held.weight.aliases)}
    extra = sorted(set(where) - known)
    problems = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"unknown: {', '.join(extra)}"] * bool(extra)
    with ExitStack() as stack:
        try:
            opened = {f: stack.enter_context(safe_open(f, framework="pt")) for f in sorted(set(where.values()))}
            for name, held in weights.items():
                source = stored[name]
                if source is None:
                    continue
                shape = tuple(opened[where[source]].get_slice(source).get_shape())
                if shape != held.weight.shape:
                    problems.append(f"shape of {source}: {shape} in the file, {held.weight.shape} in the model")
            if problems:
                raise ConfigError(f"load: {directory!r} does not fit the model. {'; '.join(problems)}")
            for name, held in weights.items():
                source = stored[name] or name
                file = opened[where[source]]
                for piece in held.pieces:
                    box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.sizes, strict=True))
                    part = file.get_slice(source)[box] if box else file.get_tensor(source)  # a number has no slices
                    piece.of_local(held.local).copy_(part)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"load: cannot read {directory!r}: {error}") from None
