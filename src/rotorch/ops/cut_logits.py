"""Logits of which each rank that shares a batch has a stretch of the vocabulary, and their cross-entropy.

What models do between head and loss is done to the stretch; `cross_entropy` exchanges three numbers per token
(Megatron-LM, arXiv 1909.08053, section 3); anything else places the stretches side by side, once.

Shapes: B tokens, V vocabulary, R rows of it on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from rotorch._torch_private import wrapper_tensor
from rotorch.comm.collectives import all_reduce_largest, all_reduce_sum
from rotorch.core.spec import Range
from rotorch.ops.conjugates import place_side_by_side
from rotorch.ops.logits import LogitsStandIn


class CutLogits(LogitsStandIn):
    """Stands for logits `[.., V]`, equal on all ranks of `mesh`.

    Attributes:
        local: this rank's stretch `[.., R]`, with its history.
        lengths: of all ranks' stretches.
        mesh: the ranks, one axis.
    """

    local: Tensor
    lengths: tuple[int, ...]
    mesh: DeviceMesh

    @staticmethod
    def __new__(cls, local: Tensor, *, lengths: Sequence[int], mesh: DeviceMesh) -> CutLogits:
        """Makes logits of this rank's stretch."""
        self: CutLogits = wrapper_tensor(cls, (*local.shape[:-1], sum(lengths)), like=local)
        self.local, self.lengths, self.mesh, self.written = local, tuple(lengths), mesh, None
        return self

    def elementwise(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CutLogits:
        """Does it to the stretch."""
        return self._with(func(self.local, *args, **kwargs))

    def with_leading(self, sizes: tuple[int, ...]) -> CutLogits:
        """Reshapes the stretch."""
        return self._with(self.local.reshape(*sizes, self.local.shape[-1]))

    def picked(self, index: Any) -> CutLogits:
        """Picks tokens of the stretch."""
        return self._with(self.local[index])

    def token_losses(self, target_B: Tensor, *, ignore_index: int) -> Tensor:
        """Each token's loss [B], equal on all ranks. All of them call it."""
        local_BR = self.local
        if torch.is_autocast_enabled(local_BR.device.type):  # under which losses are computed in float32
            local_BR = local_BR.float()
        position = self.mesh.get_local_rank()
        rows = Range(sum(self.lengths[:position]), self.lengths[position])
        loss_B: Tensor = _CutCrossEntropy.apply(local_BR, target_B, rows, ignore_index, self.mesh)
        return loss_B

    def computed(self) -> Tensor:
        """The stretches side by side."""
        return place_side_by_side(self.local, dim=-1, lengths=self.lengths, mesh=self.mesh)

    def _with(self, local: Tensor) -> CutLogits:
        return CutLogits(local, lengths=self.lengths, mesh=self.mesh)


class _CutCrossEntropy(Function):
    """Forward: the largest logit, then sum of exponentials and target's logit. Backward: softmax minus one-hot."""

    @staticmethod
    def forward(
        ctx: Any, logits_BR: Tensor, target_B: Tensor, rows: Range, ignore_index: int, mesh: DeviceMesh
    ) -> Tensor:
        least = torch.finfo(logits_BR.dtype).min
        largest_B = logits_BR.amax(-1) if rows.length else logits_BR.new_full(target_B.shape, least)
        largest_B = all_reduce_largest(largest_B.clamp_min_(least), mesh=mesh)
        exp_BR = torch.sub(logits_BR, largest_B.unsqueeze(1)).exp_()
        tokens = ((target_B >= rows.start) & (target_B < rows.stop)).nonzero().squeeze(1)
        columns = target_B[tokens] - rows.start
        sums_2B = logits_BR.new_zeros((2, *target_B.shape))
        sums_2B[0] = exp_BR.sum(-1)
        sums_2B[1, tokens] = logits_BR[tokens, columns]
        sum_B, picked_B = all_reduce_sum(sums_2B, mesh=mesh)
        valid_B = target_B != ignore_index
        ctx.save_for_backward(exp_BR, sum_B, valid_B, tokens, columns)
        return torch.where(valid_B, sum_B.log() + largest_B - picked_B, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_B: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        exp_BR, sum_B, valid_B, tokens, columns = ctx.saved_tensors
        scale_B = torch.where(valid_B, grad_B, 0.0)
        grad_BR = exp_BR * (scale_B / sum_B).unsqueeze(1)
        grad_BR[tokens, columns] -= scale_B[tokens]
        return grad_BR, None, None, None, None
