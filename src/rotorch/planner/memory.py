"""Peak bytes of a rank: memory at rest (`memory_at_rest.py`), and memory of passes, by traced layers.

[Note: what is traced]
    No formula gives the bytes that autograd saves: `traced/passes.py` runs a shallow copy of the model on fake
    tensors, and counts them. For each class of equal layers it separates tensors as wide as the residual stream,
    tensors of a layer's interior, which tensor parallelism cuts, inputs of a layer, and tensors around the layers. Each
    has a part that does not depend on the batch (weights cast for autocast) and a part per row.

[Note: moments]
    At the start of backward all saved tensors are alive, and logits with their gradient; then the head's gradient. In
    the backward of what is behind the layers, and in that of a layer, temporaries are alive beside what is left, and
    all of the layer's interior if that is recomputed: of whole layers every moment is traced. At the end no tensor is
    saved any more, but all gradients exist. The highest counts. Before the first backward of a step
    gradients exist only if they have permanent memory (`ddp`'s buckets, home slices in shared memory, buffers of
    grids). In a pipeline the embedding's gradient is the last of a micro-batch, made while others are kept.

[Note: experts]
    A module of experts gathers its tokens by expert and adds their outputs up. Cut through their widths, each slice
    does so with all pairs of a token and an expert; of whole experts a slice has its own pairs alone, as many as every
    other one if routing is even, which is assumed. Autograd makes the gradients of a slice's stacked weights, and those
    of a module are there together before they are added to what travels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from rotorch.core.messages import SUM_CHUNK_BYTES
from rotorch.core.spec import Weight
from rotorch.core.strategy import Strategy, with_visits
from rotorch.core.traffic import MicroBatch
from rotorch.planner.kept import KeptBytes
from rotorch.planner.memory_at_rest import FixedMemory, Gathered, trained_weights
from rotorch.planner.shared_tokens import backward_bytes, kept_bytes, own_tokens
from rotorch.planner.traced import PerRow, Traced
from rotorch.planner.workload import FoldedModel
from rotorch.strategies import sequence_ranks

CATEGORIES = ("weights", "gradients", "optimizer", "slots", "gathered", "activations", "logits", "temporaries")
"""Of `Memory`, in the order in which they are shown."""


@dataclass(frozen=True)
class Memory:
    """Bytes of the rank that holds most, at its highest moment.

    Attributes:
        by_category: of `CATEGORIES`.
        rank: number of the rank.
    """

    by_category: dict[str, float]
    rank: int

    @property
    def total_bytes(self) -> float:
        """Bytes of all categories together."""
        return sum(self.by_category.values())

    def largest(self) -> str:
        """The category of what depends on the batch or the layout that takes most."""
        return max(self.by_category, key=lambda name: self.by_category[name])


def peaks(
    model: FoldedModel,
    traced: Traced,
    *,
    ranks: Sequence[FixedMemory],
    strategies: Sequence[Strategy],
    batch: MicroBatch,
    accumulation: int,
    parts: Sequence[range] = (),
    cut: FoldedModel | None = None,
    held: FoldedModel | None = None,
    device: str,
) -> tuple[Memory, ...]:
    """Peaks of ranks.

    Args:
        model: folded.
        traced: its passes, for the batch's precision and the tokens that a rank has of a sequence.
        ranks: memory of ranks at rest, by `at_rest`.
        strategies: outermost first.
        batch: one micro-batch.
        accumulation: micro-batches of a step.
        parts: layers of each stage, where there are stages.
        cut: the model as strategies hold it, whose units have numbers of visits of their own; given if slices visit.
        held: the model as the innermost strategy holds it, with one layer per class; given if its buffers grow with the
            batch.
        device: of ranks, "cpu" or "cuda".
    """
    slots, inner = 0, strategies[-1]
    if held is not None:  # gradients of small layers are summed side by side, up to a limit
        spec = held.with_layers_of(SUM_CHUNK_BYTES * inner.num_ranks)
        slots = inner.layout_of(spec, batch=batch).slots_bytes
    shared_by = sequence_ranks(strategies)
    own = own_tokens(batch, num_ranks=shared_by.num_ranks)
    keys, attending = (
        tuple([of(each, batch=batch, shared_by=shared_by) for each in layer.attentions] for layer in traced.layers)
        for of in (partial(kept_bytes, device=device), backward_bytes)
    )
    ring = with_visits(strategies)
    passes = _Passes(
        model, traced, strategies, own, accumulation, parts, float(slots),
        keys=tuple(map(sum, keys)), attending=tuple(max(each, default=0.0) for each in attending),
        visits_by_name={} if cut is None else cut.visits_by_name,
        device=device, head_parts=1 if ring is None or cut is None or cut.head is None else ring.num_parts(cut.head),
    )  # fmt: skip
    return tuple(map(passes.peak, ranks))


class _Passes(KeptBytes):
    """Moments of the passes of a layout, and what is alive at each (see [Note: moments])."""

    def peak(self, rank: FixedMemory) -> Memory:
        """Returns the peak of one rank."""
        kept, first, has_head, fewest = self._kept(rank)
        held, whole = dict(rank.by_category), rank.gathered
        gradients = held.pop("gradients")
        if self.inner.kind == "ddp" and self.accumulation > 1:
            gradients *= 2  # DDP's buckets, and what micro-batches add up without them
        # Those of a ring, and those of the strategy inside of it.
        held["slots"] = held["slots"] + self.slots_bytes if self.sharing else max(held["slots"], self.slots_bytes)
        has_own = any(s.gradients_stay for s in (*self.sharing, self.inner)) or self.accumulation > fewest
        early = gradients if has_own else 0.0
        layers = range(len(self.traced.layers))  # none if the model does not say what its layers are
        given = max((layer.given.of(self.rows, cut=self.cuts.stream) for layer in self.traced.layers), default=0.0)
        inside = max(map(self._whole, self._redone(rank)), default=0.0)
        temporaries = inside
        if not self.by_units:  # else one unit at a time
            passing = self._passing(rank, has_head=has_head)
            # Gradients of weights are added where they travel, or counted above.
            if self.ring is not None or self.gathers:
                passing = passing.without_constant()
            # Of a mixture nearly all of them are inside of its experts.
            cut = self.cuts.interior if self.mixes else min(self.cuts.stream, self.cuts.interior)
            temporaries += passing.without_constant().of(self.rows, cut=cut)
            temporaries += passing.constant_bytes / (self.inner.num_ranks if self.cuts.interior > 1 else 1)
        loss, messages = self._loss(given, has_head=has_head), self._messages(rank) * given
        if messages:
            loss["temporaries"] = loss.get("temporaries", 0.0) + messages
        if whole.stage:
            moments = self._moments_of_stage(whole, kept=kept, gradients=gradients, fewest=fewest)
            besides: list[tuple[float, dict[str, float]]] = [(0.0, loss), (0.0, {"temporaries": temporaries})]
            if self.in_whole_layers:
                in_layers = self._moments_of_own_stages(rank, kept=kept)
                besides = [(0.0, loss), *((a - kept, {"temporaries": b + messages}) for a, b in in_layers)]
            moments = [
                {**moment, "activations": moment["activations"] + less, **beside}
                for moment in moments
                for less, beside in besides
            ]
            moments.append({"gradients": gradients, "gathered": whole.stage_gradients, "temporaries": given})
            if 0 in rank.stages:
                moments.append({"gathered": whole.stage, **self._end_of_first_stage(kept, given=given)})
        else:
            in_forward, in_backward = 0.0, 0.0
            last = self._end_of_backward(early, gradients)
            last["temporaries"] = max(given, last["temporaries"])
            if 0 in rank.stages:
                last |= self._end_of_first_stage(kept, given=given)
            if self.gathers:  # gradients of layers leave one after the other
                number = max(1, self.model.num_layers)
                late = early or (gradients - rank.around) * max(0, number - (2 if self.again else 1)) / number
                in_forward = whole.root + max(whole.block, whole.layers)
                in_backward = whole.root + whole.head + max(2 * whole.block, whole.layers)
                in_backward += whole.gradient + whole.message
                last = {"gradients": late, "gathered": in_backward, "activations": first, "temporaries": inside}
            moments = [
                {"gradients": early, "gathered": in_forward, "activations": kept, **loss},
                {"gradients": early, "gathered": in_backward, "activations": kept, "temporaries": temporaries},
                last,
            ]
            if self.has_whole_layers and layers:
                moments[1:2] = self._moments_of_whole_layers(rank, kept=kept, gradients=gradients, early=early)
            if self.in_whole_layers:
                in_layers = self._moments_of_own_stages(rank, kept=kept)
                moments = [{"gradients": early, "activations": kept, **loss}, last] if has_head else [last]
                moments += [{"gradients": early, "activations": a, "temporaries": b + messages} for a, b in in_layers]
            if self.gathers and not self.sharing and layers and all(layer.backward for layer in self.traced.layers):
                own, outside = gradients - rank.around, rank.around
                moments[1:] = self._moments_of_layers(whole, kept=kept, own=own, outside=outside, early=early)
            if any(self.attending):
                left = kept - self.traced.behind.of(self.rows) if has_head else kept
                left, beside = max((self._attending(number, kept=left) for number in layers), key=sum)
                in_attention = {"activations": left, "temporaries": beside}
                moments.append({"gradients": early, "gathered": in_backward, **in_attention})
            makes_logits_again = getattr(self.ring, "recompute", "") == "head" and not self.traced.on_logits
            if self.ring is not None and not early and has_head and self.model.head and makes_logits_again:
                # The loss ends with this rank's own slice, whose gradient has got its memory, and with as many logits.
                own = sum(weight.num_bytes for weight in trained_weights(self.model.head)) / self.cuts.interior
                moments.append({"gradients": own / self.ring.num_ranks, "activations": kept, **loss})
            if self.ring is not None:
                left = kept - self.traced.behind.of(self.rows) if has_head and not self.by_units else kept
                each = [self._gradients_of_experts(number, kept=left) for number in layers]
                moments += [{"gradients": early, "activations": a, "temporaries": b} for a, b in each]
                if not early:
                    # In the last layer's backward: the only one's of a step, or the first one's of several in flight.
                    among = max(self.in_flight)
                    left, late = kept * (1 - 1 / among), gradients
                    if among == 1:
                        left, late = first, gradients - self._last_to_come(rank, of_layers=gradients - rank.around)
                    each = [self._gradients_of_experts(number, kept=left) for number in layers]
                    each.append((left, temporaries))
                    moments += [{"gradients": late, "activations": a, "temporaries": b} for a, b in each]
        highest = max(moments, key=lambda moment: sum(moment.values()))
        return Memory({**dict.fromkeys(CATEGORIES, 0.0), **held, **highest}, rank.rank)

    @cached_property
    def _lie_beside(self) -> bool:
        """True if a backward's gradients are made beside memory in which `ddp` puts them side by side at its end.

        So it is on the CPU ranks of a host where passes have copies of weights; else they go to DDP's buckets.
        """
        return self.inner.kind == "ddp" and self.accumulation == 1 and self._has_copies and self.device == "cpu"

    def _made(self, early: float, made: float) -> float:
        """Gradients, of which `early` have permanent memory and `made` are made so far in a backward."""
        return early + made if self._lie_beside else early or made

    @cached_property
    def _has_copies(self) -> bool:
        units = (unit for layer in self.model.classes for unit in layer.units)
        return any(weight.copy_itemsize is not None for unit in units for weight in unit.weights)

    def _tables(self, *, tied: bool) -> list[Weight]:
        """Tables of words whose gradients autograd adds up whole: those that are the head, too, or all others."""
        if self.inner.kind not in ("single", "ddp") or self.sharing:
            return []
        units = (unit for unit in self.model.before if bool(unit.logits) is tied)
        return [weight for unit in units for weight in trained_weights(unit) if len(weight.shape) == 2]

    @cached_property
    def _tied(self) -> float:
        """Bytes of the gradient of a table that is the head, too."""
        return float(sum(weight.num_bytes for weight in self._tables(tied=True)))

    def _end_of_backward(self, early: float, gradients: float) -> dict[str, float]:
        """The last gradient, of the table of words, is made in the passes' precision and added to what was there.

        Of a table that is the head, too, the head's gradient has waited for it: both are there, and their sum.
        """
        whole = float(sum(weight.num_bytes for weight in self._tables(tied=False)))
        if self._has_copies:
            made = float(sum(weight.numel * weight.itemsize_in_pass for weight in self._tables(tied=False)))
        else:
            made = whole if early or self.accumulation > 1 else 0.0
        adds = self.accumulation > 1 or (early and not self._lie_beside)
        made += self._tied * (3 if adds else 2)
        if self.inner.kind == "ddp" and self.accumulation > 1 and not self._has_copies:
            return {"gradients": gradients / 2 + whole + self._tied, "temporaries": made}  # all others are in buckets
        return {"gradients": self._made(early, gradients), "temporaries": made}

    def _last_to_come(self, rank: FixedMemory, *, of_layers: float) -> float:
        """The gradients that are not there yet in the first layer's backward: its own, and those of what is before."""
        num_layers = sum(len(self.parts[stage]) for stage in rank.stages) or self.model.num_layers
        own = of_layers / max(1, num_layers)
        if self.stages is not None and 0 not in rank.stages:
            return own
        tables = (weight for unit in self.model.before if not unit.logits for weight in trained_weights(unit))
        ranks = math.prod(strategy.num_ranks for strategy in (*self.sharing, self.inner))
        return own + sum(weight.num_bytes for weight in tables) / ranks

    def _alive_in(self, number: int, *, again: bool) -> Iterator[tuple[float, float]]:
        """Share of a layer's gradients that are made, and bytes of the layer, at each moment of its backward.

        These are its output's gradient, and all that it keeps, also where it was computed again for this.

        Args:
            number: of the layer's class.
            again: the layer is computed again, so its input is there whoever has a use for it.
        """
        layer = self.traced.layers[number]
        there = self._all_kept(number) + layer.given.of(self.rows, cut=self.cuts.stream)
        there += layer.unsaved_input.of(self.rows, cut=self.cuts.stream) if again else 0.0
        for point in layer.backward:
            # Gradients of slices are added where they travel.
            made = 0.0 if self.ring is not None else point.constant_bytes
            yield point.made, there + (point.row_bytes * self.rows + made) / self.cuts.interior

    def _moments_of_own_stages(self, rank: FixedMemory, *, kept: float) -> Iterator[tuple[float, float]]:
        """Bytes of what is kept, and of all else, in layers' backward in a stage that nobody else holds.

        Of each class of layers, also of those that are computed again, the first and the last one's count, when all
        behind it is done.
        """
        assert self.stages is not None
        for stage in rank.stages:
            part, layers = self.parts[stage], self.traced.layers
            again = self._again_in(stage, part)
            left = kept - (self.traced.behind.of(self.rows) if stage == self.stages.num_stages - 1 else 0.0)
            for number in sorted({*self._ends(again), *self._ends(range(again.stop, part.stop))}):
                place = self.model.pattern[number]
                behind = self.model.counts_of(range(max(number + 1, again.stop), part.stop))
                done = sum(count * self._all_kept(n) for n, count in behind.items())
                inputs = self.model.counts_of(range(number + 1, again.stop))
                done += sum(count * layers[n].given.of(self.rows) for n, count in inputs.items())
                own = layers[place].given.of(self.rows) if number in again else self._all_kept(place)
                yield left - done, max(alive for _, alive in self._alive_in(place, again=number in again)) - own

    def _ends(self, part: range) -> set[int]:
        """The first and the last layer of each class among some layers, by number."""
        first = {self.model.pattern[number]: number for number in reversed(part)}
        return {*first.values(), *{self.model.pattern[number]: number for number in part}.values()}

    @property
    def has_whole_layers(self) -> bool:
        """True if a rank has all layers, whole or cut alike, and each moment of their backward is known."""
        if self.stages is not None or self.gathers or self.by_units or any(self.attending):
            return False
        return all(layer.backward for layer in self.traced.layers)

    def _moments_of_whole_layers(
        self, rank: FixedMemory, *, kept: float, gradients: float, early: float
    ) -> Iterator[dict[str, float]]:
        """The backward of what is behind the layers, and of the last and the first layer of each class.

        Args:
            rank: memory at rest.
            kept: by autograd, of all layers and around them.
            gradients: of all weights that the rank holds.
            early: of these, what is there before.
        """
        number, pattern, rows, cuts = self.model.num_layers, self.model.pattern, self.rows, self.cuts
        each = [self._of_layer(place) for place in range(len(self.traced.layers))]
        own = (gradients - rank.around) / number
        behind = max(0.0, gradients - self._last_to_come(rank, of_layers=gradients - rank.around) - own * (number - 1))
        around = kept - sum(each[place] for place in pattern) - self.traced.behind.of(rows, cut=cuts.outside)
        if self.ring is None and self.model.head is not None and trained_weights(self.model.head):
            # The head's gradient is made, and added to what was there before.
            made = float(self.inner.layout(self.model.head).resident_bytes)
            one = self._logits / (cuts.interior if self.inner.kind in ("megatron", "atp") else cuts.stream)
            half = self.batch.itemsize / self.batch.loss_itemsize
            yield {"gradients": early, "activations": kept, "logits": one * half, "temporaries": made}
            if self._has_copies and early and self.inner.kind in ("single", "ddp"):
                # It is made in the passes' precision first.
                made += float(self.model.head.bytes_in_pass)
                yield {"gradients": early, "activations": kept, "temporaries": made}
        waits = self._tied if early else 0.0  # the head's gradient of a table, for the table's own
        beside = self.traced.layers[pattern[-1]].given.of(rows, cut=cuts.stream)
        beside += self.traced.behind_backward.of(rows, cut=cuts.outside)
        yield {
            "gradients": self._made(early, behind),
            "activations": kept - self.traced.behind.of(rows, cut=cuts.outside),
            "temporaries": beside + waits,
        }
        for layer in self._ends(range(number)):
            saved = self._all_kept(pattern[layer])
            left = around + sum(each[place] for place in pattern[:layer])
            for made, alive in self._alive_in(pattern[layer], again=self.again):
                yield {
                    "gradients": self._made(early, behind + own * (number - 1 - layer + made)),
                    "activations": left + min(alive, saved),
                    "temporaries": max(0.0, alive - saved) + waits,
                }

    def _messages(self, rank: FixedMemory) -> int:
        """Hidden states and their gradients that are under way to or from a stage, as many as there are at a time."""
        if 0 in rank.stages or self.stages is None:
            return 0
        ahead = min(self.accumulation - self.in_flight[stage] for stage in rank.stages)
        # A next input is awaited, and behind the first backward a gradient may not have left.
        return max(int(ahead > 0), int(self.accumulation > 1) + int(ahead > 1))

    def _moments_of_layers(
        self, whole: Gathered, *, kept: float, own: float, outside: float, early: float
    ) -> Iterator[dict[str, float]]:
        """A backward under `fully_shard`, point by point of every layer's (see [Note: gathered]).

        Args:
            whole: what is gathered.
            kept: by autograd, of all layers and around them.
            own: gradients of this rank's parts of the layers.
            outside: of its parts of what lies around these.
            early: gradients that are there before.
        """
        number = self.model.num_layers
        each = [self._of_layer(place) for place in range(len(self.traced.layers))]
        of_layers = sum(each[place] * count for place, count in self.model.counts_of(range(number)).items())
        around = kept - of_layers - self.traced.behind.of(self.rows)
        if whole.layers:  # in a loss's forward the last layer's message has not been freed
            one = self._logits * self.batch.itemsize / self.batch.loss_itemsize
            in_loss = self._logits + (one + self._logits if one < self._logits else 0.0)
            gathered = whole.root + whole.layers + whole.block
            yield {"gradients": early, "gathered": gathered, "activations": kept, "logits": in_loss}
        yield {
            "gradients": early,
            "gathered": whole.root + whole.head + max(whole.block, whole.layers),
            "activations": kept - self.traced.behind.of(self.rows),
            "temporaries": self.traced.layers[self.model.pattern[-1]].given.of(self.rows)
            + self.traced.behind_backward.of(self.rows),
        }
        # Between these numbers of layers that are done it grows evenly, or shrinks.
        for done in {0, min(1, number - 1), max(0, number - 2), number - 1}:
            ahead = 2 if done < number - 1 else 1
            gathered = whole.root + whole.head + max(ahead * whole.block, whole.layers)
            gathered += whole.message if done else 0.0  # what the layer behind has sent
            left = around + of_layers * (number - done - 1) / number
            for place, saved in enumerate(each):
                for made, alive in self._alive_in(place, again=self.again):
                    yield {
                        "gradients": early or own * done / number,
                        "gathered": gathered + made * whole.gradient,
                        "activations": left + min(alive, saved),
                        "temporaries": max(0.0, alive - saved),
                    }
            sends = gathered - (whole.message if done else 0.0) - whole.block + whole.gradient + whole.message
            yield {"gradients": early or own * (done + 1) / number, "gathered": sends, "activations": left}
        tables = whole.root + whole.head + whole.before + whole.message
        yield {"gradients": early or own, "gathered": tables, "activations": around}
        # Beside a message gloo has a copy of it, where others have the gradients that it is made of.
        yield {"gradients": early or own + outside, "gathered": 2 * whole.root_message}

    def _moments_of_stage(
        self, whole: Gathered, *, kept: float, gradients: float, fewest: int
    ) -> list[dict[str, float]]:
        """A gathered stage while most is kept, and in later units, which begin with gradients that have been summed.

        A first backward makes all gradients of the stage, and gives one micro-batch's activations up.
        """
        assert self.stages is not None
        # Weight gradients that are put off are made when the weights have been freed.
        waits = self.stages.splits_backward and self.in_whole_layers
        made = whole.stage_gradients if self.accumulation > fewest and not waits else 0.0
        summed = gradients if self.accumulation > self.stages.unit_of(self.accumulation) else 0.0
        others, everything = kept * (1 - 1 / max(self.in_flight)), whole.stage + whole.stage_gradients
        return [
            {"gathered": whole.stage + made, "activations": kept},
            {"gradients": summed, "gathered": everything, "activations": others},
        ]

    def _end_of_first_stage(self, kept: float, *, given: float) -> dict[str, float]:
        """The last gradient of a micro-batch, the embedding's, is made while other micro-batches are kept."""
        tables = [unit for unit in self.model.before if trained_weights(unit)]
        held = max((float(self.inner.layout(unit).resident_bytes) for unit in tables), default=0.0)
        made = min(held, self.traced.temporaries.constant_bytes)
        if self.ring is not None:  # rows are added where they travel
            made = 0.0
        # The first micro-batch's gradients are there to stay; what adds to them is made apart.
        among, adds = self.in_flight[0], self.accumulation > self.in_flight[0]
        second = kept * max(0.0, 1 - 2 / among), made if self.accumulation > 1 else 0.0
        others = kept * (1 - 1 / among)
        if self.stages is not None and self.stages.splits_backward and self.in_whole_layers:
            others = min(kept, others + self._operands(0))  # of this one, which are put off now
        left, beside = max((others, made if adds else 0.0), second, key=sum)
        return {"activations": left, "temporaries": given + beside}

    def _passing(self, rank: FixedMemory, *, has_head: bool) -> PerRow:
        """Temporaries of a backward; in a stage a weight's gradient is one of a weight that the rank has."""
        passing, head = self.traced.temporaries, self.model.head
        stages = rank.stages if self.stages is not None else ()
        if not stages:
            return passing
        layers = {number for stage in stages for number in self.model.counts_of(self.parts[stage])}
        units = [unit for number in layers for unit in self.model.classes[number].units]
        units += [head] if has_head and head is not None else []
        largest = max((w.num_bytes for unit in units for w in trained_weights(unit)), default=0)
        return replace(passing, constant_bytes=min(passing.constant_bytes, largest))

    def _loss(self, given: float, *, has_head: bool) -> dict[str, float]:
        """Logits, what is made of them, and their gradient; ranks that cut a vocabulary make two tensors of it."""
        inner, ring = self.inner, self.ring
        head = self.model.head
        if not has_head or head is None:
            return {"temporaries": given}
        if not (inner.kind in ("megatron", "atp") or ring is not None or inner.feature_axes):
            return {"logits": self.traced.logits.of(self.rows)}
        one, half = self._logits, self.batch.itemsize / self.batch.loss_itemsize
        if ring is not None:
            keeps = getattr(ring, "recompute", "none") == "none"
            visits = self.visits([head])
            parts = self.cuts.interior * visits * self.head_parts
            if half < 1:
                # A slice exists as the product gave it, its gradient too, and where it is computed again one is kept.
                at_once = (one + one * half * (1 if keeps else 3)) / parts
                at_once += one * half / self.cuts.interior if keeps else 0.0
            elif keeps:
                at_once = one / self.cuts.interior
            else:  # only where there are others is a slice computed again, beside the gradient that is made of it
                at_once = min(2, visits) * one / parts
            if self.traced.on_logits:  # these run again for each slice: the last one's output, gradients, what is kept
                at_once += (1 + self.traced.kept_on_logits) * one * (half if half < 1 else 2) / parts
            return {"logits": at_once, "temporaries": given * (4 if keeps else 2)}
        cut = self.cuts.interior if inner.kind in ("megatron", "atp") else self.cuts.stream
        return {"logits": (2 + self.traced.kept_on_logits * half) * one / cut}

    def _attending(self, number: int, *, kept: float) -> tuple[float, float]:
        """Bytes of what is kept, and of all else, in a layer's attention, when all behind it is done.

        Args:
            number: of the layer's class.
            kept: bytes, but for those behind the layers.
        """
        layer = self.traced.layers[number]
        beside = self.attending[number] + 2 * layer.given.of(self.rows)
        if self.by_units:
            return kept - layer.given.of(self.rows), beside
        done = layer.interior.of(self.rows)
        return (kept, beside + self._whole(number) - done) if self.again else (kept - done, beside)

    def _gradients_of_experts(self, number: int, *, kept: float) -> tuple[float, float]:
        """Bytes of what is kept, and of all else, when gradients of a slice's experts are made (see [Note: experts]).

        Args:
            number: of the layer's class.
            kept: bytes, but for those behind the layers.
        """
        layer, units = self.traced.layers[number], self.model.classes[number].units
        stacked = [w for unit in units for w in trained_weights(unit) if len(w.shape) > 2]
        if not stacked:
            return 0.0, 0.0
        visits = self.visits_in(number)
        slices = self.cuts.interior * visits
        given = layer.given.of(self.rows)
        pairs = layer.repeated.of(self.rows)
        inside = (layer.experts.of(self.rows) - pairs) / slices
        pairs /= visits if self.whole_experts else 1
        done = 0.0 if self.by_units else inside + pairs
        # The output of the first product has its gradient still, of what lies between it and the second one; tokens by
        # expert have theirs, and the layer's input and output.
        beside = sum(w.num_bytes for w in stacked) / slices + inside / 2 + pairs + 3 * given
        return kept - done, beside
