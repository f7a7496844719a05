"""Adafactor on weights of which every rank has a part: `torch.optim.Adafactor`, under any layout.

[Note: what is summed]
    The second moment of a matrix is kept as averages along its rows and its columns, and its update is scaled by norms
    of the whole weight and of the whole update. Per step ranks sum, in one message each, the squares of rows, columns
    and weights, and then those of updates: rows plus columns of every matrix, a thousandth of what gradients take. What
    is kept of rows and columns is small and the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rotorch.comm.collectives import all_reduce_sum
from rotorch.core.errors import ConfigError
from rotorch.optim.members import Member, closure_loss, mesh_of, of_models, with_gradients
from rotorch.shard.sharded_weight import Chunk


class Adafactor(torch.optim.Optimizer):
    """`torch.optim.Adafactor` for the parameters that `parallelize` leaves. All ranks call `step`.

    Args:
        params: parameters of parallel models, or groups.
        lr: learning rate, and the most that a relative step may be.
        beta2_decay: exponent of the decay of second moments.
        eps: added to second moments (None: that of the dtype), and the least norm of a weight.
        d: the most that a root mean square of an update may be.
        weight_decay: decoupled.

    Raises:
        ConfigError: a value that cannot be, or a parameter of no parallel model.
    """

    whole_state = frozenset({"row_var", "col_var"})
    """Keys of its state that are whole, and the same on all ranks."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        if not (lr >= 0.0 and weight_decay >= 0.0 and beta2_decay <= 0.0 and d >= 1.0):
            raise ConfigError(
                f"Adafactor: lr={lr!r}, weight_decay={weight_decay!r}, beta2_decay={beta2_decay!r}, d={d!r}: write 0 "
                "or more, beta2_decay of 0 or less, and d of 1 or more"
            )
        if len(eps) != 2 or any(each is not None and each < 0.0 for each in eps) or eps[1] is None:
            raise ConfigError(f"Adafactor: eps={eps!r}: write two numbers of 0 or more; the first may be None")
        defaults = {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update. All ranks of the model, equally often."""
        loss = closure_loss(closure)
        models, plain = of_models(self.param_groups)
        if plain:
            raise ConfigError("Adafactor: a parameter of no parallel model. Use torch.optim.Adafactor for it")
        for members in models:
            self._step_of(with_gradients(members))
        return loss

    def _step_of(self, members: list[Member]) -> None:
        if not members:
            return
        mesh = mesh_of(members)
        sums = all_reduce_sum(torch.cat([_squares(member) for member in members]), mesh=mesh)
        norms = []
        for member, of_member in zip(members, sums.split([_num_sums(m) for m in members]), strict=True):
            norms.append(math.sqrt(float(of_member[0])))
            self._move_on(member, of_member[1:])
        squares = torch.tensor([self._squared_update(member) for member in members], dtype=torch.float64)
        for member, norm, square in zip(members, norms, all_reduce_sum(squares, mesh=mesh).tolist(), strict=True):
            self._update(member, norm=norm, update_norm=math.sqrt(square))

    def _move_on(self, member: Member, sums: Tensor) -> None:
        """Second moments after this step's gradient, of which `sums` has the squares of whole rows and columns."""
        held, state = member.held, self.state[member.parameter]
        shape, like = held.weight.shape, held.local
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            if len(shape) > 1:
                state["row_var"] = like.new_zeros((*shape[:-1], 1))
                state["col_var"] = like.new_zeros((*shape[:-2], 1, shape[-1]))
            else:
                state["variance"] = torch.zeros_like(member.parameter.detach())
        state["step"] += 1
        weight = float(state["step"]) ** member.group["beta2_decay"]
        if len(shape) < 2:
            _local(state["variance"]).lerp_(member.grad.square(), weight)
            return
        rows, columns = state["row_var"], state["col_var"]
        for moment, total, length in zip(
            (rows, columns), sums.split([rows.numel(), columns.numel()]), (shape[-1], shape[-2]), strict=True
        ):
            mean = (total.view(moment.shape) / length).to(moment.dtype)
            moment.lerp_(mean.to(moment.device), weight)

    def _updates(self, member: Member) -> Iterator[tuple[Tensor, Chunk]]:
        """Yields the update of each box that this rank has, before the learning rate, and the box."""
        held, state = member.held, self.state[member.parameter]
        grad, eps = member.grad, member.group["eps"][0]
        eps = torch.finfo(held.local.dtype).eps if eps is None else eps
        for chunk in held.chunks:
            if len(held.weight.shape) > 1:
                mean = state["row_var"].mean(dim=-2, keepdim=True).clamp_(min=eps)
                estimate = _box(state["row_var"], chunk) @ _box(state["col_var"], chunk)
                estimate.div_(_box(mean, chunk))
            else:
                estimate = chunk.of_local(_local(state["variance"])).clone()
            yield estimate.clamp_(min=eps * eps).rsqrt_().mul_(chunk.of_local(grad)), chunk

    def _squared_update(self, member: Member) -> float:
        if member.held.holder:
            return 0.0
        return sum(float(_norm(update).square()) for update, _ in self._updates(member))

    def _update(self, member: Member, *, norm: float, update_norm: float) -> None:
        held, group = member.held, member.group
        root, lr = held.weight.numel**0.5, float(group["lr"])
        step = float(self.state[member.parameter]["step"])
        alpha = max(group["eps"][1], norm / root) * min(lr, 1 / step**0.5)
        held.local.mul_(1 - lr * group["weight_decay"])
        for update, chunk in self._updates(member):
            chunk.of_local(held.local).add_(update, alpha=-alpha / max(1.0, update_norm / (root * group["d"])))


def _num_sums(member: Member) -> int:
    shape = member.held.weight.shape
    lengths = (math.prod(shape[:-1]), math.prod((*shape[:-2], shape[-1]))) if len(shape) > 1 else ()
    return 1 + sum(lengths)


def _squares(member: Member) -> Tensor:
    """This rank's share of sums of squares: of the weight, of the gradient's rows and of its columns."""
    held, shape = member.held, member.held.weight.shape
    found = torch.zeros(_num_sums(member), dtype=torch.float64)
    if held.holder:  # one of those that hold the same
        return found
    if held.local.numel():
        found[0] = _norm(held.local).square()
    if len(shape) > 1:
        rows, columns = found[1:].split([math.prod(shape[:-1]), math.prod((*shape[:-2], shape[-1]))])
        for chunk in held.chunks:
            part = chunk.of_local(member.grad)
            for total, dim in ((rows.view(*shape[:-1], 1), -1), (columns.view(*shape[:-2], 1, shape[-1]), -2)):
                norms = torch.linalg.vector_norm(part, dim=dim, keepdim=True, dtype=torch.float64)
                _box(total, chunk).add_(norms.square().cpu())
    return found


def _box(tensor: Tensor, chunk: Chunk) -> Tensor:
    """Returns the part of a tensor that belongs to a box of the weight; dims of one element stay whole."""
    for dim, (start, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        if tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
