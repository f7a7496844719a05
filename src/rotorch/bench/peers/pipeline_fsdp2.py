"""torch's pipeline (`Schedule1F1B`) with `fully_shard` in its two stages, gathered per micro-batch or once a step.

[Note: stages by hand]
    torch's stages are modules from tensors to tensors. As its users do, the model is cut by taking out layers: the
    first stage keeps the embedding and calls the trunk with token ids, the last keeps norm and head and calls it with
    embeddings. Layers are cut where rotorch cuts them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from rotorch.bench.contender import WithoutLayout, adamw, build, whole_model
from rotorch.bench.task import Task
from rotorch.comm.collectives import all_reduce_sum
from rotorch.core.errors import ConfigError
from rotorch.mesh import pick_device
from rotorch.models.describe import describe
from rotorch.models.losses import count_targets
from rotorch.shard.materialize import on_meta
from rotorch.strategies.pp.plan import PP

NUM_STAGES = 2
_CUT = PP(stages=NUM_STAGES)


class _Stage(nn.Module):
    """Some layers of a model, with what stands before and after them where it is the first or the last stage."""

    def __init__(self, module: nn.Module, *, number: int) -> None:
        super().__init__()
        spec = describe(module)
        order, part = spec.order, _CUT.parts_of(spec)[number]
        layers = module.get_submodule(order.layers[0].rpartition(".")[0])
        assert isinstance(layers, nn.ModuleList)
        self.first, self.last = number == 0, number + 1 == NUM_STAGES
        self.trunk = module.base_model
        self.head = module.get_output_embeddings() if self.last else None
        kept = list(layers)[part.start : part.stop]
        for name, child in list(self.trunk.named_children()):
            if child is layers:
                setattr(self.trunk, name, nn.ModuleList(kept))
            elif any(True for _ in child.parameters()):
                # Whatever has weights beside the layers stands before or after them.
                after = any(path.endswith(f".{name}") for path in order.after)
                if not (self.last if after else self.first):
                    setattr(self.trunk, name, nn.Identity())
        self.layers = tuple(kept)

    def forward(self, given: Tensor) -> Tensor:
        how = {"input_ids": given} if self.first else {"inputs_embeds": given}
        hidden: Tensor = self.trunk(**how, use_cache=False).last_hidden_state
        return hidden if self.head is None else self.head(hidden)


class PipelineFSDP2(WithoutLayout):
    """Two stages on two halves of the ranks, each sharded over its half; ranks of one position share a micro-batch.

    Args:
        task: the task to train.
        rank: this one.
        keep: weights gathered for the first micro-batch stay gathered until the last one's backward.
    """

    def __init__(self, task: Task, *, rank: int, keep: bool = False) -> None:
        self._task = task
        self._device = pick_device(task.device)
        self._mesh = init_device_mesh(
            self._device.type, (NUM_STAGES, task.num_ranks // NUM_STAGES), mesh_dim_names=("stages", "shards")
        )
        number, self._share = self._mesh.get_local_rank("stages"), self._mesh.get_local_rank("shards")
        self.module: nn.Module = _Stage(whole_model(task), number=number)
        self._last = number + 1 == NUM_STAGES
        shared = {
            "mesh": self._mesh["shards"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=task.half_dtype, reduce_dtype=torch.float32),
        }
        for layer in self.module.layers:
            fully_shard(layer, reshard_after_forward=not keep, **shared)
        fully_shard(self.module, reshard_after_forward=False if keep else None, **shared)
        self.optimizer = adamw(self.module, settings=task.optimizer)
        self._num_targets = 1
        stage = PipelineStage(self.module, number, NUM_STAGES, self._device, group=self._mesh.get_group("stages"))
        self._schedule = Schedule1F1B(stage, task.accumulation, loss_fn=self._loss, scale_grads=False)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        summed = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum")
        return summed / self._num_targets

    def forward_backward(self, step: int) -> float:
        """As `Contender` says, but returns the loss of this rank's share."""
        batches = self._task.batches(step, share=self._share, num_shares=self._mesh.size(1))
        self._num_targets = sum(count_targets(batch) for batch in batches)
        ids, labels = (
            torch.cat([batch[name] for batch in batches]).to(self._device) for name in ("input_ids", "labels")
        )
        losses: list[Tensor] = []
        if self._last:
            self._schedule.step(target=labels, losses=losses, return_outputs=False)
        else:
            self._schedule.step(ids, return_outputs=False)
        mine = torch.tensor(sum(float(loss.detach()) for loss in losses), dtype=torch.float64)
        return float(all_reduce_sum(mine, mesh=self._mesh["stages"]))

    def clip(self) -> None:
        if self._task.optimizer.clip_norm:
            raise AssertionError("refused by check")

    @staticmethod
    def check(task: Task) -> None:
        """Raises `ConfigError` if the model cannot be cut in two, or the ranks or micro-batches are too few."""
        if task.num_ranks % NUM_STAGES or task.accumulation < NUM_STAGES:
            raise ConfigError(
                f"bench: --peer pipeline-fsdp2: {task.num_ranks} ranks and {task.accumulation} micro-batches a step; "
                f"it has {NUM_STAGES} stages, and torch wants a micro-batch for each. Write an even --nproc, and "
                f"train.accumulation={NUM_STAGES} or more"
            )
        if task.optimizer.clip_norm:
            raise ConfigError(
                "bench: --peer pipeline-fsdp2: no clipping across stages. Write optimizer.clip_norm=0, or leave it out"
            )
        with on_meta():
            spec = describe(build(task))
        _CUT.check(spec)
        if any(weight.aliases for weight in spec.weights):
            raise ConfigError(
                "bench: --peer pipeline-fsdp2: the embedding is tied to the head, which another stage has. Write "
                "tie_word_embeddings=false into the model's configuration, or leave this peer out"
            )
