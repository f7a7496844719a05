"""Sizes of messages: chunks of slices that replace each other in one buffer, chunks of sums, slices in eight bits.

Read by the Layouts, which predict these bytes, and by the transports, which send them. No torch.
"""

from __future__ import annotations

import mmap

CHUNK_BYTES = 2 * 1024 * 1024
"""Slices that replace each other in one buffer are exchanged in chunks of this size at most."""

SUM_CHUNK_BYTES = 4 * 1024 * 1024
"""Over shared memory, tensors are summed over all ranks in chunks of this size at most."""

FP8_BLOCK = 128
"""Elements that share a scale where slices travel in eight bits: a row, or a part of one, of most weights."""

_SCALE_BYTES = 4


def bounce_bytes(largest: int) -> int:
    """Bytes of the buffer in which chunks of a slice arrive: one chunk, or two in turn if the slice has several."""
    return largest if largest <= CHUNK_BYTES else 2 * CHUNK_BYTES


def num_chunks(num_bytes: int) -> int:
    """Number of messages of a slice that replaces another one in its buffer."""
    return -(-num_bytes // CHUNK_BYTES)


def fp8_scale_bytes(numel: int) -> int:
    """Bytes of the scales of `numel` elements, which travel before them."""
    return -(-numel // FP8_BLOCK) * _SCALE_BYTES


def fp8_bytes(numel: int) -> int:
    """Bytes of `numel` elements in eight bits with their scales."""
    return fp8_scale_bytes(numel) + numel


def sum_slots(hosts: int) -> int:
    """Slots per rank for gradients of other hosts' slices: one is added to while another one is on its way."""
    return min(2, hosts - 1)


def lane_bytes(size: int, *, whole: int, part: int = 0) -> int:
    """Slots of one rank in memory that `size` ranks share (`comm/shared_axis_group.py`).

    Args:
        size: number of ranks.
        whole: bytes of the largest tensor that a rank gives all others to read.
        part: bytes of the largest part of a sum that it makes for one of them.
    """
    return 0 if size == 1 else 2 * _whole_pages(whole) + (size - 1) * _whole_pages(part)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
