"""Messages between the ranks of a pipeline: hidden states to the next stage, their gradients back.

[Note: headers]
    Beside each tensor goes a header on CPU with its shape and dtype, or the news that the sender has broken off, so a
    rank whose neighbour failed fails too, without further waits. Headers carry tags and come in any order.

[Note: posted ahead]
    A receiver allocates a tensor, and posts its receive, where its row says so (RECV), long before it needs the tensor,
    which travels meanwhile. For that it must predict the shape. Tensors that go the same way for micro-batches of the
    same shape are taken to be alike (`like`), and both ends remember the shapes of earlier steps. The first time, a
    receiver waits at RECV for the header. Where a tensor differs from the prediction, or there is none since the sender
    has broken off, zeros go in its place, since their receive is posted; the tensor itself, if there is one, goes
    behind its header.

[Note: known alike]
    Both ends must predict the same form, or a tensor would be sent for which no receive of its form is posted. Three
    rules keep them equal. Both ends do all messages of their rows, broken off or not, and update their predictions only
    when a step ends (`settle`). If shapes differ from the prediction, the message with the lowest tag updates it: a
    receiver may take messages in another order than they were sent in. And a step that was left in the middle (Ctrl-C,
    a connection that broke, no memory for a tensor) leaves receives posted for messages that never come, which would
    take messages of the next step; so no step may follow (`leave`).

[Note: one order per direction]
    So sends and receives of tensors stand in the rows of both ranks, in one order (`pipelining/lower.py`, [Note: order
    of messages]), which holds even if a send blocks its rank until the receive is posted. Backends that carry messages
    between two ranks in the order in which they are posted (NCCL) get a communicator for each direction, so that a send
    is never behind a receive of something that is not there yet.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rotorch._torch_private import group_timeout, set_group_timeout
from rotorch.comm.axis_group import Wait
from rotorch.comm.transports.message_ring import connect, new_group
from rotorch.core.errors import HeardFailure, RankFailure
from rotorch.pipelining.simulate import MOST_UNCLAIMED

HEARD = "pipeline: another stage of the model raised; see the rank that holds it"

_MOST_DIMS = 4
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8)
_AS_KNOWN, _OTHERWISE, _BROKEN_OFF = 0, 1, -1
_HEADER, _TENSOR, _BEHIND = range(3)

Form = tuple[torch.dtype, tuple[int, ...]]


class Connections(Protocol):
    """Connections between this rank of a pipeline and the others. All ranks are named by their positions."""

    def send_header(self, header: Tensor, *, to: int, tag: int) -> Wait:
        """Starts sending a tensor on CPU, identified by its tag; it may arrive before earlier ones."""

    def receive_header(self, header: Tensor, *, source: int, tag: int) -> Wait:
        """Starts receiving the tensor that is sent with the same tag."""

    def send(self, tensor: Tensor, *, to: int, tag: int) -> Wait:
        """Starts sending a tensor; tensors to one rank arrive in the order of sending, not of tags."""

    def receive(self, tensor: Tensor, *, source: int, tag: int) -> Wait:
        """Starts receiving the next tensor of a rank."""


class GroupConnections:
    """Connections over process groups (see [Note: one order per direction]); gloo goes by tags, without a second group.

    Args:
        mesh: of the pipeline, one axis. All its ranks make them.
        device: of the tensors.
    """

    def __init__(self, mesh: DeviceMesh, *, device: torch.device) -> None:
        self._position, self._size = mesh.get_local_rank(), mesh.size()
        self._upwards = self._downwards = mesh.get_group() if self._size > 1 else None
        if device.type != "cpu" and self._upwards is not None:
            timeout = group_timeout(self._upwards, device=device)
            self._downwards = new_group(dist.get_process_group_ranks(self._upwards), timeout=timeout)
            # A group has a backend for each kind of device, with a timeout of its own.
            for carrier in (device, torch.device("cpu")):
                set_group_timeout(self._downwards, timeout, device=carrier)
            self._connect(device)

    def _connect(self, device: torch.device) -> None:
        """Makes NCCL create its communicators now, not in the first message, for which both ends would have to come."""
        for group in (self._upwards, self._downwards):
            connect(group, device=device)
        # Every pair of neighbours in one order on all ranks, so that both ends of a pair come to it together.
        one = torch.zeros(1, device=device)
        for low, high in dict.fromkeys(tuple(sorted((k, (k + 1) % self._size))) for k in range(self._size)):
            for source, to in ((low, high), (high, low)):
                if self._position == source:
                    self.send(one, to=to, tag=0)()
                elif self._position == to:
                    self.receive(one, source=source, tag=0)()

    def send_header(self, header: Tensor, *, to: int, tag: int) -> Wait:
        return _waiting(dist.isend(header, group=self._upwards, group_dst=to, tag=tag))

    def receive_header(self, header: Tensor, *, source: int, tag: int) -> Wait:
        return _waiting(dist.irecv(header, group=self._upwards, group_src=source, tag=tag))

    def send(self, tensor: Tensor, *, to: int, tag: int) -> Wait:
        group = self._upwards if to > self._position else self._downwards
        return _waiting(dist.isend(tensor, group=group, group_dst=to, tag=tag))

    def receive(self, tensor: Tensor, *, source: int, tag: int) -> Wait:
        group = self._upwards if source < self._position else self._downwards
        return _waiting(dist.irecv(tensor, group=group, group_src=source, tag=tag))


@dataclass(eq=False)
class _Expected:
    """A message to come: its header, and the tensor whose receive is posted. Waits may be called again."""

    like: Hashable
    header: Tensor
    header_came: Wait
    tensor: Tensor | None = None
    tensor_came: Wait | None = None


class StageMessages:
    """This rank's messages to and from the others of its pipeline. A tensor must not change until it has left.

    Args:
        mesh: of the pipeline, one axis. All its ranks make them.
        device: of the tensors.
        connections: to carry them; None: process groups.
    """

    def __init__(self, mesh: DeviceMesh, *, device: torch.device, connections: Connections | None = None) -> None:
        self._mesh = mesh
        self._device = device
        self._connections: Connections = GroupConnections(mesh, device=device) if connections is None else connections
        self._known: dict[Hashable, Form] = {}
        """By `like`: the form that both ends predict in this step (see [Note: posted ahead])."""
        self._learned: dict[Hashable, tuple[int, Form]] = {}
        """The lowest tag in this step, and the form of its tensor (see [Note: known alike])."""
        self._was_left = False
        self._expected: dict[tuple[int, int], _Expected] = {}
        self._under_way: dict[tuple[int, int], list[tuple[Wait, Tensor]]] = {}
        self._unclaimed: dict[int, deque[int]] = {}
        self._left_behind: list[tuple[Wait, Tensor]] = []
        """Sends and receives without a waiter; their memory must stay."""

    def send(self, tensor: Tensor | None, *, to: int, tag: int, like: Hashable, unclaimed: bool = False) -> None:
        """Starts sending a tensor to the rank at position `to`; None tells it that this rank has broken off.

        Args:
            tensor: in the form that both ends predict by `like`, or in another one.
            to: position of the receiver.
            tag: the same at both ends, and another one for each message under way.
            like: see [Note: posted ahead]; the same at both ends.
            unclaimed: only this message holds the tensor, whose memory should be freed soon: at most two of these are
                under way to a rank, and before a third the oldest is waited for.
        """
        known, form = self._known.get(like), None if tensor is None else _form_of(tensor)
        state = _BROKEN_OFF if form is None else _AS_KNOWN if known in (form, None) else _OTHERWISE
        header = _header(state, form)
        self._under_way[to, tag] = [(self._connections.send_header(header, to=to, tag=_tag(tag, _HEADER)), header)]
        # The receiver has posted a receive exactly then: from its prediction, or else from this header.
        if known is not None or form is not None:
            asked_for = known or form
            assert asked_for is not None
            payload = tensor
            if payload is None or state != _AS_KNOWN:
                # The posted receive needs a message of its form; the tensor itself follows behind the header.
                payload = torch.zeros(asked_for[1], dtype=asked_for[0], device=self._device)
            if payload.numel():
                payload = payload.contiguous()
                leaves = self._connections.send(payload, to=to, tag=_tag(tag, _TENSOR))
                self._under_way[to, tag].append((leaves, payload))
        if state == _OTHERWISE and tensor is not None and tensor.numel():
            # Tagged, like a header: as an untagged tensor it would meet the receive of the next tensor.
            on_cpu = tensor.cpu().contiguous()
            leaves = self._connections.send_header(on_cpu, to=to, tag=_tag(tag, _BEHIND))
            self._under_way[to, tag].append((leaves, on_cpu))
        if form is not None:
            self._learn(like, form, tag=tag)
        if unclaimed:
            oldest = self._unclaimed.setdefault(to, deque())
            oldest.append(tag)
            # The simulation of the schedule counts memory for this many tensors.
            if len(oldest) > MOST_UNCLAIMED:
                self.arrived(to=to, tag=oldest.popleft())

    def expect(self, *, source: int, tag: int, like: Hashable) -> None:
        """Posts the receive of a message from the rank at position `source`."""
        header = torch.empty(_MOST_DIMS + 3, dtype=torch.int64)
        came = self._connections.receive_header(header, source=source, tag=_tag(tag, _HEADER))
        found = self._expected[source, tag] = _Expected(like, header, came)
        form = self._known.get(like)
        if form is None:
            # Without a prediction the shape is known only now; the sender sends its header first.
            came()
            form = _form_in(header)
        if form is not None:
            found.tensor = torch.empty(form[1], dtype=form[0], device=self._device)
            if found.tensor.numel():
                found.tensor_came = self._connections.receive(found.tensor, source=source, tag=_tag(tag, _TENSOR))

    def receive(self, *, source: int, tag: int) -> Tensor | None:
        """Waits for an expected tensor; None if its sender has broken off."""
        found = self._expected.pop((source, tag))
        # Both waits, even if the header says that its sender broke off: the posted receive has taken a message too.
        found.header_came()
        if found.tensor_came is not None:
            found.tensor_came()
        form = _form_in(found.header)
        if form is None:
            return None
        self._learn(found.like, form, tag=tag)
        if int(found.header[0]) == _AS_KNOWN:
            return found.tensor
        # On CPU: a tensor behind its header goes by tag, as headers do.
        tensor = torch.empty(form[1], dtype=form[0])
        if tensor.numel():
            self._connections.receive_header(tensor, source=source, tag=_tag(tag, _BEHIND))()
        return tensor.to(self._device)

    def exchange(self, outgoing: Sequence[tuple[int, Tensor]], incoming: Sequence[tuple[int, Tensor]]) -> None:
        """Sends and receives (in place) tensors, given as pairs (position of the other rank, tensor). Waits for all."""
        self.check_whole()
        group = self._mesh.get_group() if self._mesh.size() > 1 else None
        # Receives first, or gloo carries the two directions of a pair one after the other.
        ops = [dist.P2POp(dist.irecv, t, group=group, group_peer=k, tag=_BORROWED) for k, t in incoming if t.numel()]
        ops += [dist.P2POp(dist.isend, t, group=group, group_peer=to, tag=_BORROWED) for to, t in outgoing if t.numel()]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()

    def settle(self) -> None:
        """Ends a step: waits until all messages have left; receives and drops the ones not asked for."""
        # After a failure of this rank: its neighbours still send, and each posted receive takes its message.
        for source, tag in list(self._expected):
            self.receive(source=source, tag=tag)
        for to, tag in list(self._under_way):
            self.arrived(to=to, tag=tag)
        self._unclaimed.clear()
        # Not before the end of the step: the other end may not have come to the same message yet.
        self._known.update({like: form for like, (_, form) in self._learned.items()})
        self._learned.clear()

    def _learn(self, like: Hashable, form: Form, *, tag: int) -> None:
        self._learned[like] = min(self._learned.get(like, (tag, form)), (tag, form), key=lambda found: found[0])

    def leave(self) -> None:
        """Records that a step was left in the middle: its messages are dropped (see [Note: known alike])."""
        self._was_left = self._mesh.size() > 1

    def check_whole(self) -> None:
        """Raises `RankFailure` if an earlier step was left in the middle."""
        if self._was_left:
            raise RankFailure(
                "pipeline: an earlier step was left in the middle, and messages of it are still under way. "
                "Start the ranks again, from a checkpoint"
            )

    def arrived(self, *, to: int, tag: int) -> None:
        """Waits for a message that the rank at position `to` has asked for, or soon will, and frees its memory."""
        for leaves, _ in self._under_way.pop((to, tag), ()):
            leaves()

    def to_all(self, value: object) -> None:
        """Sends all other ranks of the pipeline a small picklable value, which they receive by `from_one`."""
        pickled = io.BytesIO()
        torch.save(value, pickled)
        content = torch.frombuffer(bytearray(pickled.getvalue()), dtype=torch.uint8)
        header = _header(_AS_KNOWN, _form_of(content))
        for leaves in [*self._to_others(header, tag=_RESULT), *self._to_others(content, tag=_RESULT + 1)]:
            leaves()

    def from_one(self, *, source: int) -> Any:
        """Receives the value that the rank at position `source` gives by `to_all`.

        Raises:
            HeardFailure: that rank has broken off.
        """
        header = torch.empty(_MOST_DIMS + 3, dtype=torch.int64)
        self._connections.receive_header(header, source=source, tag=_RESULT)()
        form = _form_in(header)
        if form is None:
            raise HeardFailure(HEARD)
        content = torch.empty(form[1], dtype=form[0])
        self._connections.receive_header(content, source=source, tag=_RESULT + 1)()
        # Unpickling is safe: the bytes are of a rank of this job, not of a file.
        return torch.load(io.BytesIO(content.numpy().tobytes()), map_location=self._device, weights_only=False)

    def no_value(self, *, source: int) -> None:
        """Replaces `to_all` and `from_one` on a rank that is about to raise; does not wait.

        Others may wait for this rank to leave, inside of a stage, before they do their part.
        """
        if self._mesh.get_local_rank() == source:
            header = _header(_BROKEN_OFF, None)
            self._left_behind += [(leaves, header) for leaves in self._to_others(header, tag=_RESULT)]
        else:  # or the next value would be taken for this one
            header = torch.empty(_MOST_DIMS + 3, dtype=torch.int64)
            self._left_behind.append((self._connections.receive_header(header, source=source, tag=_RESULT), header))

    def _to_others(self, tensor: Tensor, *, tag: int) -> list[Wait]:
        others = [to for to in range(self._mesh.size()) if to != self._mesh.get_local_rank()]
        return [self._connections.send_header(tensor, to=to, tag=tag) for to in others]


_RESULT, _BORROWED = 0, 2
"""The first two tags are for a pipeline's result (header and content), the third for `exchange` of borrowed weights.

A rank that breaks off leaves a receive for a result behind, which must take nothing else.
"""


def _tag(tag: int, part: int) -> int:
    return 3 + 3 * tag + part


def _form_of(tensor: Tensor) -> Form:
    if tensor.dim() > _MOST_DIMS or tensor.dtype not in _DTYPES:
        raise RankFailure(
            f"pipeline: a stage gives a tensor of shape {tuple(tensor.shape)} and {tensor.dtype}; "
            f"stages send hidden states of at most {_MOST_DIMS} dims and a floating-point dtype"
        )
    return tensor.dtype, tuple(tensor.shape)


def _header(state: int, form: Form | None) -> Tensor:
    dtype, shape = form or (_DTYPES[0], ())
    return torch.tensor([state, _DTYPES.index(dtype), len(shape), *shape, *[0] * (_MOST_DIMS - len(shape))])


def _form_in(header: Tensor) -> Form | None:
    """The form that a header gives; None if its sender has broken off."""
    state, dtype, num_dims, *shape = header.tolist()
    return None if state == _BROKEN_OFF else (_DTYPES[dtype], tuple(shape[:num_dims]))


def _waiting(work: dist.Work | None) -> Wait:
    waited = [work is None]

    def wait() -> None:
        if not waited[0]:  # gloo would wait for another message the second time
            waited[0] = True
            assert work is not None
            work.wait()

    return wait
