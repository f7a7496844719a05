"""Weights that are whole on every rank of an axis.

A plain twin for passes, a replicated DTensor at rest, one memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rotorch.core.spec import Weight
from rotorch.hold.twins import Twins, whole_part
from rotorch.shard.sites import Site, find_sites


class Replicas(Twins):
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
        super().__init__(
            [whole_part(weight, mesh=mesh) for weight in weights],
            parameters=parameters,
            sites=sites,
            mesh=mesh,
            device=device,
            gradients_stay=gradients_stay,
        )

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

    def withhold(self, name: str) -> None:
        """Lends nothing for one weight (a bias that is added elsewhere)."""
        self.lend_instead(name, None)
