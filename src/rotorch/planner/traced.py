"""Bytes of a model's passes by layers, as `traced/passes.py` counts them; what plans of memory are made of."""

from __future__ import annotations

from dataclasses import dataclass

from rotorch.planner.shared_tokens import TracedAttention


@dataclass(frozen=True)
class PerRow:
    """Bytes that grow with the rows of a micro-batch."""

    row_bytes: float = 0.0
    constant_bytes: float = 0.0

    def of(self, rows: float, *, cut: float = 1.0) -> float:
        """Returns the bytes for a number of rows, if `cut` ranks share them."""
        return (self.row_bytes * rows + self.constant_bytes) / cut

    def __add__(self, other: PerRow) -> PerRow:
        return PerRow(self.row_bytes + other.row_bytes, self.constant_bytes + other.constant_bytes)

    def without_constant(self) -> PerRow:
        """The part that grows with the batch."""
        return PerRow(self.row_bytes)


@dataclass(frozen=True)
class BackwardPoint:
    """The most that is alive of a layer in a part of its backward, which ends when a gradient of a weight is made.

    Attributes:
        made: share of the layer's gradients that were made before.
        row_bytes: of tensors, weights and their gradients apart, beyond the layer's saved ones, per row; negative where
            most of these are gone.
        constant_bytes: the same for any batch, the gradient that is being made among them.
    """

    made: float
    row_bytes: float
    constant_bytes: float


@dataclass(frozen=True)
class TracedLayer:
    """Bytes that autograd keeps of one layer of a class (see [Note: what is traced]).

    Attributes:
        stream: as wide as the residual stream, and all else of modules that are not cut.
        interior: of modules that tensor parallelism cuts.
        given: the layer's input.
        attention: where only a part of a sequence was traced, of its attentions, but for keys and values.
        attentions: these attentions.
        backward: from its beginning to its end; none if that was not traced.
        experts: of `interior`, what modules of experts keep (see [Note: experts]).
        repeated: of `experts`, what every slice keeps whole where experts are cut through their widths.
        second: of all that is kept, what the layer's second half keeps, where layers have halves.
        unsaved_input: the layer's input if autograd does not keep it as it is, which a norm in float32 has no use for.
    """

    stream: PerRow
    interior: PerRow
    given: PerRow
    attention: PerRow = PerRow()
    attentions: tuple[TracedAttention, ...] = ()
    backward: tuple[BackwardPoint, ...] = ()
    experts: PerRow = PerRow()
    repeated: PerRow = PerRow()
    second: PerRow = PerRow()
    unsaved_input: PerRow = PerRow()


@dataclass(frozen=True)
class Traced:
    """A model's passes for one length of sequence and one precision.

    Attributes:
        layers: by class, as in `FoldedModel.classes`.
        outside: kept before and behind the layers, but for logits.
        logits: of the highest moment: logits, what is made of them, and their gradient.
        temporaries: the same of all else that is not kept.
        behind: of `outside`, those behind the layers.
        behind_backward: the most in the backward of what lies between the layers and the head, beyond what the layers
            keep and the gradient of their output.
        unsaved_shared: given to all layers and not kept, but where these are computed again.
        on_logits: element-wise operations between the head and the loss: scales, soft caps.
        kept_on_logits: those of them that keep a tensor as large as the logits.
    """

    layers: tuple[TracedLayer, ...]
    outside: PerRow
    logits: PerRow
    temporaries: PerRow
    behind: PerRow = PerRow()
    behind_backward: PerRow = PerRow()
    unsaved_shared: PerRow = PerRow()
    on_logits: int = 0
    kept_on_logits: int = 0
