"""Operations of a pass as a GPU would get them: launches, casts, bytes, and calls for which the host waits.

[Note: without arithmetic]
    Counts of a large model need its shapes, not its values. `WithoutArithmetic` gives every operation on large
    floating-point tensors an output of the right shape in memory that nobody writes, which takes no time and no pages.
    Views, small tensors and integers are computed as always, so code that looks at values still finds them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rotorch._torch_private import FUSED_ATTENTION, TorchDispatchMode, tree_flatten, tree_unflatten
from rotorch.ops import ids_in_slice, random_state
from rotorch.parallel_model import ParallelModel

_PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "convolution", "convolution_backward"}
_ATTENTION = {op.name().partition("::")[2].partition(".")[0] for op in FUSED_ATTENTION}
_OVERWRITES = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"}
"""Operations that write a tensor in place without reading it."""
_ALLOCATES = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
_WAITS = {
    *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "masked_select"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive", "allclose"),
}
"""Operations whose result, or its shape, the host needs: on a GPU it waits until all before them has run."""
_TO_HOST = ("cpu", "numpy", "tolist")
"""Methods that bring values to the host. On CPU tensors they reach no dispatch mode."""
_ON_HOST = ((ids_in_slice, "_raise_if_any"), (random_state, "draw_seed"))
"""Functions that look at values on CPU: where ids are on a GPU it asserts by itself; seeds come from the CPU."""
_SMALL = 1 << 12


class Operations(TorchDispatchMode):
    """Counts the operations of all code within its block. Views and allocations count nothing, nor does communication.

    Attributes:
        num_ops: operations, each at least one launch on a GPU.
        num_casts: those of them that only change a dtype.
        num_copies: those of them that only copy.
        elementwise_bytes: read and written by operations that are no products and no attention.
        waits: calls for which the host would wait for a GPU, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = self.num_casts = self.num_copies = self.elementwise_bytes = 0
        self.waits: Counter[str] = Counter()
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Counts nothing within the block: work of a copy engine, say."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if _is_counted(func) and not self._paused:
            self._count(func, args, kwargs or {}, out)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = _name(func)
        if name in _WAITS or (name == "index" and _by_mask(args)):
            self.waits[name] += 1
        if name in _ALLOCATES or _is_view(func) or name in _WAITS:
            return
        self.num_ops += 1
        source = next((t for t in _tensors((args[1:2] if name in _OVERWRITES else args[:1]))), None)
        # Custom operations return nothing, and write to what they are given by name.
        target = next(iter(_tensors(args[:1] if name in _OVERWRITES else [out, kwargs.get("out")])), None)
        if name in ("_to_copy", "copy_", "_foreach_copy_", "clone") and source is not None and target is not None:
            if source.dtype != target.dtype:
                self.num_casts += 1
            else:
                self.num_copies += 1
        elif "cat" in name or "split_with_sizes_copy" in name:
            if source is not None and target is not None and source.dtype != target.dtype:
                self.num_casts += 1
            else:
                self.num_copies += 1
        if name not in _PRODUCTS and not any(name.startswith(attention) for attention in _ATTENTION):
            self.elementwise_bytes += _bytes_moved(func, name, args, kwargs, out)


@contextmanager
def counted_waits() -> Iterator[Counter[str]]:
    """Counts the calls within the block for which the host would wait for a GPU, by name; also `.cpu()` on CPU.

    Functions that look at values on the CPU only, whatever the device of the pass, do not count.
    """
    operations = Operations()
    with ExitStack() as stack:
        for module, name in _ON_HOST:
            stack.enter_context(mock.patch.object(module, name, _uncounted(operations, getattr(module, name))))
        for name in _TO_HOST:
            stack.enter_context(mock.patch.object(Tensor, name, _counting(operations.waits, name)))
        stack.enter_context(operations)
        yield operations.waits


@contextmanager
def waits_of_micro_batches(model: ParallelModel) -> Iterator[Counter[str]]:
    """Counts such calls in steps of `model`, from the start of the first micro-batch to the end of the last one."""
    found: Counter[str] = Counter()
    run = model.sharded.forward_backward

    def counted(*args: Any, **kwargs: Any) -> Any:
        with counted_waits() as waits:
            out = run(*args, **kwargs)
        found.update(waits)
        return out

    with mock.patch.object(model.sharded, "forward_backward", counted):
        yield found


def _uncounted(operations: Operations, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with operations.paused():
            return function(*args, **kwargs)

    return call


def _counting(waits: Counter[str], name: str) -> Any:
    method = getattr(Tensor, name)

    def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        waits[name] += 1
        return method(self, *args, **kwargs)

    return call


class WithoutArithmetic(TorchDispatchMode):
    """Makes operations on large floating-point tensors give outputs without values (see [Note: without arithmetic])."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        given = _tensors((args, kwargs))
        if func.namespace == "fsdp" and not func._schema.returns and any(t.numel() > _SMALL for t in given):
            return None  # copies into and out of messages
        if func.namespace != "aten" or _is_view(func) or _name(func) in _ALLOCATES | _WAITS:
            return func(*args, **kwargs)
        # Products with wider sums are on CUDA only: here they have shapes, whatever their size.
        wider = _name(func) in _PRODUCTS and func._overloadname.startswith("dtype")
        is_large = wider or any(t.is_floating_point() and t.numel() > _SMALL for t in given)
        if not is_large and (given or math.prod(_shape_asked_for(args)) <= _SMALL):
            return func(*args, **kwargs)
        shapes = func(*_mapped(_on_meta, args), **_mapped(_on_meta, {**kwargs, **_no_device(kwargs)}))
        written = [value for value, argument in _arguments(func, args, kwargs) if _is_written(argument)]
        if written:
            return written[0] if len(written) == 1 and isinstance(written[0], Tensor) else _as_returned(func, written)
        return _mapped(_without_values, shapes)


def _mapped(change: Callable[[Any], Any], values: Any) -> Any:
    leaves, tree = tree_flatten(values)
    return tree_unflatten([change(leaf) for leaf in leaves], tree)


def _as_returned(func: Any, written: list[Any]) -> Any:
    returns = func._schema.returns
    return None if not returns else tuple(written) if len(returns) > 1 else written[0]


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _no_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {"device": torch.device("meta")} if kwargs.get("device") is not None else {}


def _without_values(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)


def _shape_asked_for(args: Any) -> tuple[int, ...]:
    """The shape that a factory function is given; empty if it is given none."""
    first = args[0] if args else ()
    return tuple(first) if isinstance(first, (list, tuple, torch.Size)) else ()


def _name(func: Any) -> str:
    found: str = func.name().partition("::")[2].partition(".")[0]
    return found


def _is_counted(func: Any) -> bool:
    """True for torch's operations, and for copies into and out of the messages of `fully_shard`, one launch each."""
    copies = func.namespace == "fsdp" and any(map(_is_written, func._schema.arguments))
    return func.namespace == "aten" or copies


def _is_view(func: Any) -> bool:
    """True for views and for functions that only tell of a tensor."""
    if _name(func) == "_unsafe_view":  # how a product of three dims ends; its schema does not say that it is a view
        return True
    returns = func._schema.returns
    aliases = [r.alias_info for r in returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _by_mask(args: Any) -> bool:
    return any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1:]))


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]


def _arguments(func: Any, args: Any, kwargs: Any) -> list[tuple[Any, Any]]:
    """Values that a function is given, each with its place in the schema."""
    schema = func._schema.arguments
    given = list(zip(args, schema, strict=False))
    return given + [(kwargs[a.name], a) for a in schema[len(args) :] if a.name in kwargs]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _bytes_moved(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> int:
    moved, has_written = 0, False
    for value, argument in _arguments(func, args, kwargs):
        size = sum(map(_bytes_of, _tensors(value)))
        if _is_written(argument):
            has_written = True
            moved += size if name in _OVERWRITES or argument.is_out else 2 * size
        else:
            moved += size
    return moved if has_written else moved + sum(map(_bytes_of, _tensors(out)))


def _bytes_of(tensor: Tensor) -> int:
    """Bytes that a tensor's elements take in memory; those of an expanded one count once."""
    sizes = (n for n, stride in zip(tensor.size(), tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()
