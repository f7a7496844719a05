"""A rank's position in a step: a few numbers in memory that others can read even if the rank no longer responds.

[Note: one assignment]
    A rank records its position by assigning one number, which holds operation, unit and slice; the rank that it waits
    for is written only where it really waits. No time is written: readers see when the number last changed. So nothing
    is timed, formatted or sent in a step, and the record of a rank that was killed or stopped is complete.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum


class Operation(IntEnum):
    """The operation that a rank is at."""

    NONE = 0
    SLICE_FORWARD = 1
    SLICE_BACKWARD = 2
    AWAIT_SLICE = 3
    AWAIT_GRADIENT = 4
    BLOCK_FORWARD = 5
    BLOCK_BACKWARD = 6
    COUNT_TARGETS = 7
    COMPLETE_GRADIENTS = 8
    STAGE = 9
    AWAIT_STAGE = 10
    AWAIT_BLOCK = 11


_TEXTS = {
    Operation.SLICE_FORWARD: "at slice {part} of {unit}, forward",
    Operation.SLICE_BACKWARD: "at slice {part} of {unit}, backward",
    Operation.AWAIT_SLICE: "waiting for slice {part} of {unit}",
    Operation.AWAIT_GRADIENT: "waiting for the gradient of slice {part} of {unit}",
    Operation.BLOCK_FORWARD: "at {unit}, forward",
    Operation.BLOCK_BACKWARD: "at {unit}, backward",
    Operation.COUNT_TARGETS: "summing the number of targets over all ranks",
    Operation.COMPLETE_GRADIENTS: "completing gradients with the other ranks",
    Operation.STAGE: "at stage {part}",
    Operation.AWAIT_STAGE: "waiting for what stage {part} sends",
    Operation.AWAIT_BLOCK: "waiting for a block of the grid",
}
_WAITS = {Operation.AWAIT_SLICE, Operation.AWAIT_GRADIENT, Operation.AWAIT_STAGE, Operation.AWAIT_BLOCK}
_PART_BITS, _UNIT_BITS = 16, 32


class StatusWord(ctypes.Structure):
    """This rank's position in a step. Without `from_buffer` it lies in this process's own memory, unread.

    Attributes:
        now: see `at`.
        micro_batch: the micro-batch of the step, counted from 1; 0 outside of one.
        peer: the rank that is waited for plus 1, where `now` is a wait; 0 if that is not known.
        passes: number of tokens of a sample begun so far; without it two tokens' passes could look the same.
    """

    _fields_ = (
        ("now", ctypes.c_int64),
        ("micro_batch", ctypes.c_int32),
        ("peer", ctypes.c_int32),
        ("passes", ctypes.c_int64),
    )


STATUS_BYTES = ctypes.sizeof(StatusWord)


def at(operation: Operation, *, unit: int = 0, part: int = 0) -> int:
    """Encodes a position as one number: the operation, the number of its unit, and the slice or stage of that unit."""
    # One number, so that a reader never finds the unit of one operation with the slice of another.
    return operation << (_UNIT_BITS + _PART_BITS) | unit << _PART_BITS | part


def describe_status(now: int, micro_batch: int, peer: int, *, names: Sequence[str]) -> str:
    """Returns a position in words; "" for none.

    Args:
        now: of a `StatusWord`, as are `micro_batch` and `peer`.
        micro_batch: see there.
        peer: see there.
        names: of the units, by number.
    """
    try:
        operation = Operation(now >> (_UNIT_BITS + _PART_BITS))
    except ValueError:  # read while it was written
        return ""
    if operation is Operation.NONE:
        return ""
    number, part = now >> _PART_BITS & (1 << _UNIT_BITS) - 1, now & (1 << _PART_BITS) - 1
    unit = repr(names[number]) if number < len(names) else f"unit {number}"
    text = _TEXTS[operation].format(unit=unit, part=part)
    if operation in _WAITS and peer:
        text += f" from rank {peer - 1}"
    return f"micro-batch {micro_batch}, {text}" if micro_batch else text
