"""torch's DistributedDataParallel as its documentation says; between hosts with buckets of the size of ours."""

from __future__ import annotations

import socket
from contextlib import AbstractContextManager, nullcontext

from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from rotorch.bench.contender import PlainLoop, whole_model
from rotorch.bench.task import Task
from rotorch.comm.collectives import gather_objects
from rotorch.mesh import pick_device
from rotorch.strategies.ddp.apply import bucket_bytes


class TorchDDP(PlainLoop):
    """The whole model on every rank; gradients are averaged in buckets, under backward."""

    def __init__(self, task: Task, *, rank: int) -> None:
        module = whole_model(task)
        num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        mesh = init_device_mesh(pick_device(task.device).type, (task.num_ranks,))
        num_hosts = len(set(gather_objects(socket.gethostname(), mesh=mesh)))
        bucket = bucket_bytes(num_bytes, num_hosts=num_hosts)
        self._wrapped = DistributedDataParallel(
            module, gradient_as_bucket_view=True, bucket_cap_mb=None if bucket is None else bucket / 2**20
        )
        super().__init__(task, module=module, callee=self._wrapped, shares=[rank])

    def _micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._wrapped.no_sync()
