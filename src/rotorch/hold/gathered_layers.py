"""Another strategy's shards, of which ranks around it have some rows at rest: gathered block by block for a pass.

That is ZeRO stage 3 (arXiv 1910.02054) over whatever the inner strategy holds: `fsdp=2,megatron=4` is what torchtitan
calls 2-D. The inner strategy knows nothing of it: `Setup.shards` gives it leaves of its own shapes, whose memory comes
and goes (`gathered_stages.py`). This file says when.

[Note: when]
    A block's shards are gathered before its forward, and those of the next block start to come then; they are freed
    behind it. Backward does the same in the other order. When a block's backward has ended, its gradients are summed,
    each rank keeps its rows, and the rest is freed; the sum is waited for when the next one begins. What lies outside
    of blocks is there during a whole pass, and summed once a step: a head's logits may be made after the model's
    forward has ended. A block that a checkpoint computes again, within its own backward, stays until that has ended.

[Note: between]
    While its slices are away, a block has its parameters at rest. So code that takes a weight of a block from outside
    of the block's call finds a DTensor, with which no plain tensor computes. A leaf without memory would end the
    process.

[Note: the end of a block's backward]
    Inputs of a block pass a node of the graph that does nothing but say, in backward, that all gradients of these
    inputs have been made; torch adds up the gradients of weights before it goes on to such a node. Inputs that need no
    gradient (of the first block, if the embedding is frozen) pass none: what is left is summed at the end of the
    backward, from the last block to the first. So ranks that run the same blocks send the same messages in one order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rotorch._torch_private import in_backward
from rotorch.comm.axis_group import AxisGroup
from rotorch.core.errors import ConfigError
from rotorch.core.spec import ModelSpec
from rotorch.hold.gathered_stages import GatheredStages
from rotorch.hold.sharded_model import OuterShardedModel, SimpleShardedModel
from rotorch.hold.sharded_weights import ShardPlacement, rows_of_chunk
from rotorch.models.nested import mapped
from rotorch.shard.sharded_weight import ShardedWeight


def shared_in_rows(
    placements: Sequence[ShardPlacement],
    *,
    spec: ModelSpec,
    around: DeviceMesh,
    device: torch.device,
    param_dtype: torch.dtype | None,
) -> tuple[list[ShardPlacement], GatheredStages]:
    """Returns this rank's rows of the inner strategy's shards, and the memory that gathers them: by blocks, or stages.

    Args:
        placements: of the inner strategy, on its own axis.
        spec: the units that it holds.
        around: the axis of the ranks that share its shards, and its own.
        device: of this rank.
        param_dtype: of what is gathered, if it is not that of the shards.
    """
    axis_group = AxisGroup.along(around, (around.mesh_dim_names or ("",))[0])
    rows = [_rows_of(placement, axis_group=axis_group) for placement in placements]
    stages = {w.name: unit.stages or (spec.block_number(w),) for unit in spec.units for w in unit.weights}
    shapes = {placement.weight.name: placement.shape for placement in placements}
    return rows, GatheredStages(stages, axis_group=axis_group, device=device, shapes=shapes, param_dtype=param_dtype)


def _rows_of(placement: ShardPlacement, *, axis_group: AxisGroup) -> ShardPlacement:
    rows = rows_of_chunk(placement.shape[0], size=axis_group.size, position=axis_group.position)
    return placement.rows_of_it(rows).on_axis_around(Shard(0))


class GatheredLayers(OuterShardedModel):
    """The inner strategy's model, whose shards come and go block by block (see [Note: when]).

    Args:
        inner: the inner strategy's model, of shards that `shared_in_rows` has placed.
        spec: the units that it holds.
        reshard: free a block's shards after its forward, and gather them again for its backward.
    """

    def __init__(self, inner: SimpleShardedModel, *, spec: ModelSpec, reshard: bool) -> None:
        super().__init__(inner)
        if not isinstance(inner.shards.memory, GatheredStages):
            raise AssertionError("the inner strategy's shards are not shared")
        self._memory, self._module = inner.shards.memory, inner.module
        self.weights = inner.weights
        self.loss_scale = inner.loss_scale
        self._reshard = reshard
        self._outside = len(spec.blocks)
        self._in_backward: set[int] = set()
        """Blocks whose backward has begun, and whose gradients have not been summed since."""
        self._of_block: dict[int, list[ShardedWeight]] = defaultdict(list)
        for weight in spec.weights:
            self._of_block[spec.block_number(weight)].append(inner.weights[weight.name])
        for number, name in enumerate(spec.blocks):
            block = self._module.get_submodule(name)
            block.register_forward_pre_hook(partial(self._before_forward, number), prepend=True, with_kwargs=True)
            block.register_forward_hook(partial(self._after_forward, number))

    def unsharded(self) -> AbstractContextManager[nn.Module]:
        return self._explained(self._inner.unsharded())

    def unsharded_for_calls(self) -> AbstractContextManager[nn.Module]:
        return self._explained(self._inner.unsharded_for_calls())

    @contextmanager
    def _explained(self, unsharded: AbstractContextManager[nn.Module]) -> Iterator[nn.Module]:
        try:
            with unsharded as module:
                yield module
        except (RuntimeError, ConfigError) as error:
            name = called_while_sharded(self._module, error)
            if name or any(words in str(error) for words in _OF_DTENSORS):
                raise used_outside_of_its_block(name) from error
            raise

    def start(self) -> None:
        self._inner.start()
        self._in_backward.clear()
        for number in range(self._outside):
            self._put_away(number)
        self._gather(self._outside)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        with self._inner.micro_batch(last=last):
            yield
        self._sum_what_is_left()

    def finish(self) -> None:
        self._sum_what_is_left()
        self._memory.reshard(self._outside)  # before its gradients are summed, which takes memory
        self._memory.sum_gradients(self._outside)
        self._inner.finish()

    def _gather(self, number: int) -> None:
        self._memory.unshard(number)
        self._memory.computes(number, backward=False)  # a sum may go on beside the next block's backward
        for held in self._of_block[number]:
            held.unshard()

    def _put_away(self, number: int) -> None:
        self._memory.reshard(number)
        for held in self._of_block[number]:
            held.reshard()

    def _start_to_gather(self, number: int) -> None:
        if 0 <= number < self._outside:
            self._memory.unshard(number)

    def _before_forward(self, number: int, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self._gather(number)
        if not in_backward():  # else a checkpoint computes the block again
            self._start_to_gather(number + 1)
        if not torch.is_grad_enabled():
            return args, kwargs
        given: list[Tensor] = []

        def take(tensor: Tensor) -> Tensor:
            given.extend([tensor] if tensor.requires_grad else [])
            return tensor

        mapped((args, kwargs), take)
        if not given:
            return args, kwargs
        passed = iter(_EndOfBackward.apply(partial(self._after_backward, number), *given))
        changed: tuple[Any, Any] = mapped((args, kwargs), lambda t: next(passed) if t.requires_grad else t)
        return changed

    def _after_forward(self, number: int, _: nn.Module, __: Any, output: Any) -> Any:
        learns = torch.is_grad_enabled()
        if (self._reshard or not learns) and not in_backward():  # within its own backward it is needed after that
            self._put_away(number)
        return mapped(output, partial(self._watched, number)) if learns else output

    def _watched(self, number: int, output: Tensor) -> Tensor:
        if not output.requires_grad:
            return output
        if output._is_view():  # a write into a view would lose the hook
            output = output.clone()
        output.register_hook(partial(self._before_backward, number))
        return output

    def _before_backward(self, number: int, _: Tensor) -> None:
        self._in_backward.add(number)
        self._gather(number)
        self._start_to_gather(number - 1)

    def _after_backward(self, number: int) -> None:
        self._memory.sum_gradients(number)
        self._put_away(number)
        self._in_backward.discard(number)

    def _sum_what_is_left(self) -> None:
        """Sums gradients of blocks whose backward had no end that a node could tell of."""
        for number in sorted(self._in_backward, reverse=True):
            self._after_backward(number)


_OF_DTENSORS = ("mixed torch.Tensor and DTensor", "torch would put them together wrongly")
"""In errors of operations on plain tensors and DTensors, and on parts that are uneven or fused."""


def called_while_sharded(module: nn.Module, error: BaseException) -> str:
    """The name of the innermost part that was running, if it failed because its weights were not gathered."""
    if not isinstance(error, RuntimeError) or "DTensor" not in str(error):
        return ""
    running = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    names = {part: name for name, part in module.named_modules()}
    innermost = next((m for m in reversed(running) if isinstance(m, nn.Module) and m in names), module)
    weights = innermost.parameters(recurse=False)
    return names[innermost] if any(isinstance(p, DTensor) for p in weights) else ""


def used_outside_of_its_block(name: str) -> ConfigError:
    """The error for a part of a block that other code calls, or for a weight of it if there is no name."""
    does = f"calls {name!r}" if name else "uses a weight of a block"
    return ConfigError(
        f"fsdp: the model {does} outside of the block that it belongs to, and weights of a block are gathered for its "
        "own forward alone. Write rtp, or ddp"
    )


class _EndOfBackward(torch.autograd.Function):
    """Passes tensors on; calls a function in backward once the gradients of all of them have been made."""

    @staticmethod
    def forward(ctx: Any, ended: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ended = ended
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)  # else they were views, which a block may not write into

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.ended()
        return (None, *gradients)
