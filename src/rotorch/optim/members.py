"""Parameters of an optimizer, with what this rank holds of each: for updates in which ranks take part together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.collectives import all_reduce_sum
from rotorch.shard.sharded_weight import ShardedWeight, weight_of


@dataclass(frozen=True)
class Member:
    """A parameter of a parallel model, what this rank holds of it, and its group."""

    parameter: nn.Parameter
    held: ShardedWeight
    group: dict[str, Any]

    @property
    def grad(self) -> Tensor:
        """This rank's part of the gradient; zeros where only other ranks have one."""
        grad = self.held.local_grad
        return torch.zeros_like(self.held.local) if grad is None else grad


def mesh_of(members: list[Member]) -> DeviceMesh:
    """All ranks of the model that the members are of."""
    mesh = members[0].held.mesh
    assert mesh is not None, "weight_of gives weights of parallel models"
    return mesh


def of_models(groups: Iterable[dict[str, Any]]) -> tuple[list[list[Member]], list[tuple[nn.Parameter, dict[str, Any]]]]:
    """The members of each parallel model, and plain parameters with their group."""
    models: dict[int, list[Member]] = {}
    plain = []
    for group in groups:
        for parameter in group["params"]:
            held = weight_of(parameter)
            if held is None:
                plain.append((parameter, group))
            else:
                models.setdefault(id(held.mesh), []).append(Member(parameter, held, group))
    return list(models.values()), plain


def closure_loss(closure: Callable[[], Any] | None) -> Any:
    """Returns the result of a closure that `step` was given, computed with gradients as torch's optimizers do."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def with_gradients(members: list[Member]) -> list[Member]:
    """Returns the members of which any rank has a gradient. All ranks of the model call it."""
    learns = torch.tensor([float(m.held.local_grad is not None) for m in members], dtype=torch.float64)
    all_reduce_sum(learns, mesh=mesh_of(members))
    return [member for member, number in zip(members, learns.tolist(), strict=True) if number]
