"""Messages of ranks along an axis: waits in the order in which blocks are used."""

import pytest
import torch

from rotorch.comm.axis_group import AxisGroup


class Noted(AxisGroup):
    """A rank that sends nothing and notes for whose block it waits."""

    def broadcast(self, block, *, source):
        return lambda: self.__dict__.setdefault("waited", []).append(source)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_own_block_is_waited_for_behind_all_others(size):
    """It is there from the start; its message may take until the last block of others has come, and no longer."""
    group = Noted("row", size, 1, None)
    blocks = list(group.blocks(torch.zeros(2), own_first=True))
    assert len(blocks) == size
    others = [rank for rank in range(size) if rank != 1]
    assert group.__dict__["waited"] == [*others, 1]
