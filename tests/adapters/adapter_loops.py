"""Loops as people write them for Accelerate, Fabric and Lightning, run without a layout or under one."""

import contextlib
import io
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import LlamaConfig, LlamaForCausalLM

from rotorch.strategies import batch_ranks, parse_parallel

MESSAGES = "rtp=2[transport=send_receive]"
LAYOUTS = ("rtp=2", MESSAGES, "fsdp=2", "ddp=2", "megatron=2")
AFTERWARDS = dict(zip(LAYOUTS, ("fsdp=2", "megatron=2", MESSAGES, "rtp=2", "ddp=2"), strict=True))
"""Under which layout a run that was begun under another one is resumed."""
BEGUN = [pytest.param(each, marks=pytest.mark.slow) if each not in LAYOUTS[:2] else each for each in LAYOUTS]
"""Layouts under which tests begin a run; in those that are not slow two others resume one."""


@dataclass
class Run:
    """Numbers that a loop has seen, in its order, and the weights in the end."""

    seen: list[tuple[str, float]] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def see(self, name: str, value: Any) -> None:
        self.seen.append((name, float(value)))


def model(seed: int = 0) -> LlamaForCausalLM:
    """Grouped queries, tied embeddings, a vocabulary that two ranks cannot cut evenly."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True)
    )


def rows(number: int, *, seed: int) -> list[dict[str, torch.Tensor]]:
    """Rows with equally many targets each, so the mean over a batch is the mean of means over its shares."""
    ids = torch.randint(0, 61, (number, 10), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]


def rows_each(layout: str | None, number: int) -> int:
    """Number of rows, of `number`, that a rank reads."""
    return number // (1 if layout is None else batch_ranks(parse_parallel(layout)))


def weights_of(module: Any) -> dict[str, np.ndarray]:
    full = getattr(module, "full_state_dict", None)
    state = module.state_dict() if full is None else full(all_ranks=True)
    return {name: value.numpy().copy() for name, value in state.items()}


def run_all(work: list[tuple[str, Any, str | None, Any, dict[str, Any]]]) -> dict[str, Run]:
    """On a rank: loops one after another, by name."""
    AcceleratorState._reset_state(reset_partial_state=True)  # as in a new process: a test here may have made one
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if all(layout is None for _, _, layout, _, _ in work):  # as a script without a launcher
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    found = {}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # these libraries have much to say
        for name, loop, layout, directory, changes in work:
            found[name] = loop(layout, directory, **changes)
    return found


def difference(ours: Run, theirs: Run) -> list[str]:
    """Lines for all that differs by more than 1e-5, relative to the size of a number, from a run of one process."""
    if [name for name, _ in ours.seen] != [name for name, _ in theirs.seen]:
        return [f"saw {[name for name, _ in ours.seen]}, not {[name for name, _ in theirs.seen]}"]
    found = [
        f"number {number}, {name}, is {mine}, not {other}"
        for number, ((name, mine), (_, other)) in enumerate(zip(ours.seen, theirs.seen, strict=True))
        if not abs(mine - other) <= 1e-5 * max(1.0, abs(other))
    ]
    for name, value in theirs.weights.items():
        error = np.abs(ours.weights[name] - value).max()
        if not error <= 1e-5:
            found.append(f"{name} is off by {error:.1e}")
    return found


def run_page(blocks: list[str], directory: Path) -> None:
    """On a rank: a page's programs one after another."""
    AcceleratorState._reset_state(reset_partial_state=True)  # as in a new process: a test here may have made one
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    os.chdir(directory)
    names: dict[str, Any] = {"__name__": "page", "rows": rows(8, seed=1)}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for block in blocks:
            exec(compile(block, "page", "exec"), names)
