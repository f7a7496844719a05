"""Seconds of a training step under a layout: operators and transfers of one rank, scheduled on its lanes.

[Note: extrapolation]
    From the third layer of a class on, each takes as long as the one before, so at most three of a class are scheduled.

[Note: least time]
    Tables of hundreds of stages take seconds to make. Under every table a rank begins when the first micro-batch has
    passed the stages before it, and then computes its own stages for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from rotorch.pipelining.simulate import Link, StageCosts
from rotorch.planner.lanes import Lane, Lanes
from rotorch.planner.pipeline_time import layers_passed, pipeline_s, without_layers
from rotorch.planner.planned import Planned
from rotorch.planner.speeds import Group
from rotorch.planner.unit_time import UnitTime, UnitTimes
from rotorch.planner.workload import optimizer_work

_MOST_LAYERS = 3
"""Of a class that are scheduled (see [Note: extrapolation])."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        step_s: all of it.
        compute_s: of one rank's operators, in the mean of stages.
        copies_s: of these, copies and sums beside messages, but those of stages that are gathered whole.
        sums_s: at its end, over replicas.
        optimizer_s: of clipping and the optimizer.
        bubble_s: in which ranks of a pipeline wait, in the mean.
        waiting_s: in which computation waits for messages or the host.
        busy_s: by lane, of the last micro-batch.
    """

    step_s: float
    compute_s: float
    copies_s: float
    sums_s: float
    optimizer_s: float
    bubble_s: float
    waiting_s: float
    busy_s: dict[str, float]


@dataclass(frozen=True)
class _Pass:
    """Time of one micro-batch, forward and backward."""

    forward_s: float
    backward_s: float
    compute_s: float
    copies_s: float
    input_share: float
    busy_s: dict[Lane, float]


def step_time(plan: Planned) -> StepTime:
    """Seconds of a step, its parts, and what each lane has to do."""
    found = step_time_if(plan, worth=lambda _: True)
    assert found is not None
    return found


def step_time_if(plan: Planned, *, worth: Callable[[float], bool]) -> StepTime | None:
    """The same, or None for a pipeline whose table is not worth making (see [Note: least time]).

    Args:
        plan: the layout.
        worth: given seconds that a step takes at least, returns True if all of them are asked for.
    """
    return _Step(plan).time(worth)


class _Step:
    def __init__(self, plan: Planned) -> None:
        self.plan = plan
        times, classes = UnitTimes(plan), plan.model.classes
        self.layers = [times.layer(layer, again=plan.numerics.recompute) for layer in classes]
        if plan.stages is not None and plan.stages.recomputes_some:  # (see `layers_passed`)
            self.layers = [*(times.layer(layer, again=False) for layer in classes), *self.layers]
        self.ends = times.ends_of_layers([unit for layer in classes for unit in layer.units])
        self.before, self.after = times.before_layers(), times.after_layers()
        self._ends: dict[tuple[tuple[tuple[int, int], ...], bool, bool], tuple[float, float]] = {}
        """Of stages that are alike: seconds of their sums and of their optimizer."""

    # ---------------------------------------------------------------- one micro-batch

    def one_pass(self, counts: Mapping[int, int], *, before: bool, after: bool, sums: bool = False) -> _Pass:
        """Schedules one micro-batch through so many layers of each class (see [Note: extrapolation])."""
        few = {number: min(count, _MOST_LAYERS) for number, count in counts.items()}
        found = self._scheduled(few, before=before, after=after, sums=sums)
        for number, count in counts.items():
            if count > _MOST_LAYERS:
                less = self._scheduled({**few, number: few[number] - 1}, before=before, after=after, sums=sums)
                found = _extrapolated(found, less, by=count - _MOST_LAYERS)
        return found

    def _scheduled(self, counts: Mapping[int, int], *, before: bool, after: bool, sums: bool) -> _Pass:
        row: list[list[UnitTime]] = [[self.before]] if before else []
        row += [self.layers[number] for number, count in counts.items() for _ in range(count)]
        row += [self.ends] if self.ends else []
        row += [[self.after]] if after else []
        lanes = Lanes()
        self._through(lanes, row, back=0, early=())
        forward_s = lanes.end_s
        if self.plan.stages is not None:
            lanes.wait(forward_s)  # what comes next begins with a message
        early = {id(part) for parts in row for part in parts} if sums else set()
        if self.plan.early_sums == "layers":
            early -= {id(self.before), id(self.after)}
        self._through(lanes, [parts[::-1] for parts in row[::-1]], back=1, early=early)
        each = [part for parts in row for part in parts]
        inputs, backward = sum(p.input_s for p in each), sum(p.backward_s for p in each)
        # Of stages that are gathered whole, copies belong to the gathers.
        copies_s = sum(p.add_s if self.plan.gathers_stages else p.copies_s for p in each)
        return _Pass(
            forward_s=forward_s,
            backward_s=lanes.end_s - forward_s,
            compute_s=sum(p.forward_s for p in each) + backward + copies_s,
            copies_s=copies_s,
            input_share=inputs / backward if backward else 0.5,
            busy_s=dict(lanes.busy_s),
        )

    def _through(self, lanes: Lanes, row: Sequence[Sequence[UnitTime]], *, back: int, early: Collection[int]) -> None:
        """Schedules the layers of one pass, forward (`back` 0) or backward; `early`: what leaves for its sum in it."""
        start = lanes.end_s
        done, before_that = start, start
        """Ends of the last computation, and of the last one of the layer before."""
        last = start
        """Start of the last computation."""
        for parts in row:
            gather_s = 0.0 if self.plan.gathers_stages else sum(part.gathers_s[back] for part in parts)
            gathered = lanes.put(Lane.FETCH, gather_s, after=[before_that]) if gather_s else start
            before_that = done
            if gather_s:
                done = gathered = lanes.put(
                    Lane.COMPUTE, sum(part.unpack_s[back] for part in parts), after=[gathered, done]
                )
            for part in parts:
                compute_s = part.backward_s if back else part.forward_s
                host_s = part.backward_host_s if back else part.forward_host_s
                fetch_s = part.fetches_s[back]
                number = part.parts if fetch_s or part.hop_s else 1
                beside = fetch_s + part.hop_s * back + gather_s + part.scatter_s * back
                compute_s *= 1.0 + self.plan.speeds.overlap * (min(1.0, beside / compute_s) if compute_s else 0.0)
                compute_s += part.add_s * back
                come_s = fetch_s / max(number - (not part.all_come), 1)
                for piece in range(number):
                    # One part comes while the one before is computed with.
                    comes = fetch_s and (piece or part.all_come)
                    come = lanes.put(Lane.FETCH, come_s, after=[last]) if comes else gathered
                    last = done
                    done = lanes.put(Lane.COMPUTE, compute_s / number, after=[come, done], issue_s=host_s / number)
                    complete = done
                    if back and part.hop_s:
                        complete = lanes.put(Lane.HOP, (part.hop_s + part.add_s) / number, after=[done])
                if part.activations_s[back]:
                    done = lanes.put(
                        Lane.COLLECTIVE, part.activations_s[back], after=[done], issue_s=part.activations_host_s[back]
                    )
                if back and part.scatter_s and not self.plan.gathers_stages:
                    done = lanes.put(Lane.COMPUTE, part.pack_s, after=[done])
                    complete = lanes.put(Lane.HOP, part.scatter_s, after=[done])
                if part.sum_s and id(part) in early:
                    lanes.put(Lane.SUM, part.sum_s, after=[complete])

    # ---------------------------------------------------------------- a step

    def time(self, worth: Callable[[float], bool]) -> StepTime | None:
        """Returns the time of a step and its parts; None if its least time is not worth it."""
        return self._pipelined(worth) if self.plan.stages is not None else self._in_one_piece()

    def _in_one_piece(self) -> StepTime:
        plan = self.plan
        counts = plan.model.counts_of(range(plan.model.num_layers))
        one = self.one_pass(counts, before=True, after=True)
        last = one if plan.early_sums == "none" else self.one_pass(counts, before=True, after=True, sums=True)
        outside = plan.early_sums != "all"
        sums_s = self._sums(counts if plan.early_sums == "none" else {}, before=outside, after=outside)
        optimizer_s = self._optimizer(counts, before=True, after=True)
        passes_s = (plan.accumulation - 1) * (one.forward_s + one.backward_s) + last.forward_s + last.backward_s
        compute_s = plan.accumulation * one.compute_s
        return StepTime(
            step_s=passes_s + sums_s + optimizer_s,
            compute_s=compute_s,
            copies_s=plan.accumulation * one.copies_s,
            sums_s=sums_s,
            optimizer_s=optimizer_s,
            bubble_s=0.0,
            waiting_s=max(0.0, passes_s - compute_s),
            busy_s={str(lane): seconds for lane, seconds in last.busy_s.items()},
        )

    def _units(self, counts: Mapping[int, int], *, before: bool, after: bool) -> list[UnitTime]:
        layers = [part for number, count in counts.items() for part in self.layers[number] * count]
        return [*([self.before] if before else []), *layers, *([self.after] if after else [])]

    def _sums(self, counts: Mapping[int, int], *, before: bool, after: bool) -> float:
        return sum(part.sum_s for part in self._units(counts, before=before, after=after))

    def _optimizer(self, counts: Mapping[int, int], *, before: bool, after: bool) -> float:
        plan = self.plan
        units = [(unit, count) for number, count in counts.items() for unit in plan.model.classes[number].units]
        units += [(unit, 1) for unit in plan.model.before] if before else []
        units += [(unit, 1) for unit in plan.model.after] if after else []
        held = numbers = 0.0
        for unit, count in units:
            trained = [w for w in unit.weights if w.trained]
            if trained:
                layout = plan.layout_of(replace(unit, weights=tuple(trained)))
                held += count * layout.resident_bytes / trained[0].itemsize
                numbers += count * len(trained)
        work = optimizer_work(held, num_weights=numbers, numerics=plan.numerics)
        return max(plan.speeds.device_s(work), plan.speeds.host_s(work))

    def _pipelined(self, worth: Callable[[float], bool]) -> StepTime | None:
        plan = self.plan
        stages = plan.stages
        assert stages is not None
        parts = plan.parts
        cache: dict[tuple[object, ...], _Pass] = {}
        passes: list[_Pass] = []
        gathers: list[tuple[float, float]] = []
        for number, part in enumerate(parts):
            counts = plan.model.counts_of(part)
            first, last = number == 0, number == len(parts) - 1
            passing = layers_passed(plan.model, stages, stage=number, part=part)
            key = (tuple(sorted(passing.items())), first, last)
            if key not in cache:
                cache[key] = self.one_pass(passing, before=first, after=last)
            passes.append(cache[key])
            gathers.append(self._gathered(counts, before=first, after=last) if self.plan.gathers_stages else (0.0, 0.0))
        group = plan.group_of[stages.stage_axis]
        message = plan.own.num_rows * plan.own.num_tokens * plan.model.width * plan.own.itemsize
        costs = [
            StageCosts(
                forward_s=one.forward_s,
                backward_input_s=one.backward_s * one.input_share,
                backward_weight_s=one.backward_s * (1 - one.input_share),
                unshard_s=unshard_s,
                reduce_s=reduce_s,
                message_bytes=message,
            )
            for one, (unshard_s, reduce_s) in zip(passes, gathers, strict=True)
        ]
        link = Link(
            bytes_per_s=plan.speeds.bytes_per_s_of(Group(2, group.stride)),
            latency_s=plan.speeds.message_s(Group(2, group.stride), collective=False),
        )
        ranks, of_rank = range(stages.stages), stages.stages_by_rank
        ends = [self._after_passes(parts, numbers) for numbers in of_rank]
        sums_s, optimizer_s = max((sums for sums, _ in ends), default=0.0), max(o for _, o in ends)
        makespan_s = _least_makespan_s(of_rank, passes, plan.accumulation)
        if not worth(makespan_s + sums_s + optimizer_s):
            return None
        table = without_layers(stages)
        predicted_s = pipeline_s(table, plan.accumulation, ahead=self.plan.gathers_stages, costs=costs, link=link)
        makespan_s = max(makespan_s, predicted_s)  # which of many micro-batches is extrapolated
        compute_s = plan.accumulation * sum(one.compute_s for one in passes) / len(ranks)
        bubble_s = makespan_s - plan.accumulation * sum(one.forward_s + one.backward_s for one in passes) / len(ranks)
        busy = [sum(passes[k].busy_s[lane] for k in of_rank[0]) for lane in Lane]
        return StepTime(
            step_s=makespan_s + sums_s + optimizer_s,
            compute_s=compute_s,
            copies_s=plan.accumulation * sum(one.copies_s for one in passes) / len(ranks),
            sums_s=sums_s,
            optimizer_s=optimizer_s,
            bubble_s=bubble_s,
            waiting_s=max(0.0, makespan_s - bubble_s - compute_s),
            busy_s=dict(zip(map(str, Lane), busy, strict=True)),
        )

    def _gathered(self, counts: Mapping[int, int], *, before: bool, after: bool) -> tuple[float, float]:
        """Seconds of gathering a stage whole, and of summing its gradients."""
        parts = self._units(counts, before=before, after=after)
        return sum(p.gathers_s[0] + p.unpack_s[0] for p in parts), sum(p.scatter_s + p.pack_s for p in parts)

    def _after_passes(self, parts: Sequence[range], numbers: Sequence[int]) -> tuple[float, float]:
        """Seconds of a rank's sums over replicas and of its optimizer, of all its stages."""
        each = []
        for number in numbers:
            counts = self.plan.model.counts_of(parts[number])
            key = (tuple(sorted(counts.items())), number == 0, number == len(parts) - 1)
            if key not in self._ends:
                where = {"before": key[1], "after": key[2]}
                self._ends[key] = self._sums(counts, **where), self._optimizer(counts, **where)
            each.append(self._ends[key])
        return sum(sums_s for sums_s, _ in each), sum(optimizer_s for _, optimizer_s in each)


def _least_makespan_s(of_rank: Sequence[Sequence[int]], passes: Sequence[_Pass], num_micro_batches: int) -> float:
    """Seconds that the busiest rank takes from the first hidden states that reach it (see [Note: least time])."""
    reached = [0.0, *accumulate(one.forward_s for one in passes)]
    work = [num_micro_batches * sum(passes[k].forward_s + passes[k].backward_s for k in mine) for mine in of_rank]
    return max(reached[min(mine)] + seconds for mine, seconds in zip(of_rank, work, strict=True))


def _extrapolated(found: _Pass, less: _Pass, *, by: int) -> _Pass:
    return _Pass(
        forward_s=found.forward_s + by * (found.forward_s - less.forward_s),
        backward_s=found.backward_s + by * (found.backward_s - less.backward_s),
        compute_s=found.compute_s + by * (found.compute_s - less.compute_s),
        copies_s=found.copies_s + by * (found.copies_s - less.copies_s),
        input_share=found.input_share,
        busy_s={lane: s + by * (s - less.busy_s[lane]) for lane, s in found.busy_s.items()},
    )
