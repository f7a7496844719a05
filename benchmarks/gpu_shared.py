"""Ranks that share one GPU over symmetric memory: whether rtp is exact there, and what each rank holds (see gpu.py).

The process group is gloo, since NCCL refuses two ranks on a device. On CPU the ranks share memory instead.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

SIZES = (2, 4)
EXACT = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip
LARGE = {
    **EXACT, "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip
_SEED = 3


def measure(*, device: str, tokens: int, steps: int) -> dict[str, Any]:
    """Exactness in float64 and, on CUDA, peak memory in bfloat16; per number of ranks."""
    from rotorch.comm.transports.peer_memory import OVERLAPPING

    transport = "symmetric_memory" if device == "cuda" else "shared_memory"
    with mock.patch.dict(os.environ, {OVERLAPPING: "1"}):
        exact = [exactness(f"rtp={n}[transport={transport}]", device=device) for n in SIZES]
        memory = []
        if device == "cuda":
            memory = [peaks("single", num_ranks=1, tokens=tokens, steps=steps)]
            for recompute in ("head", "slice"):
                layout = f"transport={transport},recompute={recompute}"
                memory += [peaks(f"rtp={n}[{layout}]", num_ranks=n, tokens=tokens, steps=steps) for n in SIZES]
    return {"exact": exact, "memory": memory, "tokens": tokens}


# ------------------------------------------------------------- exactness


def exactness(parallel: str, *, device: str) -> dict[str, Any]:
    """Largest relative errors of losses and gradients of three steps against one process, in float64."""
    from rotorch.testing.verify import verify

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(EXACT))
        report = verify(str(path), parallel=parallel, device=device, timeout_s=300)
    names = ("parallel", "ok", "steps", "max_rel_err_loss", "max_rel_err_grad", "verdict")
    return {name: report.to_json()[name] for name in names}


# ------------------------------------------------------------- memory


def peaks(parallel: str, *, num_ranks: int, tokens: int, steps: int) -> dict[str, Any]:
    """Peak memory of every rank; all ranks together train on `tokens` tokens, so a row compares with one process."""
    from rotorch.testing.ranks import run_ranks

    by_rank = run_ranks(rank_of_peaks, parallel, max(tokens // num_ranks, 1), steps, num_ranks=num_ranks, timeout_s=300)
    return {
        "parallel": parallel,
        "tokens_per_rank": max(tokens // num_ranks, 1),
        "peak_bytes_by_rank": [found["peak"] for found in by_rank],
        "window_bytes_by_rank": [found["window"] for found in by_rank],
        "window_counted_by_the_allocator": [found["counted"] for found in by_rank],
    }


def build() -> torch.nn.Module:
    """The model on meta, in bfloat16."""
    import rotorch
    from rotorch.models.hf import causal_lm, config_from_dict

    config = config_from_dict({**LARGE, "use_cache": False}, source="benchmarks/gpu_shared.py")
    with rotorch.on_meta():
        return causal_lm(config).to(torch.bfloat16).train()


def rank_of_peaks(parallel: str, tokens: int, steps: int) -> dict[str, Any]:
    """`torch.cuda.max_memory_allocated`, plus this rank's window if the allocator does not count it."""
    import rotorch

    model = rotorch.parallelize(build(), parallel, device="cuda").materialize(seed=_SEED)
    ring = getattr(model.sharded, "ring", None)
    window = ring.window_bytes if hasattr(ring, "window_bytes") else 0
    counted = window > 0 and window_is_counted()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
    ids = torch.randint(LARGE["vocab_size"], (1, tokens), device="cuda")
    for number in range(1 + steps):
        if number == 1:
            torch.cuda.reset_peak_memory_stats()
        model.forward_backward({"input_ids": ids, "labels": ids})
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() + (0 if counted else window)
    model.close()
    return {"peak": peak, "window": window, "counted": counted}


def window_is_counted() -> bool:
    """True if `torch.cuda.memory_allocated` sees symmetric memory."""
    from rotorch._torch_private import symmetric_empty

    before = torch.cuda.memory_allocated()
    kept = symmetric_empty(1 << 22, dtype=torch.uint8, device=torch.device("cuda", torch.cuda.current_device()))
    return torch.cuda.memory_allocated() - before >= kept.numel()
