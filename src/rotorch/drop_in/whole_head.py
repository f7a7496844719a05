"""Head whose weight other code multiplies with: whole during this time; its gradient goes to its owners as ever."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rotorch.models.lora import base_of
from rotorch.ops.weight_proxy import WeightProxy
from rotorch.parallel_model import ParallelModel


@dataclass(frozen=True)
class WholeHead:
    """Attributes of a head that a fused loss reads within a pass.

    Attributes:
        weight: [vocabulary, features], whole and differentiable.
        bias: [vocabulary], or None.
    """

    weight: Tensor
    bias: Tensor | None


def show_whole_head(module: nn.Module, model: ParallelModel) -> None:
    """Makes `get_output_embeddings()` return a head with whole weights within a pass. All ranks must call it alike.

    Losses that never make logits (TRL's) read the head's weight in the model's forward, past the layer that knows how
    to compute with what this rank has. The weight is whole on every rank for as long as autograd needs it.

    Args:
        module: the parallel module; of one that peft has wrapped, the model within.
        model: its passes.
    """
    _, base = base_of(module)
    if not hasattr(base, "get_output_embeddings") or "get_output_embeddings" in vars(base):
        return
    own = base.get_output_embeddings

    def get_output_embeddings() -> Any:
        head = own()
        return _whole(head) if model.in_pass and isinstance(head, nn.Linear) else head

    vars(base)["get_output_embeddings"] = get_output_embeddings


def _whole(head: nn.Linear) -> WholeHead:
    weight, bias = head.weight, head.bias
    if isinstance(weight, WeightProxy) or isinstance(bias, WeightProxy):
        weight, bias = WeightProxy.answer(a_fused_loss, (weight, bias), {})
    return WholeHead(weight, bias)


def a_fused_loss(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Whole weights as they are; refusals and the log use the name."""
    return weight, bias
