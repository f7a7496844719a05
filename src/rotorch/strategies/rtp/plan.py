"""rtp: rotated tensor parallelism. Activations stay, weight slices go round, gradients ride home with them.

Idea
    Every rank keeps 1/n of each weight and its own micro-batch. At step i of a unit, rank r computes with slice (r -
    i) mod n, which it takes from that slice's home; the slices' outputs are summed (or concatenated), and no rank ever
    holds a whole weight. Source: RTP (Luo, Zhong, Fox, arXiv 2311.01635).

Picture (4 ranks, one unit; the number is the slice that a rank computes with)
              forward          backward         a slice's gradient visits its ranks in backward and
    rank 0 |  0  3  2  1  |  1  2  3  0  |      ends at home: slice 0 is seen by rank 3, 2, 1, 0
    rank 1 |  1  0  3  2  |  2  3  0  1  |      and rank 0 adds the last part. No all-reduce, no
    rank 2 |  2  1  0  3  |  3  0  1  2  |      reduce-scatter: the optimizer is local.
    rank 3 |  3  2  1  0  |  0  1  2  3  |

Layout
    `W[F_ring, D]` or `W[F, D_ring]`: cut where the model's tensor-parallel plan says, by whole heads, by rows of the
    vocabulary. Uncut weights (norms) are whole on every rank; their gradients are all-reduced.

Cost (unit of P bytes, n ranks)
    resident   P/n
    transient  Two slots of a slice for weights, in backward two more for gradients; none over shared memory. Over
               symmetric memory a third buffer for gradients, the inbox. `buffering=in_place`, over messages: slices
               replace each other in their homes' memory, so no slot for weights and one for gradients, and two bounces
               of a few MiB at most; uneven slices need room for the largest one in every home. `ahead=2`: a third slot.
               With `visits=g` slots hold n/g slices. Over messages out of place and over symmetric memory a slice of
               an embedding or a head that is larger than a visit of a layer, by a quarter or more, comes in parts about
               as large as one, of 1 MiB at least, and slots are no larger than that.
               Under `auto` on CPU, which may come to a transport without parts, plans count whole slices.
    sent       (n-1)/n (P + P + P): weights in forward, weights and gradients in backward; nothing over shared memory.
               Backward asks for no weights of an embedding, nor of a head whose logits are kept (`recompute=none`),
               unless logits become real: for another loss than a plain cross-entropy, or a bias that is whole.
               In place, slices that backward does not need, or that are used twice, hop home once more: P/n.
               `transport=hierarchical` over H hosts: (H-1)/n (P + P + P), all of it between hosts; a third slot for
               gradients if H > 2.
    hides      A fetch hides behind the compute of the slice before it, a gradient's hop behind that of the next slice;
               over symmetric memory, behind that of two. In place, only the first few MiB of a hop do.

Long sequences (`context=c`; `tsp=n` is `rtp=n[context=n]`; c ranks, T tokens, K features of keys and values)
    Neighbours in groups of c share a batch, and each has T/c of its tokens from the embedding to the loss, one chunk of
    the front and one of the back. Attentions rotate weight by weight, so that all heads of a rank's tokens are there at
    once, and every rank gets the keys and values that its tokens attend to: sent per layer 3/4 (c-1)/c T K in forward
    on average, at most 2 w K with a window of w tokens, as much for their gradients; kept for backward T K at most,
    or with `recompute=slice` this rank's own, and the others' are sent once more.
    With `exchange=heads` every rank gets all tokens of some heads instead, and sends outputs back: in forward
    (c-1)/c^2 T (2 D + K), with D features of queries and of outputs, as much in backward; kept T (2 D + K) / c.
    Source: TSP (arXiv 2604.26294), whose tensor and sequence parallelism share one axis; DeepSpeed-Ulysses (arXiv
    2309.14509) for heads.

Mixtures of experts (`experts=whole`)
    A slice of a layer's experts is a set of E/n whole experts (of uneven numbers the first ranks have one more) instead
    of 1/n of every expert's width. Tokens stay: a visiting set computes for the tokens that the router sends to it. The
    same bytes, one product per expert instead of n narrower ones. This is the paper's own way.

Around another strategy (`rtp=a,megatron=b`)
    The b ranks inside share a batch, and each has 1/b of every weight's heads or columns; that part rotates over a ring
    of the a ranks that have the same one. A rank keeps P/(a b), and sends (a-1)/a (P + P + P)/b beside what `megatron`
    sends: activations are summed behind the last slice of an attention or MLP. It computes its part of the logits a
    slice at a time.

Precision
    Where a pass computes in bfloat16 (`compute`: under autocast, or with `param_dtype`), slices visit and travel in it:
    half the bytes. Masters and gradients stay in float32, as do their hops without `hops`. No copy in bfloat16 is kept:
    over messages there is a third slot, from which slices are sent, over shared memory one, into which a visit
    converts. In place it is a copy that travels, in one slot, and the masters stay. Only over symmetric memory each
    rank keeps a copy, in the window that others read: half of its slices again. `wire=fp8`, over messages: slices
    travel in eight bits, with a scale for every 128 of them (`comm/fp8.py`).

Deviations
    Slices are taken from their home instead of being handed on: the same order and volume, but weights never leave
        home, so an exception loses nothing. Embedding and head rotate too, and the loss is computed slice by slice.
        Slices may be uneven.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from rotorch.core.errors import ConfigError
from rotorch.core.layout import Layout
from rotorch.core.messages import bounce_bytes, fp8_bytes, num_chunks, sum_slots
from rotorch.core.row_parts import num_parts, part_bytes, with_row_parts
from rotorch.core.shared_context import SequenceRanks, check_divides, check_shares, key_value_transfers
from rotorch.core.spec import Combine, ModelSpec, Unit, UnitKind
from rotorch.core.stages import in_stage
from rotorch.core.strategy import OneAxis, Strategy
from rotorch.core.traffic import Kind, MicroBatch, Phase, Transfer
from rotorch.core.visits_by_size import visits_of, with_visits_by_size
from rotorch.core.whole_experts import check_whole_experts, with_whole_experts
from rotorch.core.whole_units import StaysWhole, check_memory, is_whole, whole_layout, with_whole_units

_COMPUTE_ITEMSIZE = 2  # of bfloat16 and float16
_WITH_SLOTS = ("send_receive", "symmetric_memory")
"""Transports whose slots hold what visits: several slices, or a part of one."""


class RTP(OneAxis):
    """Weights rotate over a ring of `size` ranks. Written `rtp=4`, or `rtp=4[recompute=slice]`.

    Attributes:
        size: number of ranks on the ring.
        recompute: computed again in backward. "none": nothing, logits are kept; "head": the logits, the largest
            tensor of a step, which then never exist whole; "slice": logits, norms and the interior of every unit, a
            slice at a time; "all_but_attention": the same, but outputs of attention are kept, which takes the most
            time and little memory.
        transport: of slices. "auto" takes shared memory when all ranks of the ring are CPU ranks of one host
            and it is large enough, symmetric memory when they are GPUs of one host that reach each other's memory, else
            point-to-point messages. "hierarchical": messages between CPU ranks of several hosts, where each slice
            crosses to each host once per pass and its ranks share it; "auto" takes it where every host has as many
            ranks, more than one, side by side, and messages carry slices as they are at home.
        hosts: number of hosts that `transport=hierarchical` goes over.
        buffering: of messages. "out_of_place": the next slice comes while this one is computed with. "in_place": it
            takes this one's place, which saves the slots and costs overlap. Where ranks share memory there is nothing
            to save, and both are the same.
        ahead: messages under way while a slice is computed with, 1 to 4. 2 takes one more slot, and pays between two
            hosts whose link takes about as long as their compute (docs/lab_log.md); not where slices are converted,
            packed or replace each other.
        visits: number of visits in which the slices of a layer's largest unit come, over messages out of place or
            symmetric memory; it divides `size`. `size / visits` slices lie side by side in a slot, and are one product.
            Smaller units come in as few visits as fit into the same slots, tables in more, heads in no fewer
            (core/visits_by_size.py). By default every slice comes by itself on CPU; between GPUs it is `size`, in slots
            of single slices, but where backward runs units again.
        wire: "fp8": messages carry slices in eight bits; they are computed with in the pass's own precision.
        hops: "bfloat16": sums of gradients travel in it, over messages out of place and symmetric memory: half the
            bytes, and a rounding or two at each rank. At home they add up in the weights' precision.
        context: number of neighbours on the ring that share a batch, each with its part of the tokens: keys and values
            are exchanged among them. It divides `size`. `tsp=4` is short for `rtp=4[context=4]`.
        exchange: among neighbours that share a batch. "gather": each gets the keys and values that its own tokens
            attend to, and keeps them for backward, or with `recompute=slice` gets them again. "heads": each gets all
            tokens of some heads, and gives their outputs back; it keeps 1/context of them, and sends less the more
            ranks share (docs/long_context.md).
        memory: budget of a rank for weights, gradients and AdamW's moments, written `2GiB`: units that are worth most
            are whole on every rank within it (`osdp=4[memory=2GiB]`, core/whole_units.py). A whole unit is computed
            with as it is; `recompute` is for the others. Copies of slices in the precision of a pass, which only
            symmetric memory keeps, come on top.
        experts: "cut": every expert of a mixture is cut through its hidden width, as the model's plan says. "whole": a
            slice is a set of whole experts, and computes for the tokens that go to these.
        compute: the dtype in which slices are computed with, if it is not the weights' own: that of `param_dtype` or of
            autocast, from which `parallelize` fills it in.
    """

    kind: ClassVar[str] = "rtp"
    not_compiled: ClassVar[str] = ""
    not_recorded: ClassVar[str] = ""
    cuts_weights: ClassVar[bool] = True
    slices_visit: ClassVar[bool] = True
    shares_inside: ClassVar[bool] = True
    holds_inside: ClassVar[bool] = True
    recompute: Literal["none", "head", "all_but_attention", "slice"] = "head"
    transport: Literal["auto", "shared_memory", "symmetric_memory", "hierarchical", "send_receive"] = "auto"
    hosts: Annotated[int, Field(ge=2)] = 2
    buffering: Literal["out_of_place", "in_place"] = "out_of_place"
    ahead: Annotated[int, Field(ge=1, le=4)] = 1
    visits: PositiveInt | None = None
    wire: Literal["fp8"] | None = None
    hops: Literal["bfloat16"] | None = None
    context: PositiveInt = 1
    exchange: Literal["gather", "heads"] = "gather"
    memory: str | None = None
    experts: Literal["cut", "whole"] = "cut"
    compute: Literal["bfloat16", "float16"] | None = None

    @model_validator(mode="after")
    def _context_divides(self) -> Self:
        check_divides(size=self.size, context=self.context, kind=self.kind)
        check_memory(self.memory, kind=self.kind, context=self.context)
        return self

    @property
    def gradients_stay(self) -> bool:
        return self.transport in ("shared_memory", "hierarchical")  # other ranks map them there

    @property
    def visits_together(self) -> bool:
        """True if several slices may come in one visit."""
        return self.visits is not None and self.size > 1

    @property
    def recomputes_units(self) -> bool:
        """True if backward runs units again, a slice at a time."""
        return self.recompute in ("all_but_attention", "slice")

    @property
    def recomputes_layers(self) -> bool:
        return self.recompute == "slice"

    @property
    def context_axes(self) -> dict[str, int]:
        return {"rtp": self.context} if self.context > 1 else {}

    @property
    def sequence_ranks(self) -> SequenceRanks:
        by_heads = self.exchange == "heads"
        return SequenceRanks(self.context, by_heads=by_heads, fetches_again=self.recompute == "slice" and not by_heads)

    def activation_transfers(self, unit: Unit, *, batch: MicroBatch, position: int = 0) -> tuple[Transfer, ...]:
        return key_value_transfers(
            unit,
            batch=batch,
            shared_by=self.sequence_ranks,
            axis="rtp",
            position=position,
            num_forwards=2 if self.sequence_ranks.fetches_again else 1,
        )

    def units_of(self, spec: ModelSpec) -> ModelSpec:
        held = (with_whole_experts(spec) if self.experts == "whole" else spec).with_inside_cut()
        if self.memory is not None:
            # Over messages: what a ring in shared memory spares is waiting for turns, which the same numbers rank. Nor
            # may the choice hang on what "auto" comes to.
            known = self.transport not in ("auto", "symmetric_memory", "shared_memory")
            transport = self.transport if known else "send_receive"
            unlimited = self.model_copy(update={"memory": None, "transport": transport})
            weighed = self._in_visits(held) if self.visits_together else held
            chosen = with_whole_units(weighed, strategy=unlimited, axis="rtp", memory=self.memory)
            found = zip(held.units, map(is_whole, chosen.units), strict=True)
            held = replace(held, units=tuple(_uncut(unit) if whole else unit for unit, whole in found))
        return self._in_visits(held)

    def _in_visits(self, spec: ModelSpec) -> ModelSpec:
        """The same model, its units with how their slices visit."""
        if self.visits is not None and self.visits_together:
            by_size = not self.recomputes_units
            return with_visits_by_size(spec, num_slices=self.size, most=self.visits, by_size=by_size)
        return with_row_parts(spec, num_slices=self.size) if self._visit_in_parts else spec

    @property
    def _visit_in_parts(self) -> bool:
        """True if tables visit in parts where slices are messages, each in a slot of its own."""
        out_of_place = self.buffering == "out_of_place"  # also where it says nothing: "auto" may come there with it
        return self.transport in ("auto", *_WITH_SLOTS) and out_of_place and self.size > 1

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        n = self.size
        if unit.kind is UnitKind.REPLICATED:
            return whole_layout(unit, axis="rtp", size=n)
        slices = [unit.slice_bytes(num_slices=n, index=k) for k in range(n)]
        parts = part_bytes(unit, slices, num_slices=n) if self.num_parts(unit) > 1 else [[s] for s in slices]
        home, largest = slices[position], max(map(max, parts))
        # The ring's memory is in one piece: borrowed weights and their gradients keep a permanent slot.
        kept = 2 * home if in_stage(unit).borrowed else 0
        visits = visits_of(unit, num_slices=n)
        m = n // visits  # slices that come at once
        itemsize = unit.weights[0].itemsize
        slots = self._slots_bytes(largest, together=m, itemsize=itemsize)
        if self.transport == "shared_memory" or n == 1:
            return Layout(resident_bytes=home, transient_bytes=slots, slots_bytes=slots, padding_bytes=kept)
        messages = [sum(self._message_bytes(p, itemsize=itemsize) for p in each) for each in parts]
        copies = self._copies_travel(itemsize)
        in_forward, in_backward = self._weights_sent(unit, messages, position=position, copies=copies)
        num_hops = unit.uses if unit.trained_bytes else 0  # of gradients; frozen units are frozen whole
        hopped = sum(slices) - home
        if self.transport == "hierarchical":
            per_host = n // self.hosts
            hopped = sum(slices[position % per_host :: per_host]) - home  # sums of slices that have this rank's place
        if self._in_place:
            chunks = [num_chunks(m) for m in messages]
            numbers = self._weights_sent(unit, chunks, position=position, copies=copies)
            hops = sum(map(num_chunks, slices)) - num_chunks(home)
        elif self.transport == "hierarchical":
            numbers = ((self.hosts - 1) * unit.uses, (self.hosts - 1) * self._reads_in_backward(unit))
            hops = self.hosts - 1
        else:
            own = self._num_flat_chunks(unit, position)
            numbers = ((n - 1) * own * unit.uses, (n - 1) * own * self._reads_in_backward(unit))
            hops = (n - 1) * self.num_parts(unit)
            if m > 1:
                first = position // m * m
                neighbours = sum(self._num_flat_chunks(unit, k) for k in range(first, first + m) if k != position)
                hops = visits - 1 + neighbours
        hopped, hops = self._hop_bytes(hopped, itemsize=itemsize) * num_hops, hops * num_hops
        transfers: tuple[Transfer, ...]
        if self.transport == "symmetric_memory":
            transfers = (
                Transfer(Kind.COPY, "rtp", Phase.FORWARD, in_forward, in_forward, numbers[0]),
                Transfer(Kind.COPY, "rtp", Phase.BACKWARD, in_backward, in_backward, numbers[1]),
                Transfer(Kind.SEND, "rtp", Phase.BACKWARD, hopped, hopped, hops),
            )
        else:
            in_backward += hopped
            transfers = (
                Transfer(Kind.SEND, "rtp", Phase.FORWARD, in_forward, in_forward, numbers[0]),
                Transfer(Kind.SEND, "rtp", Phase.BACKWARD, in_backward, in_backward, numbers[1] + hops),
            )
        padding = largest - home if self._in_place and not copies else 0
        if self.transport == "symmetric_memory" and copies:  # see [Note: staged] in comm/transports/symmetric_memory.py
            padding = self._visiting_bytes(home, itemsize=itemsize)
        return Layout(
            resident_bytes=home,
            transient_bytes=slots,
            transfers=transfers,
            slots_bytes=slots,
            padding_bytes=padding + kept,
            outbox_bytes=self._outbox_bytes(largest, itemsize=itemsize),
        )

    def keeps_copies(self, unit: Unit) -> bool:
        return unit.kind is UnitKind.REPLICATED

    @property
    def _in_place(self) -> bool:
        return self.buffering == "in_place" and self.transport in ("auto", "send_receive")

    def _copies_travel(self, itemsize: int) -> bool:
        """Returns True if a converted or packed copy of the slice travels."""
        return (self.compute is not None and itemsize != _COMPUTE_ITEMSIZE) or self.wire is not None

    def _visiting_bytes(self, slice_bytes: int, *, itemsize: int) -> int:
        return slice_bytes if self.compute is None else slice_bytes // itemsize * _COMPUTE_ITEMSIZE

    def _hop_bytes(self, slice_bytes: int, *, itemsize: int) -> int:
        """Bytes of a slice's gradient under way."""
        return slice_bytes if self.hops is None else slice_bytes // itemsize * _COMPUTE_ITEMSIZE

    def _message_bytes(self, slice_bytes: int, *, itemsize: int) -> int:
        """Bytes that carry a slice."""
        if self.wire == "fp8":
            return fp8_bytes(slice_bytes // itemsize)
        return self._visiting_bytes(slice_bytes, itemsize=itemsize)

    def _outbox_bytes(self, largest: int, *, itemsize: int) -> int:
        """The buffer in which slices are converted or packed to be sent, over messages."""
        elsewhere = self.size > 1 and self.transport not in ("auto", "send_receive")
        return 0 if elsewhere or not self._copies_travel(itemsize) else self._message_bytes(largest, itemsize=itemsize)

    def _slots_bytes(self, largest: int, *, together: int, itemsize: int) -> int:
        """All buffers that slices and gradients pass through, shared by all units; `together` slices come at once."""
        visiting = self._visiting_bytes(largest, itemsize=itemsize)
        message = self._message_bytes(largest, itemsize=itemsize)
        unpacked = visiting if self.wire == "fp8" else 0
        copies, travels = self._copies_travel(itemsize), self.size > 1
        hop = self._hop_bytes(largest, itemsize=itemsize)
        if self.transport == "shared_memory":
            return visiting if copies else 0
        if not travels and not copies:
            return 0
        if self.transport == "symmetric_memory" and travels:
            return together * (2 * visiting + 3 * hop)  # two for weights; two for gradients, and the inbox
        if self.transport == "hierarchical" and travels:
            return (self.ahead + 1 + sum_slots(self.hosts) + 1) * largest
        to_send = self._outbox_bytes(largest, itemsize=itemsize)
        if self._in_place:
            hops = bounce_bytes(message) + largest + bounce_bytes(largest) if travels else 0
            return to_send + unpacked + hops
        under_way = 1 if self.wire == "fp8" else self.ahead + 1
        return together * (under_way * message + (2 * hop if travels else 0)) + unpacked + to_send

    def _num_flat_chunks(self, unit: Unit, index: int) -> int:
        """Messages that carry a slice: one per part, or one per block of each weight where slices lie side by side."""
        if visits_of(unit, num_slices=self.size) == self.size:
            return self.num_parts(unit)
        found = (
            r
            for w in unit.weights
            if w.cut
            for r in w.cut.ranges(w.shape[w.cut.dim], num_slices=self.size, index=index)
        )
        return sum(r.length > 0 for r in found)

    def num_parts(self, unit: Unit) -> int:
        """Parts in which a slice is known to visit: "auto" may come to a transport that has none."""
        known = self.transport in _WITH_SLOTS or self.visits_together
        return num_parts(unit) if self._visit_in_parts and known else 1

    def _reads_in_backward(self, unit: Unit) -> int:
        """Number of times that backward needs the unit's slices: 0 for a head with kept logits (see `ops/loss.py`)."""
        return 0 if unit.logits and self.recompute == "none" else unit.reads_in_backward

    def _weights_sent(self, unit: Unit, sizes: Sequence[int], *, position: int, copies: bool) -> tuple[int, int]:
        """Bytes (or messages) of a unit's weights that this rank sends in forward and in backward; see `sizes`."""
        n, uses, reads, total = self.size, unit.uses, self._reads_in_backward(unit), sum(sizes)
        if not self._in_place:  # its own, to all others
            readers = self.hosts - 1 if self.transport == "hierarchical" else n - 1
            return readers * sizes[position] * uses, readers * sizes[position] * reads
        # In place it sends the slice that it has. Forward ends, and backward begins, with the next rank's slice.
        next_one, previous = sizes[(position + 1) % n], sizes[(position - 1) % n]
        if copies:  # one's own is there without a hop
            return uses * (total - next_one), reads * (total - previous)
        in_backward = reads * total - sizes[position] if reads else 0
        return uses * total - (next_one if reads else 0), in_backward

    def at_precision(self, dtype: str | None) -> Self:
        if self.compute is not None and self.compute != dtype:
            raise ConfigError(
                f"rtp: compute={self.compute}, but passes compute in "
                f"{'the precision of the weights' if dtype is None else dtype}. Leave compute out: it follows from "
                "train.precision, or from parallelize's param_dtype and autocast_dtype"
            )
        if dtype not in ("bfloat16", "float16"):
            return self
        if self.size == 1:  # nothing is sent, so nothing is ahead
            return self.model_copy(update={"compute": dtype, "ahead": 1})
        if self.transport == "hierarchical":
            raise ConfigError(
                f"rtp: transport=hierarchical sends slices as they are at home, and passes compute with them in "
                f"{dtype}. Write transport=send_receive, or train in the weights' own precision"
            )
        self._check_ahead(converted=f"slices are converted to {dtype} to be sent")
        return self.model_copy(update={"compute": dtype})

    def _check_ahead(self, *, converted: str = "") -> None:
        """Refuses `ahead` if there is one buffer to send from, or none to receive into (`converted`: the reason)."""
        reason = converted
        if self.wire is not None:
            reason = f"wire={self.wire} packs slices to send them"
        elif self._in_place:
            reason = "with buffering=in_place slices replace each other"
        if self.ahead > 1 and reason:
            raise ConfigError(f"rtp: ahead={self.ahead}, but {reason}, so one is under way at a time. Leave ahead out")

    def _check_visits(self) -> None:
        if self.visits is None:
            return
        if self.size % self.visits:
            some = [k for k in range(1, self.size) if self.size % k == 0]
            raise ConfigError(
                f"{self.kind}: visits={self.visits} does not divide the ring of {self.size}, and each visit brings as "
                f"many slices. Write visits={' or '.join(map(str, some or [1]))}, or leave visits out"
            )
        if self._comes_one_by_one:
            self._refuse_visits(because=self._comes_one_by_one)

    @property
    def _comes_one_by_one(self) -> str:
        """The option for which each slice visits by itself; empty if several can come together."""
        if self.transport in ("shared_memory", "hierarchical"):
            return f"transport={self.transport}"
        if self._in_place:
            return f"buffering={self.buffering}"
        return "" if self.wire is None else f"wire={self.wire}"

    def _refuse_visits(self, *, because: str) -> None:
        if self.visits is not None:
            raise ConfigError(
                f"{self.kind}: visits={self.visits} brings several slices into one slot, and {because} brings them one "
                f"by one. Write {self.kind}={self.size}[visits={self.visits},transport=send_receive] or leave visits "
                "out"
            )

    def _refuse_hops(self, *, because: str) -> None:
        if self.hops is not None and self.size > 1:
            raise ConfigError(
                f"{self.kind}: hops={self.hops} is for messages out of place and symmetric memory, not for {because}. "
                f"Write {self.kind}={self.size}[hops={self.hops},transport=send_receive], or leave hops out"
            )

    def without_idle_options(self) -> Self:
        idle: dict[str, object] = {} if self.context > 1 else {"exchange": "gather"}
        if self.transport not in ("auto", "send_receive"):
            idle["buffering"] = "out_of_place"
            if self.transport != "hierarchical":
                idle["ahead"] = 1  # there are no messages to buffer
        return self.model_copy(update=idle)

    def check_around(self, inner: Strategy) -> None:
        """Raises `ConfigError` for options of either strategy that have no meaning together."""
        without = self.model_copy(update={"context": 1, "exchange": "gather", "memory": None, "experts": "cut"})
        if self != without:
            raise ConfigError(
                f"parallel: '{self},{inner}': rtp around {inner.kind} rotates that one's parts of weights, and has no "
                f"context, memory or experts of its own. Write {without},{inner}"
            )
        plain = f"Write {self},{inner.kind}={inner.num_ranks}, or fsdp={self.size},{inner}"
        if inner.token_axes:
            raise ConfigError(
                f"parallel: '{self},{inner}': a module runs once for each slice that visits, and needs all tokens each "
                f"time. {plain}"
            )
        if inner.changes_the_model:
            raise ConfigError(
                f"parallel: '{self},{inner}': slices of a part add up to one output, and sync_fraction makes ranks' "
                f"outputs differ. {plain}"
            )

    def on_device(self, device_type: str) -> Self:
        needed = {"shared_memory": "cpu", "hierarchical": "cpu", "symmetric_memory": "cuda"}.get(
            self.transport, device_type
        )
        if device_type != needed:
            raise ConfigError(
                f"rtp: transport={self.transport} works between {needed.upper()} ranks, not on {device_type}. "
                "Write transport=auto"
            )
        if device_type == "cpu" and self.transport == "auto":
            self._refuse_visits(because="transport=auto")
            self._refuse_hops(because="transport=auto on CPU")
        if device_type == "cpu" or self.visits is not None or self._comes_one_by_one or self.recomputes_units:
            return self
        # Between GPUs slices pass through slots, whichever way: in those of single slices several small ones have room.
        return self.model_copy(update={"visits": self.size})

    def check(self, spec: ModelSpec) -> None:
        check_shares(spec, context=self.context, exchange=self.exchange, kind=self.kind)
        if self.experts == "whole":
            check_whole_experts(spec, kind=self.kind)
        self._check_ahead()
        if self.hosts != 2 and self.transport != "hierarchical":
            raise ConfigError(
                f"rtp: hosts={self.hosts} is for transport=hierarchical, and transport is {self.transport}. "
                "Write both, or leave hosts out: auto finds them"
            )
        if self.transport == "hierarchical" and (self.size % self.hosts or self.size == self.hosts):
            raise ConfigError(
                f"rtp: transport=hierarchical over {self.hosts} hosts, but a ring of {self.size} does not give each as "
                "many ranks, more than one. Write a multiple of the hosts, or transport=send_receive"
            )
        self._check_visits()
        if self.transport in ("shared_memory", "hierarchical"):
            self._refuse_hops(because=f"transport={self.transport}")
        if self._in_place:
            self._refuse_hops(because=f"buffering={self.buffering}")
        if any(unit.weights[0].itemsize <= _COMPUTE_ITEMSIZE for unit in spec.cut_units):
            self._refuse_hops(because="weights of 16 bits, whose gradients have as many")
        if self.wire is not None and self.transport != "send_receive":
            raise ConfigError(
                f"rtp: wire={self.wire} halves messages, and transport={self.transport} may send none. "
                f"Write {self.kind}={self.size}[wire={self.wire},transport=send_receive], or leave wire out"
            )
        self._check_cut(with_whole_experts(spec) if self.experts == "whole" else spec)
        self.units_of(spec)  # finds units that fit into `memory`, or says that none do


def _uncut(unit: Unit) -> Unit:
    """A unit that does not rotate: its module runs as it is, with the biases that slices add once."""
    unit = unit.with_note(StaysWhole())
    return replace(unit, kind=UnitKind.REPLICATED, combine=Combine.NONE, replicated=(), added_once=())
