"""A weight whose slices visit one after another, or are read where they lie side by side, at its uses (rtp)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from rotorch.core.spec import Weight
from rotorch.ops.conv import rotate_conv
from rotorch.ops.deferred_logits import DeferredLogits
from rotorch.ops.gather_weight import gather_weights
from rotorch.ops.linear import rotate_embedding, rotate_linear
from rotorch.ops.loss import RotatingHead
from rotorch.ops.rotate import RotatingUnit
from rotorch.ops.side_by_side import embedding_side_by_side, linear_side_by_side
from rotorch.ops.weight_proxy import WeightUse, use_of


@dataclass(frozen=True)
class RotatingUse(WeightUse):
    """One weight of a WEIGHT unit on a ring.

    Attributes:
        weight: which.
        unit: the unit that it belongs to.
        head: whether products with it are logits, which the loss takes slice by slice.
        keep_logits: whether the loss keeps them for backward.
        by_plan: whether the user's own plan says that it goes round; then no function gets it whole.
    """

    strategy: ClassVar[str] = "rtp"
    weight: Weight
    unit: RotatingUnit
    head: bool = False
    keep_logits: bool = False
    by_plan: bool = False

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """The product slice by slice, or in place; a head's logits are deferred."""
        cut_bias = self._unit_of(bias)
        together = cut_bias is self.unit
        if not together and self._brings_more:
            return None
        if self.head and (together or (bias is None and len(self.unit.unit.weights) == 1)):
            return DeferredLogits(x, RotatingHead(self.unit, self.keep_logits))
        if self.unit.whole is not None:
            return linear_side_by_side(self.unit, x, bias=bias if cut_bias is None else cut_bias)
        output = rotate_linear(self.unit, x)
        return output if bias is None or together else output + bias

    def embedding(self, ids: Tensor, *, padding_idx: int | None) -> Tensor:
        """Each slice answers the ids in its rows."""
        embedding = rotate_embedding if self.unit.whole is None else embedding_side_by_side
        return embedding(self.unit, ids, padding_idx=padding_idx)

    def convolution(
        self, func: Callable[..., Tensor], x: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """Each slice makes its output channels."""
        cut_bias = self._unit_of(bias)
        if self.unit.whole is not None:
            (whole,) = gather_weights(self.unit)
            if cut_bias is not None:
                (bias,) = gather_weights(cut_bias)
            return func(x, whole, bias, *args, **kwargs)
        together = cut_bias is self.unit
        if not together and self._brings_more:
            return None
        output = rotate_conv(func, self.unit, x, *args, **kwargs)
        if bias is None or together:
            return output
        return output + bias.view(-1, *[1] * (len(self.weight.shape) - 2))

    @property
    def _brings_more(self) -> bool:
        """True if slices travel with a bias, which the unit's product adds: it has none for the matrix alone."""
        return self.unit.whole is None and len(self.unit.unit.weights) > 1

    @staticmethod
    def _unit_of(bias: Tensor | None) -> RotatingUnit | None:
        use = use_of(bias)
        return use.unit if isinstance(use, RotatingUse) else None

    def refusal(self) -> str | None:
        """A plan that the user has written is taken at its word."""
        return (
            "cannot take a weight that goes round. Give it no role in the plan, or use fsdp" if self.by_plan else None
        )

    def copies_whole(self) -> bool:
        """False in shared memory, where it lies there whole."""
        return self.unit.whole is None

    @classmethod
    def gather(cls, uses: Sequence[RotatingUse]) -> list[Tensor]:
        """Each unit's slices once."""
        units = {id(use.unit): use.unit for use in uses}
        whole = {key: gather_weights(unit) for key, unit in units.items()}
        return [whole[id(use.unit)][use.unit.unit.weights.index(use.weight)] for use in uses]
