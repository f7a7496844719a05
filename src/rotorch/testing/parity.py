"""Losses of training steps on the same global batches under any layout, to be compared with one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from rotorch.core.errors import ConfigError
from rotorch.parallel_model import ParallelModel
from rotorch.testing.batches import Rows, global_batch
from rotorch.testing.reference import reference_step

NUM_ROWS, NUM_TOKENS, LEARNING_RATE = 12, 24, 1e-3


def parity_batch(*, step: int, vocab_size: int, seed: int = 0) -> Rows:
    """The global batch of a step, 12 rows of 24 tokens: the same however many ranks share it."""
    return global_batch(
        seed=seed,
        step=step,
        num_shares=1,
        num_micro_batches=1,
        num_rows=NUM_ROWS,
        num_tokens=NUM_TOKENS,
        vocab_size=vocab_size,
    )


def my_micro_batches(model: ParallelModel, batch: Mapping[str, Tensor]) -> list[Rows]:
    """This rank's rows of a global batch, in two micro-batches (of uneven sizes where they do not divide)."""
    num_rows = len(next(iter(batch.values())))
    each, rest = divmod(num_rows, model.num_batch_ranks)
    if rest or each < 2:
        raise ConfigError(f"parity: {num_rows} rows do not divide over {model.num_batch_ranks} ranks, 2 or more each")
    mine = {name: rows[model.batch_rank * each : (model.batch_rank + 1) * each] for name, rows in batch.items()}
    halves = {name: rows.tensor_split(2) for name, rows in mine.items()}
    return [{name: parts[number] for name, parts in halves.items()} for number in range(2)]


def parallel_losses(model: ParallelModel, *, num_steps: int, vocab_size: int, fused: bool = False) -> Iterator[float]:
    """Trains with AdamW (all weights at once) on the parity batches and yields the loss of every step. All ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=not fused, fused=fused)
    for step in range(num_steps):
        optimizer.zero_grad()
        yield float(model.forward_backward(my_micro_batches(model, parity_batch(step=step, vocab_size=vocab_size))))
        optimizer.step()


def reference_losses(module: nn.Module, *, num_steps: int, vocab_size: int) -> Iterator[float]:
    """Trains a plain module on one process, each global batch at once, one weight after another; yields losses."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    for step in range(num_steps):
        yield float(reference_step(module, parity_batch(step=step, vocab_size=vocab_size)))
        optimizer.step()
