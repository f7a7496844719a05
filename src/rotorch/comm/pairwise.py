"""Messages between any two ranks of a mesh: in each turn a rank sends one and receives one."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch._torch_private import flat_group
from rotorch.comm.transports.messages import Exchange


class Pairwise:
    """All ranks of a mesh by their position in it, row by row. All of them make it.

    Attributes:
        size: number of ranks.
        position: this rank's, 0-based.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        ranks = mesh.mesh.flatten().tolist()
        self.size = len(ranks)
        self.position = ranks.index(mesh.get_rank()) if self.size > 1 else 0
        self._group: dist.ProcessGroup | None = None
        self._peers = list(range(self.size))
        if self.size > 1:
            # The world's group, where it has the same ranks: a new group would connect each rank to all others once
            # more.
            world = dist.group.WORLD
            self._group = world if world is not None and world.size() == self.size else flat_group(mesh)
            # The order of ranks on the mesh need not be that of the group.
            self._peers = [dist.get_group_rank(self._group, rank) for rank in ranks]

    def swap(self, send: Tensor, *, to: int, receive: Tensor, source: int) -> None:
        """Sends a tensor to one position and receives one from another; empty ones need no message. Contiguous.

        Every rank takes part whose message somebody waits for; both ends know its length.
        """
        Exchange(send=send, to=self._peers[to], receive=receive, source=self._peers[source], group=self._group).wait()
