"""Trains a residual network, written as torchvision writes them, on handwritten digits.

    python examples/03_resnet.py [STEPS]
    torchrun --nproc-per-node 2 examples/03_resnet.py [STEPS]

Batch norms see a rank's own share of the batch; their running statistics are the mean over all ranks.
"""

import os
import sys

import torch
import torch.nn.functional as F
from inputs import digits
from torch import nn

import rotorch


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, num_in, num_out, *, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.downsample = None
        if stride > 1 or num_in != num_out:
            self.downsample = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    """Three stages of blocks between a stem and a linear head."""

    def __init__(self, widths=(16, 32, 64), num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        pairs = zip((widths[0], *widths), widths, strict=False)
        self.layers = nn.Sequential(
            *(nn.Sequential(BasicBlock(a, b, stride=1 if a == b else 2), BasicBlock(b, b, stride=1)) for a, b in pairs)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[-1], num_classes)

    def forward(self, x):
        x = self.layers(F.relu(self.bn1(self.conv1(x)), inplace=True))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def loss_fn(module, batch, num_targets):
    """The sum of this rank's losses over the number of targets of all ranks."""
    return F.cross_entropy(module(batch["images"]), batch["labels"], reduction="sum") / num_targets


steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
with rotorch.on_meta():
    resnet = ResNet()
model = rotorch.parallelize(resnet, f"rtp={os.environ.get('WORLD_SIZE', '1')}", loss=loss_fn)
model.materialize(seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

images, labels = digits()
losses = []
for step in range(1, steps + 1):
    rows = (torch.arange(64) + 64 * step) % 4480
    mine = rows[model.batch_rank :: model.num_batch_ranks]
    optimizer.zero_grad()
    losses.append(float(model.forward_backward({"images": images[mine], "labels": labels[mine]})))
    optimizer.step()
    if model.batch_rank == 0 and (step % 5 == 0 or step == steps):
        print(f"step {step}: loss {losses[-1]:.4f}", flush=True)

if model.batch_rank == 0:
    print(model.spec.summary())
model.close()
torch.distributed.destroy_process_group()
