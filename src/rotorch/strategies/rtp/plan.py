"""rtp: rotated tensor parallelism. Activations stay, weight slices go round, gradients ride home with them.

Idea
    Every rank keeps 1/n of each weight and its own micro-batch. At step i of a unit, rank r computes with slice (r -
    i) mod n, which it takes from that slice's home; what the slices give is added up (or placed side by side), and no
    rank ever holds a whole weight. Source: RTP (Luo, Zhong, Fox, arXiv 2311.01635).

Picture (4 ranks, one unit; the number is the slice that a rank computes with)
              forward          backward         a slice's gradient visits its ranks in backward and
    rank 0 |  0  3  2  1  |  1  2  3  0  |      ends at home: slice 0 is seen by rank 3, 2, 1, 0
    rank 1 |  1  0  3  2  |  2  3  0  1  |      and rank 0 adds the last part. No all-reduce, no
    rank 2 |  2  1  0  3  |  3  0  1  2  |      reduce-scatter: the optimizer is local.
    rank 3 |  3  2  1  0  |  0  1  2  3  |

Layout
    `W[F_ring, D]` or `W[F, D_ring]`: cut where the model's tensor-parallel plan says, by whole heads, by rows of the
    vocabulary. Weights that nobody cuts (norms) are whole on every rank; their gradients are all-reduced.

Cost (unit of P bytes, n ranks)
    resident   P/n transient  two slots of a slice for weights, in backward two more for gradients; none over shared
    memory sent       (n-1)/n (P + P + P): weights in forward, weights and gradients in backward; nothing moves over
    shared memory hides      a fetch hides behind the compute of the slice before it, a gradient's hop behind that of
    the next slice
    Over symmetric memory a third buffer for gradients, the inbox, and a hop hides behind the compute of two slices.

Deviations
    Slices are taken from their home instead of being handed on: the same order and volume, but weights never leave
        home, so an exception loses nothing. Embedding and head rotate too, and the loss is computed slice by slice.
        Slices may be uneven.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import PositiveInt

from rotorch.core.errors import ConfigError
from rotorch.core.layout import Layout
from rotorch.core.spec import ModelSpec, Unit, UnitKind
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import Kind, Phase, Transfer, all_reduce


class RTP(Strategy):
    """Weights rotate over a ring of `size` ranks. Written `rtp=4`, or `rtp=4[recompute=slice]`.

    Attributes:
        size: number of ranks on the ring.
        recompute: what backward computes again. "none": nothing, logits are kept; "head": the logits, the largest
            tensor of a step, which then never exist whole; "slice": logits and the interior of every unit, a slice at
            a time.
        transport: how slices travel. "auto" takes shared memory when all ranks of the ring are CPU ranks of one host
            and it is large enough, symmetric memory when they are GPUs of one host that reach each other's memory, else
            point-to-point messages.
    """

    kind: ClassVar[str] = "rtp"
    cuts_weights: ClassVar[bool] = True
    size: PositiveInt
    recompute: Literal["none", "head", "slice"] = "head"
    transport: Literal["auto", "shared_memory", "symmetric_memory", "send_receive"] = "auto"

    @property
    def axes(self) -> dict[str, int]:
        return {"rtp": self.size}

    @property
    def batch_axes(self) -> tuple[str, ...]:
        return ("rtp",)

    def layout(self, unit: Unit, *, position: int = 0) -> Layout:
        n = self.size
        if unit.kind is UnitKind.REPLICATED:
            reduced = (all_reduce(unit.num_bytes, axis="rtp", size=n),) if n > 1 else ()
            return Layout(resident_bytes=unit.num_bytes, transfers=reduced)
        slices = [unit.slice_bytes(num_slices=n, index=k) for k in range(n)]
        home, largest = slices[position], max(slices)
        if self.transport == "shared_memory" or n == 1:
            return Layout(resident_bytes=home)
        fetched = home * (n - 1)
        hopped = sum(slices) - home
        transfers = (
            Transfer(Kind.SEND, "rtp", Phase.FORWARD, fetched * unit.uses, fetched * unit.uses, (n - 1) * unit.uses),
            Transfer(
                Kind.SEND,
                "rtp",
                Phase.BACKWARD,
                fetched * unit.reads_in_backward + hopped * unit.uses,
                fetched * unit.reads_in_backward + hopped * unit.uses,
                (n - 1) * (unit.reads_in_backward + unit.uses),
            ),
        )
        # Two for weights, two for gradients, and the inbox of symmetric memory; shared by all units.
        slots = (5 if self.transport == "symmetric_memory" else 4) * largest
        return Layout(resident_bytes=home, transient_bytes=slots, transfers=transfers, slots_bytes=slots)

    def check_device(self, device_type: str) -> None:
        needed = {"shared_memory": "cpu", "symmetric_memory": "cuda"}.get(self.transport, device_type)
        if device_type != needed:
            raise ConfigError(
                f"rtp: transport={self.transport} works between {needed.upper()} ranks, not on {device_type}. "
                "Write transport=auto"
            )

    def check(self, spec: ModelSpec) -> None:
        if self.size > 1 and not spec.cut_units:
            raise ConfigError(
                f"rtp: nothing to rotate in {spec.name}: no weight has a role in its tensor-parallel plan. "
                "Write plan={...} with roles for its weights, or use ddp or fsdp"
            )
        most = max((w.cut.groups for u in spec.cut_units for w in u.weights if w.cut), default=1)
        if self.size > most:
            raise ConfigError(
                f"rtp: a ring of {self.size} over {spec.name}, whose finest cut has {most} groups: "
                f"ranks would hold nothing. Write rtp={most} or less"
            )

    def __str__(self) -> str:
        defaults = type(self)(size=self.size)
        options = [f"{k}={v}" for k, v in self.model_dump(exclude={"size"}).items() if v != getattr(defaults, k)]
        return f"rtp={self.size}" + (f"[{','.join(options)}]" if options else "")
