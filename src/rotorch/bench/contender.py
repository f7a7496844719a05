"""Contenders of a bench: a model under a layout, under another library (`peers/`), or replicas that work alone."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from rotorch.bench.peers import PEERS
from rotorch.bench.task import Task
from rotorch.comm.collectives import all_reduce_sum
from rotorch.comm.observe import Observable, Observer
from rotorch.mesh import pick_device
from rotorch.models.compiled import compile_blocks
from rotorch.models.decay import is_decayed
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.parallel_model import causal_lm_loss, count_targets
from rotorch.parallelize import parallelize
from rotorch.run_config import OptimizerSection
from rotorch.shard.materialize import initialise, on_meta, take_recipes
from rotorch.shard.sharded_weight import ShardedWeight, cut_chunks
from rotorch.shard.sites import find_sites
from rotorch.shard.storages import local_part
from rotorch.traced.weight_copies import WeightCopies
from rotorch.train.module import precision_arguments
from rotorch.train.optim import clip_gradients, make_optimizer, squared_norm_share

LIMIT = "limit"
"""The row of ranks that do not communicate at all."""

REFERENCE = "reference"
"""One process that trains on the whole global batch, a rank's share at a time: what losses are compared with."""


class Contender(Observable, ABC):
    """One row of a bench on one rank. Other libraries take part by a subclass.

    Attributes:
        module: the model.
        optimizer: AdamW over its parameters.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def forward_backward(self, step: int) -> float:
        """Leaves complete gradients in the parameters; returns the loss per target token of the global batch."""

    @abstractmethod
    def clip(self) -> None:
        """Scales the gradients down to the norm that the task allows."""

    def update(self) -> None:
        """Clips, steps the optimizer, and clears the gradients."""
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """This rank's part of the weights, as plain tensors."""

    def copies(self) -> list[Tensor]:
        """Copies of its weights, in the dtype of passes, that stay from step to step."""
        return []

    @abstractmethod
    def gradients(self) -> list[Tensor]:
        """This rank's part of the gradients, between `forward_backward` and `update`."""

    def optimizer_state(self) -> list[Tensor]:
        """This rank's part of the optimizer's state."""
        values = chain.from_iterable(state.values() for state in self.optimizer.state.values())
        return [local_part(value) for value in values if isinstance(value, Tensor)]

    def close(self) -> None:
        """Frees resources shared with other ranks. All ranks."""
        return None

    @staticmethod
    def check(task: Task) -> None:
        """Raises `ConfigError` if it cannot train the task. Before any rank is started."""
        return None


class UnderLayout(Contender):
    """A model under `rotorch.parallelize`."""

    def __init__(self, task: Task, *, parallel: str) -> None:
        self._task = task
        with on_meta():
            module = build(task)
        passes = precision_arguments(task.precision)
        self.model = parallelize(module, parallel, device=task.device, compile=task.compile, **passes)
        self.model.materialize(seed=task.seed)
        self.module = self.model.module
        self.optimizer = make_optimizer(self.model, settings=task.optimizer)

    def forward_backward(self, step: int) -> float:
        return float(self.model.forward_backward(self.batches(step)))

    def batches(self, step: int) -> list[dict[str, Tensor]]:
        """This rank's micro-batches, on its device."""
        model = self.model
        batches = self._task.batches(step, share=model.batch_rank, num_shares=model.num_batch_ranks)
        return _on(batches, device=model.device)

    def weights(self) -> list[Tensor]:
        return [held.local for held in self.model.weights.values()]

    def copies(self) -> list[Tensor]:
        return self.model.sharded.copies()

    def gradients(self) -> list[Tensor]:
        return [held.local_grad for held in self.model.weights.values() if held.local_grad is not None]

    def clip(self) -> None:
        clip_norm = self._task.optimizer.clip_norm
        if clip_norm:
            squared = torch.tensor([squared_norm_share(self.model)], dtype=torch.float64)
            norm = math.sqrt(float(all_reduce_sum(squared, mesh=self.model.mesh)))
            clip_gradients(self.model, norm=norm, clip_norm=clip_norm)

    def close(self) -> None:
        self.model.close()

    @property
    def transport(self) -> str | None:
        return self.model.sharded.transport

    @property
    def transport_within(self) -> str | None:
        return self.model.sharded.transport_within

    def slots(self) -> list[Tensor]:
        return self.model.sharded.slots()

    def observed(self, observer: Observer) -> AbstractContextManager[None]:
        return self.model.sharded.observed(observer)


class WithoutLayout(Contender):
    """Contender with weights and gradients in `module` itself: whole, or as the DTensors of other libraries."""

    def weights(self) -> list[Tensor]:
        return [local_part(parameter.detach()) for parameter in self.module.parameters()]

    def gradients(self) -> list[Tensor]:
        return [local_part(parameter.grad) for parameter in self.module.parameters() if parameter.grad is not None]


class PlainLoop(WithoutLayout):
    """Training as people write it around a module, wrapped by any library that leaves averaged gradients in `.grad`.

    Args:
        task: what to train.
        module: the model; the optimizer gets its parameters.
        shares: numbers of the equal shares, of `num_shares`, of a global batch that this rank trains on.
        num_shares: number of equal shares; by default one per rank.
        callee: callable in place of `module`.
    """

    def __init__(
        self,
        task: Task,
        *,
        module: nn.Module,
        shares: Sequence[int],
        num_shares: int | None = None,
        callee: nn.Module | None = None,
    ) -> None:
        self._task = task
        self._shares = shares
        self._num_shares = task.num_ranks if num_shares is None else num_shares
        self._device = pick_device(task.device)
        self._callee = module if callee is None else callee
        self._autocast_dtype = task.half_dtype
        """That its passes run in under autocast; None if they do not, or if the library converts by itself."""
        self.module = module
        self.optimizer = adamw(module, settings=task.optimizer)

    def forward_backward(self, step: int) -> float:
        """Works as in `Contender`, but returns the loss per target token of this rank's shares only."""
        batches = self._batches(step)
        num_targets = sum(count_targets(batch) for batch in batches)
        total = 0.0
        for number, batch in enumerate(batches):
            with self._micro_batch(last=number == len(batches) - 1):
                total += self._pass(batch, num_targets=num_targets)
        return total

    def clip(self) -> None:
        if self._task.optimizer.clip_norm:
            nn.utils.clip_grad_norm_(self.module.parameters(), self._task.optimizer.clip_norm)

    def _batches(self, step: int) -> list[dict[str, Tensor]]:
        """This rank's micro-batches, on its device."""
        shares = [self._task.batches(step, share=share, num_shares=self._num_shares) for share in self._shares]
        return _on([batch for share in shares for batch in share], device=self._device)

    def _micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Wraps the forward and backward of a micro-batch."""
        return nullcontext()

    def _pass(self, batch: dict[str, Tensor], *, num_targets: int) -> float:
        """Forward and backward of one micro-batch; its losses, summed, over `num_targets`."""
        dtype = self._autocast_dtype
        with nullcontext() if dtype is None else torch.autocast(self._device.type, dtype=dtype):
            loss = causal_lm_loss(self._callee, batch, num_targets)
        self._backward(loss)
        return float(loss.detach())

    def _backward(self, loss: Tensor) -> None:
        """Accumulates the gradients of the loss."""
        loss.backward()


class Independent(PlainLoop):
    """A replica of the whole model, trained on some shares of the data alone: plain torch, nothing sent."""

    def __init__(self, task: Task, *, shares: Sequence[int]) -> None:
        super().__init__(task, module=whole_model(task), shares=shares)
        self._copies = WeightCopies(self.module) if task.precision == "bfloat16" else None
        if self._copies is not None:
            self._autocast_dtype = None

    def forward_backward(self, step: int) -> float:
        with nullcontext() if self._copies is None else self._copies.in_place():
            return super().forward_backward(step)

    def copies(self) -> list[Tensor]:
        return [] if self._copies is None else self._copies.tensors()


def make_contender(task: Task, *, row: str, rank: int) -> Contender:
    """Builds the contender of a row on this rank. All ranks of the row."""
    if row == LIMIT:
        return Independent(task, shares=[rank])
    if row == REFERENCE:
        return Independent(task, shares=range(task.num_ranks))
    if row in PEERS:
        return PEERS[row].load()(task, rank=rank, **PEERS[row].options)
    if task.own_loop:
        return PEERS["rtp-own-loop"].load()(task, rank=rank, parallel=row)
    return UnderLayout(task, parallel=row)


def build(task: Task) -> nn.Module:
    """Builds the task's model, in training mode."""
    module = causal_lm(config_from_dict(task.model, source=task.name, checks_keys=False))
    if hasattr(module.config, "use_cache"):
        module.config.use_cache = False
    return module.train()


def whole_model(task: Task) -> nn.Module:
    """Builds the task's model with its first weights, all of them, as plain parameters: the values of every row."""
    with on_meta():
        module = build(task)
    recipes, device, held = take_recipes(module), pick_device(task.device), {}
    sites = find_sites(module)
    empty = {name: torch.empty_like(p, device=device) for name, p in module.named_parameters()}
    for weight in describe(module).weights:
        parameter = nn.Parameter(empty[weight.name])
        whole = cut_chunks(weight, num_slices=1, index=0)
        held[weight.name] = ShardedWeight(weight, parameter.detach(), whole, parameter)
        for site in sites[weight.name]:
            site.put(parameter)
    initialise(held, recipes=recipes, seed=task.seed)
    if task.compile:
        compile_blocks(module)
    return module.to(device)


def adamw(module: nn.Module, *, settings: OptimizerSection) -> torch.optim.AdamW:
    """Makes the optimizer of `make_optimizer`, over plain parameters."""
    decayed, others = [], []
    for name, parameter in module.named_parameters():
        (decayed if is_decayed(module, name, shape=parameter.shape) else others).append(parameter)
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def _on(batches: list[dict[str, Tensor]], *, device: torch.device) -> list[dict[str, Tensor]]:
    return [{name: tensor.to(device) for name, tensor in batch.items()} for batch in batches]
