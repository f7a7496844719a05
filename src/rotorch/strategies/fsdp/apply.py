"""The `fsdp` strategy's hold on a model: torch's `fully_shard` on every decoder block and on the root."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rotorch._torch_private import before_sums_of_gradients, tree_flatten, tree_unflatten
from rotorch.comm.axis_group import AxisGroup
from rotorch.core.whole_experts import WholeExperts, check_not_compiled
from rotorch.core.whole_units import is_whole
from rotorch.hold.early_sums import Part, SumLater
from rotorch.hold.gathered_layers import GatheredLayers, called_while_sharded, used_outside_of_its_block
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_model import ShardedModel, SimpleShardedModel
from rotorch.hold.sharded_weights import ShardPlacement
from rotorch.hold.stage_shards import StageShards, StageSlices
from rotorch.hold.whole_experts import pairs_that_travelled, send_tokens_to_experts
from rotorch.mesh import sum_in_one_message
from rotorch.models.blocks import recompute_blocks, repeated_blocks
from rotorch.shard.sharded_weight import ShardedWeight


class FSDPModel(ShardedModel):
    """The model under `fully_shard`: gathered block by block for a pass, sharded along dim 0 at rest."""

    calls_start_at_root = True

    def __init__(self, setup: Setup) -> None:
        module, mesh, strategy = setup.module, setup.mesh, setup.strategy
        self._module = module
        self.loss_scale = float(mesh.size())  # fully_shard averages; the rule here is to sum
        # Gradients are summed in float32, the weights' own: torch's default would be that of the passes.
        precision = MixedPrecisionPolicy(
            param_dtype=setup.param_dtype, reduce_dtype=None if setup.param_dtype is None else torch.float32
        )
        on_meta = any(p.is_meta for p in module.parameters())
        whole = [unit for unit in setup.spec.units if is_whole(unit)]
        experts = [unit for unit in setup.spec.units if unit.note(WholeExperts) and not is_whole(unit)]
        check_not_compiled(setup.spec, kind="fsdp", compiled=bool(setup.compiled))
        placements = [ShardPlacement.whole(weight, mesh=mesh) for unit in whole for weight in unit.weights]
        placements += [ShardPlacement.slice_of(weight, mesh=mesh) for unit in experts for weight in unit.weights]
        self._beside = setup.shards(placements)
        self._summed = [weight.name for unit in whole for weight in unit.weights]
        axis_group = AxisGroup.along(mesh, "fsdp")
        self._travelling = send_tokens_to_experts(setup, experts, axis_group=axis_group, leaves=self._beside.leaves)
        ignored = {held.parameter for held in self._beside.held.values()}
        options = {"reshard_after_forward": strategy.reshard, "mp_policy": precision}
        for block in repeated_blocks(module):
            block.register_forward_hook(_return_no_views)
            fully_shard(block, mesh=mesh, ignored_params=ignored, **options)
            before_sums_of_gradients(block, self._note_reached)
        module.register_forward_hook(_return_no_views)
        # Whole until backward ends, as torch has it: what is outside of blocks is needed at both ends of a pass.
        fully_shard(module, mesh=mesh, ignored_params=ignored, mp_policy=precision, reshard_after_forward=False)
        before_sums_of_gradients(module, self._note_reached)
        self._has_begun = False
        module.register_forward_pre_hook(self._begin)  # behind torch's own, which makes what `_recover` resets
        if on_meta:
            # _apply is what nn.Module.to_empty calls; here only parameters that have no memory yet get some.
            module._apply(lambda t: torch.empty_like(t, device=setup.device) if t.is_meta else t.to(setup.device))
        self.weights = {}
        for weight in setup.spec.weights:
            if weight.name in self._beside.held:
                self.weights[weight.name] = self._beside.held[weight.name]
                continue
            parameter = setup.sites[weight.name][0].get()
            if not isinstance(parameter, DTensor):
                raise AssertionError(f"{weight.name} is no DTensor under fully_shard")
            local = parameter.to_local().detach()
            chunks = ShardPlacement.rows_of(weight, mesh=mesh).chunks
            self.weights[weight.name] = ShardedWeight(weight, local, chunks, parameter)
        self._names = {id(held.parameter): name for name, held in self.weights.items()}
        self._reached: set[str] = set()
        """Names of weights that a backward of this step has given a gradient."""
        self._sums_come: set[str] = set()
        """Names of those whose gradients fully_shard is summing, which it then gives to the parameters."""
        self._for_calls = False
        self._blocks = setup.spec.weights_of_blocks()
        self._named_blocks = [(name, module.get_submodule(name)) for name in setup.spec.blocks]
        self._in_parts: set[str] = set()
        """Weights whose gradients are sent by `early_sums` in parts."""

    @contextmanager
    def unsharded(self) -> Iterator[nn.Module]:
        try:
            with self._beside.unsharded():
                yield self._module
        except BaseException as error:
            part = called_while_sharded(self._module, error)
            self._recover()
            if part:
                raise used_outside_of_its_block(part) from error
            raise
        finally:
            for child in self._module.modules():  # a pass without backward, or one that raised, leaves blocks gathered
                if isinstance(child, FSDPModule):
                    child.reshard()

    @contextmanager
    def unsharded_for_calls(self) -> Iterator[nn.Module]:
        self._for_calls = True
        try:
            with self.unsharded() as module:
                yield module
        finally:
            self._for_calls = False

    def start(self) -> None:
        self._reached, self._sums_come = set(), set()
        self._beside.start()

    def _note_reached(self, group: list[tuple[Tensor, nn.Parameter]]) -> None:
        """Gives weights that this rank's backward has not reached zeros: another rank's may have reached them."""
        self._sums_come.update(self._names[id(at_rest)] for at_rest, _ in group)
        for at_rest, whole in group:
            if whole.grad is None:
                whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)
            else:
                self._reached.add(self._names[id(at_rest)])

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        with super().micro_batch(last=last):
            # Called by fully_shard behind its sums, and by autograd where a penalty uses weights at rest. Hooks that
            # are found between steps count as a user's.
            watched = [self.weights[name].parameter for name in self._in_parts] if last else []
            handles = [p.register_post_accumulate_grad_hook(self._note_summed) for p in watched if p.requires_grad]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()

    def _note_summed(self, at_rest: Tensor) -> None:
        name = self._names[id(at_rest)]
        if name in self._sums_come:
            self._sums_come.discard(name)
        elif self._for_calls:  # called by autograd; what it adds there is kept apart (drop_in/calls.py)
            return
        assert self.early_sums is not None
        self.early_sums.added(name)
        self.early_sums.leave()

    def _note_forward(self, block: str, *_: Any) -> None:
        assert self.early_sums is not None
        self.early_sums.used(block)

    def _parts(self, sum_later: SumLater) -> list[Part]:
        for name, block in self._named_blocks:
            block.register_forward_pre_hook(partial(self._note_forward, name))
        trained = {n for n, held in self.weights.items() if held.parameter.requires_grad} - self._beside.held.keys()
        blocks = [tuple(n for n in names if n in trained) for names in reversed(self._blocks)]
        self._in_parts = {name for names in blocks for name in names}
        return [Part(names, partial(self._gradients_of, names), sum_later) for names in blocks if names]

    def _gradients_of(self, names: Iterable[str]) -> list[Tensor]:
        return [grad for name in names if (grad := self.weights[name].local_grad) is not None]

    def _gradients_behind_backward(self) -> list[Tensor]:
        return self._gradients_of(name for name in self.weights if name not in self._in_parts)

    def unused(self) -> list[str]:
        trained = (name for name in self._names.values() if self.weights[name].parameter.requires_grad)
        return [name for name in trained if name not in self._beside.held and name not in self._reached] + (
            self._beside.unused()
        )

    def finish(self) -> None:
        if self._travelling:  # no token of this step may have come to this rank's experts, and some to others'
            self._beside.unused_count_as_zero()
        self._beside.reduce(self._summed)
        for leaf in self._beside.leaves.values():
            if leaf.grad is not None:
                leaf.grad.div_(self.loss_scale)  # those of shards are averaged, and the loss scaled for it
        self._beside.finish()

    @property
    def routed(self) -> tuple[tuple[str, int, int], ...]:
        return pairs_that_travelled(self._travelling)

    def _recover(self) -> None:
        """Resets torch's state after an exception in the middle of a pass, since it still expects the rest of it."""
        for parameter in self._module.parameters():
            if not isinstance(parameter, DTensor):
                parameter.grad = None  # gathered, its gradient not reduced: it would count in the next step
        if self._has_begun:
            self._module.reset_iter_state()
            for name, held in self.weights.items():  # which torch 2.13 leaves as a broken backward has them
                if name not in self._beside.held:
                    held.parameter.grad = None

    def _begin(self, *_: Any) -> None:
        self._has_begun = True


def _return_no_views(_: nn.Module, __: Any, output: Any) -> Any:
    """Copies outputs that are views: a write into a view would lose the hook that gathers in backward."""
    leaves, tree = tree_flatten(output)
    views = [isinstance(leaf, Tensor) and leaf.requires_grad and leaf._is_view() for leaf in leaves]
    if not any(views):
        return output
    return tree_unflatten([leaf.clone() if view else leaf for leaf, view in zip(leaves, views, strict=True)], tree)


def apply(setup: Setup) -> ShardedModel:
    """Shards the model, or what another strategy's ranks hold of it; in a pipeline stages, gathered when it says so."""
    if setup.inner is not None:
        return _around(setup, setup.inner)
    setup.prepare_blocks()
    if any(unit.stages for unit in setup.spec.units):
        return StageShards(setup, spec=setup.spec, mesh=setup.mesh, reshard=setup.strategy.reshard)
    return FSDPModel(setup)


def _around(setup: Setup, inner: ShardedModel) -> ShardedModel:
    """Gathers the inner strategy's shards by blocks, or by stages; compiling is that one's affair."""
    if not isinstance(inner, SimpleShardedModel):
        raise AssertionError(f"{setup.strategy} is around a model whose shards it cannot share")
    sum_in_one_message(setup.mesh if setup.inside is None else setup.inside, device=setup.device)
    if setup.strategy.recomputes_layers:
        recompute_blocks(setup.module, strategy=setup.strategy.kind, contexts=inner.computed_again)
    if any(unit.stages for unit in setup.spec.units):
        return StageSlices(inner, reshard=setup.strategy.reshard)
    return GatheredLayers(inner, spec=setup.spec, reshard=setup.strategy.reshard)
