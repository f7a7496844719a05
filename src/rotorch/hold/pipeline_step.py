"""One step of a pipeline on one rank: the actions of its row, one after another.

[Note: breaking off]
    A rank whose stage raises goes on through its row without computing, and tells the ranks that wait for it; they do
    the same. At the end of the row they raise: the first what happened, those who heard of it a RankFailure. Who waits
    for no message after that hears of it in what comes next. To agree at the end would be a deadlock: others of this
    stage may wait inside of a ring for the rank that raised, which has to leave for them to notice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rotorch.comm.stage_messages import HEARD, StageMessages
from rotorch.comm.status_word import Operation, StatusWord, at
from rotorch.core.errors import HeardFailure, RankFailure
from rotorch.hold.holding import StageHolding
from rotorch.models.losses import Batch
from rotorch.models.stages import StagedModule, StageOutput
from rotorch.ops.later_gradients import LaterGradients
from rotorch.pipelining.actions import COMPUTE, MESSAGES, SENDS, Action, ActionKind, Schedule, counterpart, peer_stage

Watch = Callable[[Action], AbstractContextManager[None]]


class PipelineStep:
    """What a rank has in hand during a step.

    Args:
        inner: holds the weights of this rank's stages, and is unsharded.
        staged: the module.
        messages: to and from the other ranks of the pipeline.
        run: the whole model's forward on a micro-batch, and what is made of it (its loss, before `backward`).
        micro_batches: of the step.
        later: what puts weight gradients off, where they can be.
        status: where this rank writes down what it is at.
        ranks: of the pipeline, by position.
        watch: is entered around every action of the row.

    Attributes:
        results: of the last stage, what `run` gave, with the micro-batch's number.
    """

    def __init__(
        self,
        inner: StageHolding,
        *,
        staged: StagedModule,
        messages: StageMessages,
        run: Callable[[Batch], Any],
        micro_batches: Sequence[Batch],
        later: LaterGradients | None = None,
        status: StatusWord | None = None,
        ranks: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> None:
        self._status = status or StatusWord()
        self._ranks = ranks
        self._inner = inner
        self._later = later
        self._watch = watch
        self._staged = staged
        self._messages = messages
        self._run = run
        self._micro_batches = micro_batches
        self._given: dict[Action, Tensor | None] = {}
        """What a computation gave for the message that it goes with, by that SEND; None if the step has broken off."""
        self._graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        """Of each forward whose backward is to come: what was received, and what came out."""
        self._shapes = [_shapes(batch) for batch in micro_batches]
        self._error: BaseException | None = None
        self._heard = False
        self.results: list[tuple[int, Any]] = []

    def run(self, row: Iterable[Action], table: Schedule) -> None:
        """Does a row of a lowered table. All ranks of the pipeline, each its own.

        Raises:
            HeardFailure: another rank of the pipeline has broken off.
            RankFailure: an earlier step was left in the middle of a row.
        """
        self._messages.check_whole()
        try:
            for action in row:
                with nullcontext() if self._watch is None else self._watch(action):
                    if action.kind in MESSAGES:
                        self._message(action, table)
                    elif not (self._error or self._heard):
                        self._guarded(action, table)
            self._messages.settle()
        except BaseException:  # not of a stage, whose errors end no row
            self._messages.leave()
            raise
        if self._later is not None:
            self._later.forget()
        if self._error is not None:
            raise self._error
        if self._heard:
            raise HeardFailure(HEARD)

    def _guarded(self, action: Action, table: Schedule) -> None:
        try:
            self._compute(action, table)
        except Exception as error:  # told to the other ranks, and raised at the end of the row
            self._error = error

    def _message(self, action: Action, table: Schedule) -> None:
        peer, tag, like = table.rank_of(peer_stage(action)), _tag(action, table), self._like(action)
        if action.kind not in SENDS:
            self._messages.expect(source=peer, tag=tag, like=like)
            return
        # What a stage gives stays for its backward; gradients, and what no backward follows, are nobody's but theirs.
        unclaimed = action.kind is ActionKind.SEND_BACKWARD or not torch.is_grad_enabled()
        try:
            self._messages.send(self._given.pop(action, None), to=peer, tag=tag, like=like, unclaimed=unclaimed)
        except RankFailure as error:  # it is no tensor to send
            self._error = error
            self._messages.send(None, to=peer, tag=tag, like=like)

    def _like(self, action: Action) -> Hashable:
        """What messages between two stages have in common that have the same shape, at both of their ends."""
        forward, lower = _boundary(action)
        return lower, forward, self._shapes[_number(action)]

    def _take(self, kind: ActionKind, stage: int, micro_batch: int, table: Schedule) -> Tensor | None:
        """What another stage has for a computation of this one: received, or given on this rank."""
        receive = Action(kind, stage, micro_batch)
        send = counterpart(receive)
        peer = table.rank_of(send.stage)
        if peer == table.rank_of(stage):
            return self._given.pop(send)
        here = self._status.now
        self._status.peer = self._ranks[peer] + 1 if self._ranks else 0
        self._status.now = at(Operation.AWAIT_STAGE, part=send.stage)
        tensor = self._messages.receive(source=peer, tag=_tag(receive, table))
        if kind is ActionKind.RECV_BACKWARD:
            self._messages.arrived(to=peer, tag=_tag(Action(ActionKind.SEND_FORWARD, stage, micro_batch), table))
        self._heard = self._heard or tensor is None
        self._status.now = here
        return tensor

    def _compute(self, action: Action, table: Schedule) -> None:
        self._status.micro_batch = 0 if action.micro_batch is None else action.micro_batch + 1
        self._status.now = at(Operation.STAGE, part=action.stage)
        if action.kind in COMPUTE:
            self._inner.computes(action.stage, backward=action.kind is not ActionKind.FORWARD)
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(action, table)
            case ActionKind.BACKWARD:
                self._backward(action, table)
            case ActionKind.BACKWARD_INPUT:
                later = self._later
                with nullcontext() if later is None else later.put_off(action.stage, _number(action)):
                    self._backward(action, table)
            case ActionKind.BACKWARD_WEIGHT:
                if self._later is not None:  # else the whole of backward is done with the input's gradient
                    self._later.compute(action.stage, _number(action))
            case ActionKind.UNSHARD:
                self._inner.unshard(action.stage)
            case ActionKind.RESHARD:
                self._inner.reshard(action.stage)
            case ActionKind.REDUCE_GRAD:
                self._inner.sum_gradients(action.stage)
            case other:
                raise AssertionError(f"no rule for {other}")

    def _forward(self, action: Action, table: Schedule) -> None:
        stage, number = action.stage, _number(action)
        received = None
        if stage > 0:
            received = self._take(ActionKind.RECV_FORWARD, stage, number, table)
            if received is None:
                return
            received = received.detach().requires_grad_(torch.is_grad_enabled())
        with self._staged.stage(stage, received=received):
            try:
                output = self._run(self._micro_batches[number])
            except StageOutput as end:
                output = end.hidden_states
                self._given[Action(ActionKind.SEND_FORWARD, stage, number)] = output.detach()
            else:
                self.results.append((number, output.detach() if isinstance(output, Tensor) else output))
        if torch.is_grad_enabled():
            self._graphs[stage, number] = received, output

    def _backward(self, action: Action, table: Schedule) -> None:
        stage, number = action.stage, _number(action)
        gradient = None
        if stage + 1 < table.num_stages:
            gradient = self._take(ActionKind.RECV_BACKWARD, stage, number, table)
            if gradient is None:
                return
        received, output = self._graphs.pop((stage, number))
        if output.requires_grad:  # else all that lies before is frozen
            torch.autograd.backward(output, gradient)
            self._inner.computed_backward(stage)
        if received is not None:
            found = torch.zeros_like(received) if received.grad is None else received.grad
            self._given[Action(ActionKind.SEND_BACKWARD, stage, number)] = found


def _number(action: Action) -> int:
    if action.micro_batch is None:
        raise AssertionError(f"{action} computes on no micro-batch")
    return action.micro_batch


def _boundary(action: Action) -> tuple[bool, int]:
    """Of a message: whether it goes forward, and the lower one of the two stages."""
    return action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD), min(action.stage, peer_stage(action))


def _tag(action: Action, table: Schedule) -> int:
    """A number of its own for every message between two stages, the same at both ends."""
    forward, lower = _boundary(action)
    return (lower * table.num_micro_batches + _number(action)) * 2 + (0 if forward else 1)


def _shapes(batch: Batch) -> Hashable:
    """What the shapes of hidden states follow from: those of a micro-batch, which all ranks of a pipeline share."""
    return tuple((name, value.dtype, value.shape) for name, value in sorted(batch.items()) if isinstance(value, Tensor))
