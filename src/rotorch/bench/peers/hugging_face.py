"""transformers' own `DistributedConfig`: `fully_shard` or tensor parallel by the model's plans, made while it loads.

[Note: from_pretrained]
    `DistributedConfig` is an argument of `from_pretrained` only. So each rank writes the first weights, those of every
    row, into a directory for a moment, and loads its part from there, as users do. On CPU the parts that it loads are
    views of the file's tensors, whole; on an accelerator they would be copied there. So they are copied here, too, by
    way of float64, which changes no value. Its tensor parallel gives all ranks one batch, as `tp` does, but with whole
    activations between the plan's layers.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn
from torch.distributed.tensor import DTensor

from rotorch.bench.contender import PlainLoop, whole_model
from rotorch.bench.task import Task
from rotorch.core.errors import ConfigError


class HuggingFace(PlainLoop):
    """A model as `from_pretrained(distributed_config=...)` returns it.

    Args:
        task: the task to train.
        rank: this one.
        tensor_parallel: tensor parallel over all ranks, instead of FSDP2.
    """

    def __init__(self, task: Task, *, rank: int, tensor_parallel: bool = False) -> None:
        in_bfloat16 = task.half_dtype is not None
        if tensor_parallel:
            super().__init__(task, module=_load(task, tp_size=task.num_ranks), shares=[0], num_shares=1)
        else:
            module = _load(task, fsdp_size=task.num_ranks, fsdp_mixed_precision=in_bfloat16)
            super().__init__(task, module=module, shares=[rank])
            self._autocast_dtype = None  # FSDP2's own policy is in its place

    def clip(self) -> None:
        """Tensor parallel leaves DTensors beside plain norms, which torch's clipping does not take together."""
        if not self._task.optimizer.clip_norm:
            return
        parameters = [p for p in self.module.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        kinds = [[g for g in gradients if isinstance(g, DTensor) is cut] for cut in (True, False)]
        norms = [nn.utils.get_total_norm(kind) for kind in kinds if kind]
        whole = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms])
        for kind in (True, False):
            nn.utils.clip_grads_with_norm_(
                [p for p in parameters if isinstance(p.grad, DTensor) is kind],
                self._task.optimizer.clip_norm,
                whole.norm(),
            )

    @staticmethod
    def check(task: Task) -> None:
        """Raises `ConfigError` if blocks were to be compiled."""
        if task.compile:
            raise ConfigError("bench: peers hf-fsdp2 and hf-tp: blocks are not compiled. Leave train.compile out")


def _load(task: Task, **sizes: Any) -> nn.Module:
    """See [Note: from_pretrained]."""
    from transformers.distributed import DistributedConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="rotorch-bench-") as directory:
        module: Any = whole_model(task)
        module.config.save_pretrained(directory)
        save_model(module, os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})
        kind = type(module)
        del module
        loaded = kind.from_pretrained(
            directory, distributed_config=DistributedConfig(**sizes), dtype=torch.float32, use_safetensors=True
        )
    loaded.config.use_cache = False
    return loaded.double().float().train()
