"""Muon on weights of which every rank has a part: `torch.optim.Muon`, each matrix orthogonalised once, by its owner.

[Note: what goes on the wire]
    Momentum is element-wise and stays cut like its weight. Newton-Schulz starts by rounding to bfloat16, element by
    element, and ends in bfloat16, so parts travel as that both ways, and the result has the bits of one process's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rotorch.core.errors import ConfigError
from rotorch.models.decay import is_decayed
from rotorch.models.hf import head_weights
from rotorch.optim.adamw import AdamW
from rotorch.optim.members import Member, closure_loss, of_models, with_gradients
from rotorch.optim.whole_matrices import WholeMatrices
from rotorch.shard.sharded_weight import ShardedWeight, weight_of

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_MOST_STEPS = 100
_BLOCK_NUMEL = 1 << 16
_ADJUST: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for the parameters that `parallelize` leaves, with AdamW for all but hidden matrices.

    Arguments, defaults and results are torch's, under any layout. All ranks call `step`. Plain parameters, which belong
    to no parallel model, are updated by each rank alone.

    Args:
        params: parameters, or groups. A group with `use_muon=False` is updated by AdamW, with its own `lr`, `betas`,
            `eps` and `weight_decay`; `muon_groups(model)` makes the usual ones.
        lr: learning rate.
        weight_decay: decoupled.
        momentum: its factor.
        nesterov: use Nesterov's momentum.
        ns_coefficients: of the polynomial of Newton-Schulz.
        eps: the least norm that a matrix is divided by.
        ns_steps: steps of Newton-Schulz.
        adjust_lr_fn: "original" (None is the same), "match_rms_adamw", or "spectral_unclamped".

    Raises:
        ConfigError: a hyperparameter that cannot be, a parameter that is no matrix, or a DTensor of somebody else.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = _COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "use_muon": True,
        }
        self._adamw = AdamW([torch.zeros(0)])
        """Updates the groups without Muon, in the state of this optimizer."""
        self._wholes: dict[tuple[int, ...], WholeMatrices] = {}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, of Muon's or, with `use_muon=False`, of AdamW's parameters."""
        if not param_group.get("use_muon", True):
            given = {"lr": self.defaults["lr"], **param_group}
            param_group = {**self._adamw.defaults, **given}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["use_muon"]:
            _check(group)
            for parameter in group["params"]:
                _check_matrix(parameter)
        else:
            for name in self.defaults.keys() - self._adamw.defaults.keys() - {"use_muon"}:
                group.pop(name, None)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._adamw, self._wholes = AdamW([torch.zeros(0)]), {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update. All ranks of the model, equally often."""
        loss = closure_loss(closure)
        models, plain = of_models(group for group in self.param_groups if group["use_muon"])
        for parameter, group in plain:
            if (grad := parameter.grad) is not None:
                update = _orthogonal(_nesterov(grad, self._momentum(parameter, group, grad), group), group)
                _subtract(parameter, update, group, shape=tuple(parameter.shape))
        for members in models:
            self._step_of(members)
        others = [group for group in self.param_groups if not group["use_muon"]]
        if others:
            self._adamw.param_groups, self._adamw.state = others, self.state
            self._adamw.step()
        return loss

    def _step_of(self, members: list[Member]) -> None:
        """Updates the matrices of one parallel model."""
        meant = {member.held.name: member for member in with_gradients(members)}
        updates: dict[str, Callable[[], Tensor]] = {}
        for name, member in meant.items():
            grad = member.grad
            updates[name] = partial(_nesterov, grad, self._momentum(member.parameter, member.group, grad), member.group)
        self._whole_matrices(members).update(
            lambda held: updates[held.name](),
            lambda held, whole: _orthogonal(whole, meant[held.name].group),
            lambda held, part: _subtract(held.local, part, meant[held.name].group, shape=held.weight.shape),
            dtype=torch.bfloat16,
            names=meant.keys(),
        )

    def _whole_matrices(self, members: list[Member]) -> WholeMatrices:
        key = tuple(id(member.parameter) for member in members)
        if key not in self._wholes:
            steps = members[0].group["ns_steps"]
            self._wholes[key] = WholeMatrices([m.held for m in members], operations=partial(_operations, steps=steps))
        return self._wholes[key]

    def _momentum(self, parameter: Tensor, group: dict[str, Any], grad: Tensor) -> Tensor:
        """The momentum of a parameter, of this rank's part of it, moved on by a gradient."""
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.detach())
        buffer = state["momentum_buffer"]
        local: Tensor = buffer.to_local() if isinstance(buffer, DTensor) else buffer
        return local.lerp_(grad, 1 - group["momentum"])


def muon_groups(model: Any, **others: Any) -> list[dict[str, Any]]:
    """Groups for `Muon(...)`: hidden matrices for Muon; embeddings, head, norms, biases and the rest for AdamW.

    Weights of more than two dims (experts in one tensor, convolutions) are no matrices: AdamW updates them. Vectors,
    norms and biases are not decayed.

    Args:
        model: what `parallelize` returned.
        others: `lr`, `betas`, `eps` and `weight_decay` of AdamW.
    """
    chosen: dict[str, list[Tensor]] = {"muon": [], "decayed": [], "rest": []}
    for held in model.weights.values():
        if held.parameter.requires_grad:
            chosen[_use_of(model.module, held)].append(held.parameter)
    groups = [
        {"params": chosen["muon"], "use_muon": True},
        {"params": chosen["decayed"], "use_muon": False, **others},
        {"params": chosen["rest"], "use_muon": False, **others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def is_hidden_matrix(module: nn.Module, held: ShardedWeight) -> bool:
    """True for a matrix between the embedding and the head of a model: what Muon is for. The same on all ranks."""
    names = {held.name, *held.weight.aliases}
    tables = {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, nn.Embedding)}
    is_matrix = len(held.weight.shape) == 2 and is_decayed(module, held.name, shape=held.weight.shape)
    return is_matrix and not names & (tables | head_weights(module))


def _use_of(module: nn.Module, held: ShardedWeight) -> str:
    if is_hidden_matrix(module, held):
        return "muon"
    return "decayed" if is_decayed(module, held.name, shape=held.weight.shape) else "rest"


def _operations(shape: tuple[int, ...], *, steps: int) -> float:
    """Multiplications of Newton-Schulz on a matrix: per step two products with it, and one of its Gram matrix."""
    small, large = sorted(shape)
    return float(steps * (2 * small * small * large + small**3))


def _nesterov(grad: Tensor, momentum: Tensor, group: dict[str, Any]) -> Tensor:
    """Returns the matrix to orthogonalise, in bfloat16, made by blocks of rows: no second one exists in full."""
    update = torch.empty(grad.shape, dtype=torch.bfloat16, device=grad.device)
    rows = max(1, _BLOCK_NUMEL // max(1, grad.shape[1]))
    for of_update, of_grad, of_momentum in zip(*(t.split(rows) for t in (update, grad, momentum)), strict=True):
        of_update.copy_(of_grad.lerp(of_momentum, group["momentum"]) if group["nesterov"] else of_momentum)
    return update


def _orthogonal(matrix: Tensor, group: dict[str, Any]) -> Tensor:
    """Newton-Schulz on a contiguous bfloat16 matrix, which it overwrites: torch.optim.Muon's operations in their order.

    Takes memory for one more of it and two of its Gram matrix: as much as one matrix and one Gram matrix in float32.
    """
    a, b, c = group["ns_coefficients"]
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=group["eps"]))
    gram, update = x.new_empty(2, len(x), len(x))
    memory = [x.new_empty(x.shape), matrix.view(x.shape)]
    for step in range(group["ns_steps"]):
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=update)
        x = torch.addmm(x, update, x, beta=a, out=memory[step % 2])
    return x.T if is_tall else x


def _subtract(weight: Tensor, update: Tensor, group: dict[str, Any], *, shape: tuple[int, ...]) -> None:
    lr = float(group["lr"])
    weight.mul_(1 - lr * group["weight_decay"])
    weight.add_(update, alpha=-lr * _ADJUST[group["adjust_lr_fn"] or "original"](*shape))


def _check(group: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay", "momentum"):
        if not float(group[name]) >= 0.0:
            raise ConfigError(f"Muon: {name}={group[name]!r}: write 0 or more")
    if not 0 <= group["ns_steps"] < _MOST_STEPS:
        raise ConfigError(f"Muon: ns_steps={group['ns_steps']!r}: write fewer than {_MOST_STEPS}, e.g. 5")
    if len(group["ns_coefficients"]) != len(_COEFFICIENTS):
        raise ConfigError(f"Muon: ns_coefficients={group['ns_coefficients']!r}: write three numbers")
    if group["adjust_lr_fn"] not in (None, *_ADJUST):
        raise ConfigError(f"Muon: adjust_lr_fn={group['adjust_lr_fn']!r}: write one of {', '.join(_ADJUST)}")


def _check_matrix(parameter: Tensor) -> None:
    held = weight_of(parameter)
    name = "a parameter" if held is None else repr(held.name)
    shape = parameter.shape if held is None else held.weight.shape
    if len(shape) != 2:
        raise ConfigError(
            f"Muon: {name} of shape {list(shape)} is no matrix. Give it to AdamW: a group with use_muon=False, or "
            "rotorch.optim.muon_groups(model)"
        )
    if parameter.is_complex():
        raise ConfigError(f"Muon: {name} is complex. Give it to AdamW: a group with use_muon=False")
    if held is None and isinstance(parameter, DTensor):
        raise ConfigError(
            f"Muon: {name} of shape {list(shape)} is a DTensor that parallelize has not made. Use torch.optim.Muon"
        )
