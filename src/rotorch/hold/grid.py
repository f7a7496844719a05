"""Models on a grid of ranks (`tesseract`, `summa`): blocks of matrices and parts of vectors on each rank.

At rest each parameter is a DTensor over this rank's block. For a pass matrices are replaced by proxies that multiply
block by block (`ops/grid_use.py`), vectors by this rank's part. Activations are cut along their features from the
embedding to the loss, or to a classifier, which gives whole outputs; so norms sum over the features of all ranks
(`models/feature_sums.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement

from rotorch.comm.axis_group import AxisGroup
from rotorch.comm.collectives import barrier, common_seed
from rotorch.comm.shared_axis_group import make_axis_group
from rotorch.comm.status_word import StatusWord
from rotorch.core.grid import ACROSS, DEPTH, DOWN
from rotorch.core.grid_memory import products
from rotorch.core.spec import Cut, GridCut, Range, Unit, Weight
from rotorch.hold.flat_gradients import FlatGradients
from rotorch.hold.gathered_blocks import GatheredBlocks
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_model import ShardedModel, ShardedStages, SimpleShardedModel
from rotorch.hold.sharded_weights import Memory, ShardPlacement, placed
from rotorch.models.feature_sums import complete_sums
from rotorch.ops.conjugates import sum_of_parts
from rotorch.ops.grid_use import GridUse
from rotorch.ops.random_state import seeded_rng
from rotorch.ops.summa import Grid
from rotorch.ops.weight_proxy import WeightProxy
from rotorch.shard.sharded_weight import Chunk, box_chunks


def apply(setup: Setup) -> ShardedModel:
    """Cuts the model into blocks over the mesh, for every strategy on grids."""
    return GridModel(setup)


class GridModel(SimpleShardedModel, ShardedStages):
    """One rank's blocks on a square grid, which may be several layers deep."""

    def __init__(self, setup: Setup) -> None:
        strategy, spec, mesh, sites = setup.strategy, setup.spec, setup.mesh, setup.sites
        self._mesh = mesh
        axes = mesh.mesh_dim_names or ()
        make = partial(make_axis_group, mesh, transport=strategy.transport, device=setup.device)
        self._depth = make(DEPTH) if DEPTH in axes else AxisGroup(DEPTH, 1, 0, None)
        self.grid = Grid(make(DOWN), make(ACROSS))
        self._rank = 0
        for axis_group in self._all_axis_groups():
            # A number of its own for each rank of the grid, which makes its random numbers its own (`unsharded`).
            self._rank = self._rank * axis_group.size + axis_group.position
        parameters = dict(setup.module.named_parameters())
        self._sizes = {"size": self.grid.down.size, "row": self.grid.down.position, "column": self.grid.across.position}
        placements = [self._placement(w) for w in spec.weights]
        sums = {w.name: self._sums(w) for w in spec.weights}
        memory: Memory
        if strategy.in_shards and self._depth.size > 1:
            memory = GatheredBlocks(placements, depth=self._depth, sums=sums, param_dtype=setup.param_dtype)
            placements = memory.placements(mesh=mesh)
        else:
            # A pass with converted copies reads no shard.
            read = [] if setup.param_dtype is not None else [weight for _, weight in products(spec.units)]
            memory = FlatGradients(sums=sums, homes=self._homes(read, parameters=parameters, device=setup.device))
        shards = setup.shards(placements, memory=memory)
        super().__init__(setup.module, shards)
        heads = {w.name for u in spec.units if u.logits for w in u.weights}
        for weight in spec.weights:
            if weight.grid is not None and (weight.grid.rows is not None or weight.grid.whole_output):
                block = shards.leaves[weight.name]
                biased = f"{weight.name.removesuffix('weight')}bias" in parameters
                use = GridUse(weight, block, self.grid, strategy.kind, head=weight.name in heads, biased=biased)
                shards.replace(weight.name, WeightProxy(use, like=block))
        for weight in spec.weights:
            if weight.grid is not None and weight.grid.sums and self.grid.across.size > 1:
                for site in sites[weight.name]:
                    self._complete_sums(site.module, weight)

    def _homes(
        self, matrices: Sequence[Weight], *, parameters: Mapping[str, nn.Parameter], device: torch.device
    ) -> dict[str, Tensor]:
        """Memory for blocks of matrices, which the ranks of a column read in every product; by name."""
        rows = range(self.grid.down.size)
        shapes = {w.name: [w.block_shape(**{**self._sizes, "row": row}) for row in rows] for w in matrices}
        dtypes = {w.name: parameters[w.name].dtype for w in matrices}
        return self.grid.down.homes(shapes, dtypes=dtypes, device=device)

    def _axis_groups(self, weight: Weight) -> list[tuple[AxisGroup, Cut | None]]:
        """The axis groups of this rank, each with the cut of a weight over it; None: its ranks hold the same."""
        cut = weight.grid or GridCut()
        return [(self._depth, None), (self.grid.down, cut.rows), (self.grid.across, cut.columns)]

    def _placement(self, weight: Weight) -> ShardPlacement:
        chunks, shape = block_chunks(weight, **self._sizes), weight.block_shape(**self._sizes)
        return ShardPlacement.on_axis_groups(
            weight, chunks=chunks, shape=shape, mesh=self._mesh, cuts=self._axis_groups(weight)
        )

    def placements_of(self, weight: Weight, *, unit: Unit) -> tuple[Placement, ...]:
        return placed(self._axis_groups(weight), mesh=self._mesh)

    def _sums(self, weight: Weight) -> tuple[AxisGroup, ...]:
        return tuple(axis_group for axis_group, cut in self._axis_groups(weight) if cut is None and axis_group.size > 1)

    def _complete_sums(self, norm: nn.Module, weight: Weight) -> None:
        (total,) = weight.shape
        (mine,) = weight.block_shape(**self._sizes)
        complete_sums(norm, mine=mine, total=total, sum_over=partial(sum_of_parts, axis_group=self.grid.across))

    @contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        # No two ranks have the same tokens and features, so their random numbers (dropout) must differ.
        with seeded_rng(common_seed(mesh=self._mesh) + self._rank), super().unsharded() as callee:
            yield callee

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        memory = self.shards.memory
        inside = memory.micro_batch(last=last) if isinstance(memory, FlatGradients) else nullcontext()
        with super().micro_batch(last=last), inside:
            yield

    def borrowed_ready(self) -> None:
        barrier(mesh=self._mesh)  # ranks of a column read blocks in homes that another one has received

    def start(self) -> None:
        # First the axis groups: gathering blocks, in `super().start`, communicates over the depth already.
        for axis_group in self._all_axis_groups():
            axis_group.start()
        super().start()

    def _all_axis_groups(self) -> tuple[AxisGroup, ...]:
        return (self._depth, self.grid.down, self.grid.across)

    @property
    def transport(self) -> str | None:
        found = {axis_group.transport for axis_group in self._all_axis_groups() if axis_group.size > 1}
        return None if not found else found.pop() if len(found) == 1 else "auto"

    def slots(self) -> list[Tensor]:
        return [slot for axis_group in self._all_axis_groups() for slot in axis_group.slots()]

    def write_status_to(self, status: StatusWord) -> list[str]:
        for axis_group in self._all_axis_groups():
            axis_group.write_status_to(status)
        return super().write_status_to(status)

    def close(self) -> None:
        for axis_group in self._all_axis_groups():
            axis_group.close()


def block_chunks(weight: Weight, *, size: int, row: int, column: int) -> tuple[Chunk, ...]:
    """The chunks of the whole weight that are the block at `row`, `column` of a grid of `size` x `size`."""
    cut = weight.grid or GridCut()
    boxes: list[tuple[Range, ...]] = [(Range(0, length),) for length in weight.shape]
    for part, index in ((cut.rows, row), (cut.columns, column)):
        if part is not None:
            boxes[part.dim] = part.ranges(weight.shape[part.dim], num_slices=size, index=index)
    return box_chunks(boxes)
