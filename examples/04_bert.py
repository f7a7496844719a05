"""Trains a small BERT to fill in masked letters of the Zen of Python. Head and loss are those of transformers.

python examples/04_bert.py [STEPS]
torchrun --nproc-per-node 2 examples/04_bert.py [STEPS]
"""

import contextlib
import io
import os
import sys

import torch
from transformers import BertConfig, BertForMaskedLM

import rotorch

with contextlib.redirect_stdout(io.StringIO()) as zen:
    import this  # noqa: F401
MASK = 0  # no letter
windows = torch.tensor(list(zen.getvalue().encode()))[:768].view(24, 32)  # bytes are tokens

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
with rotorch.on_meta():
    bert = BertForMaskedLM(
        BertConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
model = rotorch.parallelize(bert, f"rtp={os.environ.get('WORLD_SIZE', '1')}")
model.materialize(seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

losses = []
for step in range(1, steps + 1):
    masked = torch.rand(windows.shape, generator=torch.Generator().manual_seed(step)) < 0.15
    batch = {"input_ids": windows.masked_fill(masked, MASK), "labels": windows.masked_fill(~masked, -100)}
    optimizer.zero_grad()
    mine = {name: rows[model.batch_rank :: model.num_batch_ranks].contiguous() for name, rows in batch.items()}
    losses.append(float(model.forward_backward(mine)))
    optimizer.step()
    if model.batch_rank == 0 and (step % 10 == 0 or step == steps):
        print(f"step {step}: loss {losses[-1]:.4f}", flush=True)

if model.batch_rank == 0:
    print(model.spec.summary())
model.close()
torch.distributed.destroy_process_group()
