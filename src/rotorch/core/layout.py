"""Memory and traffic of one unit on one rank under a strategy, in bytes: the one place of the formulas.

The planner sums Layouts, `apply.py` cuts by them, the conformance tests hold measured bytes against them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from rotorch.core.spec import Unit
from rotorch.core.traffic import Kind, Transfer


@dataclass(frozen=True)
class Layout:
    """Bytes of one unit on one rank. Gradients and optimizer state are as large as the resident weights times a factor.

    Attributes:
        resident_bytes: weights that this rank holds at rest.
        transient_bytes: further memory of its forward and backward at their peak (slots, gathered copies).
        slots_bytes: the part of these that stays from step to step: buffers that slices or blocks pass through.
        transfers: this rank's messages in one step of one micro-batch.
        padding_bytes: memory of its weights at rest beyond themselves: room for larger slices that take their place, or
            for weights that are borrowed from another rank, and their gradients.
        copies_bytes: copies of its weights, in the dtype of passes, that stay from step to step.
        outbox_bytes: the part of `slots_bytes` that slices are sent from, which is as large as the largest slice, where
            slots are as large as the largest visit.
    """

    resident_bytes: int
    transient_bytes: int = 0
    transfers: tuple[Transfer, ...] = field(default=())
    slots_bytes: int = 0
    padding_bytes: int = 0
    copies_bytes: int = 0
    outbox_bytes: int = 0

    def sent_bytes(self, *, kind: Kind | None = None) -> int:
        return sum(t.sent_bytes for t in self.transfers if kind is None or t.kind is kind)


def copies_beside(unit: Unit, *, layout_of: Callable[[Unit], Layout]) -> int:
    """Bytes of copies of the shards of a unit, in the dtype of passes, one of each; 0 if passes need none."""
    copied = tuple(weight for weight in unit.weights if weight.copy_itemsize)
    if not copied:
        return 0
    held = layout_of(unit if len(copied) == len(unit.weights) else replace(unit, weights=copied)).resident_bytes
    return held // copied[0].itemsize * copied[0].itemsize_in_pass


def combine_layouts(layouts: Iterable[Layout]) -> Layout:
    """Layout of several units together.

    Residents, their padding, copies and traffic add up, transients share their buffers (the largest counts).
    """
    resident, transient, slots, padding, copies, outbox = 0, 0, 0, 0, 0, 0
    transfers: list[Transfer] = []
    for layout in layouts:
        resident += layout.resident_bytes
        transient = max(transient, layout.transient_bytes - layout.outbox_bytes)
        slots = max(slots, layout.slots_bytes - layout.outbox_bytes)
        outbox = max(outbox, layout.outbox_bytes)
        padding += layout.padding_bytes
        copies += layout.copies_bytes
        transfers.extend(layout.transfers)
    return Layout(resident, transient + outbox, tuple(transfers), slots + outbox, padding, copies, outbox)
