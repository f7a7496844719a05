"""Whole tensors of a parallel module as its family publishes them, one after another: for an inference server."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rotorch.comm.roll_call import ModelCall
from rotorch.core.errors import ConfigError
from rotorch.models.lora import adapter_config, adapters_of, base_of, is_adapter, merged_weight, without_adapters
from rotorch.models.published import as_published
from rotorch.parallel_model import ParallelModel
from rotorch.shard.materialize import on_meta
from rotorch.shard.sites import persistent_buffers


@torch.no_grad()
def published_tensors(
    module: nn.Module, model: ParallelModel, *, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Whole weights and buffers by the names and in the shapes that the model's family publishes, adapters merged."""
    model.meet_at_rest(ModelCall.GATHER)
    adapters, buffers = adapter_config(module), persistent_buffers(module)
    plain, own_names = module, {name: name for name in (*model.weights, *buffers)}
    if adapters is not None:
        prefix, base = base_of(module)
        with on_meta():
            plain = (type(base) if prefix else type(module).__bases__[1])(base.config)
        start = f"{prefix}." if prefix else ""
        own_names = {without_adapters(n).removeprefix(start): n for n in own_names if not is_adapter(n)}
        published = plain.state_dict().keys()
        if other := next((name for name in own_names if name not in published), None):
            raise ConfigError(
                f"iter_full_tensors: {other!r} is no weight of the model without adapters. Write full_state_dict()"
            )
    held = {}
    for name, own in own_names.items():
        shape = buffers[own].shape if own in buffers else model.weights[own].weight.shape
        held[name] = torch.empty(shape, device="meta")

    def whole(name: str) -> Tensor:
        own = own_names[name]
        if own in buffers:
            return buffers[own].detach().clone()
        beside = adapters_of(own) if adapters is not None else None
        if adapters is None or beside is None or beside[0] not in model.weights:
            return model.full_tensor(own)
        return merged_weight(*map(model.full_tensor, (own, *beside)), config=adapters)

    for published in as_published(held, module=plain):
        for name, tensor in published.make([whole(source) for source in published.sources]).items():
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
