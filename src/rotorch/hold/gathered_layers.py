"""Another strategy's shards, of which ranks around it have some rows at rest: gathered block by block for a pass.

That is ZeRO stage 3 (arXiv 1910.02054) over whatever the inner strategy holds: `fsdp=2,megatron=4` is what torchtitan
calls 2-D. The inner strategy knows nothing of it: `Setup.shards` gives it leaves of its own shapes, whose memory comes
and goes (`gathered_stages.py`). This file says when.

[Note: when]
    A block's shards are gathered before its forward, and those of the next block start to come then; they are freed
    behind it. Backward does the same in the other order. When a block's backward has ended, its gradients are summed,
    each rank keeps its rows, and the rest is freed. What lies outside of blocks is there during a whole pass, and
    summed once a step: a head's logits may be made after the model's forward has ended.

[Note: the end of a block's backward]
    Inputs of a block pass a node of the graph that does nothing but say, in backward, that all gradients of these
    inputs have been made; torch adds up the gradients of weights before it goes on to such a node. Inputs that need no
    gradient (of the first block, if the embedding is frozen) pass none: what is left is summed at the end of the
    backward, from the last block to the first. So ranks that run the same blocks send the same messages in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from rotorch._torch_private import tree_flatten, tree_unflatten
from rotorch.comm.axis_group import AxisGroup
from rotorch.core.spec import ModelSpec, Range
from rotorch.hold.gathered_stages import GatheredStages
from rotorch.hold.sharded_model import OuterShardedModel, SimpleShardedModel
from rotorch.hold.sharded_weights import ShardPlacement


def shared_in_rows(
    placements: Sequence[ShardPlacement],
    *,
    spec: ModelSpec,
    around: DeviceMesh,
    device: torch.device,
    param_dtype: torch.dtype | None,
) -> tuple[list[ShardPlacement], GatheredStages]:
    """This rank's rows of the inner strategy's shards, and the memory that gathers them, a block being a stage.

    Args:
        placements: of the inner strategy, on its own axis.
        spec: the units that it holds.
        around: the axis of the ranks that share its shards, and its own.
        device: of this rank.
        param_dtype: of what is gathered, if it is not that of the shards.
    """
    axis_group = AxisGroup.along(around, (around.mesh_dim_names or ("",))[0])
    rows = [_rows_of(placement, axis_group=axis_group) for placement in placements]
    stages = {weight.name: (spec.block_number(weight),) for weight in spec.weights}
    shapes = {placement.weight.name: placement.shape for placement in placements}
    return rows, GatheredStages(stages, axis_group=axis_group, device=device, shapes=shapes, param_dtype=param_dtype)


def _rows_of(placement: ShardPlacement, *, axis_group: AxisGroup) -> ShardPlacement:
    rows = placement.shape[0]
    each = -(-rows // axis_group.size)
    first = min(axis_group.position * each, rows)
    part = placement.rows_of_it(Range(first, min(each, rows - first)))
    return part.on_axis_around(Shard(0))


class GatheredLayers(OuterShardedModel):
    """The inner strategy's model, whose shards come and go block by block (see [Note: when]).

    Args:
        inner: the inner strategy's model, of shards that `shared_in_rows` has placed.
        blocks: the model's repeated blocks, in order.
        reshard: free a block's shards after its forward, and gather them again for its backward.
    """

    def __init__(self, inner: SimpleShardedModel, *, blocks: Sequence[nn.Module], reshard: bool) -> None:
        super().__init__(inner)
        if not isinstance(inner.shards.memory, GatheredStages):
            raise AssertionError("the inner strategy's shards are not shared")
        self._memory = inner.shards.memory
        self.weights = inner.weights
        self.loss_scale = inner.loss_scale
        self._reshard = reshard
        self._outside = len(blocks)
        self._in_backward: set[int] = set()
        """Blocks whose backward has begun, and whose gradients have not been summed since."""
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._before_forward, number), prepend=True, with_kwargs=True)
            block.register_forward_hook(partial(self._after_forward, number))

    def unsharded(self) -> AbstractContextManager[nn.Module]:
        return self._inner.unsharded()

    def unsharded_for_calls(self) -> AbstractContextManager[nn.Module]:
        return self._inner.unsharded_for_calls()

    def start(self) -> None:
        self._inner.start()
        self._in_backward.clear()
        self._gather(self._outside, backward=torch.is_grad_enabled())

    @contextmanager
    def micro_batch(self, *, last: bool) -> Any:
        with self._inner.micro_batch(last=last):
            yield
        self._sum_what_is_left()

    def finish(self) -> None:
        self._sum_what_is_left()
        self._memory.reshard(self._outside)  # before its gradients are summed, which takes memory
        self._memory.sum_gradients(self._outside)
        self._inner.finish()

    def gradients(self) -> list[Tensor]:
        return self._inner.gradients()

    def _gather(self, number: int, *, backward: bool) -> None:
        self._memory.unshard(number)
        self._memory.computes(number, backward=backward)

    def _start_to_gather(self, number: int) -> None:
        if 0 <= number < self._outside:
            self._memory.unshard(number)

    def _before_forward(self, number: int, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._gather(number, backward=False)
        if number not in self._in_backward:
            self._start_to_gather(number + 1)
        if not torch.is_grad_enabled():
            return args, kwargs
        leaves, tree = tree_flatten((args, kwargs))
        learns = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if learns:
            passed = _EndOfBackward.apply(partial(self._after_backward, number), *(leaves[place] for place in learns))
            for place, tensor in zip(learns, passed, strict=True):
                leaves[place] = tensor
        return tree_unflatten(leaves, tree)

    def _after_forward(self, number: int, _: nn.Module, __: Any, output: Any) -> Any:
        learns = torch.is_grad_enabled()
        # A block that a checkpoint computes again, within its own backward, is needed after that.
        if (self._reshard or not learns) and number not in self._in_backward:
            self._memory.reshard(number)
        if not learns:
            return output
        leaves, tree = tree_flatten(output)
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                if leaf._is_view():  # a write into a view would lose the hook
                    leaves[place] = leaf.clone()
                leaves[place].register_hook(partial(self._before_backward, number))
        return tree_unflatten(leaves, tree)

    def _before_backward(self, number: int, _: Tensor) -> None:
        self._in_backward.add(number)
        self._gather(number, backward=True)
        self._start_to_gather(number - 1)

    def _after_backward(self, number: int) -> None:
        self._memory.sum_gradients(number)
        self._memory.reshard(number)
        self._in_backward.discard(number)

    def _sum_what_is_left(self) -> None:
        """Sums gradients of blocks whose backward had no end that a node could tell of."""
        for number in sorted(self._in_backward, reverse=True):
            self._after_backward(number)


class _EndOfBackward(torch.autograd.Function):
    """Passes tensors on; calls a function in backward once the gradients of all of them have been made."""

    @staticmethod
    def forward(ctx: Any, ended: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ended = ended
        ctx.set_materialize_grads(False)
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.ended()
        return (None, *gradients)
