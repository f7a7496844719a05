"""The look for packed sequences that decoders of transformers take before each pass without a cache.

Several sequences in one row show in their positions. transformers looks at these values, for which the host waits for a
GPU, once per micro-batch. Where a batch says nothing of positions, decoders number each row from 0 on, and the answer
is known: nothing is packed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

_ROWS_OF_TEXT = {"input_ids", "labels", "shift_labels"}
"""Entries of a batch by which decoders number rows; masks, positions and images may say otherwise."""


@contextmanager
def nothing_packed(entries: Collection[str]) -> Iterator[None]:
    """Spares a pass over a batch with these entries the look, if its answer is known."""
    masking = sys.modules.get("transformers.masking_utils")
    look = getattr(masking, "find_packed_sequence_indices", None)
    if masking is None or look is None or not set(entries) <= _ROWS_OF_TEXT:
        yield
        return
    masking.find_packed_sequence_indices = lambda position_ids: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = look  # type: ignore[attr-defined]
