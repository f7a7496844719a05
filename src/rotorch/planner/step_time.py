"""Seconds of a training step under a layout: operators and transfers of one rank, scheduled on its lanes.

[Note: where transfers go]
    A Layout lists the transfers of a unit, by kind and phase; these decide the order of waits.
    All-gathers of weights come one layer ahead of their use, and so do slices and blocks from other ranks, one part
    ahead of the computation with it. Activations hold up the next computation. Gradients leave after the computation:
    reduce-scatters in every micro-batch, slices' gradients hop by hop, sums over replicas layer by layer in the last
    backward, where what is inside of them says when gradients are complete, or else at the end of a step.

[Note: extrapolation]
    From the third layer of a class on, each takes as long as the one before, so at most three of a class are scheduled.

[Note: least time]
    Tables of hundreds of stages take seconds to make. Under every table a rank begins when the first micro-batch has
    passed the stages before it, and then computes its own stages for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import prod

from rotorch.core.layout import Layout
from rotorch.core.shared_context import SequenceRanks
from rotorch.core.spec import Unit, UnitKind
from rotorch.core.strategy import Strategy, sharing, with_visits
from rotorch.core.traffic import Kind, MicroBatch, Phase, Transfer, all_gather, all_reduce
from rotorch.pipelining.simulate import Link, StageCosts
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.planner.lanes import Lane, Lanes
from rotorch.planner.pipeline_time import layers_passed, pipeline_s, without_layers
from rotorch.planner.prediction import unit_layout
from rotorch.planner.shared_tokens import attention_passes, own_tokens, slowest_exchange
from rotorch.planner.speeds import Group, Speeds, Work
from rotorch.planner.workload import (
    Cutting,
    FoldedModel,
    LayerClass,
    Numerics,
    Passes,
    embedding_passes,
    head_passes,
    layer_passes,
    optimizer_work,
    unit_passes,
)
from rotorch.strategies import sequence_ranks
from rotorch.strategies.megatron.along_tokens import longest, tokens_cut, without_ends

_MOST_LAYERS = 3
"""Of a class that are scheduled (see [Note: extrapolation])."""

_BUCKET_BYTES = 25 << 20
"""Of gradients that are summed together; DDP's default."""

_COLLECTIVE_OPERATORS = 2
"""Operators that the host takes as long for as for one collective: the collective, and its own autograd function."""


@dataclass(frozen=True)
class Planned:
    """A layout with all that its time depends on.

    Attributes:
        model: with its units as the innermost strategy holds them.
        strategies: outermost first.
        batch: one micro-batch of one rank, or of several that share its sequences.
        accumulation: micro-batches of a step.
        speeds: of the cluster.
        numerics: numerics of the model.
        parts: layers of each pipeline stage, where there are stages.
        groups: positions of the ranks of each axis; left out: as the mesh has them, innermost strategies on neighbours.
        ddp_overlaps: True if sums over replicas run beside the last backward where they can.
    """

    model: FoldedModel
    strategies: tuple[Strategy, ...]
    batch: MicroBatch
    accumulation: int
    speeds: Speeds
    numerics: Numerics
    parts: tuple[range, ...] = ()
    groups: Mapping[str, Group] = field(default_factory=dict)
    ddp_overlaps: bool = True

    @cached_property
    def stages(self) -> StageStrategy | None:
        """The strategy that cuts the model into stages, if one does."""
        return next((s for s in self.strategies if isinstance(s, StageStrategy)), None)

    @cached_property
    def inner(self) -> Strategy:
        """The innermost strategy."""
        return self.strategies[-1]

    @cached_property
    def ring(self) -> Strategy | None:
        """The strategy whose slices visit."""
        return with_visits(self.strategies)

    @cached_property
    def sequence_ranks(self) -> SequenceRanks:
        """Ranks that share a sequence."""
        return sequence_ranks(self.strategies)

    @cached_property
    def own(self) -> MicroBatch:
        """The part of a micro-batch that one rank computes."""
        return own_tokens(self.batch, num_ranks=self.sequence_ranks.num_ranks)

    @cached_property
    def group_of(self) -> dict[str, Group]:
        """Groups of ranks by axis."""
        axes = [(axis, size) for strategy in self.strategies for axis, size in strategy.axes.items()]
        sizes = [size for _, size in axes]
        meshed = {axis: Group(size, prod(sizes[number + 1 :])) for number, (axis, size) in enumerate(axes)}
        return {**meshed, **self.groups}

    @cached_property
    def outer_axes(self) -> tuple[str, ...]:
        """Axes of replicas of what other strategies hold."""
        return tuple(axis for s in self.strategies[:-1] if s.kind == "ddp" for axis in s.axes)

    @cached_property
    def early_sums(self) -> str:
        """The gradients that are summed over replicas under backward: those of "all" units, of "layers", or "none"."""
        inside = self.strategies[1:] or self.strategies
        kind = inside[0].kind if self.ddp_overlaps and self.strategies[0].kind == "ddp" else ""
        layers = kind == "megatron" or (kind == "fsdp" and len(inside) == 1)
        return "all" if kind in ("ddp", "rtp") else "layers" if layers else "none"


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        step_s: all of it.
        compute_s: of one rank's operators, in the mean of stages.
        sums_s: at its end, over replicas.
        optimizer_s: of clipping and the optimizer.
        bubble_s: in which ranks of a pipeline wait, in the mean.
        waiting_s: in which computation waits for messages or the host.
        busy_s: by lane, of the last micro-batch.
    """

    step_s: float
    compute_s: float
    sums_s: float
    optimizer_s: float
    bubble_s: float
    waiting_s: float
    busy_s: dict[str, float]


def cutting_of(strategy: Strategy, *, ring: Strategy | None) -> Cutting:
    """Returns the way in which the innermost strategy, and slices that visit, cut a rank's operators."""
    slices = 1 if ring is None else ring.num_ranks
    if strategy.kind == "megatron":
        return Cutting(interior=strategy.num_ranks, slices=slices)
    if ring is not None:
        return Cutting(slices=slices)
    if strategy.kind == "atp":
        features = strategy.axes[strategy.feature_axes[0]]
        return Cutting(interior=strategy.num_ranks // features, features=features)
    if strategy.feature_axes:
        side = strategy.axes[strategy.feature_axes[0]]
        return Cutting(interior=side, features=side, steps=side)
    return Cutting()


@dataclass(frozen=True)
class _UnitTime:
    """Seconds of one unit, or of the units around the layers."""

    forward_s: float
    input_s: float
    weight_s: float
    forward_host_s: float
    backward_host_s: float
    parts: int = 1
    all_come: bool = False
    """True if every part of a unit's weights comes from other ranks; else the first is this rank's own."""
    gathers_s: tuple[float, float] = (0.0, 0.0)
    fetches_s: tuple[float, float] = (0.0, 0.0)
    activations_s: tuple[float, float] = (0.0, 0.0)
    activations_host_s: tuple[float, float] = (0.0, 0.0)
    hop_s: float = 0.0
    scatter_s: float = 0.0
    sum_s: float = 0.0
    """Of gradients over replicas, once per step."""

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s


@dataclass(frozen=True)
class _Pass:
    """Time of one micro-batch, forward and backward."""

    forward_s: float
    backward_s: float
    compute_s: float
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
        self.cutting, ring = cutting_of(plan.inner, ring=plan.ring), plan.ring
        gathering = any(strategy.gathers_weights for strategy in (*sharing(plan.strategies), plan.inner))
        self.at_once = plan.stages is not None and gathering  # a stage is gathered whole
        model = plan.model
        self.layers = [self._layer(layer, again=plan.numerics.recompute) for layer in model.classes]
        if plan.stages is not None and plan.stages.recomputes_some:  # (see `layers_passed`)
            self.layers = [*(self._layer(layer, again=False) for layer in model.classes), *self.layers]
        self.ends = self._ends_of_layers([unit for layer in model.classes for unit in layer.units])
        batch, cutting = plan.own, self.cutting
        self.before = self._outside(model.before, embedding_passes(model, batch=batch, cutting=cutting))
        head = head_passes(model, batch=batch, cutting=cutting)
        if ring is not None and getattr(ring, "recompute", "none") != "none":
            head = replace(head, backward_input=Work.together([head.forward, head.backward_input]))
        self.after = self._outside(model.after, head)
        self._ends: dict[tuple[tuple[tuple[int, int], ...], bool, bool], tuple[float, float]] = {}
        """Of stages that are alike: seconds of their sums and of their optimizer."""

    def _layer(self, layer: LayerClass, *, again: bool) -> list[_UnitTime]:
        plan, shares = self.plan, self.plan.sequence_ranks.num_ranks > 1
        attention = None
        if shares and plan.model.attention_width:
            attention = attention_passes(
                plan.model,
                layer,
                batch=plan.batch,
                shared_by=plan.sequence_ranks,
            )
        passes = layer_passes(
            plan.model, layer, batch=plan.own, cutting=self.cutting, numerics=plan.numerics, attention=attention
        )
        # Slices that visit are computed again, but not those of an attention of which all heads are there at once.
        stays = shares and getattr(plan.ring, "recomputes_units", False)
        redone = [again and not (stays and unit.kind is UnitKind.WEIGHT) for unit in layer.units]
        each = zip(layer.units, passes, redone, strict=True)
        return [self._part([without_ends(unit)], p, recomputes=recomputes) for unit, p, recomputes in each]

    def _ends_of_layers(self, units: Sequence[Unit]) -> list[_UnitTime]:
        """Gathers of hidden states behind all layers, and of gradients before them, where layers cut tokens."""
        batch, inner = self.plan.batch, self.plan.inner
        if not (width := max((tokens_cut(unit).ends for unit in units), default=0)):
            return []
        part = longest(batch, inner.num_ranks) * width * batch.itemsize
        one_s = self._s(all_gather(part, axis=inner.token_axes[0], size=inner.num_ranks, phase=Phase.FORWARD))
        host_s = _COLLECTIVE_OPERATORS * self.plan.speeds.operator_s
        return [_UnitTime(0.0, 0.0, 0.0, 0.0, 0.0, activations_s=(one_s, one_s), activations_host_s=(host_s, host_s))]

    def _outside(self, units: Sequence[Unit], passes: Passes) -> _UnitTime:
        """Part before or behind the layers; a matrix there that is not the head counts as a plain matrix."""
        plan = self.plan
        others = [
            unit_passes(
                unit,
                tokens=plan.own.num_rows * plan.own.num_tokens,
                batch=plan.own,
                cutting=self.cutting.of(unit),
                experts=plan.model.experts,
                numerics=plan.numerics,
            )
            for unit in units
            if plan.model.num_layers == 0 and not unit.logits
        ]
        return self._part(units, Passes.together([passes, *others]), recomputes=plan.numerics.recompute)

    def _part(self, units: Sequence[Unit], passes: Passes, *, recomputes: bool) -> _UnitTime:
        speeds = self.plan.speeds
        cut = [unit for unit in units if unit.kind is not UnitKind.REPLICATED]
        backward = passes.backward
        recompute = speeds.device_s(passes.forward) if recomputes else 0.0
        recompute_host = speeds.host_s(passes.forward) if recomputes else 0.0
        found = _UnitTime(
            forward_s=speeds.device_s(passes.forward),
            input_s=speeds.device_s(passes.backward_input) + recompute,
            weight_s=speeds.device_s(passes.backward_weight),
            forward_host_s=speeds.host_s(passes.forward),
            backward_host_s=speeds.host_s(backward) + recompute_host,
            parts=max((self.cutting.of(unit).parts for unit in cut), default=self.cutting.parts),
            all_come=any(self.cutting.of(unit).slices < self.cutting.slices for unit in cut),
        )
        for unit in units:
            found = self._with_transfers(found, unit)
        return found

    def _layout(self, unit: Unit) -> Layout:
        """Layout of a unit, as ranks hold it that share what the innermost strategy holds."""
        strategies = (*sharing(self.plan.strategies), self.plan.inner)
        return unit_layout(unit, strategies=strategies, positions=[0] * len(strategies))

    def _with_transfers(self, part: _UnitTime, unit: Unit) -> _UnitTime:
        """Adds a unit's transfers to its part (see [Note: where transfers go])."""
        plan = self.plan
        layout = self._layout(unit)
        exchanged = slowest_exchange(unit, strategy=plan.inner, batch=plan.batch)
        moved = plan.inner.activation_transfers(unit, batch=plan.batch) if plan.inner is not plan.stages else ()
        gathers, fetches, activations = list(part.gathers_s), list(part.fetches_s), list(part.activations_s)
        hosts = list(part.activations_host_s)
        hop, scatter, total = part.hop_s, part.scatter_s, part.sum_s
        forward_send = sum(self._s(t) for t in layout.transfers if t.kind is Kind.SEND and t.phase is Phase.FORWARD)
        for transfer in layout.transfers:
            seconds, back = self._s(transfer), transfer.phase is not Phase.FORWARD
            match transfer.kind:
                case Kind.ALL_GATHER:
                    gathers[back] += seconds
                case Kind.BROADCAST | Kind.COPY:
                    fetches[back] += seconds
                case Kind.SEND if plan.inner is plan.stages:
                    continue  # of a weight that two stages use: once per step, and small
                case Kind.SEND if not back:
                    fetches[0] += seconds
                case Kind.SEND:
                    fetched = min(seconds, forward_send * unit.reads_in_backward / max(unit.uses, 1))
                    fetches[1] += fetched
                    hop += seconds - fetched
                case Kind.REDUCE_SCATTER:
                    scatter += seconds
                case Kind.REDUCE:
                    hop += seconds
                case Kind.ALL_REDUCE:
                    total += self._bucketed_s(transfer)
        for transfer in exchanged or moved:
            seconds = self._s(transfer, among=plan.sequence_ranks.num_ranks if exchanged else 0)
            back = transfer.phase is not Phase.FORWARD
            if transfer.kind in (Kind.BROADCAST, Kind.REDUCE):
                fetches[back] += seconds
            else:
                says_all = transfer.kind is Kind.SEND  # what backward sends again, too
                for again in {back, back or (plan.numerics.recompute and not says_all)}:
                    activations[again] += seconds
                    hosts[again] += _COLLECTIVE_OPERATORS * plan.speeds.operator_s
        if plan.numerics.recompute:
            fetches[1] += fetches[0] if plan.ring is None else 0.0
        total += sum(self._bucketed_s(t) for t in self._outer_sums(layout))
        return replace(
            part,
            gathers_s=(gathers[0], gathers[1]),
            fetches_s=(fetches[0], fetches[1]),
            activations_s=(activations[0], activations[1]),
            activations_host_s=(hosts[0], hosts[1]),
            hop_s=hop,
            scatter_s=scatter,
            sum_s=total,
        )

    def _outer_sums(self, layout: Layout) -> list[Transfer]:
        groups = self.plan.group_of
        return [all_reduce(layout.resident_bytes, axis=axis, size=groups[axis].size) for axis in self.plan.outer_axes]

    def _bucketed_s(self, transfer: Transfer) -> float:
        """Seconds of a sum that shares its messages with other sums, as sums of many gradients do."""
        group = self.plan.group_of[transfer.axis]
        whole_s, message_s = self._s(transfer), self.plan.speeds.message_s(group, collective=True)
        return whole_s - message_s * max(0.0, 1.0 - transfer.payload_bytes / _BUCKET_BYTES) if whole_s else 0.0

    def _s(self, transfer: Transfer, *, among: int = 0) -> float:
        """Seconds of a transfer between the ranks of its axis, or `among` so many neighbours of these."""
        group = self.plan.group_of[transfer.axis]
        return self.plan.speeds.transfer_s(transfer, replace(group, size=among) if among else group)

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
        row: list[list[_UnitTime]] = [[self.before]] if before else []
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
        return _Pass(
            forward_s=forward_s,
            backward_s=lanes.end_s - forward_s,
            compute_s=sum(p.forward_s for p in each) + backward,
            input_share=inputs / backward if backward else 0.5,
            busy_s=dict(lanes.busy_s),
        )

    def _through(self, lanes: Lanes, row: Sequence[Sequence[_UnitTime]], *, back: int, early: Collection[int]) -> None:
        """Schedules the layers of one pass, forward (`back` 0) or backward; `early`: what leaves for its sum in it."""
        start = lanes.end_s
        done, before_that = start, start
        """Ends of the last computation, and of the last one of the layer before."""
        last = start
        """Start of the last computation."""
        for parts in row:
            gather_s = 0.0 if self.at_once else sum(part.gathers_s[back] for part in parts)
            gathered = lanes.put(Lane.FETCH, gather_s, after=[before_that]) if gather_s else start
            before_that = done
            for part in parts:
                compute_s = part.backward_s if back else part.forward_s
                host_s = part.backward_host_s if back else part.forward_host_s
                fetch_s = part.fetches_s[back]
                number = part.parts if fetch_s or part.hop_s else 1
                beside = fetch_s + part.hop_s * back + gather_s + part.scatter_s * back
                compute_s *= 1.0 + self.plan.speeds.overlap * (min(1.0, beside / compute_s) if compute_s else 0.0)
                come_s = fetch_s / max(number - (not part.all_come), 1)
                for piece in range(number):
                    # One part comes while the one before is computed with.
                    comes = fetch_s and (piece or part.all_come)
                    come = lanes.put(Lane.FETCH, come_s, after=[last]) if comes else gathered
                    last = done
                    done = lanes.put(Lane.COMPUTE, compute_s / number, after=[come, done], issue_s=host_s / number)
                    complete = done
                    if back and part.hop_s:
                        complete = lanes.put(Lane.HOP, part.hop_s / number, after=[done])
                if part.activations_s[back]:
                    done = lanes.put(
                        Lane.COLLECTIVE, part.activations_s[back], after=[done], issue_s=part.activations_host_s[back]
                    )
                if back and part.scatter_s and not self.at_once:
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
            sums_s=sums_s,
            optimizer_s=optimizer_s,
            bubble_s=0.0,
            waiting_s=max(0.0, passes_s - compute_s),
            busy_s={str(lane): seconds for lane, seconds in last.busy_s.items()},
        )

    def _units(self, counts: Mapping[int, int], *, before: bool, after: bool) -> list[_UnitTime]:
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
                layout = self._layout(replace(unit, weights=tuple(trained)))
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
            gathers.append(self._gathered(counts, before=first, after=last) if self.at_once else (0.0, 0.0))
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
        predicted_s = pipeline_s(table, plan.accumulation, ahead=self.at_once, costs=costs, link=link)
        makespan_s = max(makespan_s, predicted_s)  # which of many micro-batches is extrapolated
        compute_s = plan.accumulation * sum(one.compute_s for one in passes) / len(ranks)
        bubble_s = makespan_s - plan.accumulation * sum(one.forward_s + one.backward_s for one in passes) / len(ranks)
        busy = [sum(passes[k].busy_s[lane] for k in of_rank[0]) for lane in Lane]
        return StepTime(
            step_s=makespan_s + sums_s + optimizer_s,
            compute_s=compute_s,
            sums_s=sums_s,
            optimizer_s=optimizer_s,
            bubble_s=bubble_s,
            waiting_s=max(0.0, makespan_s - bubble_s - compute_s),
            busy_s=dict(zip(map(str, Lane), busy, strict=True)),
        )

    def _gathered(self, counts: Mapping[int, int], *, before: bool, after: bool) -> tuple[float, float]:
        """Seconds of gathering a stage whole, and of summing its gradients."""
        parts = self._units(counts, before=before, after=after)
        return sum(part.gathers_s[0] for part in parts), sum(part.scatter_s for part in parts)

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
        input_share=found.input_share,
        busy_s={lane: s + by * (s - less.busy_s[lane]) for lane, s in found.busy_s.items()},
    )
