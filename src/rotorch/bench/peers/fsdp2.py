"""torch's `fully_shard` (FSDP2): around every block as its documentation says, or around every weight.

In bfloat16 it gathers and computes in that precision by its own `MixedPrecisionPolicy`, and sums gradients in float32.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rotorch.bench.contender import PlainLoop, whole_model
from rotorch.bench.task import Task
from rotorch.mesh import pick_device
from rotorch.models.blocks import recompute_blocks, repeated_blocks
from rotorch.shard.sites import find_sites


class FSDP2(PlainLoop):
    """Weights rest cut along their first dim; a group of them is gathered whole for its forward and its backward.

    Args:
        task: the task to train.
        rank: this one.
        recompute: activation checkpointing of every block.
        per_weight: one group per module that has weights of its own, instead of one per block.
        ends: beside blocks one group for the embedding, and one for the last norm and the head, which stays gathered
            from forward to backward. Without, they belong to the root's group, which is whole during the whole step.
    """

    def __init__(
        self, task: Task, *, rank: int, recompute: bool = False, per_weight: bool = False, ends: bool = False
    ) -> None:
        module = whole_model(task)
        mesh = init_device_mesh(pick_device(task.device).type, (task.num_ranks,))
        if recompute:
            recompute_blocks(module, strategy="fsdp2")
        if per_weight:  # of what a model might do in place to a layer's output; the losses say that it does not
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module", category=UserWarning)
        policy = MixedPrecisionPolicy(param_dtype=task.half_dtype, reduce_dtype=torch.float32)
        for group in _owners(module) if per_weight else repeated_blocks(module):
            fully_shard(group, mesh=mesh, mp_policy=policy)
        if ends:
            embedding, last = _ends(module)
            fully_shard(embedding, mesh=mesh, mp_policy=policy)
            fully_shard(last, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        super().__init__(task, module=module, shares=[rank])
        self._autocast_dtype = None  # that policy is in its place


def _ends(module: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """The embedding; and norm and head, in the order that they run. Tied ones are one group, as torchtitan has them."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    blocks = {id(child) for block in repeated_blocks(module) for child in block.modules()}
    norms = [
        m
        for m in module.modules()
        if id(m) not in blocks and m not in (embedding, head) and list(m.parameters(recurse=False))
    ]
    return embedding, [*norms, head]


def _owners(module: nn.Module) -> list[nn.Module]:
    """Modules with weights of their own. Those that share one with another module (tied) are left to the root."""
    tied = {id(site.module) for sites in find_sites(module).values() if len(sites) > 1 for site in sites}
    return [m for m in module.modules() if list(m.parameters(recurse=False)) and id(m) not in tied]
