"""Weights of stages, cut over the ranks of a stage and gathered whole for a run of micro-batches.

Used by `fsdp` inside of a pipeline, by `zeropp`, and by `fsdp` around another strategy, whose slices come and go with
stages or, without a pipeline, with the blocks of a model (`gathered_layers.py`). Torch's `fully_shard` gathers around
every forward and backward of a module; a pipeline has many of them in a row, and has actions of its own to gather a
stage's weights (UNSHARD), to free them (RESHARD), and to sum their gradients (REDUCE_GRAD): one message each, however
many weights.

[Note: gathered memory]
    A whole weight is one parameter throughout, whose storage is freed and allocated again, so that tensors which
    autograd saved in forward have their values in backward. It is written through `.data`, which autograd does not
    count as a change. Parts are gathered right into it, and gradients summed where autograd left them, both without a
    copy; only weights whose rows the ranks do not divide evenly are copied, to pad them.

[Note: under way]
    UNSHARD and REDUCE_GRAD only start their messages. Weights are waited for before the first computation that needs
    them. Sums of gradients are waited for before a stage of this rank makes new ones, so that only one stage's whole
    gradients exist at a time, and forwards in between hide the sums, if something other than the rank's own core sends
    them. On CPU nothing would be hidden, and whole gradients would lie beside the forwards' activations: so there a sum
    is waited for at once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from rotorch.comm.axis_group import AxisGroup, Wait
from rotorch.hold.sharded_weights import Memory, ShardPlacement, dtype_of_leaf, make_leaf
from rotorch.shard.sharded_weight import ShardedWeight, update_leaves
from rotorch.shard.storages import allocate, free


@dataclass(eq=False)
class _Shard:
    """One weight: `rows` of it per rank, the last ranks fewer; `whole` has no memory unless gathered.

    `is_used`: a backward of this rank has reached it in this step.
    """

    held: ShardedWeight
    whole: nn.Parameter
    rows: int
    is_used: bool = False

    @property
    def padded(self) -> int:
        """Elements per rank, padding included: equal on all ranks."""
        return self.rows * math.prod(self.whole.shape[1:])

    def is_even(self, size: int) -> bool:
        """True if each of `size` ranks has as many rows."""
        return self.rows * size == self.whole.shape[0]


@dataclass(eq=False)
class _Group:
    """Weights of one dtype at rest that the same stages use: one message gathers them, one sums their gradients."""

    shards: list[_Shard] = field(default_factory=list)
    gathered_for: set[int] = field(default_factory=set)
    comes: Wait | None = None
    """Waits for the gather that is under way; None if there is none."""
    sums: Tensor | None = None
    """This rank's part of the step's summed gradients so far, flat."""

    @property
    def trained(self) -> list[_Shard]:
        return [shard for shard in self.shards if shard.whole.requires_grad]


def hides_sums(device: torch.device) -> bool:
    """Returns True if sums of gradients are under way while a rank computes (see [Note: under way])."""
    return device.type != "cpu"


class GatheredStages(Memory):
    """Memory for passes that compute with whole weights, whose storage is freed between runs of a stage.

    Args:
        stages: those that use each weight, by its name.
        axis_group: the ranks that share them.
        device: of this rank.
        shapes: of gathered weights, by name, where these are slices.
        param_dtype: of gathered weights, if it is another one than that of the shards, which gradients have.
        stay: names of weights that are not gathered: passes compute with this rank's shards of them, and their
            gradients are complete there.
    """

    fills_leaves = True

    def __init__(
        self,
        stages: Mapping[str, tuple[int, ...]],
        *,
        axis_group: AxisGroup,
        device: torch.device,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        param_dtype: torch.dtype | None = None,
        stay: Collection[str] = (),
    ) -> None:
        super().__init__()
        self._stay = frozenset(stay)
        self._stages = dict(stages)
        self._shapes, self._param_dtype = shapes or {}, param_dtype
        self._axis_group = axis_group
        self._hides_sums = hides_sums(device)
        self._groups: dict[tuple[tuple[int, ...], torch.dtype], _Group] = {}
        self._sums_end: Wait | None = None
        """Waits for the one sum of gradients that is under way; None if there is none."""
        self._rows: dict[str, Tensor] | None = None
        """This rank's rows of the step's summed gradients, by name, once a step is being completed."""
        self._left_behind: list[Wait] = []
        """Gathers that a step broke off: late messages still write to the memory that was given for them."""

    def leaf(self, placement: ShardPlacement, held: ShardedWeight) -> nn.Parameter | None:
        if held.name in self._stay:
            return super().leaf(placement, held)
        shape = self._shapes.get(held.name, held.weight.shape)
        whole = make_leaf(held.local.new_empty(shape, dtype=dtype_of_leaf(held, self._param_dtype)), of=held)
        # Only the shape is kept: `_gather` allocates the storage when the stage is needed.
        free(whole)
        group = self._groups.setdefault((self._stages[held.name], held.local.dtype), _Group())
        group.shards.append(_Shard(held, whole, -(-whole.shape[0] // self._axis_group.size)))
        return whole

    def start(self, weights: Mapping[str, ShardedWeight]) -> None:
        super().start(weights)
        update_leaves(weights[name] for name in self._stay)

    # ---------------------------------------------------------------- whole weights

    def _of(self, stage: int) -> Sequence[_Group]:
        return [group for (stages, _), group in self._groups.items() if stage in stages]

    def unshard(self, stage: int) -> None:
        """Gathers a stage's weights. All ranks that share it."""
        for group in self._of(stage):
            if not group.gathered_for:
                self._gather(group)
            group.gathered_for.add(stage)

    def reshard(self, stage: int) -> None:
        """Frees a stage's whole weights, unless another gathered stage uses them."""
        for group in self._of(stage):
            group.gathered_for.discard(stage)
            if not group.gathered_for:
                self._free(group)

    def computes(self, stage: int, *, backward: bool) -> None:
        """Waits for the messages that a computation with a stage depends on (see [Note: under way])."""
        for group in self._of(stage):
            if group.comes is not None:
                group.comes()
        # This backward makes whole gradients: those of the stage before it must be summed and freed first.
        if backward and self._sums_end is not None:
            self._sums_end()

    @torch.no_grad()
    def _gather(self, group: _Group) -> None:
        size, wholes, parts, padded = self._axis_group.size, [], [], []
        for shard in group.shards:
            whole, mine = shard.whole, shard.held.local.to(shard.whole.dtype)
            allocate(whole)
            if shard.is_even(size):
                wholes.append(whole.data.view(-1))  # see [Note: gathered memory]
                parts.append(mine.reshape(-1))
            else:
                part = mine.new_zeros(shard.padded)
                part[: mine.numel()] = mine.reshape(-1)
                all_parts = mine.new_empty(size * shard.padded)
                wholes.append(all_parts)
                parts.append(part)
                padded.append((whole, all_parts))
        came = self._axis_group.gather_each(wholes, parts)

        def end() -> None:
            came()
            for whole, all_parts in padded:
                whole.data.copy_(all_parts[: whole.numel()].view(whole.shape))
            padded.clear()
            parts.clear()  # they were being sent until now
            group.comes = None

        group.comes = end

    def _free(self, group: _Group) -> None:
        if group.comes is not None:  # the message still writes to this memory
            group.comes()
        group.gathered_for.clear()
        for shard in group.shards:
            free(shard.whole)

    def _leave(self, group: _Group) -> None:
        """Abandons a gather that is under way, after an exception: other ranks may never join it."""
        if group.comes is not None:
            self._left_behind.append(group.comes)
            group.comes = None
            for shard in group.shards:  # late messages may write to the old memory at any time
                shard.whole.data = torch.empty_like(shard.whole)
                increment_version(shard.whole)  # graphs of earlier calls may refer to that memory: they must not go on

    def break_off(self, weights: Mapping[str, ShardedWeight], error: BaseException) -> None:
        for group in self._groups.values():
            self._leave(group)
        super().break_off(weights, error)

    def end(self, weights: Mapping[str, ShardedWeight]) -> None:
        """Frees whole weights, also those that were gathered ahead and not used."""
        self._rows = None
        for group in self._groups.values():
            self._free(group)
            group.sums = None
            for shard in group.shards:
                shard.whole.grad = None
                shard.is_used = False
        self._sums_end = None

    # ---------------------------------------------------------------- gradients

    def sum_gradients(self, stage: int) -> None:
        """Sums a stage's gradients so far and adds this rank's part to the step's. All ranks that share the stage."""
        for group in self._of(stage):
            self._sum(group)

    @torch.no_grad()
    def _sum(self, group: _Group) -> None:
        trained = group.trained
        if not trained:
            return
        if self._sums_end is not None:  # one at a time: `exchange` matches messages of sums in their order
            self._sums_end()
        size, like = self._axis_group.size, trained[0].held.local
        wholes = []
        for shard in trained:
            found, shard.whole.grad = shard.whole.grad, None
            shard.is_used |= found is not None
            if found is None or not shard.is_even(size):
                whole = like.new_zeros(size * shard.padded)
                if found is not None:
                    whole[: found.numel()] = found.reshape(-1)
            else:
                whole = found.reshape(-1)
            wholes.append(whole)
            # Only `wholes` keeps a whole gradient: `end` frees it right after the sum.
            del found
        mine = like.new_empty(sum(shard.padded for shard in trained))
        came = self._axis_group.sum_each(list(mine.split([shard.padded for shard in trained])), wholes)

        def end() -> None:
            came()
            wholes.clear()
            group.sums = mine if group.sums is None else group.sums.add_(mine)
            self._sums_end = None

        self._sums_end = end
        if not self._hides_sums:
            end()

    def unused(self, weights: Mapping[str, ShardedWeight]) -> list[str]:
        trained = (shard for group in self._groups.values() for shard in group.trained)
        gathered = [shard.held.name for shard in trained if not shard.is_used and shard.whole.grad is None]
        return gathered + super().unused({name: weights[name] for name in self._stay})

    def gradient(self, held: ShardedWeight) -> Tensor | None:
        return super().gradient(held) if held.name in self._stay else self._completed.get(held.name)

    def put_gradient(self, held: ShardedWeight, gradient: Tensor) -> None:
        if held.name in self._stay:
            super().put_gradient(held, gradient)
        else:
            self._completed[held.name] = gradient

    def complete(self, weights: Mapping[str, ShardedWeight]) -> Mapping[str, Tensor]:
        """This rank's rows of the step's summed gradients; none of stages that no rank has computed."""
        return {**super().complete({name: weights[name] for name in self._stay}), **self._completed}

    @property
    def _completed(self) -> dict[str, Tensor]:
        if self._rows is not None:
            return self._rows
        if self._sums_end is not None:
            self._sums_end()
        self._left_behind.clear()  # this step's messages came behind the abandoned ones, so those have come too
        self._rows = {}
        for group in self._groups.values():
            trained = group.trained
            if any(shard.whole.grad is not None for shard in trained):
                raise AssertionError("gradients of a stage were made behind their sum")
            if group.sums is None:
                continue
            for shard, part in zip(trained, group.sums.split([s.padded for s in trained]), strict=True):
                local = shard.held.local
                self._rows[shard.held.name] = part[: local.numel()].view(local.shape)
        return self._rows
