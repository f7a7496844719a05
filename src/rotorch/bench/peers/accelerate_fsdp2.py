"""Accelerate with its FSDP2 plugin.

[Note: CPU ranks]
    Accelerate shards on accelerators only: with `cpu=True` it quietly makes a DDP model of it, and without, it quietly
    lets every rank train alone. So its state is made for CPU ranks and then told that this is FSDP after all. What the
    bench checks in any case: that the ranks hold the model once, and that losses are those of one process.
"""

from __future__ import annotations

from torch import Tensor

from rotorch.bench.contender import PlainLoop, whole_model
from rotorch.bench.task import Task
from rotorch.models.blocks import repeated_blocks


class AccelerateFSDP2(PlainLoop):
    """A model and its optimizer as `Accelerator.prepare` returns them."""

    def __init__(self, task: Task, *, rank: int) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils import DistributedType

        module = whole_model(task)
        super().__init__(task, module=module, shares=[rank])
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=sorted({type(block).__name__ for block in repeated_blocks(module)}),
            cpu_ram_efficient_loading=False,
        )
        on_cpu = self._device.type == "cpu"
        self._accelerator = Accelerator(cpu=on_cpu, fsdp_plugin=plugin)
        if on_cpu:  # see [Note: CPU ranks]
            self._accelerator.state.distributed_type = DistributedType.FSDP
            self._accelerator.state.fsdp_plugin = plugin
        self._callee, self.optimizer = self._accelerator.prepare(module, self.optimizer)
        self.module = self._callee

    def _backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def clip(self) -> None:
        if self._task.optimizer.clip_norm:
            self._accelerator.clip_grad_norm_(self.module.parameters(), self._task.optimizer.clip_norm)
