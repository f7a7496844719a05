"""A pipeline over NCCL, one GPU per rank; its messages are held on CPU by tests/comm/test_stage_messages.py."""

import pytest
import torch
from torch import distributed as dist

import rotorch
from rotorch.models.hf import causal_lm, load_config
from rotorch.testing.ranks import run_ranks

NUM_RANKS = 4


def losses(path, parallel, device, store):
    if device == "cuda":
        rank = dist.get_rank()
        dist.destroy_process_group()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", store=dist.FileStore(store, NUM_RANKS), rank=rank, world_size=NUM_RANKS
        )
    with rotorch.on_meta():
        module = causal_lm(load_config(path)).train()
    model = rotorch.parallelize(module, parallel, device=device).materialize(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(model.module.config.vocab_size, (8, 16), generator=torch.Generator().manual_seed(0))
    mine = ids.tensor_split(model.num_batch_ranks)[model.batch_rank].to(model.device)
    found = []
    for _ in range(4):
        found.append(float(model.forward_backward([{"input_ids": row[None], "labels": row[None]} for row in mine])))
        optimizer.step()
        optimizer.zero_grad()
    found.append(model.evaluate({"input_ids": mine, "labels": mine}).loss)
    model.close()
    return found


@pytest.mark.skipif(torch.cuda.device_count() < NUM_RANKS, reason=f"NCCL wants a GPU per rank: {NUM_RANKS}")
@pytest.mark.parametrize("parallel", ["pp=4", "zeropp=2x2[unit=2]", "pp=2[schedule=zb_h1],fsdp=2"])
def test_losses_are_those_of_cpu_ranks(tiny, parallel, tmp_path):
    on_cpu = run_ranks(losses, tiny("llama"), parallel, "cpu", "", num_ranks=NUM_RANKS)
    on_gpu = run_ranks(losses, tiny("llama"), parallel, "cuda", str(tmp_path / "store"), num_ranks=NUM_RANKS)
    for found, expected in zip(on_gpu, on_cpu, strict=True):
        assert found == pytest.approx(expected, rel=1e-3)
