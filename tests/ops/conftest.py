import importlib
from dataclasses import dataclass

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rotorch.comm.transports import make_ring
from rotorch.core.spec import Combine, Cut, Unit, UnitKind, Weight
from rotorch.ops.rotate import RotatingUnit
from rotorch.shard.flat import FlatSlices
from rotorch.testing.rings import without_gradients


@pytest.fixture(scope="session", autouse=True)
def loaded():
    """Loads here what every forked rank would load for itself."""
    importlib.import_module("torch._dynamo")


@pytest.fixture(scope="session")
def rotating():
    """Makes a `Rotating` on a rank."""
    return Rotating


@dataclass
class Rotating:
    """Whole weights, and a unit over a ring that holds a slice of each here; `cuts` are (dim, groups)."""

    whole: list[torch.Tensor]
    cuts: list[tuple[int, int]]
    transport: str = "shared_memory"
    recompute: bool = False
    trained: bool = True

    def __post_init__(self):
        n = dist.get_world_size()
        weights = tuple(
            Weight(f"w{i}", tuple(w.shape), w.element_size(), Cut(dim, groups))
            for i, (w, (dim, groups)) in enumerate(zip(self.whole, self.cuts, strict=True))
        )
        slices = FlatSlices(weights, num_slices=n)
        mesh = init_device_mesh("cpu", (n,))
        dtype = self.whole[0].dtype
        self.ring = make_ring(
            self.transport, mesh=mesh, numels=[slices.numels], dtype=dtype, device=torch.device("cpu")
        )
        unit = Unit("unit", UnitKind.MODULE, Combine.SUM, weights)
        self.unit = RotatingUnit(unit, self.ring, 0, slices, self.recompute, self.ring.dtype, self.trained)
        for number, home in enumerate(self.home(self.ring.home_weights(0))):
            home.copy_(self.part(self.whole[number], number))
        without_gradients(self.ring)
        dist.barrier()

    def home(self, flat):
        return self.unit.slices.views(flat, index=self.ring.position)

    def part(self, whole, number):
        """This rank's slice of something shaped like weight `number`."""
        cut = self.unit.slices.weights[number].cut
        size = whole.shape[cut.dim]
        (part,) = cut.ranges(size, num_slices=self.ring.size, index=self.ring.position)
        return whole.narrow(cut.dim, part.start, part.length)

    def step(self, run, *, fresh=True):
        """One step: `run()` gives the loss."""
        dist.barrier()
        self.ring.start(fresh=[fresh])
        loss = run()
        loss.backward()
        self.ring.finish()
        dist.barrier()
        return loss

    def check_gradients(self, dense_whole, **tolerance):
        """Holds this rank's gradients against those of the whole weights."""
        for number, (whole, got) in enumerate(zip(dense_whole, self.home(self.ring.home_gradients(0)), strict=True)):
            torch.testing.assert_close(got, self.part(whole.grad, number), **tolerance)
