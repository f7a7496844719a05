"""One error for all ranks: an error on any rank ends the block on all of them, with the same message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh

from rotorch.comm.collectives import all_reduce_min, all_reduce_sum
from rotorch.core.errors import ConfigError, HeardFailure, RankFailure, RotorchError

_MESSAGE_CHARS = 1000


@contextmanager
def one_error(
    mesh: DeviceMesh, *, kinds: tuple[type[RotorchError], ...] = (ConfigError, RankFailure)
) -> Iterator[None]:
    """Turns an error inside the block on any rank into the same error on all: that of the first such rank. All ranks.

    An error that is not rotorch's is raised unchanged on its own rank; other ranks raise a `HeardFailure`.

    Args:
        mesh: of the ranks.
        kinds: rotorch's errors that other ranks raise as the same class, narrower classes first.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # a rank that left now would leave the others waiting
        error = caught
    rank = mesh.get_rank() if mesh.size() > 1 else 0
    # Every rank comes here, with an error or without; the lowest rank that has one speaks for all.
    first = int(all_reduce_min(float(rank if error else mesh.size()), mesh=mesh))
    if first == mesh.size():
        return
    known = (*kinds, Exception)
    text = torch.zeros(1 + _MESSAGE_CHARS, dtype=torch.int64)
    if rank == first:
        assert error is not None, "the first rank with an error has one"
        said = str(error) if isinstance(error, kinds) else f"rank {rank}: {type(error).__name__}: {error}"
        codes = [ord(char) for char in said[:_MESSAGE_CHARS]]
        text[0] = next(number for number, kind in enumerate(known) if isinstance(error, kind))
        text[1 : 1 + len(codes)] = torch.tensor(codes, dtype=torch.int64)
    # All others add zeros: a broadcast whose source is known only now, and shared memory can carry it.
    all_reduce_sum(text, mesh=mesh)
    message = "".join(chr(code) for code in text[1:].tolist() if code)
    kind = known[int(text[0])]
    if error is not None and (not isinstance(error, kinds) or (kind in kinds and str(error).startswith(message))):
        raise error  # its own, or the same: nothing is cut off
    raise (kind if kind in kinds else HeardFailure)(message) from error
