"""Descriptions of models and of their passes, kept from one plan to the next: reading one needs no torch.

[Note: key]
    A file's name is a digest of all that its contents follow from: the model's configuration, the tokens of a sequence,
    the ranks that share one, the precision; this package's source; Python, torch and transformers as they are
    installed; environment variables that these read. Packages that somebody works on have no digest (`_installed`), and
    with them nothing is kept.

[Note: writers]
    Each writes a file of its own, and renames it when it is whole: all of one name have the same contents. A file that
    cannot be read counts as absent.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import tempfile
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Any

from rotorch.core.cache_dir import default_cache_dir
from rotorch.core.shared_context import KeysAndValues
from rotorch.core.small_files import read_small
from rotorch.core.spec import Combine, Cut, GridCut, Half, KeptWhole, LayerOrder, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.whole_experts import WholeExperts
from rotorch.planner.shared_tokens import TracedAttention
from rotorch.planner.traced import BackwardPoint, PerRow, Traced, TracedLayer

MOST_FILES = 64
"""In a directory; of more, the oldest go."""

_MOST_BYTES = 1 << 26
_CLASS = "class"
_READ_BY = ("torch", "transformers")
_VARIABLES = ("ATEN", "HF_", "PYTORCH", "TORCH", "TRANSFORMERS")
"""Beginnings of names of environment variables that they read."""


@dataclass(frozen=True)
class KnownModel:
    """A model's units, and its passes for one length of sequence and one precision."""

    spec: ModelSpec
    traced: Traced


_CLASSES: dict[str, Any] = {
    each.__name__: each
    for each in (
        BackwardPoint,
        Combine,
        Cut,
        GridCut,
        Half,
        KeptWhole,
        KeysAndValues,
        KnownModel,
        LayerOrder,
        ModelSpec,
        PerRow,
        Traced,
        TracedAttention,
        TracedLayer,
        Unit,
        UnitKind,
        Weight,
        WholeExperts,
    )
}


@dataclass(frozen=True)
class KnownFile:
    """The file of one model; its directory is made when the first one is written."""

    path: Path

    def read(self) -> KnownModel | None:
        """Returns the model; None if nothing was written, or nothing that can be read."""
        with suppress(Exception):  # whatever the file has become: it is made anew
            text = read_small(self.path, most_bytes=_MOST_BYTES, what="a description of a model")
            found = json.loads(text, object_hook=_decoded)
            return found if isinstance(found, KnownModel) else None
        return None

    def write(self, model: KnownModel) -> None:
        """Keeps a model, if the directory can be written (see [Note: writers])."""
        text = json.dumps(_encoded(model))
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".tmp", delete=False) as file:
                file.write(text)
            os.replace(file.name, self.path)
            for path in sorted(self.path.parent.iterdir(), key=lambda each: each.stat().st_mtime)[:-MOST_FILES]:
                path.unlink(missing_ok=True)


def known_file(model: str | dict[str, Any], *, tokens: int, precision: str, context: int = 1) -> KnownFile | None:
    """The file of a model, which may not exist yet (see [Note: key]); None if nothing may be kept of it.

    Args:
        model: path of its `config.json` or of the directory, or the contents.
        tokens: of a sequence.
        precision: of passes.
        context: ranks that share a sequence.
    """
    configuration, installed = _configuration(model), [_installed(name) for name in _READ_BY]
    if configuration is None or None in installed:
        return None
    variables = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(_VARIABLES)]
    facts = [platform.python_version(), platform.platform(), _source(), *map(str, installed), *sorted(variables)]
    facts += [str(tokens), str(context), precision, hashlib.sha256(configuration).hexdigest()]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    with suppress(RuntimeError):  # a user without a home
        return KnownFile(default_cache_dir() / "models" / f"{name}.json")
    return None


def _configuration(model: str | dict[str, Any]) -> bytes | None:
    """The contents of a model's configuration; None where they are not those of one JSON file alone."""
    if isinstance(model, dict):
        return json.dumps(model, sort_keys=True, default=str).encode()
    path = Path(model)
    with suppress(Exception):  # who reads it to build the model says what is wrong
        if path.is_dir() and not any(each.suffix.lower() == ".gguf" for each in path.iterdir()):
            path = path / "config.json"
        if path.suffix == ".json":
            return read_small(path, most_bytes=_MOST_BYTES, what="a model's config.json")
    return None


def _installed(name: str) -> str | None:
    """A package's version and the digest of its list of files; None if its code may be another."""
    with suppress(metadata.PackageNotFoundError):
        package = metadata.distribution(name)
        found, files = importlib.util.find_spec(name), package.read_text("RECORD")
        if found is None or found.origin is None or files is None:
            return None
        if Path(str(package.locate_file(""))) in Path(found.origin).parents:
            return f"{package.version} {hashlib.sha256(files.encode()).hexdigest()}"
    return None


def _source() -> str:
    """Digest of this package's source."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _encoded(value: Any) -> Any:
    """A description as JSON has it; a class is written beside its fields, a tuple as a list."""
    if isinstance(value, Enum):
        return {_CLASS: _name(value), "value": value.value}
    if is_dataclass(value):
        return {_CLASS: _name(value), **{each.name: _encoded(getattr(value, each.name)) for each in fields(value)}}
    if isinstance(value, tuple):
        return [_encoded(each) for each in value]
    assert value is None or type(value) in (bool, int, float, str), value
    return value


def _name(value: object) -> str:
    name = type(value).__name__
    assert _CLASSES[name] is type(value)
    return name


def _decoded(written: dict[str, Any]) -> Any:
    made = _CLASSES[written.pop(_CLASS)]
    return made(**{name: _as_tuple(value) for name, value in written.items()})


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
