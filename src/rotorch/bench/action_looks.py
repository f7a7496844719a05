"""The colours of a pipeline's actions: simulated schedules and measured ones have the same. No torch."""

from __future__ import annotations

from rotorch.pipelining.actions import ActionKind

LOOKS = {
    ActionKind.FORWARD: ("forward", "#4a90c4"),
    ActionKind.BACKWARD: ("both gradients", "#6aa84f"),
    ActionKind.BACKWARD_INPUT: ("input gradient", "#6aa84f"),
    ActionKind.BACKWARD_WEIGHT: ("weight gradient", "#b7a3d0"),
    ActionKind.UNSHARD: ("gather of weights", "#d62728"),
    ActionKind.REDUCE_GRAD: ("sum of gradients", "#ff7f0e"),
    ActionKind.SEND_FORWARD: ("output under way", "#e8a0a0"),
    ActionKind.SEND_BACKWARD: ("gradient under way", "#f5c58c"),
}
"""By kind, in the order of drawing: its name and its colour."""

_PALEST = 0.55


def shade(kind: ActionKind, chunk: int, *, num_chunks: int) -> str:
    """The colour of a kind, paler for later chunks."""
    colour = LOOKS[kind][1]
    part = _PALEST * chunk / max(1, num_chunks - 1)
    values = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(value + part * (255 - value)):02x}" for value in values)
