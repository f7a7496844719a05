"""Experts that stay on their ranks under `fsdp`, to which tokens travel (`ops/travelling_tokens.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from rotorch.comm.axis_group import AxisGroup
from rotorch.core.spec import Unit
from rotorch.hold.setup import Setup
from rotorch.ops.partial_module import PartialModule
from rotorch.ops.travelling_tokens import TravellingTokens


def send_tokens_to_experts(
    setup: Setup, units: Sequence[Unit], *, axis_group: AxisGroup, leaves: Mapping[str, Tensor]
) -> dict[str, TravellingTokens]:
    """Has tokens travel to experts that stay on their ranks; by the name of the module of experts.

    Args:
        setup: of the strategy.
        units: of whole experts.
        axis_group: the ranks that share them.
        leaves: the tensors that passes compute with, by the weight's name.
    """
    found: dict[str, TravellingTokens] = {}
    for unit in units:
        module = setup.module.get_submodule(unit.name)
        found[unit.name] = TravellingTokens(module, unit=unit, axis_group=axis_group, sites=setup.sites)
        PartialModule(
            module,
            unit=unit,
            slices=found[unit.name],
            sites=setup.sites,
            once=leaves.__getitem__,
            proven=True,  # by the trial that found the unit
            compiled=False,
        )
    return found


def pairs_that_travelled(experts: Mapping[str, TravellingTokens]) -> tuple[tuple[str, int, int], ...]:
    """Of the last pass, what `ShardedModel.routed` says."""
    return tuple((name, *tokens.routed) for name, tokens in experts.items())
