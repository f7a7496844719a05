"""The look for packed sequences that decoders of transformers take before each pass without a cache.

Several sequences in one row show in their positions. transformers looks at these values, for which the host waits for a
GPU, once per micro-batch for its masks; with flash attention, if there is one row, also in each attention, so for each
slice of each layer. Where a call of a decoder says nothing of positions, it numbers each row from 0 on, and the answer
is known: nothing is packed. Elsewhere flash attention looks at a tensor once (`look_once`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from rotorch.models.attention_interface import attention_configs, attention_names

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
    flash = sys.modules.get(_FLASH)
    in_attention = getattr(flash, _LOOK, None)
    masking.find_packed_sequence_indices = lambda position_ids: None  # type: ignore[attr-defined]
    if isinstance(in_attention, _LooksOnce):
        setattr(flash, _LOOK, in_attention.that_finds_nothing)
    try:
        yield
    finally:
        masking.find_packed_sequence_indices = look  # type: ignore[attr-defined]
        if isinstance(in_attention, _LooksOnce):
            setattr(flash, _LOOK, in_attention)


_FLASH, _LOOK = "transformers.modeling_flash_attention_utils", "_is_packed_sequence"
_FOUND = "_rotorch_is_packed"
"""Where a tensor of positions keeps its version, and what a look at that has found."""


def look_once(module: nn.Module) -> None:
    """Has transformers' flash attention look at the positions of a micro-batch once, if the model attends by it."""
    if any("flash" in str(name) for name in attention_names(attention_configs(module)).values()):
        flash = import_module(_FLASH)
        if (look := getattr(flash, _LOOK, None)) is not None and not isinstance(look, _LooksOnce):
            setattr(flash, _LOOK, _LooksOnce(look))


class _LooksOnce:
    """In the place of transformers' own function of positions `[rows, tokens]` and the number of rows."""

    def __init__(self, look: Callable[[Any, int], Any]) -> None:
        self._look = look

    def __call__(self, position_ids: Tensor | None, batch_size: int) -> Any:
        if not _is_to_be_looked_at(position_ids, batch_size):
            return self._look(position_ids, batch_size)
        assert position_ids is not None
        version, found = getattr(position_ids, _FOUND, (None, False))
        if version != position_ids._version:
            found = bool(self._look(position_ids, batch_size))
            setattr(position_ids, _FOUND, (position_ids._version, found))
        return found

    def that_finds_nothing(self, position_ids: Tensor | None, batch_size: int) -> bool:
        """Its stand-in while nothing is packed; what is computed again in backward finds the answer, too."""
        if _is_to_be_looked_at(position_ids, batch_size):
            assert position_ids is not None
            setattr(position_ids, _FOUND, (position_ids._version, False))
        return False


def _is_to_be_looked_at(position_ids: Tensor | None, batch_size: int) -> bool:
    """True if the answer is in the values: transformers' own looks at shapes are for free."""
    if position_ids is None or batch_size != 1 or position_ids.shape[-1] == 1:
        return False
    return not position_ids.is_inference() and not torch.compiler.is_compiling()
