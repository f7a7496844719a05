"""Whole weights of a parallel module: its state as one process has it, and into its parts again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rotorch.comm.roll_call import ModelCall
from rotorch.core.errors import ConfigError
from rotorch.models.lora import is_adapter
from rotorch.parallel_model import ParallelModel
from rotorch.shard.in_chunks import CutInName, StatePart, StatePartInName, fill_part
from rotorch.shard.sharded_weight import ShardedWeight


def weights_by_name(module: nn.Module, model: ParallelModel) -> dict[str, str]:
    """Maps every name of a weight in the module to its name in `model`; tied weights have several.

    Frozen parts that were put into the module later are left out: every rank has all of them.
    """
    of_parameter = {id(held.parameter): name for name, held in model.weights.items()}
    named = nn.Module.named_parameters(module, remove_duplicate=False)
    return {name: of_parameter[id(parameter)] for name, parameter in named if id(parameter) in of_parameter}


def parts_by_name(module: nn.Module, model: ParallelModel, *, whole_adapters: bool) -> dict[str, Tensor]:
    """Returns this rank's part of each weight, under all its names, as DTensors; plain tensors if none is cut.

    Args:
        module: of which.
        model: its weights.
        whole_adapters: adapters of which ranks have parts are gathered, which all ranks must call.
    """
    none_is_cut = all(held.num_holders == model.mesh.size() for held in model.weights.values())

    def part_of(name: str) -> Tensor:
        held = model.weights[name]
        if none_is_cut or (whole_adapters and is_adapter(name) and held.num_holders == model.mesh.size()):
            return held.local.detach()
        if whole_adapters and is_adapter(name):
            return model.full_tensor(name)
        at_rest = held.parameter.detach()
        if isinstance(at_rest, CutInName):
            return StatePartInName.of(at_rest, held.chunks)
        assert isinstance(at_rest, DTensor)
        return StatePart.of(at_rest)

    parts = {name: part_of(name) for name in model.weights}
    return {name: parts[weight] for name, weight in weights_by_name(module, model).items()}


@torch.no_grad()
def full_state_dict(
    module: nn.Module, model: ParallelModel, *, all_ranks: bool, only: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """Returns the state of `module` as on one process, on CPU; gathers one weight at a time. All ranks.

    Args:
        module: of which.
        model: its weights.
        all_ranks: every rank gets it, not the first one alone.
        only: whether a name is wanted.
    """
    model.meet_at_rest(ModelCall.GATHER)
    names = {name: weight for name, weight in weights_by_name(module, model).items() if only(name)}
    wanted = set(names.values())
    keeps = all_ranks or not any(model.mesh.get_coordinate() or [0])
    whole: dict[str, Tensor] = {}
    for weight in (weight for weight in model.weights if weight in wanted):
        tensor = model.full_tensor(weight)
        if keeps:
            whole[weight] = tensor.cpu()
    if not keeps:
        return {}
    found = {name: value for name, value in nn.Module.state_dict(module, keep_vars=True).items() if only(name)}
    for name, value in found.items():
        if name not in names:
            whole[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return {name: whole[names.get(name, name)] for name in found}


@torch.no_grad()
def copy_into(module: nn.Module, model: ParallelModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Copies weights into this rank's chunks; returns the entries left for `nn.Module.load_state_dict`.

    Nothing is copied if a weight has another shape: torch then says which.

    Raises:
        ConfigError: a part of a weight that is not the one that this rank has.
    """
    names = {name: weight for name, weight in weights_by_name(module, model).items() if name in given}
    rest = dict(given)
    fitting = {}
    for name, weight in names.items():
        value, held = given[name], model.weights[weight]
        if isinstance(value, CutInName) and value.chunks != held.chunks:
            raise ConfigError(
                f"load_state_dict: {name!r} is a part of a weight that another rank or layout has. "
                "Save and load by torch.distributed.checkpoint, or give whole tensors"
            )
        if tuple(value.shape) == held.weight.shape:
            fitting[name] = value
            rest[name] = held.parameter.data  # torch copies it into itself
    for name, value in fitting.items() if len(fitting) == len(names) else ():
        held = model.weights[names[name]]
        if isinstance(value, CutInName) or _is_cut_alike(value, held):
            held.local.copy_(value.to_local())
            continue
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        fill_part(held.local, held.chunks, whole)
    return rest


def _is_cut_alike(value: Tensor, held: ShardedWeight) -> bool:
    """True if a DTensor that torch has cut, as peft does with adapters, is this rank's part of a weight.

    All ranks come to the same: a part is as torch cuts on all of them, or on none (`CutInName`).
    """
    ours: Tensor = held.parameter
    if not isinstance(value, DTensor) or not isinstance(ours, DTensor) or isinstance(ours, CutInName):
        return False
    return value.device_mesh == ours.device_mesh and value.placements == ours.placements
