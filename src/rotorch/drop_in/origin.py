"""A parallel module made once more: as a copy beside it, and in place with the adapters that peft has put into it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from rotorch._torch_private import forget_fully_sharded
from rotorch.comm.collectives import all_reduce_sum
from rotorch.comm.roll_call import ModelCall
from rotorch.drop_in.changes import Changes
from rotorch.models.lora import put_adapters_in_again
from rotorch.parallel_model import ParallelModel
from rotorch.shard.in_chunks import fill_part
from rotorch.shard.recipes import set_recipe
from rotorch.shard.sites import Site, find_sites


class Origin:
    """The way back to a module before `parallelize`, and to a parallel one made of it in the same way.

    Args:
        changes: those of `parallelize` in the module.
        again: `parallelize` with the arguments of then; makes a module parallel in place. All ranks call it.
    """

    def __init__(self, changes: Changes, again: Callable[[nn.Module], Any]) -> None:
        self._changes, self._parallelize = changes, again

    def _again(self, plain: nn.Module) -> Any:
        for parameter in plain.parameters():
            if parameter.is_meta:
                set_recipe(parameter, [])  # values come from elsewhere; else initialisation would run, over buffers too
        return self._parallelize(plain)

    @torch.no_grad()
    def copy(self, module: nn.Module, model: ParallelModel, memo: dict[int, Any]) -> Any:
        """A parallel module of its own with the same values, cut alike. All ranks; each copies its own parts.

        Args:
            module: the parallel module, at rest.
            model: its weights.
            memo: of `copy.deepcopy`.
        """
        model.meet_at_rest(ModelCall.COPY)
        put_back = self._changes.leave_out(module)
        try:
            plain = copy.deepcopy(module, memo)
        finally:
            put_back()
        made = self._again(plain)
        theirs: ParallelModel = made.parallel
        for name, held in model.weights.items():
            theirs.weights[name].local.copy_(held.local)
            memo[id(held.parameter)] = theirs.weights[name].parameter  # of an optimizer that is copied with the model
        theirs.values_changed()
        return made

    def as_given(self) -> AbstractContextManager[None]:
        """A context in which the module's configuration is the one before `parallelize`, as it is published."""
        return self._changes.caches_on()

    @torch.no_grad()
    def take_adapters(self, module: nn.Module, model: ParallelModel, configs: Mapping[str, Any]) -> None:
        """Makes a module parallel once more, with the adapters that peft has put into it, in place. All ranks.

        Adapters begin with the first rank's values: ranks whose generators differ have drawn different ones. Until it
        returns, ranks hold the old parts of the weights beside the new ones.

        Args:
            module: the parallel module, at rest, and peft's layers in it.
            model: its weights.
            configs: peft's, by the adapters' names.

        Raises:
            ConfigError: adapters that ranks cannot train. The module is then as it was, with idle adapters in it.
        """
        model.meet_at_rest(ModelCall.ADAPTERS)
        names = {id(held.parameter): name for name, held in model.weights.items()}
        before = {
            (id(s.module), s.attribute): names.get(id(s.get())) for sites in find_sites(module).values() for s in sites
        }
        is_first = not any(model.mesh.get_coordinate() or [0])
        remember = forget_fully_sharded(module)
        put_back = self._changes.leave_out(module)
        try:
            with _filled(module, device=model.device):
                put_adapters_in_again(module, configs)
            for parameter in module.parameters():
                if not parameter.is_meta:
                    all_reduce_sum(parameter.data if is_first else parameter.data.zero_(), mesh=model.mesh)
            made: ParallelModel = self._again(module).parallel
        except BaseException:
            put_back()
            remember()
            raise
        for name, sites in find_sites(module).items():
            held, old = made.weights[name], before.get((id(sites[0].module), sites[0].attribute))
            if old is None:
                continue  # an adapter's, which has its values
            fill_part(held.local, held.chunks, model.full_tensor(old))
        made.values_changed()
        model.close()


@contextmanager
def _filled(module: nn.Module, *, device: torch.device) -> Iterator[None]:
    """Gives weights on meta a device, with memory of one element: peft puts adapters where the weights are."""
    found: list[tuple[Site, nn.Parameter, nn.Parameter]] = []
    for sites in find_sites(module).values():
        weight = sites[0].get()
        if isinstance(weight, nn.Parameter) and weight.is_meta:
            number = torch.zeros((), dtype=weight.dtype, device=device)
            filled = nn.Parameter(number.expand(weight.shape), weight.requires_grad)
            found += [(site, weight, filled) for site in sites]
    for site, _, filled in found:
        site.put(filled)
    yield
    for site, weight, filled in found:
        site.put(weight.requires_grad_(filled.requires_grad))  # peft has frozen it
