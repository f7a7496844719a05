"""Trains a small vision transformer on handwritten digits. Head and loss are those of transformers.

python examples/05_vit.py [STEPS]
torchrun --nproc-per-node 2 examples/05_vit.py [STEPS]
"""

import os
import sys

import torch
from inputs import digits
from transformers import ViTConfig, ViTForImageClassification

import rotorch

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
with rotorch.on_meta():
    vit = ViTForImageClassification(
        ViTConfig(
            image_size=28, patch_size=7, num_channels=1, num_labels=10, hidden_size=64, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=4,
        )
    )  # fmt: skip
model = rotorch.parallelize(vit, f"rtp={os.environ.get('WORLD_SIZE', '1')}")
model.materialize(seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

images, labels = digits()
losses = []
for step in range(1, steps + 1):
    rows = (torch.arange(64) + 64 * step) % 4480
    mine = rows[model.batch_rank :: model.num_batch_ranks]
    optimizer.zero_grad()
    losses.append(float(model.forward_backward({"pixel_values": images[mine], "labels": labels[mine]})))
    optimizer.step()
    if model.batch_rank == 0 and (step % 10 == 0 or step == steps):
        print(f"step {step}: loss {losses[-1]:.4f}", flush=True)

if model.batch_rank == 0:
    print(model.spec.summary())
model.close()
torch.distributed.destroy_process_group()
