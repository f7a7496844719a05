"""Trains a small Llama on the Zen of Python. Its weights rotate over as many ranks as you start.

    python examples/01_rtp_in_30_lines.py
    torchrun --nproc-per-node 2 examples/01_rtp_in_30_lines.py

Each rank holds its share of the weights and computes its share of the batch; the losses do not depend on how many
ranks there are.
"""

import contextlib
import io
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rotorch

with contextlib.redirect_stdout(io.StringIO()) as zen:
    import this  # noqa: F401
windows = torch.tensor(list(zen.getvalue().encode()))[:768].view(12, 64)  # bytes are tokens

with rotorch.on_meta():  # no memory yet: each rank will make its own slices, and nothing else
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
            num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False,
        )
    )  # fmt: skip
model = rotorch.parallelize(llama, f"rtp={os.environ.get('WORLD_SIZE', '1')}")
model.materialize(seed=0)  # the same initial weights on any number of ranks
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

mine = windows[model.batch_rank :: model.num_batch_ranks].to(model.device)
for step in range(1, 41):
    optimizer.zero_grad()
    loss = model.forward_backward({"input_ids": mine, "labels": mine})
    optimizer.step()
    if model.batch_rank == 0 and step % 10 == 0:
        print(f"step {step}: loss {loss:.4f}", flush=True)

held = sum(weight.local.nbytes for weight in model.weights.values())
print(f"rank {model.batch_rank} holds {held:,} of {model.spec.num_bytes:,} bytes of weights", flush=True)
model.close()
torch.distributed.destroy_process_group()
