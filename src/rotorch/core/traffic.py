"""What goes over the wire: the vocabulary shared by the strategies' formulas and the meter that checks them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """When in a step something moves."""

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class Kind(StrEnum):
    """What moves, and how."""

    SEND = "send"  # point to point: a slice of weights or of gradients
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"  # a block, along one axis of a grid
    REDUCE = "reduce"


@dataclass(frozen=True)
class Transfer:
    """What one rank sends for one unit in one step (one micro-batch).

    `sent_bytes` is what this rank puts on the wire by the textbook ring algorithm of the collective; `payload_bytes`
    the size of the tensor handed to it. For `Kind.SEND` the two are equal.
    """

    kind: Kind
    axis: str
    phase: Phase
    payload_bytes: int
    sent_bytes: int
    num_messages: int = 1


@dataclass(frozen=True)
class MicroBatch:
    """What ranks that share a batch compute on at once: decides how large activations are that move.

    Attributes:
        num_rows: how many sequences.
        num_tokens: of each sequence.
        itemsize: bytes of an element of the activations.
        loss_itemsize: bytes of an element where the loss is computed.
    """

    num_rows: int
    num_tokens: int
    itemsize: int = 4
    loss_itemsize: int = 4


def all_reduce(payload_bytes: int, *, axis: str, size: int, phase: Phase = Phase.BACKWARD) -> Transfer:
    """One all-reduce of `payload_bytes` over `size` ranks: a ring sends 2 (n-1)/n of it."""
    return Transfer(Kind.ALL_REDUCE, axis, phase, payload_bytes, 2 * payload_bytes * (size - 1) // size)


def all_gather(part_bytes: int, *, axis: str, size: int, phase: Phase) -> Transfer:
    """One all-gather of what each of `size` ranks gives, `part_bytes`: a ring sends every part n-1 times."""
    return Transfer(Kind.ALL_GATHER, axis, phase, part_bytes, part_bytes * (size - 1))


def reduce_scatter(whole_bytes: int, *, axis: str, size: int, phase: Phase) -> Transfer:
    """One reduce-scatter of `whole_bytes` over `size` ranks: a ring sends (n-1)/n of it."""
    return Transfer(Kind.REDUCE_SCATTER, axis, phase, whole_bytes, whole_bytes * (size - 1) // size)


def sent_bytes(transfers: Iterable[Transfer], *, kind: Kind | None = None) -> int:
    """Sums what one rank sends, of one kind or of all."""
    return sum(t.sent_bytes for t in transfers if kind is None or t.kind is kind)


def sent_by_broadcast(payload_bytes: int, *, position: int, source: int, size: int) -> int:
    """What the rank at `position` sends of a broadcast from `source` along a chain: nothing if it is the end."""
    return 0 if (position - source) % size == size - 1 else payload_bytes


def sent_by_reduce(payload_bytes: int, *, position: int, target: int) -> int:
    """What the rank at `position` sends of a reduction to `target` along a chain: nothing if it is the target."""
    return 0 if position == target else payload_bytes
