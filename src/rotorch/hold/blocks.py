"""This rank's blocks of weights, their gradients in few flat buffers: one for all that sum over the same ranks.

A block may be held by several ranks, and after backward its gradient is summed over those; so all such gradients lie
side by side from the beginning, autograd adds to them in place, and a sum is one message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.line import Line
from rotorch.hold.twins import Part, Twins
from rotorch.shard.sites import Site


class Blocks(Twins):
    """The blocks of one rank.

    Args:
        parts: which part of which weight.
        sums: by name, the lines of ranks over which a gradient is summed, one after another.
        parameters: the module's own parameters by name; values are taken over from those that have any.
        sites: where each sits.
        mesh: the mesh of the DTensors at rest.
        device: where to hold them.
        memory: by name, where to hold a part; the others get memory of their own.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        sums: Mapping[str, tuple[Line, ...]],
        parameters: Mapping[str, nn.Parameter],
        sites: Mapping[str, tuple[Site, ...]],
        mesh: DeviceMesh,
        device: torch.device,
        memory: Mapping[str, Tensor],
    ) -> None:
        super().__init__(
            parts, parameters=parameters, sites=sites, mesh=mesh, device=device, gradients_stay=True, memory=memory
        )
        self._lines = dict(sums)
        self._flat: dict[tuple[tuple[Line, ...], torch.dtype], Tensor] = {}
        self._in_flat: dict[str, Tensor] = {}

    def start(self) -> None:
        """Before a step, as `Twins.start`; what autograd adds to is zero."""
        super().start()
        if not torch.is_grad_enabled():  # an evaluation leaves gradients as they are
            return
        if not self._flat:
            self._lay_out()
        for flat in self._flat.values():
            flat.zero_()
        for name, gradient in self._in_flat.items():
            self.twins[name].grad = gradient

    def _lay_out(self) -> None:
        alike: dict[tuple[tuple[Line, ...], torch.dtype], list[str]] = {}
        for name, twin in self.twins.items():
            if twin.requires_grad:
                alike.setdefault((self._lines[name], twin.dtype), []).append(name)
        for key, names in alike.items():
            sizes = [self.twins[name].numel() for name in names]
            self._flat[key] = torch.empty(sum(sizes), dtype=key[1], device=self.twins[names[0]].device)
            for name, part in zip(names, self._flat[key].split(sizes), strict=True):
                self._in_flat[name] = part.view_as(self.twins[name])

    def sum_gradients(self) -> None:
        """After the last backward: sums each buffer over its ranks. A weight that no pass has used counts as zeros."""
        for (lines, _), flat in self._flat.items():
            for line in lines:
                line.all_reduce(flat)

    def flat_gradients(self) -> list[Tensor]:
        """All of this rank's gradients, in few tensors."""
        return list(self._flat.values())
