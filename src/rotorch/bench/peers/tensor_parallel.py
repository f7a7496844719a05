"""torch's DTensor tensor parallel by the model's own plan, with sequence parallel and loss parallel.

[Note: one batch]
    Ranks that layers are cut over compute on the same samples: all ranks on the whole global batch. Between attentions
    and MLPs the activations are cut along the sequence: norms run on a part of it, a block's input is gathered before
    its column-wise layers, and its row-wise layer's output is summed and scattered. The logits stay cut along the
    vocabulary.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from rotorch.bench.contender import PlainLoop, build, whole_model
from rotorch.bench.task import Task
from rotorch.core.errors import ConfigError
from rotorch.core.spec import UnitKind
from rotorch.mesh import pick_device
from rotorch.models.blocks import repeated_blocks
from rotorch.models.describe import describe
from rotorch.models.hf import tensor_parallel_plan
from rotorch.shard.materialize import on_meta

_SEQUENCE = Shard(1)


class TensorParallel(PlainLoop):
    """Column- and row-wise layers cut over all ranks, norms whole on each."""

    inside: ClassVar[int | None] = None
    """Neighbours that layers are cut over; None: all ranks. What these hold, `fully_shard` cuts over the others."""

    def __init__(self, task: Task, *, rank: int) -> None:
        module, inside = whole_model(task), self.inside or task.num_ranks
        shares = task.num_ranks // inside
        mesh = init_device_mesh(pick_device(task.device).type, (shares, inside), mesh_dim_names=("data", "tensor"))
        # All ranks have the same values.
        parallelize_module(module, mesh["tensor"], parallel_styles(module), src_data_rank=None)
        if shares > 1:
            for group in (*repeated_blocks(module), module):
                fully_shard(group, mesh=mesh["data"])
        super().__init__(task, module=module, shares=[rank // inside], num_shares=shares)
        # Models would count positions by the part of the sequence that an embedding leaves them.
        self._positions = torch.arange(task.sequence_length, device=self._device)[None]

    def _pass(self, batch: dict[str, Tensor], *, num_targets: int) -> float:
        with loss_parallel():
            return super()._pass({**batch, "position_ids": self._positions}, num_targets=num_targets)

    @classmethod
    def check(cls, task: Task) -> None:
        """Raises `ConfigError` if the model or its batch cannot be cut so."""
        n = cls.inside or task.num_ranks
        if task.num_ranks % n:
            raise ConfigError(f"bench: --peer fsdp2-tp: {task.num_ranks} ranks are no multiple of {n}. Write --nproc 4")
        if task.sequence_length % n:
            raise ConfigError(
                f"bench: --peer tp: {n} ranks do not divide data.sequence_length = {task.sequence_length}. "
                f"Write data.sequence_length={n * -(-task.sequence_length // n)}"
            )
        with on_meta():
            module = build(task)
        for unit in describe(module).units:
            for weight in unit.weights:
                if weight.aliases and unit.kind is not UnitKind.REPLICATED:
                    raise ConfigError(
                        f"bench: --peer tp: {weight.name!r} is tied to {weight.aliases[0]!r}. "
                        "Write tie_word_embeddings=false into the model's configuration, or leave this peer out"
                    )
                if weight.cut is not None and weight.cut.groups % n:
                    raise ConfigError(
                        f"bench: --peer tp: {n} ranks do not divide the {weight.cut.groups} groups (heads, columns) "
                        f"of {weight.name!r}. Leave this peer out, or bench on fewer ranks"
                    )
        parallel_styles(module)


class FSDP2AroundTensorParallel(TensorParallel):
    """The same over two neighbours, and `fully_shard` over ranks that have the same slices."""

    inside: ClassVar[int | None] = 2


def parallel_styles(module: nn.Module) -> dict[str, ParallelStyle]:
    """Turns the roles of the model's plan into a style for every module that has weights, by name.

    Raises:
        ConfigError: a weight that neither its plan nor a norm on the activations' way explains.
    """
    plan, names = tensor_parallel_plan(module), {child: name for name, child in module.named_modules()}
    embedding, head = (names.get(m) for m in (module.get_input_embeddings(), module.get_output_embeddings()))
    styles: dict[str, ParallelStyle] = {}
    parents: set[str] = set()
    for name, child in module.named_modules():
        if not list(child.parameters(recurse=False)):
            continue
        role = next((role for pattern, role in plan.items() if _matches(name, pattern)), None)
        if name == embedding:
            styles[name] = RowwiseParallel(input_layouts=Replicate(), output_layouts=_SEQUENCE)
        elif name == head:
            styles[name] = ColwiseParallel(input_layouts=_SEQUENCE, use_local_output=False)
        elif role == "colwise":
            styles[name] = ColwiseParallel()
            parents.add(name.rpartition(".")[0])
        elif role == "rowwise":
            styles[name] = RowwiseParallel(output_layouts=_SEQUENCE)
        elif role is None:
            styles[name] = SequenceParallel(use_local_output=True)
        else:
            raise ConfigError(
                f"bench: --peer tp: the plan's role {role!r} of {name!r} has no style. Leave this peer out"
            )
    for name, style in styles.items():
        inside = [parent for parent in parents if name.startswith(f"{parent}.")]
        if inside and isinstance(style, SequenceParallel):
            raise ConfigError(
                f"bench: --peer tp: {name!r} lies inside {inside[0]!r}, which is cut, but has no role in the model's "
                "plan. Leave this peer out"
            )
    return {**dict.fromkeys(sorted(parents), _GatherSequence()), **styles}


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(w in ("*", p) for p, w in zip(parts, wanted, strict=True))


class _GatherSequence(ParallelStyle):
    """Gathers a module's first argument along the sequence, once for all column-wise layers in it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        first = next(iter(inspect.signature(module.forward).parameters))

        def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            part = args[0] if args else kwargs[first]
            whole = DTensor.from_local(part, device_mesh, [_SEQUENCE], run_check=False).redistribute(
                placements=[Replicate()], async_op=True
            )
            return ((whole, *args[1:]), kwargs) if args else (args, {**kwargs, first: whole})

        module.register_forward_pre_hook(gather, with_kwargs=True)
        return module
