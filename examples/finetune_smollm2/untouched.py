"""Loads SmolLM2-135M-Instruct over ranks, exports it untrained, and compares every bit with transformers' own loading.

    torchrun --nproc-per-node 2 examples/finetune_smollm2/untouched.py

The file has four-bit numbers; what is compared are the float32 weights that they stand for.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from fetch import CACHE, Unavailable, smollm2
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import rotorch
from rotorch.models.gguf import read_gguf_metadata
from rotorch.models.hf import causal_lm, load_config
from rotorch.train.checkpoint.export import export_checkpoint
from rotorch.train.checkpoint.saving import save
from rotorch.train.state import TrainState


def main() -> int:
    """Loads, saves, exports, compares; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", default=f"rtp={os.environ.get('WORLD_SIZE', '1')}")
    options = parser.parse_args()
    try:
        gguf = smollm2()
    except Unavailable as error:
        print(f"skipped: an input cannot be had here: {error}")
        return 0
    config = load_config(read_gguf_metadata(gguf, CACHE / "gguf"))
    config.dtype = torch.float32
    with rotorch.on_meta():
        module = causal_lm(config)
    model = rotorch.parallelize(module, options.parallel, device="cpu").load(str(gguf))
    named = [tempfile.mkdtemp(dir=CACHE) if model.batch_rank == 0 else None]
    torch.distributed.broadcast_object_list(named)
    folder = Path(str(named[0]))
    save(folder / "run", TrainState(model=model), keep=1)
    model.close()
    torch.distributed.destroy_process_group()
    if model.batch_rank:
        return 0
    with tempfile.TemporaryDirectory(dir=folder) as out:
        export_checkpoint(folder / "run", Path(out) / "export")
        exported = load_file(Path(out) / "export" / "model.safetensors")
        theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        return compare(exported, dict(theirs.named_parameters()), layout=options.parallel)


def compare(exported: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *, layout: str) -> int:
    """Says how many tensors are the same to the bit, and names those that are not; returns the exit code."""
    other = [n for n, weight in theirs.items() if n not in exported or not same_bits(weight.detach(), exported[n])]
    surplus = sorted(exported.keys() - theirs.keys())
    numbers = sum(tensor.numel() for tensor in exported.values())
    same = len(theirs) - len(other)
    print(f"{layout}: {same} of {len(theirs)} tensors are the same to the bit, of {numbers:,} numbers")
    for name in [*other, *surplus]:
        print(f"another: {name}")
    return 1 if other or surplus else 0


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two float32 tensors are the same, signs of zeros included."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))


if __name__ == "__main__":
    sys.exit(main())
