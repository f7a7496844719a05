"""Slices in eight bits on the wire (`float8_e4m3fn`): half the bytes of bfloat16, a quarter of float32.

[Note: scales]
    A message holds a float32 scale for every 128 elements of the flat slice, then the elements, divided by their scale
    so that the largest of a block becomes 448, the largest number of e4m3. Blocks follow the flat slice, whose rows are
    whole weights' rows (or parts of them), so a block is a row or a part of one. Finer than a scale per row or tensor:
    one large weight spoils 127 others and not a million.

[Note: error]
    e4m3 keeps 3 bits after the leading one: an element is off by at most 1/16 of itself, or, if it is smaller than
    2^-6 of its scale, by at most 2^-10 of the scale (half of the smallest number, 2^-9). A scale is its block's largest
    magnitude / 448. Rounding to the visiting dtype comes on top.

[Note: home is never rounded]
    Only messages are rounded; masters at home keep all their bits. A rank computes with its own slice rounded too,
    or ranks would not train the same model.

Products run in the dtype that slices are unpacked to. Where hardware multiplies in eight bits, `unpack` is the place
to hand codes and scales on to it (blocks of 1 x 128 are a scaling that `torch.nn.functional.scaled_mm` knows).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rotorch.comm.wire import Wire
from rotorch.core.messages import FP8_BLOCK, fp8_bytes, fp8_scale_bytes

CODE = torch.float8_e4m3fn
_LARGEST = torch.finfo(CODE).max
_PIECE = 1024 * FP8_BLOCK  # elements converted at a time, so that temporaries stay small


class Fp8Wire(Wire):
    """Packs slices into eight bits; see the module's notes."""

    packs = True

    def __init__(self, *, home_dtype: torch.dtype, dtype: torch.dtype) -> None:
        super().__init__(home_dtype=home_dtype, dtype=dtype)
        self.message_dtype = torch.uint8

    def length(self, numel: int) -> int:
        return fp8_bytes(numel)

    def pack(self, home: Tensor, message: Tensor) -> None:
        scales, codes = _parts(message, numel=home.numel())
        for start in range(0, home.numel(), _PIECE):
            piece = slice(start, start + _PIECE)
            _pack(home[piece], scales[start // FP8_BLOCK :], codes[piece])

    def unpack(self, message: Tensor, out: Tensor) -> None:
        scales, codes = _parts(message, numel=out.numel())
        for start in range(0, out.numel(), _PIECE):
            piece = slice(start, start + _PIECE)
            _unpack(scales[start // FP8_BLOCK :], codes[piece], out[piece])

    def visit(self, home: Tensor, out: Tensor) -> None:
        for start in range(0, home.numel(), _PIECE):
            piece = slice(start, start + _PIECE)
            message = torch.empty(self.length(home[piece].numel()), dtype=torch.uint8, device=home.device)
            # A rank rounds its own slice as messages round it for the others: all must compute with the same weights.
            self.pack(home[piece], message)
            self.unpack(message, out[piece])


def _parts(message: Tensor, *, numel: int) -> tuple[Tensor, Tensor]:
    """The scales, float32 [blocks], and the codes [numel] of a message."""
    split = fp8_scale_bytes(numel)
    return message[:split].view(torch.float32), message[split : split + numel].view(CODE)


def _pack(values: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Writes scales and codes of up to `_PIECE` values."""
    first = 0
    for block_values, block_codes in zip(_blocks(values), _blocks(codes), strict=True):
        wide = block_values.float()
        # Not less than the smallest normal number: quotients by a subnormal one are off by more than codes can hold.
        scale = wide.abs().amax(1).div_(_LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
        scales[first : first + len(scale)] = scale
        block_codes.copy_(wide / scale.unsqueeze(1))
        first += len(scale)


def _unpack(scales: Tensor, codes: Tensor, out: Tensor) -> None:
    first = 0
    for block_codes, block_out in zip(_blocks(codes), _blocks(out), strict=True):
        scale = scales[first : first + len(block_codes)]
        block_out.copy_(block_codes.float().mul_(scale.unsqueeze(1)))
        first += len(scale)


def _blocks(flat: Tensor) -> list[Tensor]:
    """Whole blocks of `flat` as rows, then the rest as one row."""
    whole = flat.numel() // FP8_BLOCK * FP8_BLOCK
    return [rows for rows in (flat[:whole].view(-1, FP8_BLOCK), flat[whole:].view(1, -1)) if rows.numel()]
