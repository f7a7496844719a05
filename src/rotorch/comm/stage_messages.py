"""What ranks of a pipeline send each other: hidden states to the next stage, their gradients back.

[Note: headers]
    Before each tensor goes a header that says its shape and dtype, or that the sender has broken off, so a rank whose
    neighbour failed fails too and waits for nobody. Headers are on CPU. Messages carry tags, by which gloo tells them
    apart in any order; over NCCL they come in the order in which they are sent (`pipelining/lower.py`, [Note: order of
    messages]).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch.core.errors import RankFailure

_MOST_DIMS = 4
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_BROKEN_OFF = -1


class StageMessages:
    """This rank's messages to and from the others of its pipeline. What is sent must stay as it is until `settle`.

    Args:
        mesh: of the pipeline, one axis.
        device: of the tensors.
    """

    def __init__(self, mesh: DeviceMesh, *, device: torch.device) -> None:
        self._mesh = mesh
        self._device = device
        self._expected: dict[tuple[int, int], tuple[Tensor, dist.Work | None]] = {}
        self._under_way: dict[tuple[int, int], list[tuple[dist.Work | None, Tensor]]] = {}

    def send(self, tensor: Tensor | None, *, to: int, tag: int) -> None:
        """Starts sending a tensor to the rank at position `to`; None tells it that this rank has broken off."""
        if tensor is None:
            header = [_BROKEN_OFF] + [0] * (_MOST_DIMS + 2)
        else:
            if tensor.dim() > _MOST_DIMS or tensor.dtype not in _DTYPES:
                raise RankFailure(
                    f"pipeline: a stage hands on a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}; "
                    f"stages hand on hidden states of at most {_MOST_DIMS} dims"
                )
            padding = [0] * (_MOST_DIMS - tensor.dim())
            header = [0, _DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape, *padding]
        self._under_way[to, tag] = [self._start_send(torch.tensor(header), to=to, tag=2 * tag)]
        if tensor is not None and tensor.numel():
            self._under_way[to, tag].append(self._start_send(tensor.contiguous(), to=to, tag=2 * tag + 1))

    def expect(self, *, source: int, tag: int) -> None:
        """Gets ready for a message from the rank at position `source`."""
        header = torch.empty(_MOST_DIMS + 3, dtype=torch.int64)
        work = dist.irecv(header, group=self._mesh.get_group(), group_src=source, tag=2 * tag)
        self._expected[source, tag] = header, work

    def receive(self, *, source: int, tag: int) -> Tensor | None:
        """Waits for an expected tensor; None if its sender has broken off."""
        header, work = self._expected.pop((source, tag))
        if work is not None:
            work.wait()
        state, dtype, num_dims, *shape = header.tolist()
        if state == _BROKEN_OFF:
            return None
        tensor = torch.empty(shape[:num_dims], dtype=_DTYPES[dtype], device=self._device)
        if tensor.numel():
            dist.recv(tensor, group=self._mesh.get_group(), group_src=source, tag=2 * tag + 1)
        return tensor

    def exchange(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
        """Sends tensors to ranks and receives others in place, from and to pairs (position, tensor). Waits for all."""
        group = self._mesh.get_group() if self._mesh.size() > 1 else None
        ops = [dist.P2POp(dist.isend, t, group=group, group_peer=to) for to, t in outgoing if t.numel()]
        ops += [dist.P2POp(dist.irecv, t, group=group, group_peer=source) for source, t in incoming if t.numel()]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()

    def settle(self) -> None:
        """Waits until all that was sent has left; what nobody has asked for, since something broke off, is dropped."""
        for source, tag in list(self._expected):
            self.receive(source=source, tag=tag)
        for to, tag in list(self._under_way):
            self.arrived(to=to, tag=tag)

    def arrived(self, *, to: int, tag: int) -> None:
        """Lets go of a message that the rank at position `to` has made use of, as what it sent since shows."""
        for work, _ in self._under_way.pop((to, tag), ()):
            if work is not None:
                work.wait()

    def from_one(self, value: object, *, source: int) -> object:
        """What the rank at position `source` gives, on all ranks, which all call it. Small, picklable."""
        if self._mesh.size() == 1:
            return value
        box = [value]
        group = self._mesh.get_group()
        dist.broadcast_object_list(box, group=group, group_src=source, device=torch.device("cpu"))
        return box[0]

    def _start_send(self, tensor: Tensor, *, to: int, tag: int) -> tuple[dist.Work | None, Tensor]:
        return dist.isend(tensor, group=self._mesh.get_group(), group_dst=to, tag=tag), tensor
