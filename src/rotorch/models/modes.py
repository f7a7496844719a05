"""Training and evaluation mode of a module and its parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; then each part has its own mode again: some may be in evaluation mode for good."""
    training, parts = module.training, [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        module.train(training)  # a class may do more there than set a flag
        for part, was_training in parts:
            part.training = was_training
