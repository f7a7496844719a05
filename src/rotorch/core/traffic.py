"""Traffic between ranks: the vocabulary shared by the strategies' formulas and the meter that checks them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """The part of a step in which a transfer happens.

    The planner puts transfers of FORWARD beside the computation of forward, all others beside backward; sums of
    gradients (`Kind.ALL_REDUCE` of a Layout) it takes by their kind, whatever their phase. STEP is a transfer once per
    step, however many micro-batches there are; the planner treats it as BACKWARD.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "step"


class Kind(StrEnum):
    """The operation that moves data."""

    SEND = "send"  # point to point: a slice of weights or of gradients
    COPY = "copy"  # out of memory that other ranks have mapped, by whoever reads it; nobody waits for a message
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"  # a block, along one axis of a grid
    REDUCE = "reduce"


@dataclass(frozen=True)
class Transfer:
    """Bytes that one rank sends for one unit in one step (one micro-batch).

    `sent_bytes` are this rank's bytes on the wire by the textbook ring algorithm of the collective; `payload_bytes` is
    the size of the tensor that is handed to it. For `Kind.SEND` the two are equal.
    """

    kind: Kind
    axis: str
    phase: Phase
    payload_bytes: int
    sent_bytes: int
    num_messages: int = 1


@dataclass(frozen=True)
class MicroBatch:
    """Size of one micro-batch of ranks that share a batch: it decides the size of activations that move.

    Attributes:
        num_rows: number of sequences.
        num_tokens: tokens of each sequence.
        itemsize: bytes of an element of the activations.
        loss_itemsize: bytes of an element where the loss is computed.
        routed: by unit of experts that stay on their ranks, the numbers of pairs of a token and an expert that this
            rank has sent to others and got from them, where these were counted: values decide them.
    """

    num_rows: int
    num_tokens: int
    itemsize: int = 4
    loss_itemsize: int = 4
    routed: tuple[tuple[str, int, int], ...] = ()


def all_reduce(payload_bytes: int, *, axis: str, size: int, phase: Phase = Phase.BACKWARD) -> Transfer:
    """One all-reduce of `payload_bytes` over `size` ranks: a ring sends 2 (n-1)/n of it."""
    return Transfer(Kind.ALL_REDUCE, axis, phase, payload_bytes, 2 * payload_bytes * (size - 1) // size)


def all_gather(part_bytes: int, *, axis: str, size: int, phase: Phase) -> Transfer:
    """One all-gather of `part_bytes` from each of `size` ranks: a ring sends every part n-1 times."""
    return Transfer(Kind.ALL_GATHER, axis, phase, part_bytes, part_bytes * (size - 1))


def reduce_scatter(whole_bytes: int, *, axis: str, size: int, phase: Phase) -> Transfer:
    """One reduce-scatter of `whole_bytes` over `size` ranks: a ring sends (n-1)/n of it."""
    return Transfer(Kind.REDUCE_SCATTER, axis, phase, whole_bytes, whole_bytes * (size - 1) // size)


def sent_bytes(transfers: Iterable[Transfer], *, kind: Kind | None = None) -> int:
    """Sums the bytes that one rank sends, of one kind or of all."""
    return sum(t.sent_bytes for t in transfers if kind is None or t.kind is kind)


def sent_by_broadcast(payload_bytes: int, *, position: int, source: int, size: int) -> int:
    """Bytes that the rank at `position` sends in a broadcast from `source` along a chain: 0 at the chain's end."""
    return 0 if (position - source) % size == size - 1 else payload_bytes


def sent_by_reduce(payload_bytes: int, *, position: int, target: int) -> int:
    """Bytes that the rank at `position` sends in a reduction to `target` along a chain: 0 at the target."""
    return 0 if position == target else payload_bytes
