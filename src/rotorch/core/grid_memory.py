"""What products of blocks take beyond weights at rest: blocks in flight, and slots in memory that ranks share.

[Note: slots]
    Over shared memory (`comm/shared_line.py`) a rank has two slots on every line of ranks for what all others read
    (blocks of activations, tensors that are summed over the line, in chunks), and one for every other rank for parts of
    its sums. They are as large as the largest thing that goes through them, in whole pages, and stay from step to step.
    Weights are read at home, unless they are computed with in another precision.

[Note: in flight]
    Over messages the blocks of other ranks are copied, one in use and one under way; of the parts that a product makes
    for others, one is made while one is under way, and this rank's own waits. Over shared memory blocks are read where
    they lie, and a part is gone as soon as it is in its slot. The highest moment is the backward of the largest layer,
    with both kinds of blocks and both kinds of parts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

from rotorch.core.grid import ACROSS, DEPTH, DOWN, ID_ITEMSIZE, GridPlace
from rotorch.core.messages import SUM_CHUNK_BYTES, lane_bytes
from rotorch.core.spec import GridCut, Unit, Weight
from rotorch.core.traffic import MicroBatch

_Passing = tuple[str, int, int]
"""On which line something goes, how large it is for all to read, how large as a part of a sum for one rank."""


def in_flight_bytes(place: GridPlace, units: Iterable[Unit], *, batch: MicroBatch | None, shared: bool) -> int:
    """The most that a layer's blocks take while its product is computed (see [Note: in flight]).

    Args:
        place: of the rank.
        units: of the model, or one of them.
        batch: what is computed on; None leaves out blocks of activations.
        shared: whether blocks travel through shared memory.
    """
    q = place.size
    if q == 1:
        return 0
    copies = min(2, q) if shared else min(2, q - 1) + min(3, q)
    layers = (_block_bytes(place, w, batch) + _of_activations(place, w, batch)[1] for _, w in products(units))
    return copies * max(layers, default=0)


def slots_bytes(place: GridPlace, units: Iterable[Unit], *, batch: MicroBatch | None) -> int:
    """All of a rank's slots in shared memory (see [Note: slots]); arguments as of `in_flight_bytes`."""
    whole: dict[str, int] = defaultdict(int)
    part: dict[str, int] = defaultdict(int)
    for axis, readable, of_sum in _all_that_passes(place, list(units), batch):
        whole[axis], part[axis] = max(whole[axis], readable), max(part[axis], of_sum)
    sizes = {DEPTH: place.depth, DOWN: place.size, ACROSS: place.size}
    return sum(lane_bytes(n, whole=whole[axis], part=part[axis]) for axis, n in sizes.items())


def _all_that_passes(place: GridPlace, units: list[Unit], batch: MicroBatch | None) -> Iterator[_Passing]:
    for _, weight in products(units):
        yield _of_weights(place, weight, batch)
        yield _of_activations(place, weight, batch)
    yield from _gradients(place, units)
    if batch is not None:
        for unit in units:
            yield from _besideproducts(place, unit, batch)


def products(units: Iterable[Unit]) -> Iterator[tuple[Unit, Weight]]:
    """The matrices that something is multiplied with block by block; a table may only be looked up in."""
    for unit in units:
        for weight in unit.weights:
            cut = weight.grid or GridCut()
            if len(weight.shape) == 2 and cut.rows is not None and (cut.is_linear or unit.reads_in_backward):
                yield unit, weight


def _of_weights(place: GridPlace, weight: Weight, batch: MicroBatch | None) -> _Passing:
    """Blocks of a matrix in the precision of the pass, and of its gradient in its own."""
    at_home = batch is None or batch.itemsize == weight.itemsize
    read = 0 if at_home else _block_bytes(place, weight, batch)
    return DOWN, read, place.largest_block_bytes(weight) if weight.trained else 0


def _block_bytes(place: GridPlace, weight: Weight, batch: MicroBatch | None) -> int:
    """The largest block of a matrix, in the precision of the pass."""
    numel = place.largest_block_bytes(weight) // weight.itemsize
    return numel * (weight.itemsize if batch is None else batch.itemsize)


def _of_activations(place: GridPlace, weight: Weight, batch: MicroBatch | None) -> _Passing:
    """Blocks of a linear layer's inputs, and of their gradient; of a head that uses a table, of logits."""
    if batch is None:
        return ACROSS, 0, 0
    width = max(place.widths(weight, weight.grid.rows if weight.grid else None))
    num_bytes = batch.num_rows * batch.num_tokens * width * batch.itemsize
    return ACROSS, num_bytes, num_bytes


def _gradients(place: GridPlace, units: list[Unit]) -> Iterator[_Passing]:
    """Gradients of all weights that are summed over the same lines lie side by side and are summed as one."""
    flat: dict[tuple[tuple[str, ...], int], int] = defaultdict(int)
    for weight in (w for unit in units for w in unit.weights if w.trained):
        cut = weight.grid or GridCut()
        over = ((DEPTH, None), (DOWN, cut.rows), (ACROSS, cut.columns))
        flat[tuple(axis for axis, part in over if part is None), weight.itemsize] += place.block_bytes(weight)
    for (axes, _), num_bytes in flat.items():
        for axis in axes:
            yield axis, min(num_bytes, SUM_CHUNK_BYTES), 0


def _besideproducts(place: GridPlace, unit: Unit, batch: MicroBatch) -> Iterator[_Passing]:
    """What a unit's norms, look-ups, whole outputs and loss send."""
    tokens = batch.num_rows * batch.num_tokens
    for weight in unit.weights:
        cut = weight.grid or GridCut()
        if cut.sums:
            yield ACROSS, min(tokens * batch.loss_itemsize, SUM_CHUNK_BYTES), 0
        if cut.whole_output:
            yield ACROSS, min(tokens * weight.shape[0] * batch.itemsize, SUM_CHUNK_BYTES), 0
        if cut.is_table and len(weight.shape) == 2 and unit.uses > unit.reads_in_backward:
            found = tokens * math.prod(place.block_shape(weight)[1:]) * weight.itemsize
            yield DOWN, max(tokens * ID_ITEMSIZE, found if weight.trained else 0), found
    if unit.logits:
        yield ACROSS, min(2 * tokens * batch.loss_itemsize, SUM_CHUNK_BYTES), 0
