"""torch's DistributedDataParallel as its documentation says; between hosts with buckets of the size of ours."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from rotorch.bench.contender import PlainLoop, whole_model
from rotorch.bench.task import Task
from rotorch.comm.collectives import num_hosts
from rotorch.mesh import pick_device
from rotorch.strategies.ddp.apply import bucket_mb


class TorchDDP(PlainLoop):
    """The whole model on every rank; gradients are averaged in buckets, under backward."""

    def __init__(self, task: Task, *, rank: int) -> None:
        module = whole_model(task)
        mesh = init_device_mesh(pick_device(task.device).type, (task.num_ranks,))
        self._wrapped = DistributedDataParallel(
            module, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb(module, hosts=num_hosts(mesh))
        )
        super().__init__(task, module=module, callee=self._wrapped, shares=[rank])

    def _micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._wrapped.no_sync()
