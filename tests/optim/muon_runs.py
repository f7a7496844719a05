"""Steps of Muon, on one process by torch's optimizers and on a rank by ours, and what the latter sends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import rotorch
from rotorch.comm.meter import Meter
from rotorch.core.traffic import Kind
from rotorch.models.hf import causal_lm, head_weights, load_config
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.compare import value_errors
from rotorch.traced.live_storages import LiveStorages

NUM_ROWS, NUM_TOKENS = 4, 6
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.05}
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def config_of(path: str, **changes: Any) -> Any:
    config = load_config(path)
    small = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "vocab_size": 61}
    for name, value in {**small, **changes}.items():
        setattr(config, name, value)
    return config


def build(config: Any) -> nn.Module:
    """In float64; what gets no true gradient (a bias of keys, to which soft-max is blind) is frozen."""
    module = widen(causal_lm(config)).train()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise * 0.2 + (1.0 if "norm" in name else 0.0))
            parameter.requires_grad_(not name.endswith(("k_proj.bias", "query_key_value.bias")))
    return module


def rows(vocab_size: int, *, step: int, share: int, num_shares: int) -> dict[str, Tensor]:
    ids = torch.randint(vocab_size, (NUM_ROWS, NUM_TOKENS), generator=torch.Generator().manual_seed(step))
    ids = ids[share::num_shares]
    return {"input_ids": ids, "labels": ids}


def is_hidden(name: str, parameter: Tensor, module: nn.Module) -> bool:
    return parameter.dim() == 2 and "embed" not in name and name not in head_weights(module)


def on_one_process(config: Any, *, num_steps: int, **muon: Any) -> dict[str, Tensor]:
    """Values of all weights after the steps, by torch's own Muon and AdamW."""
    module = build(config)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    hidden = {name for name, p in named.items() if is_hidden(name, p, module)}
    decayed = {name for name, p in named.items() if p.dim() == 2} - hidden
    optimizers = [
        torch.optim.Muon([named[n] for n in sorted(hidden)], **{**MUON, **muon}),
        torch.optim.AdamW([named[n] for n in sorted(decayed)], **ADAMW),
        torch.optim.AdamW([p for n, p in named.items() if n not in hidden | decayed], **{**ADAMW, "weight_decay": 0.0}),
    ]
    with exact_arithmetic():
        for step in range(num_steps):
            module(**rows(config.vocab_size, step=step, share=0, num_shares=1)).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def on_a_rank(config: Any, layout: str, expected: dict[str, Tensor], *, num_steps: int, **muon: Any) -> dict[str, Any]:
    """The largest error, and what an update of the matrices alone sends."""
    model: Any = rotorch.parallelize(build(config), layout, device="cpu")
    optimizer = rotorch.optim.Muon(rotorch.optim.muon_groups(model, **ADAMW), **{**MUON, **muon})
    with exact_arithmetic():
        for step in range(num_steps):
            batch = rows(config.vocab_size, step=step, share=model.batch_rank, num_shares=model.num_batch_ranks)
            model.forward_backward([batch])
            optimizer.step()
            if step < num_steps - 1:
                optimizer.zero_grad()
    found = {
        "error": max(value_errors(model.weights, expected).items(), key=lambda pair: pair[1]),
        "state_is_cut": all(
            optimizer.state[h.parameter]["momentum_buffer"].to_local().shape == h.local.shape
            for h in model.weights.values()
            if rotorch.optim.is_hidden_matrix(model.module, h)
        ),
        **costs(model),
    }
    model.close()
    return found


def costs(model: Any) -> dict[str, Any]:
    """Bytes that an update of the matrices sends, and the most that it takes beside weights, gradients and momentum."""
    hidden = {n: h for n, h in model.weights.items() if rotorch.optim.is_hidden_matrix(model.module, h)}
    optimizer = rotorch.optim.Muon([held.parameter for held in hidden.values()])
    optimizer.step()
    with Meter(smallest_counted_bytes=0) as meter, LiveStorages() as alive:
        optimizer.step()
    return {
        "sent": meter.sent_bytes[Kind.SEND],
        "not_counted": dict(meter.not_counted),
        "most_bytes": alive.most_made_bytes(since=0),
        "numels": {name: held.weight.numel for name, held in hidden.items()},
        "grams": {name: min(held.weight.shape) ** 2 for name, held in hidden.items()},
        "parts": {name: held.local.numel() if held.chunks else 0 for name, held in hidden.items()},
    }


def memory_of_an_update(config: Any, layouts: list[str]) -> list[dict[str, Any]]:
    """Memory of an update in float32, by layout."""
    return [_memory_under(config, layout) for layout in layouts]


def _memory_under(config: Any, layout: str) -> dict[str, Any]:
    model: Any = rotorch.parallelize(build(config).float(), layout, device="cpu")
    batch = rows(config.vocab_size, step=0, share=model.batch_rank, num_shares=model.num_batch_ranks)
    model.forward_backward([batch])
    return costs(model)
