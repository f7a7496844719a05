"""Ranks tell each other what they are about to do, so that one that does something else is named instead of awaited.

Before a pass all ranks meet: no weight changes while another rank reads it. A rank that left its loop a batch early, or
calls the model once more than the others, would be waited for until a timeout. So each brings a number that says what
it is about to do, and all see all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.collectives import all_reduce_sum
from rotorch.core.errors import ConfigError


class Doing(IntEnum):
    """What a rank is about to do, or has just done, with one model."""

    FORWARD = 1
    FORWARD_DONE = 2
    LOOK = 3
    LOOK_DONE = 4
    BACKWARD = 5
    BACKWARD_DONE = 6
    STEP = 7
    EVALUATION = 8
    PREDICTION = 9
    NEXT_TOKEN = 10
    CLOSE = 11


_TEXTS = {
    Doing.FORWARD: "calls the model",
    Doing.FORWARD_DONE: "calls the model",
    Doing.LOOK: "calls the model without gradients",
    Doing.LOOK_DONE: "calls the model without gradients",
    Doing.BACKWARD: "calls backward",
    Doing.BACKWARD_DONE: "calls backward",
    Doing.STEP: "calls forward_backward",
    Doing.EVALUATION: "calls evaluate",
    Doing.PREDICTION: "calls predict",
    Doing.NEXT_TOKEN: "asks for the logits of the next token",
    Doing.CLOSE: "closes the model",
}


class RollCall:
    """Where the ranks of one model meet. Every method is called by all of them, in one order.

    Args:
        mesh: the ranks.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._ranks = mesh.mesh.flatten().tolist()
        self._mine = self._ranks.index(mesh.get_rank()) if mesh.size() > 1 else 0
        # Tells the model from others that the ranks have; not from torch's generators, which the user has seeded.
        drawn = float(int.from_bytes(os.urandom(4))) if self._mine == 0 else 0.0
        self._model = float(all_reduce_sum(torch.tensor([drawn], dtype=torch.float64), mesh=mesh))

    def meet(self, doing: Doing, *numbers: float) -> Tensor:
        """Returns after all ranks have come here; every rank's numbers, float64 [ranks, numbers], by place in the mesh.

        Raises:
            ConfigError: some ranks are about to do something else. On all ranks.
        """
        table = torch.zeros(len(self._ranks), 5, dtype=torch.float64)  # as long for all: ranks that differ must meet
        table[self._mine, : 2 + len(numbers)] = torch.tensor((float(doing), self._model, *numbers), dtype=torch.float64)
        all_reduce_sum(table, mesh=self._mesh)
        found = table[:, :2].tolist()
        if any(each != found[0] for each in found):
            self._refuse([Doing(int(doing)) for doing, _ in found])
        return table[:, 2 : 2 + len(numbers)]

    def by_ranks(self, texts: Sequence[str]) -> str:
        """Says what each rank has to say (`texts`, by place in the mesh): those who say the same together."""
        said = {text: [rank for rank, other in zip(self._ranks, texts, strict=True) if other == text] for text in texts}
        return ", ".join(f"{_named(ranks)} {text}" for text, ranks in said.items())

    def _refuse(self, doing: list[Doing]) -> None:
        texts = [_TEXTS[each] for each in doing]
        if len(set(texts)) == 1:
            texts = [f"{text} that is not the others'" for text in texts]
        raise ConfigError(
            f"ranks do different things: {self.by_ranks(texts)}. Give every rank equally many batches, and let all "
            "of them call models, and backward, in the same order"
        )


def _named(ranks: Iterable[int]) -> str:
    """`rank 3`; `ranks 0-2, 5`."""
    ordered = sorted(ranks)
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b != a + 1), ordered[-1]]
    runs = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    return f"rank {runs}" if len(ordered) == 1 else f"ranks {runs}"
