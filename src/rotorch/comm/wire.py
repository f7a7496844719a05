"""The form in which a slice travels: as it is at home, in the dtype of its computation, or packed (`fp8.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rotorch._torch_private import copy_each


class Wire:
    """Slices travel in the dtype in which they visit, `dtype`; at home they have `home_dtype`.

    Attributes:
        home_dtype: of a slice at home.
        dtype: of a visiting slice.
        message_dtype: of the messages that carry it.
        packs: True if a message differs from the visiting slice and is unpacked on arrival.
    """

    packs = False

    def __init__(self, *, home_dtype: torch.dtype, dtype: torch.dtype) -> None:
        self.home_dtype = home_dtype
        self.dtype = dtype
        self.message_dtype = dtype

    @property
    def as_at_home(self) -> bool:
        """True if a message is the slice itself, so that nothing needs to be copied before it is sent."""
        # Equal dtypes mean equal bits: the only wire that packs has a dtype that no slice has at home.
        return self.message_dtype == self.home_dtype

    def length(self, numel: int) -> int:
        """Elements of the message that carries a slice of `numel` elements."""
        return numel

    def pack(self, home: Tensor, message: Tensor) -> None:
        """Writes the message that carries a slice: `home [numel]` into `message [length(numel)]`."""
        message.copy_(home)

    def unpack(self, message: Tensor, out: Tensor) -> None:
        """Writes the slice that a message carries: `message [length(numel)]` into `out [numel]`."""
        out.copy_(message)

    def visit(self, home: Tensor, out: Tensor) -> None:
        """Writes into `out [numel]` the values with which other ranks compute for this slice, without a message."""
        out.copy_(home)

    def visit_in_pieces(self, home: Sequence[Tensor], out: Sequence[Tensor]) -> None:
        """The same of a slice that does not lie in one piece where it visits; not of one that is packed."""
        copy_each(out, home)
