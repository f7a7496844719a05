"""The optimizer of a run with its schedule, and clipping of gradients that are spread over ranks.

[Note: one fused update]
    At rest parameters are DTensors, and torch's fused AdamW takes them: on CPU (torch 2.13, 4.8 M parameters in 54
    tensors, one thread) a step takes 5.4 ms with `fused`, 26 ms with `foreach`, 31 ms with neither. The update is local
    to every rank, so this optimizer is given the local parts as plain parameters (`LocalParameter`), which saves the
    0.1 ms that torch takes to unpack a DTensor and its state.

[Note: the global norm]
    The norm is that of the whole model's gradient. Each rank sums the squares of what it holds, divides by the number
    of ranks that hold the same chunks, and the sum over all ranks is the square of the norm, whatever the mesh.
"""

from __future__ import annotations

import fnmatch
import math
from typing import Any

import torch
from torch import Tensor

from rotorch.models.decay import is_decayed
from rotorch.optim.muon import is_hidden_matrix
from rotorch.parallel_model import ParallelModel
from rotorch.run_config import OptimizerSection
from rotorch.train.choose_optimizer import ChosenOptimizer, choose_optimizer


def make_optimizer(model: ParallelModel, *, settings: OptimizerSection) -> torch.optim.Optimizer:
    """Makes the optimizer of a run over the model's parameters, with decay on what `is_decayed` says. Every rank alone.

    Raises:
        ConfigError: as `check_optimizer` does.
    """
    chosen = choose_optimizer(settings)
    by_use: dict[tuple[bool, int, bool], list[Tensor]] = {}
    for held in model.weights.values():
        if held.parameter.requires_grad:
            number = _group_of(held.name, settings)
            decays = is_decayed(model.module, held.name, shape=held.weight.shape)
            muon = settings.groups[number].use_muon if number < len(settings.groups) else None
            is_muon = chosen.has_muon and (is_hidden_matrix(model.module, held) if muon is None else muon)
            parameter = held.local_parameter if chosen.takes_parts else held.parameter
            by_use.setdefault((not is_muon, -number, not decays), []).append(parameter)
    groups = [
        {"params": members, **_group_settings(settings, chosen, number=-minus, muon=not other, decays=not plain)}
        for (other, minus, plain), members in sorted(by_use.items(), key=lambda pair: pair[0])
    ]
    return chosen.make(groups)


def _group_of(name: str, settings: OptimizerSection) -> int:
    """The number of the first group whose pattern fits a name; the number of groups if there is none."""
    fits = (number for number, group in enumerate(settings.groups) if fnmatch.fnmatchcase(name, group.match))
    return next(fits, len(settings.groups))


def _group_settings(
    settings: OptimizerSection, chosen: ChosenOptimizer, *, number: int, muon: bool, decays: bool
) -> dict[str, Any]:
    """Returns the settings of one group of parameters."""
    group = settings.groups[number] if number < len(settings.groups) else None
    found: dict[str, Any] = dict(chosen.of_muon if muon else chosen.of_adamw) if chosen.has_muon else {}
    if chosen.has_muon:
        found["use_muon"] = muon
    if chosen.decays:
        found["weight_decay"] = settings.weight_decay if decays else 0.0
        if group is not None and group.weight_decay is not None:
            found["weight_decay"] = group.weight_decay
    if group is not None and group.lr is not None:
        found.update(lr=group.lr, lr_ratio=group.lr / settings.lr)
    return found


def learning_rate(step: int, *, settings: OptimizerSection, steps: int) -> float:
    """Returns the learning rate of `step`, counted from 1, in a run of `steps`."""
    warmup = settings.warmup_steps
    if step <= warmup:
        return settings.lr * step / warmup
    if settings.schedule == "constant":
        return settings.lr
    falls_after = warmup
    if settings.schedule == "wsd":
        falls_after = max(warmup, steps - math.ceil(settings.decay_fraction * steps))
    progress = min(1.0, max(0, step - falls_after) / max(1, steps - falls_after))
    left = 0.5 * (1.0 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1.0 - progress
    floor = settings.lr * settings.min_lr_ratio
    return floor + (settings.lr - floor) * left


def set_learning_rate(optimizer: torch.optim.Optimizer, *, lr: float) -> None:
    """Gives all parameter groups the learning rate `lr`, or the share of it that is theirs."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_ratio", 1.0)


def schedule_numbers(settings: OptimizerSection, *, steps: int) -> dict[str, Any]:
    """The inputs of `learning_rate` as plain JSON: checkpoints keep them to notice a change."""
    names = {
        "lr",
        "warmup_steps",
        "schedule",
        "min_lr_ratio",
        *(("decay_fraction",) if settings.schedule == "wsd" else ()),
    }
    return {**settings.model_dump(include=names), "steps": steps}


def squared_norm_share(model: ParallelModel) -> float:
    """This rank's share of the squared gradient norm: shares of all ranks sum to it (see [Note: the global norm])."""
    by_holders: dict[int, list[Tensor]] = {}
    for held in model.weights.values():
        grad = held.local_grad
        if grad is not None and grad.numel():
            norm = torch.linalg.vector_norm(grad, dtype=torch.float32)
            by_holders.setdefault(held.num_holders, []).append(norm)
    return sum(float(torch.stack(n).double().square().sum()) / holders for holders, n in by_holders.items())


def clip_gradients(model: ParallelModel, *, norm: float, clip_norm: float) -> None:
    """Scales all gradients so that their global norm, now `norm`, is at most `clip_norm`; 0 leaves them alone."""
    if not 0.0 < clip_norm < norm:
        return
    for held in model.weights.values():
        grad = held.local_grad
        if grad is not None:
            grad.mul_(clip_norm / norm)
