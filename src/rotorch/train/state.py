"""`TrainState`: the state that resuming needs, and its tensors under names that do not depend on the layout.

[Note: names in a checkpoint]
    `model/<weight>` and `optimizer/<key>/<weight>` are whole tensors of which every rank gives its chunks, so they load
    under any layout; `buffer/<name>` is the same on all ranks; `rng/<rank>` is the JSON text of that rank's random
    states, as bytes. A tied weight appears once. The learning rate is a function of the step and the data position
    one of (seed, step), so neither is a tensor.

[Note: kinds of optimizer state]
    Per key, e.g. of AdamW: `exp_avg` is a "weight" (cut like its weight), `step` a "tensor" (small, the same on all
    ranks); a Python number is a "number". State of another shape (a row of a factored second moment) cannot be cut
    like its weight: it is a "tensor" if the class says that it is whole on all ranks (`whole_state`), else refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rotorch.core.errors import ConfigError
from rotorch.models.lora import adapter_config
from rotorch.parallel_model import ParallelModel
from rotorch.shard.sharded_weight import ChunkedTensor, ShardedWeight
from rotorch.shard.sites import persistent_buffers
from rotorch.train.checkpoint.manifest import (
    BUFFER,
    MODEL,
    OBJECT,
    OPTIMIZER,
    RNG,
    ModelEntry,
    OptimizerEntry,
    TensorEntry,
    json_digest,
)
from rotorch.train.checkpoint.storage import DTYPES

WEIGHT, TENSOR, NUMBER = "weight", "tensor", "number"

_MEMBERS = "weights"
"""The entry of a saved group that names its weights."""

_NOT_THE_MODEL = {"transformers_version", "_name_or_path", "use_cache", "dtype", "torch_dtype", "architectures"}
"""Entries of a Hugging Face config that may differ between two runs of one model."""


@dataclass(kw_only=True)
class TrainState:
    """Contents of a checkpoint. The training loop moves `step` and `tokens`; `checkpoint.load` sets them.

    Attributes:
        model: the model; its weights are saved chunk by chunk.
        optimizer: any `torch.optim` optimizer over `model.parameters()` or their local parts, or None to leave its
            state alone.
        step: optimizer steps done.
        tokens: target tokens trained on so far, over all ranks.
        seed: the run's seed.
        schedule: the numbers of the learning rate schedule (plain JSON), to notice when a resumed run has others.
        data: data position (plain JSON): all values that make the next batch a pure function of it.
        run: the run's configuration (plain JSON), for the record.
        tokenizer_file: a `tokenizer.json` to take along, for `export_checkpoint`.
        auxiliary_files: further files to keep, by the name that each gets (see `auxiliary_files.py`).
        damaged: steps of the run's checkpoints that were found damaged when they were to be loaded; `checkpoint` keeps
            it, so that none of them is kept in place of a whole one.
        objects: further tensors of bytes to take along, by their whole name; loading puts those of `wanted` there, by
            the name of the object.
        wanted: names of objects to load.
    """

    model: ParallelModel
    optimizer: torch.optim.Optimizer | None = None
    step: int = 0
    tokens: int = 0
    seed: int = 0
    schedule: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    tokenizer_file: Path | None = None
    auxiliary_files: dict[str, Path] = field(default_factory=dict)
    damaged: set[int] = field(default_factory=set)
    objects: dict[str, Tensor] = field(default_factory=dict)
    wanted: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """This rank, 0-based."""
        return self.model.mesh.get_rank() if self.num_ranks > 1 else 0

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the model is spread over."""
        return int(self.model.mesh.size())


# ---------------------------------------------------------------- model


def model_tensors(model: ParallelModel) -> dict[str, ChunkedTensor | Tensor]:
    """The weights and persistent buffers under their names in a checkpoint; loading into them changes the model."""
    tensors: dict[str, ChunkedTensor | Tensor] = {MODEL + name: chunks for name, chunks in model.chunks().items()}
    tensors.update((BUFFER + name, buffer) for name, buffer in persistent_buffers(model.module).items())
    return tensors


def names_to_save(model: ParallelModel) -> set[str]:
    """Names of the weights that this rank saves: one holder of each chunk does, and all ranks know which.

    So rank 0 plans each chunk once, however many hold it. Holders get weights that follow each other in the model's
    description, equal shares of its bytes.
    """
    total_bytes, start_bytes, names = max(1, model.spec.num_bytes), 0, set()
    for weight in model.spec.weights:
        held = model.weights.get(weight.name)
        # By the whole model's bytes, which all ranks see alike; each holds other weights, and other parts of them.
        if held is not None:
            # Behind the last byte there may be weights without elements: the last holder's.
            saver = min(start_bytes * held.num_holders // total_bytes, held.num_holders - 1)
            names |= {weight.name} if saver == held.holder else set()
        start_bytes += weight.num_bytes
    return names


def model_entry(model: ParallelModel) -> ModelEntry:
    """Returns the manifest's entry of the model."""
    config = model_config(model.module)
    return ModelEntry(
        name=_class_name(model.module),
        config=config,
        config_sha256=json_digest(_compared(config)) if config is not None else None,
        aliases={w.name: list(w.aliases) for w in model.spec.weights if w.aliases},
        adapters=adapter_config(model.module),
    )


def model_config(module: nn.Module) -> dict[str, Any] | None:
    """The module's Hugging Face config as plain JSON with its architecture named, or None for a plain module."""
    to_json = getattr(getattr(module, "config", None), "to_json_string", None)
    if to_json is None:
        return None
    config = json.loads(to_json(use_diff=False))
    config["architectures"] = [_class_name(module)]
    return config


def _class_name(module: nn.Module) -> str:
    """The name of the user's class: `parallelize` and `fully_shard` have put classes of their own in front."""
    for cls in type(module).__mro__:
        if not cls.__module__.startswith(("torch.distributed.", "rotorch.drop_in")):
            return cls.__name__
    raise AssertionError("unreachable: every class ends in object")


def _compared(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}


def config_difference(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> str | None:
    """Names the first entry that two configs both have and that differs, or None. Versions add and drop entries."""
    if ours is None or theirs is None:
        return None
    ours, theirs = _compared(ours), _compared(theirs)
    for key in sorted(ours.keys() & theirs.keys()):
        if ours[key] != theirs[key]:
            return f"{key} is {theirs[key]!r} there and {ours[key]!r} here"
    return None


# ---------------------------------------------------------------- optimizer


def optimizer_entry(state: TrainState) -> OptimizerEntry | None:
    """Returns the manifest's entry of the optimizer; None without one.

    Raises:
        ConfigError: if it keeps state that cannot be cut like its weight, or a hyperparameter that is not plain JSON.
    """
    optimizer = state.optimizer
    if optimizer is None:
        return None
    kinds: dict[str, str] = {}
    for held, key, value in optimizer_values(state):
        kinds[key] = _merge_kind(optimizer, key, kinds.get(key), _kind(optimizer, held, key, value))
    groups = [
        {**_plain_group(optimizer, group), _MEMBERS: names}
        for group, names in zip(optimizer.param_groups, _members(state), strict=True)
    ]
    return OptimizerEntry(name=type(optimizer).__name__, groups=groups, kinds=kinds)


def optimizer_tensors(state: TrainState, *, names: Container[str]) -> dict[str, ChunkedTensor | Tensor]:
    """The optimizer's state of the weights `names` under its names in a checkpoint.

    See [Note: names in a checkpoint].
    """
    tensors: dict[str, ChunkedTensor | Tensor] = {}
    for held, key, value in optimizer_values(state):
        if held.name not in names:
            continue
        name = f"{OPTIMIZER}{key}/{held.name}"
        match _kind(state.optimizer, held, key, value):
            case "weight":
                tensors[name] = _like_weight(held, value)
            case "tensor":
                tensors[name] = value
            case _:
                tensors[name] = torch.tensor(value, dtype=torch.float64)
    return tensors


def optimizer_values(state: TrainState) -> Iterator[tuple[ShardedWeight, str, Any]]:
    """Yields the optimizer's state on this rank: the weight, the key, and the value."""
    if state.optimizer is None:
        return
    stepped = _stepped(state.optimizer)
    for held in state.model.weights.values():
        of_weight = state.optimizer.state.get(stepped(held), {})  # a defaultdict: [] would make an entry
        yield from ((held, key, value) for key, value in of_weight.items() if value is not None)


def _stepped(optimizer: torch.optim.Optimizer) -> Callable[[ShardedWeight], nn.Parameter]:
    """Returns a function from a weight to the parameter that the optimizer has: the DTensor, or the plain local one."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return lambda held: held.local_parameter if id(held.local_parameter) in known else held.parameter


def _kind(optimizer: Any, held: ShardedWeight, key: str, value: Any) -> str:
    if isinstance(value, (bool, int, float)):
        return NUMBER
    if isinstance(value, Tensor):
        if key in _whole_keys(optimizer) or (not isinstance(value, DTensor) and value.dim() == 0):
            return TENSOR
        same_type = isinstance(value, DTensor) == isinstance(_stepped(optimizer)(held), DTensor)
        if same_type and _local(value).shape == held.local.shape:
            return WEIGHT
        if not isinstance(value, DTensor) and value.numel() == 1:
            return TENSOR
    what = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"of type {type(value).__name__}"
    raise ConfigError(
        f"checkpoint: {type(optimizer).__name__} keeps {key!r} {what} for {held.name!r} of shape "
        f"{list(held.weight.shape)}, which cannot be cut like its weight. "
        "Use an optimizer whose state has its weights' shapes, e.g. AdamW"
    )


def _whole_keys(optimizer: Any) -> frozenset[str]:
    """Keys of state that is whole, and the same on all ranks, as its class says."""
    return getattr(optimizer, "whole_state", frozenset())


def _merge_kind(optimizer: Any, key: str, before: str | None, now: str) -> str:
    if {before, now} == {WEIGHT, TENSOR}:
        return WEIGHT  # a weight of one element: either would do
    if before not in (None, now):
        raise ConfigError(f"checkpoint: {type(optimizer).__name__} keeps {key!r} as {before} and as {now}")
    return now


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _like_weight(held: ShardedWeight, value: Tensor) -> ChunkedTensor:
    return ChunkedTensor(_local(value), shape=held.weight.shape, chunks=held.chunks)


def _plain_group(optimizer: Any, group: dict[str, Any]) -> dict[str, Any]:
    plain = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        number = float(value) if isinstance(value, Tensor) else value
        try:
            plain[key] = json.loads(json.dumps(number))
        except TypeError:
            raise ConfigError(
                f"checkpoint: {type(optimizer).__name__} has {key}={value!r}, not a plain value"
            ) from None
    return plain


def _members(state: TrainState) -> list[list[JsonValue]]:
    """The names of the weights in each of the optimizer's groups."""
    assert state.optimizer is not None, "who asks has one"
    stepped = _stepped(state.optimizer)
    name_of = {id(stepped(held)): name for name, held in state.model.weights.items()}
    return [sorted(name_of[id(p)] for p in g["params"] if id(p) in name_of) for g in state.optimizer.param_groups]


def moved_between_groups(state: TrainState, entry: OptimizerEntry) -> list[str]:
    """A line for each group that has weights now which were in another one when the state was saved."""
    saved = {name: number for number, group in enumerate(entry.groups) for name in _names_in(group)}
    lines = []
    for number, names in enumerate(_members(state)):
        moved = [name for name in names if saved.get(str(name), number) != number]
        if moved:
            more = f" and {len(moved) - 1} more" if moved[1:] else ""
            decay = entry.groups[number].get("weight_decay")
            lines.append(
                f"optimizer group {number} (weight_decay {decay}) has {moved[0]!r}{more} from here on, which "
                f"group {saved[str(moved[0])]} had"
            )
    return lines


def _names_in(group: Mapping[str, JsonValue]) -> list[str]:
    names = group.get(_MEMBERS, [])
    return [str(name) for name in names] if isinstance(names, list) else []


def restore_groups(optimizer: torch.optim.Optimizer, entry: OptimizerEntry) -> list[str]:
    """Gives the optimizer the saved hyperparameters; returns a line for each that this run had set otherwise."""
    changed = []
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, entry.groups, strict=True)):
        ours = _plain_group(optimizer, group)
        for key, value in saved.items():
            if key == _MEMBERS:
                continue
            if key in ours and ours[key] != value and key != "lr":
                changed.append(f"optimizer group {number}: {key} stays {value!r} as saved, not {ours[key]!r}")
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
    return changed


def empty_optimizer_state(
    state: TrainState, *, entry: OptimizerEntry, tensors: dict[str, TensorEntry]
) -> dict[str, dict[str, Any]]:
    """Makes zeros for all saved state of this rank's weights, by weight name and key, to be loaded into."""
    made: dict[str, dict[str, Any]] = {}
    assert state.optimizer is not None, "nothing to load into"
    stepped = _stepped(state.optimizer)
    for held in state.model.weights.values():
        for key, kind in entry.kinds.items():
            saved = tensors.get(f"{OPTIMIZER}{key}/{held.name}")
            if saved is None:
                continue
            dtype = DTYPES[saved.dtype]
            if kind == WEIGHT:
                value = torch.zeros_like(stepped(held), dtype=dtype, requires_grad=False)
            else:
                value = torch.zeros(saved.shape, dtype=dtype)
            made.setdefault(held.name, {})[key] = value
    return made


def loading_tensors(state: TrainState, made: dict[str, dict[str, Any]], *, kinds: dict[str, str]) -> dict[str, Any]:
    """The tensors of `empty_optimizer_state` under their names in a checkpoint."""
    weights = state.model.weights
    return {
        f"{OPTIMIZER}{key}/{name}": _like_weight(weights[name], value) if kinds[key] == WEIGHT else value
        for name, of_weight in made.items()
        for key, value in of_weight.items()
    }


def attach_optimizer_state(state: TrainState, made: dict[str, dict[str, Any]], *, kinds: dict[str, str]) -> None:
    """Puts loaded state where the optimizer looks for it, on the device where it would have made it itself."""
    assert state.optimizer is not None, "nothing to attach to"
    groups = {id(p): group for group in state.optimizer.param_groups for p in group["params"]}
    stepped = _stepped(state.optimizer)
    state.optimizer.state.clear()
    for name, of_weight in made.items():
        parameter = stepped(state.model.weights[name])
        group = groups.get(id(parameter), {})
        on_device = bool(group.get("capturable") or group.get("fused"))
        for key, value in of_weight.items():
            if kinds[key] == NUMBER:
                of_weight[key] = value.item()
            elif kinds[key] == TENSOR and (on_device or key in _whole_keys(state.optimizer)):
                of_weight[key] = value.to(parameter.device)
        state.optimizer.state[parameter] = of_weight


# ---------------------------------------------------------------- random states


def rng_tensor() -> Tensor:
    """This process's random states (torch on CPU and CUDA, Python, NumPy), as JSON text in a uint8 tensor."""
    numpy_state: Any = np.random.get_state(legacy=False)
    content = {
        "torch": _to_text(torch.get_rng_state()),
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        content["cuda"] = _to_text(torch.cuda.get_rng_state())
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def restore_rng(tensor: Tensor) -> None:
    """Gives this process the random states that `rng_tensor` wrote down."""
    content = json.loads(bytes(tensor.numpy()))
    version, internal, gauss_next = content["python"]
    random.setstate((version, tuple(internal), gauss_next))
    np.random.set_state(content["numpy"])
    torch.set_rng_state(_from_text(content["torch"]))
    if "cuda" in content and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_text(content["cuda"]))


def derive_rng(*, seed: int, step: int, rank: int) -> None:
    """Seeds this process's random states from the run's seed, the step and the rank, for another number of ranks."""
    derived = int.from_bytes(hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()[:8], "big")
    random.seed(derived)
    np.random.seed(derived % 2**32)
    torch.manual_seed(derived % 2**63)


def object_name(name: str, *, share: int | None = None) -> str:
    """The name in a checkpoint of an object's state: of one share of the data, or of all ranks."""
    return f"{OBJECT}{name}/{'all' if share is None else f'{share:05d}'}"


def rng_name(rank: int) -> str:
    """The name of a rank's random states in a checkpoint."""
    return f"{RNG}{rank:05d}"


def _to_text(tensor: Tensor) -> str:
    return base64.b64encode(bytes(tensor.numpy())).decode()


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
