"""How large messages are: chunks of slices that replace each other in one buffer and of sums, slices in eight bits.

Read by the Layouts, which predict these bytes, and by the transports, which send them. No torch.
"""

from __future__ import annotations

CHUNK_BYTES = 2 * 1024 * 1024
"""Slices that replace each other in one buffer are exchanged in chunks of this size at most."""

SUM_CHUNK_BYTES = 4 * 1024 * 1024
"""Over memory that ranks share, what is summed over all of them goes through it in chunks of this size at most."""

FP8_BLOCK = 128
"""Elements that share a scale where slices travel in eight bits: a row, or a part of one, of most weights."""

_SCALE_BYTES = 4


def bounce_bytes(largest: int) -> int:
    """What chunks of slices of up to `largest` bytes arrive in: one chunk, or two in turn if there are several."""
    return largest if largest <= CHUNK_BYTES else 2 * CHUNK_BYTES


def num_chunks(num_bytes: int) -> int:
    """In how many messages a slice travels that replaces another one."""
    return -(-num_bytes // CHUNK_BYTES)


def fp8_scale_bytes(numel: int) -> int:
    """Bytes of the scales of `numel` elements, which travel before them."""
    return -(-numel // FP8_BLOCK) * _SCALE_BYTES


def fp8_bytes(numel: int) -> int:
    """Bytes of `numel` elements in eight bits with their scales."""
    return fp8_scale_bytes(numel) + numel
