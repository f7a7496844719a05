"""Global batches as a function of seed and step, and each rank's share of them; made to bring wrong sums to light."""

from __future__ import annotations

import torch
from torch import Tensor

Rows = dict[str, Tensor]


def global_batch(
    *, seed: int, step: int, num_shares: int, num_micro_batches: int, num_rows: int, num_tokens: int, vocab_size: int
) -> Rows:
    """Makes the batch of one step: `input_ids`, `labels`: [num_shares * num_micro_batches * num_rows, num_tokens].

    No two rows are alike, and no two have equally many targets, so that a mean of means differs from the mean. Where
    there are more than two micro-batches over all ranks, the last one has no target at all.

    Args:
        seed: of the data.
        step: number of the step.
        num_shares: number of ranks that see different data.
        num_micro_batches: of each share.
        num_rows: of each micro-batch.
        num_tokens: length of a row.
        vocab_size: tokens are drawn from `range(vocab_size)`.
    """
    generator = torch.Generator().manual_seed(1000 * seed + step)
    total = num_shares * num_micro_batches * num_rows
    input_ids = torch.randint(vocab_size, (total, num_tokens), generator=generator)
    share_ignored = torch.arange(total, dtype=torch.float64)[:, None] / (total + 1)
    ignored = torch.rand((total, num_tokens), generator=generator, dtype=torch.float64) < share_ignored
    if num_shares * num_micro_batches > 2:
        ignored[-num_rows:] = True
    return {"input_ids": input_ids, "labels": input_ids.masked_fill(ignored, -100)}


def with_documents(batch: Rows, *, seed: int, most: int = 4) -> Rows:
    """Cuts each row of a batch into documents, one to `most`, at places of its own.

    Adds `position_ids`, which begin again with each document, and takes the first token of each out of the targets:
    what a model of transformers needs to keep them apart.
    """
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_tokens = batch["input_ids"].shape
    begins = torch.zeros(num_rows, num_tokens, dtype=torch.bool)
    begins.scatter_(1, torch.randint(num_tokens, (num_rows, most - 1), generator=generator), True)
    begins[:, 0] = True
    places = torch.arange(num_tokens).expand(num_rows, -1)
    first = torch.where(begins, places, 0).cummax(dim=1).values
    return {**batch, "labels": batch["labels"].masked_fill(begins, -100), "position_ids": places - first}


def share_of(batch: Rows, *, share: int, num_shares: int, num_micro_batches: int) -> list[Rows]:
    """Returns the micro-batches of one share of a global batch, an equal part of every tensor's rows."""
    parts = {name: rows.chunk(num_shares * num_micro_batches) for name, rows in batch.items()}
    numbers = [share * num_micro_batches + number for number in range(num_micro_batches)]
    return [{name: part[number] for name, part in parts.items()} for number in numbers]
