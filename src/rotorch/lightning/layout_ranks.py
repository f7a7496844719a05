"""Ranks of a layout as Lightning asks for them; what its strategies for `Fabric` and `Trainer` have in common.

[Note: shares and ranks]
    Lightning gives each rank a batch of its own. Ranks of a layout may share one (megatron, atp, grids), so samplers
    count shares of a batch, and what is summed or gathered counts each share once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.collectives import all_reduce_sum, barrier, gather_objects
from rotorch.core.errors import ConfigError
from rotorch.core.strategy import Strategy
from rotorch.drop_in.plain_loops import check_plain_loop
from rotorch.mesh import batch_position, check_world_size, local_gpu, make_mesh
from rotorch.strategies import parse_parallel

_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")


class LayoutRanks:
    """Goes before a `ParallelStrategy` of Lightning's, whose ranks torchrun has started."""

    layout: tuple[Strategy, ...]
    is_distributed = True
    num_nodes = 1

    _mesh: DeviceMesh | None = None
    _environment: Any = None
    _first_of_shares: tuple[int, ...] = (0,)
    _share: int = 0

    def _take_layout(self, layout: str | Sequence[Strategy]) -> None:
        who = f"rotorch.lightning.{type(self).__name__}"
        self.layout = tuple(parse_parallel(layout) if isinstance(layout, str) else layout)
        check_plain_loop(self.layout, who=who)
        check_world_size(self.layout, world_size=int(os.environ.get("WORLD_SIZE", "1")))

    def _check_precision(self, precision: Any) -> None:
        """Raises `ConfigError` for a precision that cannot be right under a layout; Lightning's plugins name theirs."""
        name = getattr(precision, "precision", "32-true")
        if name not in _PRECISIONS:
            raise ConfigError(
                f"rotorch.lightning.{type(self).__name__}: precision={name!r} is not tried under a layout. Write one "
                f"of {', '.join(_PRECISIONS)}"
            )

    @property
    def cluster_environment(self) -> Any:
        """Ranks by torchrun's variables, set by any launcher; Lightning starts no processes."""
        return TorchElasticEnvironment() if "RANK" in os.environ else self._environment

    @cluster_environment.setter
    def cluster_environment(self, environment: Any) -> None:
        self._environment = environment

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        devices: Any = getattr(self, "parallel_devices", None)
        if not devices or devices[0].type != "cuda":
            return torch.device("cpu")
        return local_gpu()

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks; there from `setup_environment` on."""
        assert self._mesh is not None, "Lightning calls setup_environment first"
        return self._mesh

    @property
    def num_shares(self) -> int:
        """Number of shares of a global batch."""
        return len(self._first_of_shares)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of a `DistributedSampler` that gives each share its rows."""
        return {"num_replicas": self.num_shares, "rank": self._share}

    def set_world_ranks(self) -> None:
        """Tells Lightning which rank prints."""
        vars(rank_zero_only)["rank"] = int(os.environ.get("RANK", "0"))

    _set_world_ranks = set_world_ranks  # Fabric's name of it

    def _join(self) -> None:
        """Makes the mesh of all ranks. All ranks."""
        self.set_world_ranks()
        self._mesh = make_mesh(self.layout, device=self.root_device)
        sizes = {axis: size for strategy in self.layout for axis, size in strategy.axes.items()}
        coordinate = dict(zip(sizes, self._mesh.get_coordinate() or [0] * len(sizes), strict=True))
        self._share, num_shares = batch_position(self.layout, coordinate)
        shares = gather_objects(self._share, mesh=self._mesh)
        self._first_of_shares = tuple(shares.index(share) for share in range(num_shares))

    # ---------------------------------------------------------------- between ranks

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Returns after all ranks have come here."""
        if self._mesh is not None:
            barrier(mesh=self._mesh)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns rank `src`'s object."""
        return obj if self._mesh is None else gather_objects(obj, mesh=self._mesh)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns True if all ranks, or any of them, say so."""
        said = [decision] if self._mesh is None else gather_objects(bool(decision), mesh=self._mesh)
        return min(said) if all else max(said)

    def _reduced(self, tensor: Any, reduce_op: Any) -> Any:
        """The sum, mean, maximum or minimum over shares, each counted once."""
        if not isinstance(tensor, Tensor) or self._mesh is None:
            return tensor
        name = (
            reduce_op if isinstance(reduce_op, str) else str(getattr(reduce_op, "name", reduce_op)).rpartition(".")[2]
        )
        match name.lower():
            case "mean" | "avg":
                return all_reduce_sum(_own(tensor), mesh=self._mesh) / self._mesh.size()
            case "sum":
                ranks_each = self._mesh.size() // self.num_shares
                total = all_reduce_sum(_own(tensor), mesh=self._mesh)
                return total / ranks_each if total.is_floating_point() else total // ranks_each
            case "max" | "min" as which:
                found = torch.stack([t.to(tensor.device) for t in gather_objects(_own(tensor).cpu(), mesh=self._mesh)])
                return found.amax(0) if which == "max" else found.amin(0)
        raise ConfigError(f"rotorch.lightning: reduce_op={name!r} is not known. Write mean, sum, max or min")

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Tensors of all shares, along a new first dim."""
        found: Tensor = super().all_gather(tensor, group=group, sync_grads=sync_grads)  # type: ignore[misc]
        if self._mesh is None or self.num_shares == self._mesh.size():
            return found
        return found[list(self._first_of_shares)]


def _own(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().contiguous()
