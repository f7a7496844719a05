"""Memory of products of blocks beyond weights at rest: blocks in flight, and slots in memory that ranks share.

[Note: slots]
    Over shared memory (`comm/shared_axis_group.py`) a rank has two slots in every axis group for tensors that all
    others read (blocks of activations, tensors that are summed over the group, in chunks), and one for every other rank
    for parts of its sums. They are as large as the largest tensor that goes through them, in whole pages, and stay from
    step to step. Weights are read at home, unless they are computed with in another precision.

[Note: shards over depth]
    Where layers of a grid share their blocks at rest, blocks are gathered for a step, and gradients of whole blocks
    exist until they are summed; gradients of the step before are freed by then. Both travel in messages of several
    weights (`messages_of`). Gathered blocks have no home that others read; over shared memory they go through slots.

[Note: in flight]
    Over messages the blocks of other ranks are copied, one in use and two under way; of a product's parts for other
    ranks, one is made while one is under way, and this rank's own waits. Over shared memory blocks are read in place,
    and a part is freed as soon as it is in its slot. The peak is the backward of the largest layer, with both kinds of
    blocks and both kinds of parts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from rotorch.core.grid import ACROSS, DEPTH, DOWN, ID_ITEMSIZE, GridCoordinate
from rotorch.core.messages import SUM_CHUNK_BYTES, lane_bytes
from rotorch.core.spec import GridCut, Unit, Weight
from rotorch.core.traffic import MicroBatch

_Passing = tuple[str, int, int]
"""The axis group of a message, its size where all read it, its size as one rank's part of a sum."""


def in_flight_bytes(
    coordinate: GridCoordinate, units: Iterable[Unit], *, batch: MicroBatch | None, shared: bool
) -> int:
    """Largest bytes of a layer's blocks while its product is computed (see [Note: in flight]).

    Args:
        coordinate: of the rank.
        units: of the model, or one of them.
        batch: one micro-batch; None leaves out blocks of activations.
        shared: True if blocks travel through shared memory.
    """
    q = coordinate.size
    if q == 1:
        return 0
    copies = min(2, q) if shared else min(3, q - 1) + min(3, q)
    layers = (_block_bytes(coordinate, w, batch) + _of_activations(coordinate, w, batch)[1] for _, w in products(units))
    return copies * max(layers, default=0)


def with_gathered_bytes(coordinate: GridCoordinate, units: Sequence[Unit], *, in_flight: int, shared: bool) -> int:
    """Bytes of a step beyond weights, gradients and optimizer at rest, without slots ([Note: shards over depth]).

    Gradients at rest do not exist while whole ones do, so they are subtracted.

    Args:
        coordinate: of the rank.
        units: of the model, or one of them.
        in_flight: bytes of products.
        shared: True if messages travel through shared memory.
    """
    shards = [w for unit in units for w in unit.weights if coordinate.is_in_shards(w)]
    if not shards:
        return in_flight
    trained = [w for w in shards if w.trained]
    blocks = sum(coordinate.in_pass(w, coordinate.block_bytes(w)) for w in shards)
    grads = sum(map(coordinate.block_bytes, trained))
    gathering = blocks + (coordinate.depth + 1) * _largest_message(coordinate, shards, in_pass=True)
    computing = blocks + in_flight + grads
    # A message's own gradients are freed before its sum is complete; gloo copies the tensor that it scatters.
    summing = grads + (1 if shared else coordinate.depth + 1) * _largest_message(coordinate, trained)
    return max(gathering, computing, summing) - sum(map(coordinate.held_bytes, trained))


def _largest_message(coordinate: GridCoordinate, weights: list[Weight], *, in_pass: bool = False) -> int:
    return max((part for part, _ in _messages(coordinate, weights, in_pass=in_pass)), default=0)


def messages_of(sizes: Sequence[int], *, depth: int) -> list[range]:
    """Groups neighbouring tensors into messages up to a limit; `sizes`: their bytes on one of `depth` ranks."""
    limit = SUM_CHUNK_BYTES // depth
    found: list[range] = []
    start, total = 0, 0
    for number, size in enumerate(sizes):
        if number > start and total + size > limit:
            found.append(range(start, number))
            start, total = number, 0
        total += size
    return [*found, range(start, len(sizes))] if sizes else []


def slots_bytes(coordinate: GridCoordinate, units: Iterable[Unit], *, batch: MicroBatch | None) -> int:
    """All of a rank's slots in shared memory (see [Note: slots]); arguments as of `in_flight_bytes`."""
    whole: dict[str, int] = defaultdict(int)
    part: dict[str, int] = defaultdict(int)
    for axis, readable, of_sum in _all_that_passes(coordinate, list(units), batch):
        whole[axis], part[axis] = max(whole[axis], readable), max(part[axis], of_sum)
    sizes = {DEPTH: coordinate.depth, DOWN: coordinate.size, ACROSS: coordinate.size}
    return sum(lane_bytes(n, whole=whole[axis], part=part[axis]) for axis, n in sizes.items())


def _all_that_passes(coordinate: GridCoordinate, units: list[Unit], batch: MicroBatch | None) -> Iterator[_Passing]:
    for _, weight in products(units):
        yield _of_weights(coordinate, weight, batch)
        yield _of_activations(coordinate, weight, batch)
    yield from _gradients(coordinate, units)
    if batch is not None:
        for unit in units:
            yield from _beside_products(coordinate, unit, batch)


def products(units: Iterable[Unit]) -> Iterator[tuple[Unit, Weight]]:
    """The matrices of block-by-block products; not tables that are only looked up in."""
    for unit in units:
        for weight in unit.weights:
            cut = weight.grid or GridCut()
            if len(weight.shape) == 2 and cut.rows is not None and (cut.is_linear or unit.reads_in_backward):
                yield unit, weight


def _of_weights(coordinate: GridCoordinate, weight: Weight, batch: MicroBatch | None) -> _Passing:
    """Blocks of a matrix in the precision of the pass, and of its gradient in its own."""
    itemsize = weight.itemsize_in_pass if batch is None else batch.itemsize
    at_home = not coordinate.is_in_shards(weight) and itemsize == weight.itemsize
    read = 0 if at_home else _block_bytes(coordinate, weight, batch)
    return DOWN, read, coordinate.largest_block_bytes(weight) if weight.trained else 0


def _block_bytes(coordinate: GridCoordinate, weight: Weight, batch: MicroBatch | None) -> int:
    """The largest block of a matrix, in the precision of the pass."""
    numel = coordinate.largest_block_bytes(weight) // weight.itemsize
    return numel * (weight.itemsize_in_pass if batch is None else batch.itemsize)


def _of_activations(coordinate: GridCoordinate, weight: Weight, batch: MicroBatch | None) -> _Passing:
    """Blocks of a linear layer's inputs, and of their gradient; of a head that uses a table, of logits."""
    if batch is None:
        return ACROSS, 0, 0
    width = max(coordinate.widths(weight, weight.grid.rows if weight.grid else None))
    num_bytes = batch.num_rows * batch.num_tokens * width * batch.itemsize
    return ACROSS, num_bytes, num_bytes


def _gradients(coordinate: GridCoordinate, units: list[Unit]) -> Iterator[_Passing]:
    """Messages of gradients: gradients summed over the same axis groups lie side by side, in one message."""
    flat: dict[tuple[tuple[str, ...], int], int] = defaultdict(int)
    shards: dict[tuple[tuple[str, ...], int], list[Weight]] = defaultdict(list)
    gathered: dict[int, list[Weight]] = defaultdict(list)
    for weight in (w for unit in units for w in unit.weights):
        cut = weight.grid or GridCut()
        over = (
            (DEPTH, None, coordinate.depth),
            (DOWN, cut.rows, coordinate.size),
            (ACROSS, cut.columns, coordinate.size),
        )
        key = tuple(axis for axis, part, size in over if part is None and size > 1), weight.itemsize
        if coordinate.is_in_shards(weight):
            gathered[weight.itemsize].append(weight)
            if weight.trained:
                shards[key].append(weight)
        elif weight.trained:
            flat[key] += coordinate.block_bytes(weight)
    for (axes, _), num_bytes in flat.items():
        for axis in axes:
            yield axis, min(num_bytes, SUM_CHUNK_BYTES), 0
    for weights in gathered.values():
        for largest, _ in _messages(coordinate, weights, in_pass=True):
            yield DEPTH, largest, 0
    for (axes, _), weights in shards.items():
        for largest, mine in _messages(coordinate, weights):
            yield DEPTH, 0, largest
            for axis in axes[1:]:
                yield axis, min(mine, SUM_CHUNK_BYTES), 0


def _messages(coordinate: GridCoordinate, weights: list[Weight], *, in_pass: bool = False) -> Iterator[tuple[int, int]]:
    """Per message (see `messages_of`): bytes of the largest rank's part, and of this rank's own.

    `in_pass`: of weights as passes compute with them; else of gradients, which are as weights at rest.
    """

    def sent_bytes(weight: Weight, *, layer: int | None) -> int:
        held = coordinate.held_bytes(weight, layer=layer)
        return coordinate.in_pass(weight, held) if in_pass else held

    sizes = [sent_bytes(w, layer=0) for w in weights]
    for together in messages_of(sizes, depth=coordinate.depth):
        yield sum(sizes[k] for k in together), sum(sent_bytes(weights[k], layer=None) for k in together)


def _beside_products(coordinate: GridCoordinate, unit: Unit, batch: MicroBatch) -> Iterator[_Passing]:
    """Messages of a unit's norms, look-ups, whole outputs and loss."""
    tokens = batch.num_rows * batch.num_tokens
    for weight in unit.weights:
        cut = weight.grid or GridCut()
        if cut.sums:
            yield ACROSS, min(tokens * batch.loss_itemsize, SUM_CHUNK_BYTES), 0
        if cut.whole_output:
            yield ACROSS, min(tokens * weight.shape[0] * batch.itemsize, SUM_CHUNK_BYTES), 0
        if cut.is_table and len(weight.shape) == 2 and unit.uses > unit.reads_in_backward:
            found = tokens * math.prod(coordinate.block_shape(weight)[1:]) * weight.itemsize_in_pass
            yield DOWN, max(tokens * ID_ITEMSIZE, found if weight.trained else 0), found
    if unit.logits:
        yield ACROSS, min(2 * tokens * batch.loss_itemsize, SUM_CHUNK_BYTES), 0
