"""Sums of gradients over ranks that leave in parts, while backward goes on with the rest.

[Note: when a part leaves]
    When the last micro-batch has added to all that the part is made of, and those before it have left: backward comes
    to the last weights first, so parts are given in that order. The order is the same on every rank, whatever each has
    used; parts that were not reached leave behind backward. How often a micro-batch adds to a gradient (more than once,
    where a checkpoint in it runs a backward of its own) is learned from steps whose forwards used the same, as often:
    the first one of these sums everything behind its backward.
    In a loop of a user's own each backward is a step, of forwards that were passes by themselves (`forward`).

[Note: steps that break off]
    A rank may have sent more parts than another one when both leave a step. So the next `start` sends zeros for what
    has not left: every all-reduce that was started has its counterpart on all ranks before the next step starts any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from rotorch._torch_private import in_backward
from rotorch.core.errors import RankFailure

Name = TypeVar("Name")

SumLater = Callable[[Tensor], Callable[[], object]]

_RUNS = 8
"""Parts of a model: the last one to leave, which nothing hides, is as small a part of it; messages stay few."""


_KINDS = 16
"""Steps that use different things are told apart, so many kinds of them."""


def _at_once() -> bool:
    return True


@dataclass(frozen=True)
class Part:
    """Gradients that leave together.

    Attributes:
        names: of what a backward adds to, one by one; none if the part is complete only behind backward.
        leaves: those of these names, if autograd itself adds to them; else the model calls `EarlySums.added`.
        gradients: gives their tensors once they are complete, a message each: as many on all ranks, as large.
        sum_later: starts the sum of a tensor over the ranks, in place.
        is_home: True if all additions that have begun have been made.
        beside: makes the CUDA stream current on which these additions run, so that a sum waits for no other.
    """

    names: tuple[str, ...]
    gradients: Callable[[], Sequence[Tensor]]
    sum_later: SumLater
    leaves: Sequence[nn.Parameter] = ()
    is_home: Callable[[], bool] = _at_once
    beside: Callable[[], AbstractContextManager[Any]] = nullcontext


class EarlySums:
    """See the module's notes. All ranks of the group call `start`, `micro_batch`, `send_rest` and `wait`, in one order.

    Args:
        parts: all gradients that are summed, those that backward completes first in front.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = list(parts)
        for part in parts:
            for name, leaf in zip(part.names, part.leaves, strict=False):
                leaf.register_post_accumulate_grad_hook(partial(self._note, name))
        self._part_of = {name: number for number, part in enumerate(parts) for name in part.names}
        self._num_left = 0
        """Parts of this step that have left."""
        self._waits: list[Callable[[], object]] = []
        self._sent: list[list[_Like]] = [[] for _ in parts]
        """Per part: the messages of the last step that sent it."""
        self._has_begun = self._is_last = False
        self._sends = True
        """False in a step that leaves its sums to a later one."""
        self._added: Counter[str] = Counter()
        """How often the last micro-batch of this step has added to a gradient."""
        self._used: Counter[str] = Counter()
        """How often its forward has used what tells of that."""
        self._counted: Counter[str] | None = None
        """Where uses of the forward that runs are counted, if any are."""
        self._learned: dict[frozenset[tuple[str, int]], Counter[str]] = {}
        """By uses: the most that a step with these has added; of the newest such steps."""
        self._expected: Counter[str] | None = None
        """That of this step, once its backward has begun."""

    def start(self, *, sends: bool = True) -> None:
        """Begins a step; `sends`: with sums."""
        self._sends = sends
        if self._has_begun:  # see [Note: steps that break off]
            for part, sent in zip(self._parts[self._num_left :], self._sent[self._num_left :], strict=True):
                self._waits += [part.sum_later(like.zeros()) for like in sent]
        self._added.clear()  # nothing is learned from it
        self._used.clear()
        self._expected = None
        self.wait()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Encloses the forward and backward of a micro-batch."""
        self._has_begun, self._is_last = self._sends, last and self._sends
        with self.forward(self._used) if self._is_last else nullcontext():
            try:
                yield
            finally:
                self._is_last = False

    @contextmanager
    def forward(self, uses: Counter[str]) -> Iterator[None]:
        """Encloses a forward, whose uses it adds to `uses`: for `has_used` of the step that comes back through it."""
        before, self._counted = self._counted, uses
        try:
            yield
        finally:
            self._counted = before

    def used(self, name: str) -> None:
        """Takes note that a forward of this rank uses what `name` stands for, which its backward will add to."""
        if self._counted is not None and not in_backward():  # there a checkpoint computes again
            self._counted[name] += 1

    def has_used(self, uses: Mapping[str, int]) -> None:
        """Takes note of the uses of forwards before this step, through which its backward will come."""
        self._used.update(uses)

    def _note(self, name: str, _: Tensor) -> None:
        self.added(name)
        self.leave()

    def added(self, name: str) -> None:
        """Takes note that a backward of this rank adds to what `name` stands for.

        Raises:
            RankFailure: its sum has left.
        """
        if not self._is_last or name not in self._part_of:
            return
        if self._part_of[name] < self._num_left:
            raise RankFailure(
                f"a step adds more often to the gradient of {name!r} than those before whose forward used as much, and "
                "its sum over ranks had left. Use torch's checkpoint with use_reentrant=False, and the same penalties "
                "and detached parts in every step"
            )
        self._added[name] += 1

    def leave(self) -> None:
        """Sends parts that are complete (see [Note: when a part leaves])."""
        if not self._is_last:
            return
        if self._expected is None:
            self._expected = self._learned.get(frozenset(self._used.items()), Counter())
        expected, added = self._expected, self._added
        for part in self._parts[self._num_left :]:
            reached = part.names and all(0 < expected[name] <= added[name] for name in part.names)
            if not reached or not part.is_home():
                return
            with part.beside():
                self._send()

    def send_rest(self) -> None:
        """Sends what is left, behind backward."""
        while self._sends and self._num_left < len(self._parts):
            self._send()

    def wait(self) -> None:
        """Waits for all sums: the end of a step."""
        waits, self._waits, self._num_left, self._has_begun = self._waits, [], 0, False
        for wait in waits:
            wait()
        if self._added:
            uses = frozenset(self._used.items())
            self._learned[uses] = self._learned.pop(uses, Counter()) | self._added
            while len(self._learned) > _KINDS:
                del self._learned[next(iter(self._learned))]

    def _send(self) -> None:
        part = self._parts[self._num_left]
        tensors = [tensor for tensor in part.gradients() if tensor.numel()]
        self._sent[self._num_left] = [_Like(tensor.numel(), tensor.dtype, tensor.device) for tensor in tensors]
        self._num_left += 1
        self._waits += map(part.sum_later, tensors)


@dataclass(frozen=True)
class _Like:
    """A message without its values."""

    numel: int
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.numel, dtype=self.dtype, device=self.device)


def in_runs(sizes: Sequence[tuple[Name, int]], *, least: float | None = None) -> list[tuple[Name, ...]]:
    """Cuts a sequence of names into runs that each have `least` of their sizes, or an eighth of the sum of these."""
    runs: list[list[Name]] = [[]]
    numel = 0
    if least is None:
        least = sum(size for _, size in sizes) / _RUNS
    for name, size in sizes:
        if numel >= least:
            runs.append([])
            numel = 0
        runs[-1].append(name)
        numel += size
    return [tuple(run) for run in runs if run]
