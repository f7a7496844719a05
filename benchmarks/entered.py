"""Files, classes and functions of rotorch that one training step enters, by layout: how much there is to read.

    python benchmarks/entered.py [--json FILE]
    python benchmarks/entered.py --names "rtp=2"      # which: each file with its classes

Counted on rank 0 of forked gloo ranks with `sys.setprofile`, in the third step of a tiny Llama, forward to the end of
backward, with the `fsdp` of torch beside it. A class is entered when one of its methods is; a lambda or a
comprehension counts as part of the function around it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import rotorch
from rotorch.source import source_commit
from rotorch.testing.ranks import run_ranks

LAYOUTS = {
    "rtp=2": 2,
    "rtp=2[transport=send_receive]": 2,
    "megatron=2": 2,
    "fsdp=2": 2,
    "tesseract=2x2x1": 4,
    "torch's fully_shard": 2,
}
CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
SETTLED = 2
"""Steps before the one that is counted: buffers are made and plans are read in the first."""


class Entered:
    """Files, classes and functions of `packages` that are entered while it counts."""

    def __init__(self, *packages: str) -> None:
        self._packages = packages
        self.classes_by_file: dict[str, list[str]] = {}
        self._seen: set[tuple[str, str]] = set()

    def count(self, step: Callable[[], object]) -> dict[str, int]:
        """Runs `step` and counts, also on the threads that autograd runs in.

        Returns:
            Numbers of files, classes and functions; `classes_by_file` has the names.
        """
        torch.autograd.set_multithreading_enabled(False)  # backward runs in this thread, where the profile is set
        sys.setprofile(self._event)
        try:
            step()
        finally:
            sys.setprofile(None)
            torch.autograd.set_multithreading_enabled(True)
        named = {(file, name) for file, name in self._seen if "<" not in name}
        classes = {(file, name.rpartition(".")[0]) for file, name in named if "." in name}
        self.classes_by_file = {
            file: sorted({owner for where, owner in classes if where == file}) for file in sorted(f for f, _ in named)
        }
        return {"files": len({file for file, _ in named}), "classes": len(classes), "functions": len(named)}

    def _event(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            file = frame.f_code.co_filename
            if any(package in file for package in self._packages):
                self._seen.add((file, frame.f_code.co_qualname.replace(".<locals>.", ".")))


def count_on_rank(parallel: str) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Trains a few steps and counts one; also gives the classes by file. All ranks."""
    torch.manual_seed(0)
    module = LlamaForCausalLM(CONFIG)
    ids = torch.randint(CONFIG.vocab_size, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    step, package = _torchs_step(module, batch) if "fully_shard" in parallel else _step(module, batch, parallel)
    for _ in range(SETTLED):
        step()
    entered = Entered(package)
    return entered.count(step), entered.classes_by_file


def _step(module: nn.Module, batch: dict[str, Any], parallel: str) -> tuple[Callable[[], object], str]:
    model = rotorch.parallelize(module, parallel)
    model.materialize(seed=0)
    return (lambda: model.forward_backward(batch, accumulate=True)), "/rotorch/"


def _torchs_step(module: nn.Module, batch: dict[str, Any]) -> tuple[Callable[[], object], str]:
    for layer in module.model.layers:
        fully_shard(layer)
    fully_shard(module)
    return (lambda: module(**batch).loss.backward()), "/fsdp/_fully_shard/"


def main() -> None:
    """Prints a table; writes a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the counts here, too")
    parser.add_argument("--names", choices=LAYOUTS, help="list the files and classes of one layout")
    options = parser.parse_args()
    if options.names:
        _, found = run_ranks(count_on_rank, options.names, num_ranks=LAYOUTS[options.names])[0]
        for file, classes in found.items():
            print(f"{file.rpartition('/rotorch/')[2]:40} {', '.join(classes)}")
        return
    rows = [
        {"parallel": parallel, **run_ranks(count_on_rank, parallel, num_ranks=ranks)[0][0]}
        for parallel, ranks in LAYOUTS.items()
    ]
    print(f"{'one step under':32} files  classes  functions")
    for row in rows:
        print(f"{row['parallel']:32} {row['files']:5} {row['classes']:8} {row['functions']:10}")
    if options.json:
        record = {"commit": source_commit(), "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
