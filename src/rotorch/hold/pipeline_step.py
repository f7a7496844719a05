"""One step of a pipeline on one rank: the actions of its row, one after another.

[Note: breaking off]
    A rank whose stage raises goes on through its row without computing, and tells the ranks that wait for it; they do
    the same. At the end of the row all raise: the first rank its error, the ranks that heard of it a HeardFailure. A
    rank that waits for no message after that hears of it in its next collective. Agreeing at the end would be a
    deadlock: other ranks of this stage may wait inside of a ring for the rank that raised, and notice only once it has
    left.
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
from rotorch.hold.sharded_model import ShardedStages
from rotorch.models.losses import Batch
from rotorch.models.stages import StagedModule, StageOutput
from rotorch.ops.deferred_weight_gradients import DeferredWeightGradients
from rotorch.pipelining.actions import COMPUTE, MESSAGES, SENDS, Action, ActionKind, Schedule, counterpart, peer_stage

Watch = Callable[[Action], AbstractContextManager[None]]


class PipelineStep:
    """One rank's state during a step.

    Args:
        inner: holds the weights of this rank's stages, and is unsharded.
        staged: the module.
        messages: to and from the other ranks of the pipeline.
        run: the whole model's forward on a micro-batch, down to its result (the loss, before `backward`).
        micro_batches: of the step.
        deferred: puts weight gradients off, where that is possible.
        status: status word to which this rank writes its position.
        ranks: global ranks of the pipeline, by position.
        watch: makes a context manager that is entered around every action of the row.

    Attributes:
        results: on the last stage's rank, pairs of a micro-batch's number and the result of `run`.
    """

    def __init__(
        self,
        inner: ShardedStages,
        *,
        staged: StagedModule,
        messages: StageMessages,
        run: Callable[[Batch], Any],
        micro_batches: Sequence[Batch],
        deferred: DeferredWeightGradients | None = None,
        status: StatusWord | None = None,
        ranks: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> None:
        self._status = status or StatusWord()
        self._ranks = ranks
        self._inner = inner
        self._deferred = deferred
        self._watch = watch
        self._staged = staged
        self._messages = messages
        self._run = run
        self._micro_batches = micro_batches
        self._given: dict[Action, Tensor | None] = {}
        """By SEND action: the tensor that a computation made for it; absent if the step has broken off."""
        self._graphs: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        """By stage and micro-batch, for each forward whose backward is to come: input (None: tokens) and output."""
        self._shapes = [_shapes(batch) for batch in micro_batches]
        self._error: BaseException | None = None
        self._heard = False
        self.results: list[tuple[int, Any]] = []

    def run(self, row: Iterable[Action], table: Schedule) -> None:
        """Runs a row of a lowered table. All ranks of the pipeline, each its own row.

        Raises:
            HeardFailure: another rank of the pipeline has broken off.
            RankFailure: an earlier step was left in the middle of a row.
        """
        self._messages.check_whole()
        try:
            for action in row:
                with nullcontext() if self._watch is None else self._watch(action):
                    # Also after a failure: each message has a receive at the other end that must be met.
                    if action.kind in MESSAGES:
                        self._message(action, table)
                    elif not (self._error or self._heard):
                        self._guarded(action, table)
            self._messages.settle()
        except BaseException:  # not a stage's error, which `_guarded` keeps: messages of this row stay under way
            self._messages.leave()
            raise
        if self._deferred is not None:
            # A row that broke off leaves operands of weight gradients that will not be computed.
            self._deferred.forget()
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
        # An output stays for its own backward. Gradients and inference outputs have no other owner: their memory is
        # free as soon as the message has left.
        unclaimed = action.kind is ActionKind.SEND_BACKWARD or not torch.is_grad_enabled()
        try:
            self._messages.send(self._given.pop(action, None), to=peer, tag=tag, like=like, unclaimed=unclaimed)
        except RankFailure as error:  # no tensor that can be sent; the receiver must hear of it
            self._error = error
            self._messages.send(None, to=peer, tag=tag, like=like)

    def _like(self, action: Action) -> Hashable:
        """The key by which both ends predict a message's shape: boundary, direction, and the micro-batch's shapes."""
        forward, lower = _boundary(action)
        return lower, forward, self._shapes[_number(action)]

    def _take(self, kind: ActionKind, stage: int, micro_batch: int, table: Schedule) -> Tensor | None:
        """Takes the tensor that another stage made for a computation of this one: received, or made on this rank."""
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
            # The peer made this gradient from our output, so it has that: this wait is over at once.
            self._messages.arrived(to=peer, tag=_tag(Action(ActionKind.SEND_FORWARD, stage, micro_batch), table))
        self._heard = self._heard or tensor is None
        self._status.now = here
        return tensor

    def _compute(self, action: Action, table: Schedule) -> None:
        self._status.micro_batch = 0 if action.micro_batch is None else action.micro_batch + 1
        self._status.now = at(Operation.STAGE, part=action.stage)
        if action.kind in COMPUTE:
            # Gathered weights may still be under way, and so may the sum of gradients that a backward would add to.
            self._inner.computes(action.stage, backward=action.kind is not ActionKind.FORWARD)
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(action, table)
            case ActionKind.BACKWARD:
                self._backward(action, table)
            case ActionKind.BACKWARD_INPUT:
                deferred = self._deferred
                with nullcontext() if deferred is None else deferred.deferring(action.stage, _number(action)):
                    self._backward(action, table)
            case ActionKind.BACKWARD_WEIGHT:
                if self._deferred is not None:  # else BACKWARD_INPUT has made all gradients
                    self._deferred.compute(action.stage, _number(action))
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
            # A leaf: backward stops here, and its gradient is the message to the stage before.
            received = received.detach().requires_grad_(torch.is_grad_enabled())
        with self._staged.stage(stage, received=received):
            try:
                output = self._run(self._micro_batches[number])
            # Raised behind the stage's last layer: the rest of the model's code belongs to later stages.
            except StageOutput as end:
                output = end.hidden_states
                # Detached: a next stage on this rank must not reach into this stage's graph.
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
        # Popped: the graph's memory is free when this backward ends.
        received, output = self._graphs.pop((stage, number))
        if output.requires_grad:  # else all that lies before is frozen
            torch.autograd.backward(output, gradient)
            self._inner.computed_backward(stage)
        if received is not None:
            # The stage before waits for a gradient, even if nothing here depends on its output.
            found = torch.zeros_like(received) if received.grad is None else received.grad
            self._given[Action(ActionKind.SEND_BACKWARD, stage, number)] = found


def _number(action: Action) -> int:
    if action.micro_batch is None:
        raise AssertionError(f"{action} computes on no micro-batch")
    return action.micro_batch


def _boundary(action: Action) -> tuple[bool, int]:
    """Direction of a message (True: forward), and the lower one of its two stages."""
    return action.kind in (ActionKind.SEND_FORWARD, ActionKind.RECV_FORWARD), min(action.stage, peer_stage(action))


def _tag(action: Action, table: Schedule) -> int:
    """Tag of a message between two stages: unique in a step, and the same at both ends."""
    forward, lower = _boundary(action)
    return (lower * table.num_micro_batches + _number(action)) * 2 + (0 if forward else 1)


def _shapes(batch: Batch) -> Hashable:
    """Dtypes and shapes of a micro-batch, equal on all ranks of a pipeline: they decide the hidden states' shapes."""
    return tuple((name, value.dtype, value.shape) for name, value in sorted(batch.items()) if isinstance(value, Tensor))
