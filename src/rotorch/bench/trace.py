"""A few steps of a row as spans of time: computations, waits and transfers of each rank.

[Note: phases]
    Forward is the model's own forward, loss included; backward is `Tensor.backward`; hooks record both, whatever
    library runs them. `comm/observe.py` records waits of rings and of torch.distributed. torch's DDP waits for
    its all-reduces in C++, at the end of backward: there all time after the last gradient counts as a collective.

[Note: shares]
    If spans overlap, one counts, by this order: waiting for a slice or a gradient, collectives, the optimizer, and
    computing (the rest of forward and backward). "other" is the rest of the step: making
    the batch, and waiting for ranks that have not started or not finished yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rotorch.bench.contender import Contender
from rotorch.comm.observe import ActionSpan, Activity, Observer, Span, observe_waits
from rotorch.models.blocks import repeated_blocks

COMPUTE, OTHER = "compute", "other"
SHARES = (COMPUTE, "waiting for a slice", "waiting for a gradient", "collectives", "optimizer", OTHER)
_PRIORITY = (
    ("waiting for a slice", {Activity.SLICE}),
    ("waiting for a gradient", {Activity.GRADIENT}),
    ("collectives", {Activity.COLLECTIVE}),
    ("optimizer", {Activity.OPTIMIZER}),
    (COMPUTE, {Activity.FORWARD, Activity.BACKWARD}),
)

Interval = tuple[float, float]


@dataclass(frozen=True)
class RankTrace:
    """Spans of one rank in the traced steps.

    Attributes:
        spans: of all traced steps, in the order in which they ended.
        steps: start and end of each step, in seconds of the clock that all ranks share.
        actions: of a pipeline's rows.
    """

    spans: list[Span]
    steps: list[Interval]
    actions: list[ActionSpan] = field(default_factory=list)


def trace_steps(contender: Contender, *, steps: Sequence[int], meet: Callable[[], Any]) -> RankTrace:
    """Runs `steps` and returns what this rank did. All ranks; `meet` returns when all have called it."""
    observer, times = Observer(), []
    with observe_waits(observer), contender.observed(observer), _phases(contender.module, observer):
        for step in steps:
            meet()
            start_s = time.perf_counter()
            contender.forward_backward(step)
            _finish()
            with observer.during(Activity.OPTIMIZER, "optimizer"):
                contender.update()
                _finish()
            times.append((start_s, time.perf_counter()))
    return RankTrace(observer.spans, times, observer.actions)


def together(traces: Sequence[RankTrace]) -> list[Interval]:
    """Steps of all ranks: each from the first rank's start to the last one's end."""
    return [
        (min(start for start, _ in step), max(end for _, end in step))
        for step in zip(*(trace.steps for trace in traces), strict=True)
    ]


def shares(trace: RankTrace, *, steps: Sequence[Interval]) -> dict[str, float]:
    """Returns the part of the time of `steps` spent with each of `SHARES`; all add up to 1 (see [Note: shares])."""
    found = dict.fromkeys(SHARES, 0.0)
    total = sum(end - start for start, end in steps)
    for window in steps:
        covered: list[Interval] = []
        before = 0.0
        for share, doings in _PRIORITY:
            covered += [_clip(span, window) for span in trace.spans if span.doing in doings]
            now = _length(covered)
            found[share] += (now - before) / total
            before = now
        found[OTHER] += (window[1] - window[0] - before) / total
    return found


def _clip(span: Span, window: Interval) -> Interval:
    start, end = max(span.start_s, window[0]), min(span.end_s, window[1])
    return start, max(start, end)


def _length(intervals: Sequence[Interval]) -> float:
    """Returns the length of the union of some intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@contextmanager
def _phases(module: nn.Module, observer: Observer) -> Iterator[None]:
    """Notes forward, backward, and the forward of every block (see [Note: phases])."""
    names = {id(child): name for name, child in module.named_modules()}
    gradients = _LastGradient()
    with ExitStack() as until_end:
        until_end.enter_context(_forward_noted(module, observer, Activity.FORWARD, "forward"))
        handle = module.register_forward_pre_hook(lambda *_: gradients.follow(module))
        until_end.callback(handle.remove)
        for block in repeated_blocks(module):
            until_end.enter_context(_forward_noted(block, observer, Activity.BLOCK, f"{names[id(block)]} forward"))
        until_end.enter_context(_backward_noted(observer, gradients))
        yield


@contextmanager
def _forward_noted(module: nn.Module, observer: Observer, doing: Activity, name: str) -> Iterator[None]:
    starts: list[float] = []
    before = module.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter()), prepend=True)

    def ended(*_: Any) -> None:
        if starts:
            observer.note(doing, name, since_s=starts.pop())

    after = module.register_forward_hook(ended, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


@contextmanager
def _backward_noted(observer: Observer, gradients: _LastGradient) -> Iterator[None]:
    original = Tensor.backward

    def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        with observer.during(Activity.BACKWARD, "backward"):
            try:
                return original(tensor, *args, **kwargs)
            finally:
                if gradients.complete and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
                    observer.note(Activity.COLLECTIVE, "sums of gradients", since_s=gradients.last_s)
                gradients.forget()

    Tensor.backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.backward = original  # type: ignore[method-assign]


@dataclass
class _LastGradient:
    """Time of the last gradient of a backward pass, where autograd gives each parameter its own gradient."""

    last_s: float = 0.0
    _missing: int = 1
    _handles: list[Any] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self._missing == 0

    def follow(self, module: nn.Module) -> None:
        """Attaches to a module's gradients, before a forward pass."""
        self.forget()
        parameters = list(module.parameters())
        self._missing = len(parameters)
        for parameter in parameters:
            if type(parameter) is nn.Parameter and parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._came))

    def _came(self, _: Tensor) -> None:
        self.last_s = time.perf_counter()
        self._missing -= 1

    def forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._missing = [], 1


def _finish() -> None:
    """Waits for what was started on an accelerator."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
