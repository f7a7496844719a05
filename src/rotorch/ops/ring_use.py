"""The use of a weight on a ring (rtp): its slices visit one after another, or lie whole in shared memory.

`use_on_ring` decides between the two, once for each weight, by `RotatingUnit.whole`. Either way slices come from the
same home, the order of gradients is that of the ring, and functions without a rule get the weight gathered
(`ops/gather_weight.py`).
"""

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
from rotorch.ops.loss import RotatingHead, SharedVocabulary
from rotorch.ops.rotate import RotatingUnit
from rotorch.ops.side_by_side import embedding_side_by_side, linear_side_by_side
from rotorch.ops.weight_proxy import WeightUse, use_of


@dataclass(frozen=True)
class RingUse(WeightUse):
    """One weight of a WEIGHT unit on a ring.

    Attributes:
        weight: the whole weight's description.
        unit: the unit that it belongs to.
        head: True if products with it are logits, which the loss takes slice by slice.
        keep_logits: True if the loss keeps them for backward.
        by_plan: True if the user's own plan says that it is cut; then no function gets it whole.
    """

    strategy: ClassVar[str] = "rtp"
    weight: Weight
    unit: RotatingUnit
    head: bool = False
    keep_logits: bool = False
    by_plan: bool = False

    def rotating_head(self, bias: Tensor | None, *, shared: SharedVocabulary | None = None) -> RotatingHead | None:
        """The head whose loss takes the weight's slices one by one; None if products with it and `bias` are no logits.

        Args:
            bias: of the product; may be a proxy.
            shared: the ranks that have the other parts of the vocabulary, if this weight is a part.
        """
        # A bias that does not travel with the unit has no part in the loss over its slices: real logits then.
        if not self.head or not (bias is None or self._brings(bias)):
            return None
        return RotatingHead(self.unit, self.keep_logits, shared)

    def _brings(self, bias: Tensor | None) -> bool:
        """True if a slice comes with its part of the bias."""
        return False

    @property
    def _along_columns(self) -> bool:
        return self.weight.cut is not None and self.weight.cut.dim == 1

    @staticmethod
    def _unit_of(bias: Tensor | None) -> RotatingUnit | None:
        use = use_of(bias)
        return use.unit if isinstance(use, RingUse) else None

    def refusal(self) -> str | None:
        """Refuses weights of a user's own plan, which is taken literally."""
        return "cannot take a weight that rotates. Give it no role in the plan, or use fsdp" if self.by_plan else None

    @classmethod
    def gather(cls, uses: Sequence[RingUse]) -> list[Tensor]:
        """Gathers each unit's slices once, however many of its weights are used."""
        # A function may use a matrix and its bias, which travel together.
        units = {id(use.unit): use.unit for use in uses}
        whole = {key: gather_weights(unit) for key, unit in units.items()}
        return [whole[id(use.unit)][use.unit.unit.weights.index(use.weight)] for use in uses]


class VisitingUse(RingUse):
    """The use of a weight whose slices visit, in this rank's order."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """The product slice by slice; a head's logits are deferred."""
        if self._along_columns or not self._takes(bias):
            return None
        if (head := self.rotating_head(bias)) is not None:
            return DeferredLogits(x, head)
        return self._multiply(x, bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """The product slice by slice, if the matrix is cut along its columns, which are the outputs."""
        return self._multiply(x, bias) if self._along_columns and self._takes(bias) else None

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        output = rotate_linear(self.unit, x)
        # A whole bias once, behind the slices, whose columns lie side by side: its gradient is the usual one.
        return output if bias is None or self._brings(bias) else output + bias

    def embedding(self, ids: Tensor, *, padding_idx: int | None) -> Tensor | None:
        """Each slice answers the ids in its rows."""
        return None if self._along_columns else rotate_embedding(self.unit, ids, padding_idx=padding_idx)

    def convolution(
        self, func: Callable[..., Tensor], x: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor | None:
        """Each slice makes its output channels."""
        if not self._takes(bias):
            return None
        output = rotate_conv(func, self.unit, x, *args, **kwargs)
        if bias is None or self._brings(bias):
            return output
        return output + bias.view(-1, *[1] * (len(self.weight.shape) - 2))

    def _brings(self, bias: Tensor | None) -> bool:
        return self._unit_of(bias) is self.unit

    def _takes(self, bias: Tensor | None) -> bool:
        """True if slices have a product with this bias: one that travels with the matrix is added by each slice's."""
        return self._brings(bias) or len(self.unit.unit.weights) == 1


class InPlaceUse(RingUse):
    """The use of a weight that can be read whole; only its gradient rotates, a slice at a time."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The product with the whole weight; a head's logits are deferred."""
        # Here a bias is a unit of its own, even if it is cut, and the loss over slices knows of one unit only.
        if (head := self.rotating_head(bias)) is not None:
            return DeferredLogits(x, head)
        return self._multiply(x, bias, transposed=False)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """The product with the whole matrix, whichever dim it is cut along; what slices refuse is refused here, too."""
        return None if self.by_plan and not self._along_columns else self._multiply(x, bias, transposed=True)

    def _multiply(self, x: Tensor, bias: Tensor | None, *, transposed: bool) -> Tensor:
        cut_bias = self._unit_of(bias)
        return linear_side_by_side(self.unit, x, bias=bias if cut_bias is None else cut_bias, transposed=transposed)

    def embedding(self, ids: Tensor, *, padding_idx: int | None) -> Tensor | None:
        """Rows of the whole weight."""
        return None if self._along_columns else embedding_side_by_side(self.unit, ids, padding_idx=padding_idx)

    def convolution(
        self, func: Callable[..., Tensor], x: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """The convolution with the whole weight, in a graph of its own."""
        # Nothing is copied: this is the shared memory, in a graph whose backward adds the gradient slice by slice.
        (whole,) = gather_weights(self.unit)
        cut_bias = self._unit_of(bias)
        if cut_bias is not None:
            (bias,) = gather_weights(cut_bias)
        return func(x, whole, bias, *args, **kwargs)

    def copies_whole(self) -> bool:
        """False: it is whole in shared memory already."""
        return False


def use_on_ring(
    weight: Weight, unit: RotatingUnit, *, head: bool = False, keep_logits: bool = False, by_plan: bool = False
) -> RingUse:
    """Returns the use of a weight according to its ring's memory; see `RingUse`."""
    # The unit's word, not the transport's: slices visit in shared memory, too, where they are converted or recomputed.
    made = VisitingUse if unit.whole is None else InPlaceUse
    return made(weight, unit, head, keep_logits, by_plan)
