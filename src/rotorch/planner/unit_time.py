"""Seconds of one unit of a model under a layout: its operators, and its transfers by the lane on which they go.

[Note: where transfers go]
    A Layout lists the transfers of a unit, by kind and phase; these decide the order of waits.
    All-gathers of weights come one layer ahead of their use, and so do slices and blocks from other ranks, one part
    ahead of the computation with it. Activations hold up the next computation. Gradients leave after the computation:
    reduce-scatters in every micro-batch, slices' gradients hop by hop, sums over replicas layer by layer in the last
    backward, where what is inside of them says when gradients are complete, or else at the end of a step.

[Note: copies and sums]
    Some transfers keep the device from computing, since they read and write its memory on the way. Gathered weights
    arrive in the order of ranks, and are copied to where they are whole; their gradients are copied into the order of
    ranks before they are summed. torch's `fully_shard` does both on the stream that computes, and so do pipelines that
    gather whole stages, and grids with shards over depth. A sum of gradients that came into a window of symmetric
    memory is read beside a rank's own part, and written: on a stream of its own, but by the same multiprocessors, so
    it is taken to hold up computation as long as it lasts. Over messages, products add to what has come. What is an
    n-th of these in size counts as nothing: a rank's own part converted to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rotorch.core.layout import Layout
from rotorch.core.spec import Unit, UnitKind
from rotorch.core.traffic import Kind, Phase, Transfer, all_gather, all_reduce
from rotorch.planner.planned import Planned
from rotorch.planner.shared_tokens import attention_passes, slowest_exchange
from rotorch.planner.speeds import Work
from rotorch.planner.workload import LayerClass, Passes, embedding_passes, head_passes, layer_passes, unit_passes
from rotorch.strategies.megatron.along_tokens import longest, tokens_cut, without_ends

_BUCKET_BYTES = 25 << 20
"""Of gradients that are summed together; DDP's default."""

_COLLECTIVE_OPERATORS = 2
"""Operators that the host takes as long for as for one collective: the collective, and its own autograd function."""


@dataclass(frozen=True)
class UnitTime:
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
    unpack_s: tuple[float, float] = (0.0, 0.0)
    """Of copies of gathered weights to their place, by the device that computes, as are the next two."""
    pack_s: float = 0.0
    """Of copies of gradients into the order of ranks."""
    add_s: float = 0.0
    """Of sums of gradients that came into a window."""
    sum_s: float = 0.0
    """Of gradients over replicas, once per step."""

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s

    @property
    def copies_s(self) -> float:
        """Of all copies and sums of a pass (see [Note: copies and sums])."""
        return sum(self.unpack_s) + self.pack_s + self.add_s


class UnitTimes:
    """Times of a layout's units.

    Args:
        plan: the layout.
    """

    def __init__(self, plan: Planned) -> None:
        self.plan = plan

    def before_layers(self) -> UnitTime:
        """Of what comes before the layers."""
        model, plan = self.plan.model, self.plan
        return self._outside(model.before, embedding_passes(model, batch=plan.own, cutting=plan.cutting))

    def after_layers(self) -> UnitTime:
        """Of what comes behind the layers."""
        model, plan = self.plan.model, self.plan
        head = head_passes(model, batch=plan.own, cutting=plan.cutting)
        if plan.ring is not None and getattr(plan.ring, "recompute", "none") != "none":
            head = replace(head, backward_input=Work.together([head.forward, head.backward_input]))
        return self._outside(model.after, head)

    def layer(self, layer: LayerClass, *, again: bool) -> list[UnitTime]:
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
            plan.model, layer, batch=plan.own, cutting=self.plan.cutting, numerics=plan.numerics, attention=attention
        )
        # Slices that visit are computed again, but not those of an attention of which all heads are there at once.
        stays = shares and getattr(plan.ring, "recomputes_units", False)
        redone = [again and not (stays and unit.kind is UnitKind.WEIGHT) for unit in layer.units]
        each = zip(layer.units, passes, redone, strict=True)
        return [self._part([without_ends(unit)], p, recomputes=recomputes) for unit, p, recomputes in each]

    def ends_of_layers(self, units: Sequence[Unit]) -> list[UnitTime]:
        """Gathers of hidden states behind all layers, and of gradients before them, where layers cut tokens."""
        batch, inner = self.plan.batch, self.plan.inner
        if not (width := max((tokens_cut(unit).ends for unit in units), default=0)):
            return []
        part = longest(batch, inner.num_ranks) * width * batch.itemsize
        one_s = self._s(all_gather(part, axis=inner.token_axes[0], size=inner.num_ranks, phase=Phase.FORWARD))
        host_s = _COLLECTIVE_OPERATORS * self.plan.speeds.operator_s
        return [UnitTime(0.0, 0.0, 0.0, 0.0, 0.0, activations_s=(one_s, one_s), activations_host_s=(host_s, host_s))]

    def _outside(self, units: Sequence[Unit], passes: Passes) -> UnitTime:
        """Part before or behind the layers; a matrix there that is not the head counts as a plain matrix."""
        plan = self.plan
        others = [
            unit_passes(
                unit,
                tokens=plan.own.num_rows * plan.own.num_tokens,
                batch=plan.own,
                cutting=self.plan.cutting.of(unit),
                experts=plan.model.experts,
                numerics=plan.numerics,
            )
            for unit in units
            if plan.model.num_layers == 0 and not unit.logits
        ]
        return self._part(units, Passes.together([passes, *others]), recomputes=plan.numerics.recompute)

    def _part(self, units: Sequence[Unit], passes: Passes, *, recomputes: bool) -> UnitTime:
        speeds = self.plan.speeds
        cut = [unit for unit in units if unit.kind is not UnitKind.REPLICATED]
        backward = passes.backward
        recompute = speeds.device_s(passes.forward) if recomputes else 0.0
        recompute_host = speeds.host_s(passes.forward) if recomputes else 0.0
        found = UnitTime(
            forward_s=speeds.device_s(passes.forward),
            input_s=speeds.device_s(passes.backward_input) + recompute,
            weight_s=speeds.device_s(passes.backward_weight),
            forward_host_s=speeds.host_s(passes.forward),
            backward_host_s=speeds.host_s(backward) + recompute_host,
            parts=max((self.plan.cutting.of(unit).parts for unit in cut), default=self.plan.cutting.parts),
            all_come=any(self.plan.cutting.of(unit).slices < self.plan.cutting.slices for unit in cut),
        )
        for unit in units:
            found = self._with_transfers(found, unit)
        return found

    def _with_transfers(self, part: UnitTime, unit: Unit) -> UnitTime:
        """Adds a unit's transfers to its part (see [Note: where transfers go])."""
        plan, speeds = self.plan, self.plan.speeds
        layout = plan.layout_of(unit)
        exchanged = slowest_exchange(unit, strategy=plan.inner, batch=plan.batch)
        moved = plan.inner.activation_transfers(unit, batch=plan.batch) if plan.inner is not plan.stages else ()
        gathers, fetches, activations = list(part.gathers_s), list(part.fetches_s), list(part.activations_s)
        hosts = list(part.activations_host_s)
        hop, scatter, total = part.hop_s, part.scatter_s, part.sum_s
        unpack, pack, add = list(part.unpack_s), part.pack_s, part.add_s
        through_windows = any(t.kind is Kind.COPY for t in layout.transfers)
        forward_send = sum(self._s(t) for t in layout.transfers if t.kind is Kind.SEND and t.phase is Phase.FORWARD)
        for transfer in layout.transfers:
            seconds, back = self._s(transfer), transfer.phase is not Phase.FORWARD
            match transfer.kind:
                case Kind.ALL_GATHER:
                    gathers[back] += seconds
                    whole = transfer.payload_bytes * plan.group_of[transfer.axis].size
                    unpack[back] += speeds.memory_s(2 * whole) if seconds else 0.0
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
                    add += speeds.memory_s(3 * transfer.sent_bytes) if through_windows else 0.0
                case Kind.REDUCE_SCATTER:
                    scatter += seconds
                    read = transfer.payload_bytes * unit.bytes_in_pass / unit.num_bytes
                    pack += speeds.memory_s(read + transfer.payload_bytes) if seconds else 0.0
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
                    hosts[again] += _COLLECTIVE_OPERATORS * speeds.operator_s
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
            unpack_s=(unpack[0], unpack[1]),
            pack_s=pack,
            add_s=add,
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
