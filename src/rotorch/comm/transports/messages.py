"""Point-to-point messages between neighbours on a ring: from buffer to buffer, or replacing a buffer's contents.

A send is never posted without the receive of the same hop, and no memory is sent and received into at once.

[Note: receive first]
    Over gloo a send that finds no posted receive waits for the other end to announce one, behind the data of the other
    direction: an exchange whose ends both send first is half duplex. So every receive is posted before the send of the
    same hop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from rotorch.core.errors import RankFailure
from rotorch.core.messages import CHUNK_BYTES, bounce_bytes


class Exchange:
    """Receives and sends under way (an empty slice needs neither); each is waited for once.

    Args:
        send: goes to the rank at position `to`.
        receive: comes from the one at `source`.
        group: of the ring.
        sends: further messages, each with the rank that it goes to.
        receives: further messages, each with the rank that it comes from.
    """

    def __init__(
        self,
        *,
        send: Tensor | None = None,
        to: int = 0,
        receive: Tensor | None = None,
        source: int = 0,
        group: dist.ProcessGroup | None,
        sends: Sequence[tuple[Tensor, int]] = (),
        receives: Sequence[tuple[Tensor, int]] = (),
    ) -> None:
        coming = [*([] if receive is None else [(receive, source)]), *receives]
        going = [*([] if send is None else [(send, to)]), *sends]
        wanted = [
            dist.P2POp(operation, tensor, group=group, group_peer=peer)
            for operation, messages in ((dist.irecv, coming), (dist.isend, going))
            for tensor, peer in messages
            if tensor.numel()
        ]
        works = dist.batch_isend_irecv(wanted) if wanted else []
        if len(works) < len(wanted):  # NCCL: one handle for the whole batch
            self._received, self._sent = list(works), list(works)
        else:
            num_coming = sum(tensor.numel() > 0 for tensor, _ in coming)
            self._received, self._sent = works[:num_coming], works[num_coming:]

    def has_received(self) -> bool:
        """Returns True if the message is known to have come, without waiting (gloo never knows)."""
        return all(work.is_completed() for work in self._received)

    def has_sent(self) -> bool:
        """Returns True if the message is known to have left, without waiting (gloo never knows)."""
        return all(work.is_completed() for work in self._sent)

    def wait_received(self) -> None:
        _wait(self._received)
        self._received = []

    def wait_sent(self) -> None:
        _wait(self._sent)
        self._sent = []

    def wait(self) -> None:
        self.wait_received()
        self.wait_sent()


def wait_for_all(hops: list[Exchange | None]) -> None:
    """Waits for the messages of all slots of a ring, which have none afterwards."""
    for slot, hop in enumerate(hops):
        if hop is not None:
            hop.wait()
        hops[slot] = None


def _wait(works: list[dist.Work]) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:  # timed out, or the connection was closed
        raise RankFailure(f"a neighbour on the ring is late or gone: {str(error).splitlines()[0]}") from error


class Bounce:
    """Memory for arriving chunks until the chunks of the buffer that they replace have left.

    Args:
        largest: elements of the largest slice.
        dtype: of slices.
        device: where it lies.
    """

    def __init__(self, largest: int, *, dtype: torch.dtype, device: torch.device) -> None:
        num_bytes = largest * dtype.itemsize
        self.chunk_numel = min(largest, CHUNK_BYTES // dtype.itemsize)
        self.memory = torch.empty(bounce_bytes(num_bytes) // dtype.itemsize, dtype=dtype, device=device)
        self.chunks = self.memory.split(self.chunk_numel) if largest else ()


class Hop:
    """Sends a buffer's contents to one neighbour and replaces them by those of the other neighbour's buffer.

    Chunk by chunk: a chunk arrives in the bounce, and is copied into the buffer when the buffer's own chunk has left.
    The first chunks are on their way from the beginning; the buffer may be read until `wait`.

    Args:
        buffer: flat, at least as large as both messages.
        send_numel: elements that go to the rank at position `to`.
        receive_numel: elements that come from the one at `source`.
        bounce: memory in which they arrive; no other hop may use it meanwhile.
        group: of the ring.
    """

    def __init__(
        self,
        buffer: Tensor,
        *,
        send_numel: int,
        to: int,
        receive_numel: int,
        source: int,
        bounce: Bounce,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._buffer, self._bounce = buffer, bounce
        self._send_numel, self._to = send_numel, to
        self._receive_numel, self._source, self._group = receive_numel, source, group
        self._posted: deque[tuple[int, Exchange]] = deque()
        self._next = 0
        # As many as the bounce has parts; each of the others is posted when a part has been copied out (`wait`).
        for _ in bounce.chunks:
            self._post()

    def _extent(self, chunk: int, numel: int) -> slice:
        size = self._bounce.chunk_numel
        return slice(min(chunk * size, numel), min((chunk + 1) * size, numel))

    def _post(self) -> None:
        """Starts the exchange of the next chunk, if there is one."""
        goes, comes = self._extent(self._next, self._send_numel), self._extent(self._next, self._receive_numel)
        if goes.start < goes.stop or comes.start < comes.stop:
            # Both directions of a chunk at once: each rank receives into the bounce what another one sends from its
            # buffer.
            exchange = Exchange(
                send=self._buffer[goes],
                to=self._to,
                receive=self._arrival(self._next),
                source=self._source,
                group=self._group,
            )
            self._posted.append((self._next, exchange))
            self._next += 1

    def _arrival(self, chunk: int) -> Tensor:
        """The part of the bounce in which a chunk arrives."""
        comes = self._extent(chunk, self._receive_numel)
        # Two parts in turn: one receives a chunk while the chunk in the other is copied into the buffer.
        return self._bounce.chunks[chunk % len(self._bounce.chunks)][: comes.stop - comes.start]

    def wait(self) -> None:
        """Waits until the buffer has the new contents."""
        while self._posted:
            chunk, exchange = self._posted.popleft()
            exchange.wait()
            # The exchange is over, so the buffer's own chunk has left and may be overwritten.
            self._buffer[self._extent(chunk, self._receive_numel)].copy_(self._arrival(chunk))
            self._post()

    def drop(self) -> None:
        """Waits for messages under way and discards them: the buffer keeps its contents, as on all other ranks.

        All ranks, if none of them has waited for the hop.
        """
        while self._posted:
            self._posted.popleft()[1].wait()
