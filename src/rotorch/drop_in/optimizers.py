"""Optimizers of a user's own: made over a plain module before it became parallel, or such as need whole matrices."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from rotorch.core.errors import ConfigError
from rotorch.shard.in_chunks import CutInName
from rotorch.shard.sharded_weight import ShardedWeight, weight_of

_NEED_WHOLE = {
    torch.optim.LBFGS: "adds up all weights as one vector. Write another optimizer",
    torch.optim.Adafactor: "needs means of whole rows. Write rotorch.optim.Adafactor",
    torch.optim.Muon: "would orthogonalise sums of parts, rounded to bfloat16 in between. Write rotorch.optim.Muon",
}
"""Classes of torch whose steps are not right on parts of weights, and what to write instead."""

_COUNTER = "step"
"""Name of the state that counts steps: of a 0-dim weight it has the weight's shape."""


@functools.cache
def look_at_steps_of_optimizers() -> None:
    """Has every `optimizer.step()` looked at, for good; once.

    Steps of torch's LBFGS, Adafactor and Muon over cut weights raise `ConfigError`, and so do steps with gradients of
    one replica alone; loaded state is cut like weights.
    Each step raises the versions of its weights, by which ranks see that one of them has made none since its last pass.
    """
    register_optimizer_step_pre_hook(_refuse_if_cut)
    register_optimizer_step_pre_hook(_refuse_if_not_summed)
    register_optimizer_step_pre_hook(_CutsLoadedState())
    register_optimizer_step_post_hook(_raise_versions)


def _raise_versions(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raises the versions of weights that a step has written: fused and foreach steps of DTensors raise none."""
    trained = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    increment_version([held.parameter for held in map(weight_of, trained) if held is not None])


class _CutsLoadedState:
    """Cuts loaded state as weights are cut: whole tensors of one process, and what torch has cut in its own way.

    `Optimizer.load_state_dict` leaves whole tensors whole, `set_optimizer_state_dict` makes DTensors of torch's cut of
    them, and an optimizer over a plain model brings the state of its steps there. All ranks cut in the same step, in
    the same order, since the same state has been loaded into all.
    """

    def __init__(self) -> None:
        # By optimizer, the state that is known to be cut like its weights. Another one has been loaded if it differs.
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._seen.get(optimizer) is optimizer.state:
            return
        found = [
            (state, key, value, held)
            for parameter, state in optimizer.state.items()
            if isinstance(parameter, DTensor) and (held := weight_of(parameter)) is not None
            for key, value in state.items()
            if isinstance(value, Tensor) and value.shape == parameter.shape and key != _COUNTER
        ]
        # Other classes may keep state of a rank's part by themselves, which is whole where the weight is.
        whole = [each for each in found if _is_torchs(optimizer) and not isinstance(each[2], DTensor)]
        # Ranks that have loaded nothing would go on with other moments for their parts.
        for meet in dict.fromkeys(held.meet_for_state for *_, held in whole):
            meet()
        for state, key, value, held in whole:
            state[key] = held.part_of(value)
        for state, key, value, held in found:
            like: Tensor = held.parameter
            if isinstance(like, CutInName) and isinstance(value, DTensor) and not isinstance(value, CutInName):
                state[key] = like.part_of(value.full_tensor())
        self._seen[optimizer] = optimizer.state


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """True for a class of torch, whose state of a weight's shape is a DTensor where the weight is one."""
    return type(optimizer).__module__.startswith("torch.optim.")


def _refuse_if_cut(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
    why = next((why for kind, why in _NEED_WHOLE.items() if isinstance(optimizer, kind)), None)
    if why is None:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            held = weight_of(parameter)
            if held is not None and held.mesh is not None and held.num_holders < held.mesh.size():
                raise ConfigError(
                    f"torch.optim.{type(optimizer).__name__} on a weight of shape {list(parameter.shape)}, of which "
                    f"each rank has a part: it {why}, or a layout that keeps weights whole (ddp)"
                )


def _refuse_if_not_summed(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Raises `ConfigError` for gradients of one replica alone; those of a closure are looked at when it has made them.

    Args:
        optimizer: whose step it is.
        args: the optimizer itself, and arguments of the step.
        kwargs: those by name.

    Returns:
        The arguments with a closure that does so; None: as they are.
    """
    if not _ours(optimizer):
        return None
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        _check_summed(optimizer)
        return None

    def checked() -> Any:
        loss = closure()
        _check_summed(optimizer)
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": checked}
    return (args[0], checked, *args[2:]), kwargs


def _ours(optimizer: torch.optim.Optimizer) -> list[ShardedWeight]:
    """An optimizer's weights that ranks hold together."""
    held = (weight_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return [each for each in held if each is not None]


def _check_summed(optimizer: torch.optim.Optimizer) -> None:
    if any(held.parameter.grad is not None and not held.is_summed() for held in _ours(optimizer)):
        raise ConfigError(
            f"torch.optim.{type(optimizer).__name__}.step: the last backward was within no_sync(), and each replica "
            "would make a step of its own. Let the last backward of a step run outside of it"
        )


class PlainParameters:
    """Parameters of a module as they are before `parallelize`, so that optimizers can be given those after it.

    Args:
        module: which, plain or parallel; `parallelize` changes it in place.
        who: what errors begin with.
    """

    def __init__(self, module: nn.Module, *, who: str) -> None:
        self._module, self._who = module, who
        self._plain = dict(module.named_parameters(remove_duplicate=False))  # kept alive: ids must stay theirs
        self._name_of = {id(parameter): name for name, parameter in self._plain.items()}

    def check(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises `ConfigError` for an optimizer that cannot be given other parameters. Changes nothing."""
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            if not all(id(p) in self._name_of for group in optimizer.param_groups for p in group["params"]):
                raise ConfigError(
                    f"{self._who}: {kind} has parameters that are not the model's. Make it over model.parameters() of "
                    "this model alone"
                )
            if hasattr(self._module, "parallel"):
                continue
            if optimizer.state and not _is_torchs(optimizer):
                raise ConfigError(
                    f"{self._who}: {kind} has state of whole weights, and is no class of torch.optim, whose state is "
                    "cut as its weights are. Make it after rotorch.parallelize, or give it before its first step"
                )
            if type(optimizer).__module__.startswith("rotorch."):
                raise ConfigError(
                    f"{self._who}: {kind} must know how weights are cut when it is made. Call "
                    "model = rotorch.parallelize(model, layout) first, make it over that, and give both"
                )

    def give_new_ones(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Puts the module's parameters of now into optimizers that have its former ones, in place.

        State goes with them, whole until the next step, which cuts it. All ranks, with the same state.
        """
        by_name = dict(self._module.named_parameters(remove_duplicate=False))

        def new(plain: Tensor) -> Tensor:
            return by_name[self._name_of[id(plain)]]

        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [new(parameter) for parameter in group["params"]]
            # Another dictionary, as when it is loaded: by that the next step sees that it is to be cut.
            optimizer.state = defaultdict(dict, {new(parameter): kept for parameter, kept in optimizer.state.items()})
