"""`parallelize`: makes an unmodified model parallel, in place, by a text such as "ddp=2,rtp=4"."""

from __future__ import annotations

import functools
import importlib
import logging
import warnings
from collections.abc import Iterable, Sequence
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from torch import nn

from rotorch._torch_private import import_what_steps_need
from rotorch.comm.collectives import open_shared_reduces
from rotorch.core.compiling import RECORDED, Compile
from rotorch.core.errors import ConfigError
from rotorch.core.spec import ModelSpec
from rotorch.core.strategy import Strategy
from rotorch.drop_in.changes import Changes
from rotorch.drop_in.left_parameters import mark_left
from rotorch.drop_in.module import make_parallel
from rotorch.drop_in.origin import Origin
from rotorch.hold.sequence_ranks import share_sequences
from rotorch.hold.setup import Setup
from rotorch.hold.sharded_model import ShardedModel
from rotorch.mesh import compare_over_ranks, flat_position, join_process_group, make_mesh, pick_device
from rotorch.models.checks import make_stateless, refuse_layerdrop, refuse_wrapped, slow_products
from rotorch.models.compiled import check_compiler, check_mode
from rotorch.models.describe import describe
from rotorch.models.hf import Plan
from rotorch.models.lora import base_of
from rotorch.models.losses import LossFn, loss_of
from rotorch.models.packed_rows import look_once
from rotorch.models.settings import settings_of
from rotorch.models.shared_memory import refuse_shared_memory
from rotorch.models.shared_sequence import refuse_attentions
from rotorch.models.trial.shared_sequence import try_shared, why_loss_stays_whole
from rotorch.parallel_model import ParallelModel
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.process.forking import start_autograd
from rotorch.process.gloo_threads import let_computing_go_first
from rotorch.process.host_memory import keep_freed_memory
from rotorch.shard.given_values import first_that_differs
from rotorch.shard.materialize import take_recipes
from rotorch.shard.sites import find_sites
from rotorch.strategies import (
    STRATEGIES,
    check_compiled,
    check_composition,
    cuts_context,
    cuts_features,
    cuts_tokens,
    format_parallel,
    parse_parallel,
    written_out,
)

_log = logging.getLogger(__name__)


def parallelize(
    module: nn.Module,
    parallel: str | Sequence[Strategy],
    *,
    device: str | torch.device = "auto",
    plan: Plan | None = None,
    loss: LossFn | None = None,
    autocast_dtype: torch.dtype | None = None,
    param_dtype: torch.dtype | None = None,
    compile: Compile = False,
) -> ParallelModel:
    """Spreads `module` over the ranks of this job. All ranks call it, with the same arguments.

    The module's forward code, names and hooks stay. Parameters on `meta` (see `rotorch.on_meta`)
    get memory for this rank's part only, and values from `ParallelModel.materialize` or `.load`; parameters that have
    values keep this rank's part of them.

    Args:
        module: a Hugging Face model, or any other module.
        parallel: `"rtp=2"`, `"ddp=2,rtp=4[recompute=slice]"`, or strategies such as `[DDP(size=2), RTP(size=4)]`,
            outermost first.
        device: "auto", "cpu" or "cuda".
        plan: map from name patterns to roles: `{"layers.*.up": "colwise", "layers.*.down": "rowwise"}`. The default is
            the model's own plan; a module without a plan is cut by rules over its layers (`models/rules.py`).
        loss: function from a batch to its loss; the default is the loss that the model returns (`models/losses.py`): a
            causal language model's, or a mean over `labels`.
        autocast_dtype: run forward passes under `torch.autocast` with this dtype. Weights at rest and gradients keep
            the module's own; visiting slices travel and compute in this one.
        param_dtype: compute with copies of the weights in this dtype, without autocast, as FSDP2 does by
            `MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32)`: all activations have it, but for
            operations that the model's own code runs in float32, and floating-point inputs are converted to it. Weights
            at rest, gradients and their sums keep the module's own dtype.
        compile: run blocks (under rtp: attentions and MLPs, a slice at a time) by torch.compile, one graph for all of
            a kind. The first step takes long. "reduce-overhead", of rtp on GPUs with shapes that stay: each visit's
            pass is recorded as a CUDA graph, too, and is one launch when each micro-batch of a step has been seen
            twice. Each visit whose graph is kept copies its unit's input: best with `recompute=slice`. On CPU nothing
            is recorded. No GPU has run this yet.

    On CPU, the process keeps freed memory from now on (`process/host_memory.py`), unless its allocator is set up by
    environment variables, and the threads that carry gloo's messages yield to computation
    (`process/gloo_threads.py`). A strategy whose options change the model (`Strategy.changes_the_model`) is told of in
    the log, by one rank.

    Raises:
        ConfigError: unknown strategy or composition, sizes that do not multiply to the number of ranks, a model that
            a strategy cannot hold; ranks with different layouts or models (then on all ranks).
    """
    strategies = parse_parallel(parallel) if isinstance(parallel, str) else written_out(parallel)
    check_composition(strategies)
    compile = check_mode(compile)
    if param_dtype is not None:
        _check_param_dtype(param_dtype, autocast_dtype=autocast_dtype)
    if compile:
        check_compiled(strategies, recorded=compile == RECORDED)
    if cuts_context(strategies):
        _check_context(module, strategies, compile=bool(compile))
    refuse_wrapped(module)
    if any(strategy.cuts_weights for strategy in strategies):
        refuse_layerdrop(module)
        refuse_shared_memory(module)
    spec = describe(
        module,
        plan=plan,
        features=cuts_features(strategies),
        tokens=cuts_tokens(strategies),
        context=cuts_context(strategies),
    )
    autocast, of_passes = _name(autocast_dtype), _name(autocast_dtype or param_dtype)
    if param_dtype is not None:
        spec = spec.with_copies(param_dtype.itemsize)
    on = pick_device(device) if isinstance(device, str) else device
    strategies = tuple(strategy.at_precision(of_passes).on_device(on.type) for strategy in strategies)
    for strategy in strategies:
        strategy.check(spec)
        spec = strategy.units_of(spec)
    if cuts_context(strategies):
        check_context_loss(module, loss)
    if compile:
        check_compiler(on.type)
    if on.type == "cpu":
        keep_freed_memory()
    join_process_group(device=on)
    compare_over_ranks(
        {
            "the layout": format_parallel(strategies),
            "device": on.type,
            "autocast_dtype": autocast,
            "param_dtype": _name(param_dtype),
            "compile": compile,
            **_described(module, spec),
        },
        device=on,
    )
    before, changes = list(module.parameters()), Changes(module)
    mesh = make_mesh(strategies, device=on)
    open_shared_reduces(mesh, device=on)
    if mesh.get_rank() == 0:
        _tell_of_changes(strategies)
        of_products = {autocast_dtype or param_dtype or p.dtype for p in before if p.dim() > 1}
        if warning := slow_products(of_products, device_type=on.type):
            _log.warning(warning)
    if (differs := first_that_differs(module, mesh=mesh)) is not None:
        warnings.warn(
            f"parallelize: ranks were given different values of {differs!r}, and each keeps its own part of its own: "
            "the model is sewn of several. Seed every rank alike before it builds the model (torch.manual_seed(0)), or "
            "load values into it afterwards",
            stacklevel=2,
        )
    recipes = take_recipes(module)
    look_once(module)
    without_cache = make_stateless(module, num_ranks=mesh.size(), device_type=on.type)
    positions = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or [0] * mesh.ndim, strict=True))
    parts, axes_of = [spec], [tuple(strategy.axes) for strategy in strategies]
    for strategy in strategies[:-1]:  # what strategies around it leave to each
        position = flat_position(strategy.axes, positions)
        parts.append(strategy.part_of(parts[-1], position=position))
    sharded: ShardedModel | None = None

    def before_waiting() -> None:
        assert sharded is not None
        sharded.make_deferred_additions()

    sequence = share_sequences(module, strategies, mesh=mesh, before_waiting=before_waiting, device=on)
    sites = find_sites(module)
    for number, strategy in reversed(list(enumerate(strategies))):
        is_shared = number > 0 and strategies[number - 1].shares_inside
        if is_shared and strategies[number - 1].holds_inside:
            continue  # the next one is held by both
        sharded = code_of(strategy).apply(
            Setup(
                module=module,
                strategy=strategy,
                spec=parts[number],
                mesh=mesh[axes_of[number]],
                device=on,
                sites=sites,
                compiled=compile,
                param_dtype=param_dtype,
                inner=sharded,
                inside=mesh[tuple(chain(*axes_of[number:]))],
                within=strategies[number + 1] if strategy.holds_inside and number + 1 < len(strategies) else None,
                around=mesh[tuple(chain(*axes_of[number - 1 : number + 1]))] if is_shared else None,
                computed_again=None if sequence is None else sequence.of_pass,
            )
        )
    if sharded is None:
        raise AssertionError("check_composition lets no empty list through")
    for buffer_holder in module.modules():
        for name, buffer in buffer_holder._buffers.items():
            if buffer is not None and not buffer.is_meta:
                buffer_holder._buffers[name] = buffer.to(on)
    if on.type == "cpu":
        let_computing_go_first()  # now that the groups of a step are there
    model = ParallelModel(
        module,
        sharded=sharded,
        mesh=mesh,
        strategies=strategies,
        spec=spec,
        recipes=recipes,
        loss=loss_of(module) if loss is None else loss,
        autocast_dtype=autocast_dtype,
        param_dtype=param_dtype,
        sequence=sequence,
        recorded=compile == RECORDED,
    )
    mark_left(before, module)
    again = functools.partial(
        parallelize,
        parallel=parallel,
        device=on,
        plan=plan,
        loss=loss,
        autocast_dtype=autocast_dtype,
        param_dtype=param_dtype,
        compile=compile,
    )
    made = make_parallel(module, model, origin=Origin(changes, again), compiled=bool(compile))
    changes.note(without_cache=without_cache)
    return made


def _tell_of_changes(strategies: Sequence[Strategy]) -> None:
    """Warns of strategies that train another model than one process does."""
    for strategy in strategies:
        if strategy.changes_the_model:
            _log.warning("%s trains another model than one process does: %s", strategy, strategy.changes_the_model)


def _check_context(module: nn.Module, strategies: Sequence[Strategy], *, compile: bool) -> None:
    """Raises `ConfigError` for arguments that do not go with sequences which ranks share."""
    refuse_attentions(module)
    in_stages = any(isinstance(strategy, StageStrategy) for strategy in strategies)
    if in_stages and getattr(module, "is_activation_checkpointing", False):
        raise ConfigError(
            "context: other micro-batches pass a stage before the model's own checkpoints compute a layer again, whose "
            "attention would see another sequence. Call activation_checkpointing_disable(), and write recompute=block "
            "for fsdp, or recompute=slice for rtp"
        )
    if compile:
        raise ConfigError("context: compile would trace through the exchange of keys and values. Leave it out")


def check_context_loss(module: nn.Module, loss: LossFn | None) -> None:
    """Raises `ConfigError` for a loss that is no sum over the tokens of a sequence whose parts ranks compute.

    Args:
        module: a model whose sequences can be shared.
        loss: of the user's own, or None: the model's.
    """
    _, base = base_of(module)
    if loss is None and not try_shared(base).has_loss:
        raise ConfigError(
            f"context: {type(base).__name__} has no loss of its own that is a sum over tokens. Write loss=... : "
            "loss(module, batch, num_targets) -> the sum over the batch's shift_labels / num_targets"
        )
    if loss is not None and (why := why_loss_stays_whole(base, loss)):
        raise ConfigError(
            "context: a loss of your own is given a part of each sequence (input_ids, shift_labels, position_ids), and "
            f"must sum over its tokens. Tried on a tiny model: {why}. Change it, or leave loss out for the model's own"
        )


def _name(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _check_param_dtype(dtype: torch.dtype, *, autocast_dtype: torch.dtype | None) -> None:
    """Raises `ConfigError` for a dtype in which passes cannot compute without autocast."""
    if dtype is not torch.bfloat16:
        raise ConfigError(f"param_dtype={dtype}: write torch.bfloat16, or autocast_dtype={dtype}")
    if autocast_dtype is not None:
        raise ConfigError(
            f"param_dtype={dtype} and autocast_dtype={autocast_dtype}: passes compute with converted weights, or under "
            "autocast. Write one of them"
        )


def _described(module: nn.Module, spec: ModelSpec) -> dict[str, Any]:
    """Description of a model that must be equal on all ranks: settings, weights and their cuts, not their values."""
    dtypes = {name: str(weight.dtype) for name, weight in module.named_parameters()}
    return {
        **settings_of(module),
        "the model": spec.name,
        **{f"the weight {w.name}": f"{list(w.shape)} {dtypes.get(w.name, '')}".rstrip() for w in spec.weights},
        **{
            f"where the weight {w.name} may be cut": f"{w.cut}, in a {unit.kind} ({unit.combine})"
            for unit in spec.units
            for w in unit.weights
        },
    }


def load_step_code(kinds: Iterable[str]) -> None:
    """Imports the modules of a step under these strategies, before ranks are forked: each would import them for itself.

    Computes nothing with a GPU in sight: ranks forked from a process that has could not use it
    (see `process/forking.py`).
    """
    start_autograd()
    for kind in kinds:
        code_of(STRATEGIES[kind])
    import_what_steps_need()


def code_of(strategy: Strategy | type[Strategy]) -> ModuleType:
    """The module whose `apply` holds a model, in torch; loaded when a strategy is used."""
    return importlib.import_module(strategy.held_by or f"rotorch.strategies.{strategy.kind}.apply")
