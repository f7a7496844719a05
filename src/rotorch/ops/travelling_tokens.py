"""Experts that stay on their ranks: each rank's pairs of a token and an expert travel to it, and rows come back (fsdp).

[Note: one node each way]
    All that a pair consists of (token, weight, number) travels in one autograd function, and rows come back in another
    one, so backward has the same exchanges in the same order on every rank. A rank to which no pair comes does not call
    the module, but its graph has both functions: in backward other ranks send it nothing and get nothing, and those
    that have its own pairs wait for their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import Function, once_differentiable

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.spec import Cut, Range, Unit
from rotorch.core.whole_experts import WholeExperts
from rotorch.models.routed_pairs import RoutedPairs, with_graph
from rotorch.ops.partial_module import ModuleSlices, Prove, RunOnSlice
from rotorch.shard.sites import Site


class TravellingTokens(ModuleSlices):
    """A module that has this rank's set of experts, and is called with the pairs of all ranks that go to these.

    Args:
        module: the module of experts.
        unit: its description.
        axis_group: the ranks that share the experts.
        sites: places of weights in the module.

    Attributes:
        routed: of the last call, the pairs that this rank sent to others and got from them.
    """

    strategy = "fsdp"

    def __init__(
        self, module: nn.Module, *, unit: Unit, axis_group: AxisGroup, sites: Mapping[str, tuple[Site, ...]]
    ) -> None:
        note = unit.note(WholeExperts)
        assert note is not None
        self._module, self._unit, self._axis_group, self._number = module, unit, axis_group, note.number
        self._places = [sites[weight.name][0] for weight in unit.weights]
        self.num_slices = axis_group.size
        self._sets = [
            Cut(0, note.number).ranges(note.number, num_slices=axis_group.size, index=rank)[0]
            for rank in range(axis_group.size)
        ]
        self.routed = (0, 0)

    @property
    def index(self) -> int:
        return self._axis_group.position

    def own(self) -> list[Tensor] | None:
        return [weight.detach() for place in self._places if (weight := place.get()) is not None]

    def total(self, run: RunOnSlice, leaves: list[Any], prove: Prove) -> list[Tensor]:
        """Runs the module once, on the pairs that come to this rank."""
        pairs = RoutedPairs(self._module, name=self._unit.name, num_experts=self._number, leaves=leaves)
        everyone, mine = Range(0, self._number), self._sets[self.index]
        rows = pairs.rows(leaves, everyone)
        outgoing = [pairs.num_pairs(experts) for experts in self._sets]
        trip = _Trip(self._axis_group, outgoing, _told(self._axis_group, outgoing, like=rows[pairs.tokens_at]))
        self.routed = trip.num_sent, trip.num_received
        arrived = dict(zip(rows, _Travel.apply(trip, *rows.values()), strict=True))
        like_RD = arrived[pairs.tokens_at]
        if sum(trip.incoming):
            output_RD = pairs.call(leaves, arrived, mine, run=lambda given: run(None, given)[0])
        else:
            output_RD = self._nothing(like_RD, arrived.values())
        # All ranks in one dtype: one to which nothing comes cannot know that of the module's output.
        (output_SD,) = _Travel.apply(trip.back(), output_RD.to(like_RD.dtype))
        return [pairs.total(leaves, output_SD, everyone)]

    def _nothing(self, like_RD: Tensor, arrived: Iterable[Tensor]) -> Tensor:
        """An output without rows, with a graph if that of the other ranks has one."""
        weights = (place.get() for place in self._places)
        anchor = next((x for x in (*arrived, *weights) if x is not None and x.requires_grad), None)
        empty_RD = torch.empty_like(like_RD, requires_grad=False)
        return empty_RD if anchor is None else with_graph(empty_RD, anchor)


@dataclass(frozen=True)
class _Trip:
    """Rows that travel between this rank and each other one. All ranks of the group make it.

    Attributes:
        axis_group: the ranks.
        outgoing: number of rows for each rank, by position; they lie one after another.
        incoming: number of rows from each rank.
    """

    axis_group: AxisGroup
    outgoing: Sequence[int]
    incoming: Sequence[int]

    def back(self) -> _Trip:
        """The way back of the same rows."""
        return _Trip(self.axis_group, self.incoming, self.outgoing)

    @property
    def num_sent(self) -> int:
        """Rows that go to other ranks."""
        return sum(self.outgoing) - self.outgoing[self.axis_group.position]

    @property
    def num_received(self) -> int:
        """Rows that come from other ranks."""
        return sum(self.incoming) - self.incoming[self.axis_group.position]

    def made(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sends the rows of some tensors `[rows, ..]`, and returns those that come, one rank's after another's."""
        if len(tensors) == 1:
            return [self._made(tensors[0].contiguous())]
        # Side by side, so that a message has all that belongs to its rows.
        parts = [_bytes_of(tensor) for tensor in tensors]
        came = self._made(torch.cat(parts, dim=1)).split([part.shape[1] for part in parts], dim=1)
        # Cloned, not `contiguous()`: that leaves a single row where it is, at any number of bytes.
        alone = [part.clone(memory_format=torch.contiguous_format) for part in came]
        return [part.view(tensor.dtype) for part, tensor in zip(alone, tensors, strict=True)]

    def _made(self, rows: Tensor) -> Tensor:
        mine = self.axis_group.position
        others = [rank for rank in range(self.axis_group.size) if rank != mine]
        found = rows.new_empty(sum(self.incoming), *rows.shape[1:])
        there, here = rows.split(list(self.outgoing)), found.split(list(self.incoming))
        wait = self.axis_group.swap([there[rank] for rank in others], [here[rank] for rank in others], peers=others)
        here[mine].copy_(there[mine])
        wait()
        return found


class _Travel(Function):
    """Sends rows on a trip; their gradients come back on its way back. Of other tensors no gradient travels."""

    @staticmethod
    def forward(ctx: Any, trip: _Trip, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.trip = trip
        found = trip.made(tensors)
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(tensor for tensor, needs in zip(found, needed, strict=True) if not needs))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        needed = ctx.needs_input_grad[1:]
        wanted = [grad for grad, needs in zip(grads, needed, strict=True) if needs]
        back = iter(ctx.trip.back().made(wanted))
        return None, *(next(back) if needs else None for needs in needed)


def _bytes_of(rows: Tensor) -> Tensor:
    """The bytes of some rows `[rows, n]`, a row of bytes for each."""
    # Flat first: a dim of one element may have any stride.
    return rows.contiguous().view(-1).view(torch.uint8).view(len(rows), rows.shape[1] * rows.element_size())


def _told(axis_group: AxisGroup, outgoing: Sequence[int], *, like: Tensor) -> list[int]:
    """Number of rows that come from each rank, which these ranks tell each other."""
    numbers = torch.tensor(outgoing, dtype=torch.int64, device=like.device).unsqueeze(1)
    once = [1] * axis_group.size
    (told,) = _Trip(axis_group, once, once).made([numbers])
    return [int(number) for number in told.flatten().tolist()]
