"""Loads SmolLM2-135M-Instruct over ranks and measures it on the speech of 2015; says what each rank took to load it.

    torchrun --nproc-per-node 3 examples/finetune_smollm2/perplexity.py

Perplexity in windows of 1,024 tokens that do not overlap: 22.38 whatever the number of ranks, the last, shorter window
included; 22.83 without it. README.md says more of how it is measured.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

import torch
from fetch import CACHE, Unavailable, smollm2, speeches

import rotorch
from rotorch.models.gguf import read_gguf_metadata
from rotorch.models.hf import causal_lm, load_config

WINDOW = 1024


def main() -> int:
    """Loads, measures, prints; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", default=f"rtp={os.environ.get('WORLD_SIZE', '1')}")
    parser.add_argument("--windows", type=int, help="measure on the first windows only")
    options = parser.parse_args()
    try:
        gguf, folder = smollm2(), speeches()
    except Unavailable as error:
        print(f"skipped: an input cannot be had here: {error}")
        return 0
    described = read_gguf_metadata(gguf, CACHE / "gguf")
    config = load_config(described)
    config.dtype = torch.float32
    with rotorch.on_meta():
        module = causal_lm(config)
    before_bytes = highest_memory()  # of libraries, twice as much in some builds of torch, and the tokenizer
    model = rotorch.parallelize(module, options.parallel, device="cpu").load(str(gguf))
    peak_bytes = highest_memory()
    share, largest = model.spec.num_bytes / model.num_batch_ranks, max(w.num_bytes for w in model.spec.weights)
    print(
        f"rank {model.batch_rank}: peak {peak_bytes / 1e6:.0f} MB after loading, {before_bytes / 1e6:.0f} MB before; "
        f"its share of the model is {share / 1e6:.0f} MB, the largest tensor {largest / 1e6:.0f} MB",
        flush=True,
    )
    from transformers import AutoTokenizer  # loading needs none

    text = (folder / "2015_barack_obama_d.txt").read_text("utf-8")
    ids = torch.tensor(AutoTokenizer.from_pretrained(described)(text).input_ids)
    batches = [{"input_ids": part[None], "labels": part[None]} for part in ids.split(WINDOW)[: options.windows]]
    empty = {"input_ids": ids[None, :2], "labels": torch.full((1, 2), -100)}
    while len(batches) % model.num_batch_ranks:
        batches.append(empty)  # every rank gives equally many
    measured = model.evaluate(batches[model.batch_rank :: model.num_batch_ranks])
    if model.batch_rank == 0:
        print(f"perplexity {math.exp(measured.loss):.4f} over {measured.num_targets} tokens", flush=True)
    model.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


def highest_memory() -> int:
    """The most bytes that this process ever had in memory, those that it shares with others included.

    Not `getrusage`'s: that begins with what the process had before it became this program, which is torchrun's.
    """
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
