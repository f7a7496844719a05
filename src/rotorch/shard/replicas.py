"""Weights that are whole on every rank of an axis.

A plain twin for passes, a replicated DTensor at rest, one memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from rotorch.comm.collectives import all_reduce_sum
from rotorch.core.spec import Weight
from rotorch.shard.held import HeldWeight, cut_pieces, refuse_unfrozen
from rotorch.shard.sites import Site, find_sites


class Replicas:
    """The replicated weights of one rank.

    Args:
        weights: what to hold whole.
        parameters: the module's own parameters by name; values are taken over from those that have any.
        sites: where each sits.
        mesh: the one-axis mesh whose ranks hold the same.
        device: where to hold them.
        gradients_stay: the twins' gradients lie in the same memory in every step (buckets, sums), so what refers to
            them may be kept from step to step.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        *,
        parameters: Mapping[str, nn.Parameter],
        sites: Mapping[str, tuple[Site, ...]],
        mesh: DeviceMesh,
        device: torch.device,
        gradients_stay: bool,
    ) -> None:
        self._mesh = mesh
        self._gradients_stay = gradients_stay
        self._sites = {w.name: sites[w.name] for w in weights}
        self.twins: dict[str, nn.Parameter] = {}
        self.held: dict[str, HeldWeight] = {}
        self._carried: dict[str, Tensor] = {}
        self._at_rest: dict[str, tuple[int, DTensor]] = {}
        self._sums: dict[torch.dtype, Tensor] = {}
        for weight in weights:
            source = parameters[weight.name]
            value = torch.empty_like(source, device=device) if source.is_meta else source.detach().to(device)
            twin = nn.Parameter(value, requires_grad=source.requires_grad)
            at_rest = nn.Parameter(_replicated(twin.detach(), mesh=mesh), requires_grad=source.requires_grad)
            self.twins[weight.name] = twin
            pieces = cut_pieces(weight, num_slices=1, index=0)
            self.held[weight.name] = HeldWeight(
                weight, twin.detach(), pieces, at_rest, num_holders=mesh.size(), holder=mesh.get_local_rank()
            )
            self.take_back(weight.name)

    @classmethod
    def of_module(
        cls,
        module: nn.Module,
        *,
        weights: Sequence[Weight],
        mesh: DeviceMesh,
        device: torch.device,
        gradients_stay: bool,
    ) -> Replicas:
        """Holds all `weights` of `module` whole."""
        return cls(
            weights,
            parameters=dict(module.named_parameters()),
            sites=find_sites(module),
            mesh=mesh,
            device=device,
            gradients_stay=gradients_stay,
        )

    def lend(self) -> None:
        """Puts the plain twins into the module."""
        for name, sites in self._sites.items():
            for site in sites:
                site.put(self.twins[name])

    def withhold(self, name: str) -> None:
        """Lends nothing for one weight (a bias that is added elsewhere)."""
        for site in self._sites[name]:
            site.put(None)

    def take_back(self, name: str | None = None) -> None:
        """Puts the DTensors back: all, or one."""
        for each in self._sites if name is None else (name,):
            for site in self._sites[each]:
                site.put(self.held[each].parameter)

    def start(self) -> None:
        """Before a step: gradients that the user has not cleared are set aside, to be added at the end.

        Raises:
            ConfigError: a weight that was frozen requires a gradient now.
        """
        for name, twin in self.twins.items():
            if not twin.requires_grad:
                refuse_unfrozen(self.held[name])
        self._carried = {
            name: held.local_grad.clone()  # type: ignore[union-attr]
            for name, held in self.held.items()
            if held.parameter.grad is not None
        }
        for twin in self.twins.values():
            twin.grad = None
        if not self._gradients_stay:
            self._at_rest = {}

    def reduce(self) -> None:
        """Sums the twins' gradients over the axis, all in one message. All ranks of the axis.

        A weight that this rank's passes did not use counts as zeros, since others may have used it; so if none has, its
        gradient is zero and not None, as under torch's DDP.
        """
        if self._mesh.size() == 1:
            return
        trained = [t for t in self.twins.values() if t.requires_grad]
        for dtype in sorted({t.dtype for t in trained}, key=str):
            same = [t for t in trained if t.dtype == dtype]
            if dtype not in self._sums:  # kept, so that gradients stay in one place from step to step
                self._sums[dtype] = torch.empty(sum(t.numel() for t in same), dtype=dtype, device=same[0].device)
            flat = self._sums[dtype]
            parts = [p.view_as(t) for p, t in zip(flat.split([t.numel() for t in same]), same, strict=True)]
            for twin, part in zip(same, parts, strict=True):
                part.zero_() if twin.grad is None else part.copy_(twin.grad)
                twin.grad = part
            all_reduce_sum(flat, mesh=self._mesh)

    def attach(self) -> None:
        """After a step: gives the DTensors the twins' gradients."""
        for name, twin in self.twins.items():
            if twin.grad is None:
                continue
            grad = twin.grad.detach()
            if name in self._carried:
                grad.add_(self._carried.pop(name))
            pointer, known = self._at_rest.get(name, (None, None))
            if pointer != grad.data_ptr():  # mostly the same memory as in the step before
                known = _replicated(grad, mesh=self._mesh)
                self._at_rest[name] = (grad.data_ptr(), known)
            self.held[name].parameter.grad = known
        self._carried = {}


def _replicated(local: Tensor, *, mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(local, mesh, [Replicate()], run_check=False)
