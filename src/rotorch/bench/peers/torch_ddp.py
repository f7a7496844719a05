"""torch's DistributedDataParallel, as its documentation says to use it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.nn.parallel import DistributedDataParallel

from rotorch.bench.contender import PlainLoop, whole_model
from rotorch.bench.task import Task


class TorchDDP(PlainLoop):
    """The whole model on every rank; gradients are averaged in buckets, under backward."""

    def __init__(self, task: Task, *, rank: int) -> None:
        module = whole_model(task)
        self._wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True)
        super().__init__(task, module=module, callee=self._wrapped, shares=[rank])

    def _micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._wrapped.no_sync()
