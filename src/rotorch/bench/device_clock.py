"""A simulated device: products take FLOPs / rate on its clock, while messages take their real time.

On a machine with two cores ranks that compute compete with each other and with the threads that carry their messages,
so a step says little of overlap. Here the clock of a rank's device says when its products would be done, and the rank
sleeps until then, which leaves the cores to messages. Bubbles and overlap of as many hosts as one likes show.

[Note: ahead of the device]
    As with a GPU, a rank runs ahead of its device: an operation is entered into the clock and the rank continues. It
    waits for the device if it must: before any call of torch.distributed (data to send must be complete, and
    buffers to receive into must have been read), when it reads a value, and at the end of a step. Operations other than
    products cost the device nothing; the rank runs them in the meantime.

[Note: products are made]
    The products are computed as well, so losses are right and can be compared with one process. The rate must be so low
    that this, and all other work of ranks on their cores, takes much less time than on the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from rotorch._torch_private import CPU_ATTENTION, CPU_ATTENTION_BACKWARD, TorchDispatchMode, in_backward

_SYNCHRONISES = {"c10d", "_c10d_functional"}
_aten = torch.ops.aten
_READS_A_VALUE = "_local_scalar_dense"


class DeviceClock(TorchDispatchMode):
    """Counts products inside its `with` block, and sleeps until they would be done.

    Args:
        flops_per_s: of the device; None: only counts.
        now: a clock in seconds.
        sleep: lets seconds pass.

    Attributes:
        flops: of all products so far.
        forward_done_s: when the device has done all that came before the first backward; None before that.
    """

    def __init__(
        self,
        flops_per_s: float | None,
        *,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__()
        self.flops = 0
        self.forward_done_s: float | None = None
        self._rate = flops_per_s
        self._now, self._sleep = now, sleep
        self._busy_until = 0.0

    def wait(self) -> None:
        """Returns when the device has done all that was entered."""
        left_s = self._busy_until - self._now()
        if left_s > 0.0:
            self._sleep(left_s)

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        if raised[0] is None:
            self.wait()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own dispatch comes back here with local tensors
        if self.forward_done_s is None and in_backward():
            self.forward_done_s = max(self._busy_until, self._now())
        if func.namespace in _SYNCHRONISES or func.overloadpacket.__name__ == _READS_A_VALUE:
            self.wait()
        elif (count := _COUNTS.get(func.overloadpacket)) is not None:
            self._enter(count(*args))
        return func(*args, **(kwargs or {}))

    def _enter(self, flops: int) -> None:
        self.flops += flops
        if self._rate is not None:
            self._busy_until = max(self._busy_until, self._now()) + flops / self._rate


def _of_product(a: Any, b: Any, *_: Any) -> int:
    """`[.., m, k] @ [.., k, n]`."""
    return 2 * a.numel() * b.shape[-1]


def _of_sum_and_product(_: Any, a: Any, b: Any, *__: Any) -> int:
    return _of_product(a, b)


def _of_attention(query: Any, key: Any, value: Any, *_: Any) -> int:
    """Two products; the mask saves nothing, as in most published counts."""
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    return 2 * int(scores) * int(query.shape[3] + value.shape[3])


def _of_attention_backward(_: Any, query: Any, key: Any, value: Any, *__: Any) -> int:
    return 5 * _of_attention(query, key, value) // 2  # the scores are made again


_COUNTS: dict[Any, Callable[..., int]] = {
    _aten.mm: _of_product,
    _aten.bmm: _of_product,
    _aten.addmm: _of_sum_and_product,
    _aten.addmm_: _of_sum_and_product,
    _aten.baddbmm: _of_sum_and_product,
    _aten.baddbmm_: _of_sum_and_product,
    CPU_ATTENTION: _of_attention,
    CPU_ATTENTION_BACKWARD: _of_attention_backward,
}
