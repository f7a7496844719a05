"""Storages that are alive in a process while it computes, by category: exact bytes of its tensors.

[Note: live storages]
    A dispatch mode sees every operation below autograd, in forward, backward and optimizer. A storage counts from the
    operation that returns it until it dies (a weak reference tells), and storages that Python knows before the step
    count from the start. A storage that an operation reads and no operation has made belongs to a library: if it
    outlives the step it existed all along (the buckets of DDP), else it counts from then on (gloo's copies). Memory
    that a kernel allocates and frees inside one operation is not seen; the process's own figures have it.

[Note: mapped storages]
    A storage in memory shared with other ranks counts only if this rank's own weights and gradients lie in it: each
    rank counts the bytes that it owns, so ranks together count every byte once. Slices read from other ranks' memory
    cost nothing.

[Note: categories]
    weights, gradients, optimizer, slots: tensors that the contender names, with the whole of a storage that they
        share. Copies of weights in the dtype of passes count as weights. Slots are the buffers that slices of a ring
        pass through.
    logits: outputs of the model's head (or tensors made within `LOGITS_BLOCK`), and tensors that an
        operation makes of these with as many columns: casts, soft-maxes, gradients.
    activations: other tensors made by a forward pass and still alive when its backward begins: saved by autograd.
    other: all else: gathered weights, gradients of activations, temporaries, buffers of the module, the batch.
        `TensorMemory.other` names the operations that made them.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rotorch._torch_private import FakeTensor, TorchDispatchMode, in_backward, storage_key
from rotorch.ops.deferred_logits import LOGITS_BLOCK
from rotorch.shard.storages import PLAIN, SharedMappings, all_tensors, extents, local_part, union

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, SLOTS, LOGITS, OTHER = CATEGORIES = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "slots",
    "logits",
    "other",
)

_COUNTED = frozenset({*PLAIN, FakeTensor})

_FOUND = "there before the step"
_NAMED_OTHERS = 6


@dataclass
class _Storage:
    """One storage.

    Attributes:
        nbytes: its size now.
        made: True if an operation returned it; else it was found.
        maker: the phase and operation that made it.
        category: category of its bytes.
        in_forward: True if a forward pass made it that has had no backward yet.
        reference: tells when it dies.
    """

    nbytes: int
    made: bool
    maker: str = _FOUND
    category: str = OTHER
    in_forward: bool = False
    reference: Any = None


class LiveStorages(TorchDispatchMode):
    """Follows storages through a `with` block (see [Note: live storages])."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, _Storage] = {}
        self._changes: list[tuple[_Storage, int]] = []
        self._made: list[int] = []
        """After each change of what was made, the bytes of that."""
        self._mapped: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self._mappings = SharedMappings()
        self._backward = False
        self._regions: list[str] = []
        """Names of the `record_function` blocks that are open."""
        self._until_exit = ExitStack()

    def __enter__(self) -> LiveStorages:
        for tensor in all_tensors():
            self._see(tensor, made=False)
        self._until_exit.enter_context(_followed_resizes(self._resized))
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._until_exit.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its own dispatch comes back here with plain tensors
        if func.namespace == "profiler":
            self._notice_region(func, args)
            return func(*args, **(kwargs or {}))
        self._notice_phase()
        given = list(tensors_in((args, kwargs)))
        for tensor in given:
            self._see(tensor, made=False)
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._see(tensor, made=True, func=func, given=given)
        return result

    def name(self, tensors: Iterable[Tensor], *, category: str) -> None:
        """Names the use of the storages of `tensors`, also in the past."""
        for tensor in map(local_part, tensors):
            if self._mappings.contains(tensor.untyped_storage()):
                self._mapped[category].extend(extents(tensor))
            else:
                self._see(tensor, made=False)
                found = self._alive.get(storage_key(tensor))
                if found is not None:
                    found.category = category

    def made_bytes(self) -> int:
        """Returns the bytes alive now of what operations have made since the block began."""
        return self._made[-1] if self._made else 0

    def most_made_bytes(self, *, since: int) -> int:
        """Returns the most of them since the last call, or `since` if that is more; forgets it."""
        most, self._made = max(since, *self._made, since), self._made[-1:]
        return most

    def made_since(self) -> list[int]:
        """Returns the bytes alive of them after each change since the last call of these; forgets all but the last."""
        found, self._made = self._made, self._made[-1:]
        return found

    def peak(self) -> tuple[int, dict[str, int]]:
        """Returns the most bytes that were alive at one moment, and that moment by category."""
        moment = {category: union(self._mapped[category]) for category in CATEGORIES}
        for storage, change in self._until_peak():
            moment[storage.category] += change
        return sum(moment.values()), moment

    def highest(self) -> dict[str, int]:
        """Returns the most bytes of each category that were alive at one moment."""
        now = {category: union(self._mapped[category]) for category in CATEGORIES}
        most = dict(now)
        for storage, change in self._ordered():
            now[storage.category] += change
            most[storage.category] = max(most[storage.category], now[storage.category])
        return most

    def other_at_peak(self) -> dict[str, int]:
        """Bytes at that moment that belong to no category, by the operation that made them; the largest first."""
        others: Counter[str] = Counter()
        for storage, change in self._until_peak():
            if storage.category == OTHER:
                others[storage.maker] += change
        return {maker: num_bytes for maker, num_bytes in others.most_common(_NAMED_OTHERS) if num_bytes}

    def _until_peak(self) -> list[tuple[_Storage, int]]:
        """The changes that lead to the highest moment."""
        changes = self._ordered()
        now, highest, at = 0, 0, 0
        for index, (_, change) in enumerate(changes):
            now += change
            if now > highest:
                highest, at = now, index + 1
        return changes[:at]

    def _ordered(self) -> list[tuple[_Storage, int]]:
        """All changes in the order of time; what was found and outlived the step comes first."""
        lasting = {id(storage) for storage in tuple(self._alive.values()) if not storage.made}
        first, rest = [], []
        for storage, change in self._changes:
            (first if id(storage) in lasting else rest).append((storage, change))
            lasting.discard(id(storage))
        return first + rest

    def _notice_phase(self) -> None:
        backward = in_backward()
        if backward and not self._backward:
            for storage in tuple(self._alive.values()):  # of which the garbage collector may end some meanwhile
                if storage.in_forward and storage.category == OTHER:
                    storage.category = ACTIVATIONS
                storage.in_forward = False
        self._backward = backward

    def _notice_region(self, func: Any, args: Any) -> None:
        if "enter" in func._schema.name:
            self._regions.append(str(args[0]))
        elif self._regions:
            self._regions.pop()

    def _is_logits(self, tensor: Tensor, given: Sequence[Tensor]) -> bool:
        """True if an operation made logits: in their own block, or of logits with as many columns."""
        if LOGITS_BLOCK in self._regions:
            return True
        return tensor.dim() > 0 and any(
            source.dim() > 0 and source.shape[-1] == tensor.shape[-1] and self._category(source) == LOGITS
            for source in given
        )

    def _category(self, tensor: Tensor) -> str | None:
        known = self._alive.get(storage_key(tensor))
        return None if known is None else known.category

    def _see(self, tensor: Tensor, *, made: bool, func: Any = None, given: Sequence[Tensor] = ()) -> None:
        if tensor.device.type == "meta" or tensor.layout is not torch.strided:
            return
        key = storage_key(tensor)
        if key in self._alive:
            return
        storage = tensor.untyped_storage()
        if self._mappings.contains(storage):
            return  # a view of one, if an operation returns it
        new = _Storage(storage.nbytes(), made, in_forward=made and not self._backward)
        if made:
            new.maker = f"{'backward' if self._backward else 'forward'} {func}"
            if self._is_logits(tensor, given):
                new.category = LOGITS
        new.reference = weakref.ref(storage, lambda _: self._died(key))
        self._alive[key] = new
        self._change(new, new.nbytes)

    def _died(self, key: int) -> None:
        storage = self._alive.pop(key, None)
        if storage is not None:
            self._change(storage, -storage.nbytes)

    def _change(self, storage: _Storage, num_bytes: int) -> None:
        self._changes.append((storage, num_bytes))
        if storage.made:
            self._made.append((self._made[-1] if self._made else 0) + num_bytes)

    def _resized(self, storage: torch.UntypedStorage, *, key: int) -> None:
        known = self._alive.get(key)
        if known is not None:
            self._change(known, storage.nbytes() - known.nbytes)
            known.nbytes = storage.nbytes()


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The plain tensors among an operation's arguments or results.

    Those are nested tuples, lists and dicts and nothing else: to ask torch's pytree, which knows more, for every
    operation takes as long as all the rest of measuring.
    """
    if type(tree) in _COUNTED:
        yield tree
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


@contextmanager
def _followed_resizes(resized: Callable[..., None]) -> Iterator[None]:
    """Tells of `UntypedStorage.resize_`: so `fully_shard` frees and refills gathered weights, with no operation."""
    original = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        original(storage, size)
        resized(storage, key=storage_key(storage))

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
