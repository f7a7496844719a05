"""transformers' own `DistributedConfig`: `fully_shard`, experts or tensors by the model's plans, made while it loads.

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
from fnmatch import fnmatchcase
from typing import Any

import torch
from safetensors.torch import save_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rotorch.bench.contender import PlainLoop, whole_model
from rotorch.bench.task import Task
from rotorch.core.errors import ConfigError
from rotorch.models.hf import config_from_dict


class HuggingFace(PlainLoop):
    """A model as `from_pretrained(distributed_config=...)` returns it.

    Args:
        task: the task to train.
        rank: this one.
        tensor_parallel: tensor parallel over all ranks, instead of FSDP2.
        ep_size: beside FSDP2, ranks that each have some experts whole, to which tokens travel.
    """

    def __init__(self, task: Task, *, rank: int, tensor_parallel: bool = False, ep_size: int = 1) -> None:
        in_bfloat16 = task.half_dtype is not None
        if tensor_parallel:
            super().__init__(task, module=_load(task, tp_size=task.num_ranks), shares=[0], num_shares=1)
            _split_groups(self.optimizer)
        else:
            module = _load(task, fsdp_size=task.num_ranks, fsdp_mixed_precision=in_bfloat16, ep_size=ep_size)
            super().__init__(task, module=module, shares=[rank])
            self._autocast_dtype = None  # FSDP2's own policy is in its place

    def clip(self) -> None:
        """Weights of several meshes, and whole norms beside them, torch's clipping does not take together."""
        if not self._task.optimizer.clip_norm:
            return
        by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
                by_mesh.setdefault(mesh, []).append(parameter)
        norms = [
            nn.utils.get_total_norm([p.grad for p in of_mesh if p.grad is not None]) for of_mesh in by_mesh.values()
        ]
        whole = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms])
        for of_mesh in by_mesh.values():
            nn.utils.clip_grads_with_norm_(of_mesh, self._task.optimizer.clip_norm, whole.norm())

    @staticmethod
    def check(task: Task) -> None:
        """Raises `ConfigError` if blocks were to be compiled."""
        if task.compile:
            raise ConfigError(
                "bench: peers hf-fsdp2, hf-ep and hf-tp: blocks are not compiled. Leave train.compile out"
            )


class HuggingFaceExperts(HuggingFace):
    """The same with all experts on ranks of their own."""

    def __init__(self, task: Task, *, rank: int) -> None:
        super().__init__(task, rank=rank, ep_size=task.num_ranks)

    @staticmethod
    def check(task: Task) -> None:
        """Raises `ConfigError` for a model without a plan for experts."""
        HuggingFace.check(task)
        if not getattr(config_from_dict(task.model, source="model.config"), "base_model_ep_plan", None):
            raise ConfigError(
                f"bench: peer hf-ep: transformers has no plan for experts of model_type={task.model['model_type']!r}. "
                "Leave it out, or write mixtral"
            )


def _split_groups(optimizer: torch.optim.Optimizer) -> None:
    """Puts whole weights into groups of their own: a fused step takes no list that has them beside DTensors."""
    optimizer.param_groups = [
        {**group, "params": params}
        for group in optimizer.param_groups
        for is_cut in (True, False)
        if (params := [p for p in group["params"] if isinstance(p, DTensor) == is_cut])
    ]


def _check_cut(module: Any) -> None:
    """Raises `RuntimeError` for a matrix that the model's plan cuts and every rank has whole."""
    whole = [
        name
        for name, parameter in module.named_parameters()
        if parameter.dim() > 1
        and not isinstance(parameter, DTensor)
        and any(fnmatchcase(name.removesuffix(".weight"), pattern) for pattern in module.tp_plan)
    ]
    if whole:
        raise RuntimeError(f"transformers left whole what its plan for tensor parallelism cuts: {', '.join(whole)}")


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
    if "tp_size" in sizes:
        _check_cut(loaded)
    loaded.config.use_cache = False
    return loaded.double().float().train()
