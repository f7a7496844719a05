"""The look for packed sequences that decoders of transformers take before each pass without a cache.

Several sequences in one row show in their positions. transformers looks at these values, for which the host waits for a
GPU, once per micro-batch. Where a call of a decoder says nothing of positions, it numbers each row from 0 on, and the
answer is known: nothing is packed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

_ROWS_OF_TEXT = {"input_ids", "labels", "shift_labels", "num_items_in_batch"}
"""Arguments with which decoders number rows; masks, positions and images may say otherwise."""


@contextmanager
def nothing_packed(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Spares a call of a module the look, if its answer is known: not in a class of the user's own, which may pack.

    Args:
        module: a model.
        args: arguments of its forward.
        kwargs: those given by name.
    """
    masking = sys.modules.get("transformers.masking_utils")
    look = getattr(masking, "find_packed_sequence_indices", None)
    own = next(cls for cls in type(module).__mro__ if not cls.__module__.startswith(("rotorch.", "torch.")))
    given = {name for name, value in kwargs.items() if value is not None}
    is_known = own.__module__.startswith("transformers.models.") and not args and given <= _ROWS_OF_TEXT
    if masking is None or look is None or not is_known:
        yield
        return
    masking.find_packed_sequence_indices = lambda position_ids: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = look  # type: ignore[attr-defined]
