"""A published model on disk: a Hugging Face directory of safetensors, a GGUF file, or a directory with one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from rotorch.core.errors import ConfigError
from rotorch.models.conversions import ignored_when_loaded, named_as_in_model
from rotorch.models.gguf import find_gguf, open_gguf
from rotorch.models.lora import ADAPTERS, without_adapters
from rotorch.shard.load import load_stored
from rotorch.shard.safetensors_files import open_safetensors
from rotorch.shard.sharded_weight import ShardedWeight
from rotorch.shard.stored import Stored


@dataclass(frozen=True)
class Pretrained:
    """A model's tensors as they are stored.

    Attributes:
        tensors: by the model's own names.
        ignored: names of tensors that the model has no use for, and its class says so.
    """

    tensors: Mapping[str, Stored]
    ignored: tuple[str, ...]


@contextmanager
def open_pretrained(path: str | Path, *, module: nn.Module, names: Collection[str]) -> Iterator[Pretrained]:
    """Opens a published model for a module. Every rank alone; reads no tensor yet.

    Args:
        path: a directory of safetensors, a `.gguf` file, or a directory with one.
        module: the module to read for.
        names: all names that the module knows, of tied weights and buffers too.

    Raises:
        ConfigError: nothing there that can be read, or files that are damaged.
    """
    names = {without_adapters(name): name for name in names}
    gguf = find_gguf(Path(path))
    if gguf is not None:
        with open_gguf(gguf, module=module) as stored:
            yield _pretrained(stored, module=module, names=names)
        return
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(
            f"load: {str(path)!r} is not a directory. Write a Hugging Face model directory, or a .gguf file"
        )
    with open_safetensors(directory) as stored:
        yield _pretrained(named_as_in_model(stored, module=module, names=names), module=module, names=names)


def _pretrained(stored: Mapping[str, Stored], *, module: nn.Module, names: Mapping[str, str]) -> Pretrained:
    surplus = sorted(set(stored) - set(names))
    return Pretrained(
        {names.get(name, name): tensor for name, tensor in stored.items()},
        tuple(ignored_when_loaded(module, surplus)),
    )


def load_pretrained(
    path: str | Path,
    *,
    module: nn.Module,
    weights: Mapping[str, ShardedWeight],
    buffers: Mapping[str, Tensor],
    may_lack: Sequence[str] = (),
    may_have: Sequence[str] = (),
) -> None:
    """Reads a published model: of each weight the part that is held. Every rank alone.

    Args:
        path: as of `open_pretrained`.
        module: the module to read for.
        weights: its weights, by name.
        buffers: its persistent buffers, by name.
        may_lack: name patterns of weights that need not be there, beside adapters.
        may_have: name patterns of tensors that the module has no use for.

    Raises:
        ConfigError: as of `open_pretrained` and `load_stored`.
    """
    names = {name for held in weights.values() for name in (held.name, *held.weight.aliases)} | set(buffers)
    with open_pretrained(path, module=module, names=names) as found:
        load_stored(
            found.tensors,
            weights=weights,
            source=str(path),
            buffers=buffers,
            may_lack=(*ADAPTERS, *may_lack),
            may_have=(*found.ignored, *may_have),
        )
