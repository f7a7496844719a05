"""Trains the convolutional network of the paper's tutorial on handwritten digits. It has no plan: rules cut its layers.

python examples/02_mnist_cnn.py [STEPS]
torchrun --nproc-per-node 2 examples/02_mnist_cnn.py [STEPS]
"""

import os
import sys

import torch
import torch.nn.functional as F
from inputs import digits
from torch import nn

import rotorch


class CNN(nn.Module):
    """Two convolutions, two linear layers, dropout."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def loss_fn(module, batch, num_targets):
    """The sum of this rank's losses over the number of targets of all ranks."""
    return F.nll_loss(module(batch["images"]), batch["labels"], reduction="sum") / num_targets


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
with rotorch.on_meta():
    cnn = CNN()
model = rotorch.parallelize(cnn, f"rtp={os.environ.get('WORLD_SIZE', '1')}", loss=loss_fn)
model.materialize(seed=0)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
torch.manual_seed(model.batch_rank)  # each rank drops out its own

images, labels = digits()
images = (images - 0.1307) / 0.3081
held_out = {"images": images[-512:], "labels": labels[-512:]}
losses = []
for step in range(1, steps + 1):
    rows = (torch.arange(64) + 64 * step) % 4480
    mine = rows[model.batch_rank :: model.num_batch_ranks]
    optimizer.zero_grad()
    losses.append(float(model.forward_backward({"images": images[mine], "labels": labels[mine]})))
    optimizer.step()
    if model.batch_rank == 0 and (step % 10 == 0 or step == steps):
        print(f"step {step}: loss {losses[-1]:.4f}", flush=True)

share = {name: rows[model.batch_rank :: model.num_batch_ranks] for name, rows in held_out.items()}
held_out_loss = model.evaluate(share).loss
if model.batch_rank == 0:
    print(f"held out: loss {held_out_loss:.4f}")
    print(model.spec.summary())
model.close()
torch.distributed.destroy_process_group()
