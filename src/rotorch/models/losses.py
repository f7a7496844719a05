"""Loss of a batch: the one rule of this library over the losses that models compute by themselves.

[Note: shares]
    Losses of all micro-batches and ranks are summed, so each must be a sum divided by the global number of targets.
    A causal language model of Hugging Face takes that number (`num_items_in_batch`). Terms that it adds to the loss
    (a router's auxiliary loss) ignore it, and would count once per micro-batch of each rank: they are weighted
    with the micro-batch's share of the targets, so that all shares together count once. Other models that return a
    loss return a mean over the targets of their batch; weighted with the shares, these means make the global mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rotorch.core.errors import ConfigError
from rotorch.models.lora import base_of

Batch = Mapping[str, Tensor]
"""One micro-batch: `input_ids` int64 [batch, sequence], and `labels` (shifted inside, as Hugging Face does) or
`shift_labels` (already shifted). Targets of -100 count for nothing. Further entries go to the model as they are."""

LossFn = Callable[[nn.Module, Batch, int], Tensor]
"""`loss(module, batch, num_targets)`: the SUM of the batch's losses divided by the global `num_targets`. If it has an
attribute `count_targets`, that says how many targets a batch has, else `count_targets` of this module does."""


def causal_lm_loss(module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
    """The model's own loss, as Hugging Face's causal language models compute it; nothing added to it is weighted."""
    return module(**_with_labels(batch), num_items_in_batch=num_targets).loss


def count_targets(batch: Batch) -> int:
    """Number of target tokens of one micro-batch, by the same rule that causal language models use."""
    return int(_targets_in(batch))


def _targets_in(batch: Batch) -> Tensor:
    """The same number on the batch's device, 0-dim: nothing waits for its value."""
    if "shift_labels" in batch:
        return (batch["shift_labels"] != -100).sum()
    if "labels" in batch:
        labels = batch["labels"]
        shifted = labels[..., 1:] if labels.dim() > 1 else labels
        return (shifted != -100).sum()
    raise ConfigError(f"batch: needs 'labels' or 'shift_labels', has {sorted(batch)}")


def _share(num_mine: Tensor, num_targets: int, *, loss: Tensor) -> Tensor:
    """A micro-batch's share of all targets, by which its loss is multiplied: in float32 for a loss in bfloat16."""
    return (num_mine.double() / num_targets).to(torch.promote_types(loss.dtype, torch.float32))


def loss_of(module: nn.Module) -> LossFn:
    """The loss of a model that returns one itself: by its kind, a causal language model's or a mean."""
    _, module = base_of(module)
    if _is_causal_lm(module):
        return CausalLMLoss(module) if hasattr(module, "loss_function") else causal_lm_loss
    return OwnMeanLoss()


def _is_causal_lm(module: nn.Module) -> bool:
    generates = getattr(module, "can_generate", None)
    return callable(generates) and generates() and not getattr(module.config, "is_encoder_decoder", False)


def _with_labels(batch: Batch) -> Batch:
    if "shift_labels" in batch and "labels" not in batch:
        return {**batch, "labels": batch["shift_labels"]}  # without `labels` the models return no loss
    return batch


class CausalLMLoss:
    """Loss of a causal language model of Hugging Face: its own, and by shares the terms that it adds to it.

    Listens to the model's `loss_function`, to tell the two apart (see [Note: shares]).

    Args:
        module: the model; its `loss_function` is replaced by one that does the same.

    Attributes:
        adds_terms: the model's last loss had terms beyond that of its tokens.
    """

    def __init__(self, module: nn.Module) -> None:
        self._loss_function = module.loss_function
        self._name = type(module).__name__
        self._heard: list[tuple[Tensor, Tensor, int]] | None = None
        """In the call that is under way: results of `loss_function`, the copies that the model got instead, and the
        copies' versions. None outside of a call, where nobody asks."""
        self.adds_terms = False
        module.loss_function = self._listen

    def _listen(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = self._loss_function(*args, **kwargs)
        if self._heard is None or kwargs.get("num_items_in_batch") is None:
            return loss
        copy = loss.clone()  # models add to it in place
        self._heard.append((loss, copy, copy._version))
        return copy

    def __call__(self, module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
        """The sum of the batch's losses over `num_targets`."""
        heard: list[tuple[Tensor, Tensor, int]] = []
        self._heard = heard
        try:
            loss: Tensor = module(**_with_labels(batch), num_items_in_batch=num_targets).loss
        finally:
            self._heard = None
        if not heard:
            raise ConfigError(
                f"{self._name} computes its loss without num_items_in_batch, so it cannot be summed over ranks. "
                "Write loss=... of your own: loss(module, batch, num_targets) -> the sum of the losses / num_targets"
            )
        of_text, copy, version = heard[-1]
        self.adds_terms = loss is not copy or loss._version != version
        if not self.adds_terms:  # nothing was added; a look at the values would wait for a GPU
            return loss
        return of_text + _share(_targets_in(batch), num_targets, loss=loss) * (loss - of_text)


class OwnMeanLoss:
    """Loss of any model that returns a mean over its targets: weighted with this batch's share of all targets.

    The model is called with the batch's entries by name, and returns its loss as `.loss`, under "loss", or first in a
    tuple. It is a mean over `labels` that are not -100; over rows if labels are no integers or there are none.
    """

    def count_targets(self, batch: Batch) -> int:
        """Number of targets of one micro-batch."""
        labels = batch.get("labels")
        if labels is not None and not labels.is_floating_point():
            return int((labels != -100).sum())
        first = labels if labels is not None else next(iter(batch.values()), None)
        if first is None:
            raise ConfigError("batch: is empty. Write what the model's forward takes, by name")
        return len(first)

    def __call__(self, module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
        """The sum of the batch's losses over `num_targets`."""
        labels = batch.get("labels")
        if labels is None or labels.is_floating_point():
            loss = _loss_in(module(**batch), model=type(module).__name__)
            return loss * (self.count_targets(batch) / num_targets)
        num_mine = (labels != -100).sum()
        # A mean over nothing is no number. This rank takes all steps of a pass as the others do, who wait for it, with
        # a target that counts for nothing.
        labels = labels.clone()
        first = labels.view(-1)[:1]
        first.masked_fill_(num_mine == 0, 0)
        loss = _loss_in(module(**{**batch, "labels": labels}), model=type(module).__name__)
        return loss * _share(num_mine, num_targets, loss=loss)


def _loss_in(output: Any, *, model: str) -> Tensor:
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif not isinstance(output, Tensor):
        found = getattr(output, "loss", output[0] if isinstance(output, tuple) and output else None)
    if not isinstance(found, Tensor) or found.dim() or not found.is_floating_point():
        raise ConfigError(
            f"{model} returns no loss (a {type(output).__name__}). Give the batch what its forward makes one from, or "
            "write loss=... : loss(module, batch, num_targets) -> the sum of the batch's losses / num_targets"
        )
    return found
