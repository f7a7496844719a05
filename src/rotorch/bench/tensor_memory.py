"""Exact bytes of the tensors of one rank: at rest, and at the peak of a step, by category (traced/live_storages.py)."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from rotorch.bench.contender import Contender
from rotorch.shard.storages import PLAIN, owned_bytes
from rotorch.traced.live_storages import GRADIENTS, LOGITS, OPTIMIZER, SLOTS, WEIGHTS, LiveStorages


@dataclass(frozen=True)
class TensorMemory:
    """Memory that one rank holds in tensors.

    Attributes:
        resident: bytes at rest by category (weights, gradients, optimizer).
        peak_bytes: most bytes alive at one moment of a step, all categories.
        peak: the same moment, by category.
        highest: the most of each category that was alive at any moment, each at its own.
        other: bytes of "other" at the peak, by the operation that made them ("backward aten.mm"); the largest few.
        slots_bytes: of the buffers that slices pass through, which are there from step to step.
    """

    resident: dict[str, int]
    peak_bytes: int
    peak: dict[str, int]
    highest: dict[str, int] = field(default_factory=dict)
    other: dict[str, int] = field(default_factory=dict)
    slots_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """Weights, gradients and optimizer state together."""
        return sum(self.resident.values())


def measure_tensors(contender: Contender, *, step: int) -> TensorMemory:
    """Runs one step of `contender` and measures it. Steps before it have filled the optimizer's state."""
    gc.collect()
    live = LiveStorages()
    with live, _head_named(contender.module, live):
        contender.forward_backward(step)
        owned = {
            WEIGHTS: [*contender.weights(), *contender.copies()],
            GRADIENTS: contender.gradients(),
            OPTIMIZER: contender.optimizer_state(),
        }
        for category, tensors in owned.items():
            live.name(tensors, category=category)
        resident = {category: owned_bytes(tensors) for category, tensors in owned.items()}
        slots = contender.slots()
        live.name(slots, category=SLOTS)
        slots_bytes = owned_bytes(slots)
        del owned, tensors, slots
        contender.update()
    return TensorMemory(resident, *live.peak(), live.highest(), live.other_at_peak(), slots_bytes)


@contextmanager
def _head_named(module: nn.Module, live: LiveStorages) -> Iterator[None]:
    """Counts the outputs of a Hugging Face model's head as logits, if they are plain tensors.

    Heard of all modules, since a head with a hook of its own gives real logits (`real_for_hooks`): those of the whole
    vocabulary, in place of the slices that are to be measured.
    """
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None

    def name(called: nn.Module, _: Any, output: Any) -> None:
        if called is head and type(output) in PLAIN:
            live.name([output], category=LOGITS)

    handle = register_module_forward_hook(name)
    try:
        yield
    finally:
        handle.remove()
