"""One process as one of many ranks: the memory and traffic of a rank, without the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from rotorch._torch_private import fake_store


@contextmanager
def as_rank(rank: int, *, num_ranks: int) -> Iterator[None]:
    """Makes this process rank `rank` of `num_ranks` of a process group that does nothing, within the block.

    Collectives return at once and leave tensors as they are, so only what needs no answer from other ranks means
    something: cutting, holding, counting. Nothing that maps another rank's memory works.

    Example:
        >>> with as_rank(63, num_ranks=64):
        ...     model = rotorch.parallelize(module_on_meta, "fsdp=64", device="cpu")
    """
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
