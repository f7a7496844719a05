"""Meter of a rank's bytes on the wire, from the operations it issues: an independent check of the Layouts' formulas.

Every transfer of torch.distributed goes through the dispatcher as an operation of the `c10d` namespace, whether our
ring, torch's DDP or `fully_shard` issued it. The meter is a dispatch mode around a step; it changes nothing.
Messages that stand for one collective (`comm/direct_collectives.py`) count as that, and so does a small sum through
shared memory (`comm/shared_memory_reduce.py`). Slices and blocks that are read in place move nothing and count nothing.
Copies over symmetric memory are no operations of torch.distributed: they are not counted, though their Layout has them.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import ExitStack
from typing import Any, Self

from torch import Tensor
from torch.distributed.tensor import DTensor

from rotorch._torch_private import TorchDispatchMode, group_size, tree_flatten
from rotorch.comm.direct_collectives import BLOCKS
from rotorch.comm.shared_memory_reduce import listening
from rotorch.core.traffic import Kind, sent_by_broadcast, sent_by_reduce

_KINDS = {
    "send": Kind.SEND,
    "broadcast_": Kind.BROADCAST,
    "reduce_": Kind.REDUCE,
    "allreduce_": Kind.ALL_REDUCE,
    "allreduce_coalesced_": Kind.ALL_REDUCE,
    "_allgather_base_": Kind.ALL_GATHER,
    "allgather_": Kind.ALL_GATHER,
    "allgather_into_tensor_coalesced_": Kind.ALL_GATHER,
    "_reduce_scatter_base_": Kind.REDUCE_SCATTER,
    "reduce_scatter_": Kind.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": Kind.REDUCE_SCATTER,
}
_FUNCTIONAL_KINDS = {
    "all_reduce": Kind.ALL_REDUCE,
    "all_reduce_": Kind.ALL_REDUCE,
    "all_reduce_coalesced": Kind.ALL_REDUCE,
    "all_gather_into_tensor": Kind.ALL_GATHER,
    "all_gather_into_tensor_coalesced": Kind.ALL_GATHER,
    "reduce_scatter_tensor": Kind.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": Kind.REDUCE_SCATTER,
}
"""The same operations as DTensor issues them: the input comes first, the name of the group last."""


_SENDS_NOTHING = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_", "wait_tensor", "_wrap_tensor_autograd"}
_NAMESPACES = {"c10d", "_c10d_functional", "symm_mem"}
_KINDS_OF_BLOCKS = {name: kind for kind, name in BLOCKS.items()}


class Meter(TorchDispatchMode):
    """Counts bytes and messages sent by this rank inside its `with` block.

    Attributes:
        sent_bytes: per kind, this rank's bytes on the wire by the textbook ring algorithm of the operation.
        sent_by_group: the same bytes per kind and name of the process group (of a mesh's axis:
            `mesh.get_group(axis).group_name`).
        num_messages: per kind, number of operations issued.
        smallest_counted_bytes: operations with a smaller payload (the token count of a step) are left out.
        not_counted: names of operations that send something but have no rule in the meter, with their number.
    """

    def __init__(self, *, smallest_counted_bytes: int = 64) -> None:
        super().__init__()
        self.sent_bytes: dict[Kind, int] = defaultdict(int)
        self.sent_by_group: dict[tuple[Kind, str], int] = defaultdict(int)
        self.num_messages: dict[Kind, int] = defaultdict(int)
        self.smallest_counted_bytes = smallest_counted_bytes
        self.not_counted: dict[str, int] = defaultdict(int)
        self._blocks: list[str] = []
        """Names of the profiler's blocks that are open."""
        self._in_block: dict[str, int] = defaultdict(int)
        """Bytes sent by name of the group, in a block that stands for one collective."""
        self._heard = ExitStack()

    @property
    def total_sent_bytes(self) -> int:
        return sum(self.sent_bytes.values())

    def __enter__(self) -> Self:
        self._heard.enter_context(listening(self._hear_sum))
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._heard.close()

    def _hear_sum(self, group: str, size: int, num_bytes: int) -> None:
        if num_bytes >= self.smallest_counted_bytes:
            self._add(Kind.ALL_REDUCE, _sent_by_all_reduce(num_bytes, size=size), group=group)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own dispatch issues the operations, and comes back here with each
        if func.namespace == "profiler":
            # `record_function` encloses messages that make up one collective (`comm/direct_collectives.py`).
            self._notice_block(func, args)
        elif func.namespace in _NAMESPACES:
            self._count(func._schema.name.partition("::")[2], args, functional=func.namespace == "_c10d_functional")
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Any, *, functional: bool) -> None:
        kind = (_FUNCTIONAL_KINDS if functional else _KINDS).get(name)
        if kind is None:
            if name not in _SENDS_NOTHING:
                self.not_counted[name] += 1
            return
        # In all these schemas the last tensors before the process group are this rank's contribution; gathers come as
        # (output, input), reductions in place, and only the group object has the group's size.
        if functional:
            size, payload, position, name = group_size(args[-1]), args[0], 0, str(args[-1])
        else:
            group = _group(args)
            size, position, name = group.size(), group.rank(), group.group_name
            payload = args[1] if kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER) else args[0]
        num_bytes = sum(t.numel() * t.element_size() for t in tree_flatten(payload)[0] if isinstance(t, Tensor))
        if kind is Kind.SEND and self._blocks and self._blocks[-1] in _KINDS_OF_BLOCKS:
            # Added up until the block closes: a collective's bytes are those of all its messages together.
            self._in_block[name] += num_bytes
            return
        if num_bytes < self.smallest_counted_bytes:
            return
        if kind is Kind.BROADCAST:
            sent = sent_by_broadcast(num_bytes, position=position, source=args[2], size=size)
        elif kind is Kind.REDUCE:
            sent = sent_by_reduce(num_bytes, position=position, target=args[3])
        else:
            sent = {
                Kind.SEND: num_bytes,
                Kind.ALL_REDUCE: _sent_by_all_reduce(num_bytes, size=size),
                Kind.ALL_GATHER: num_bytes * (size - 1),
                Kind.REDUCE_SCATTER: num_bytes * (size - 1) // size,
            }[kind]
        self._add(kind, sent, group=name)

    def _notice_block(self, func: Any, args: Any) -> None:
        if "enter" in func._schema.name:
            self._blocks.append(str(args[0]))
        elif self._blocks:
            kind = _KINDS_OF_BLOCKS.get(self._blocks.pop())
            if kind is not None:
                for name, sent in self._in_block.items():
                    if sent >= self.smallest_counted_bytes:
                        self._add(kind, sent, group=name)
                self._in_block.clear()

    def _add(self, kind: Kind, sent: int, *, group: str) -> None:
        self.sent_bytes[kind] += sent
        self.sent_by_group[kind, group] += sent
        self.num_messages[kind] += 1


def _sent_by_all_reduce(num_bytes: int, *, size: int) -> int:
    return 2 * num_bytes * (size - 1) // size


def _group(args: Any) -> Any:
    """The process group among the arguments of an operation, also boxed (a ScriptObject before it is unboxed)."""
    import torch.distributed as dist

    for arg in args:
        if isinstance(arg, dist.ProcessGroup):
            return arg
        if type(arg).__name__ == "ScriptObject" and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
    raise TypeError(f"no process group among {[type(a).__name__ for a in args]}")
