"""Recipes of parameters: a model's own initialisation code, recorded while it runs without memory.

[Note: recipes]
    A model's own initialisation code runs on `meta` tensors while a dispatch mode records its operations on each
    parameter: `normal_(0, 0.02)`, then `zero_` of one row, and so on. `shard/materialize.py` replays them on the slices
    that a rank holds. An operation that cannot be recorded makes the parameter's recipe unknown; none is left out
    silently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rotorch._torch_private import TRUNCATED_NORMAL, TorchDispatchMode, storage_key

_FILLS = {"normal_", "uniform_", "trunc_normal_", "fill_", "zero_"}
_ELEMENTWISE = {
    "mul_", "add_", "sub_", "div_", "pow_", "clamp_", "abs_", "neg_", "log_", "exp_", "sqrt_", "rsqrt_", "erfinv_",
}  # fmt: skip
_SILENT_ON_META = ("orthogonal_", "sparse_", "dirac_")
"""Functions of `torch.nn.init` that do nothing to a meta tensor."""


@dataclass(frozen=True)
class Instruction:
    """One step of a recipe: an in-place operation on a whole parameter, or on a flat range of its elements.

    Attributes:
        op: name of the in-place torch operation, or of a function of `torch.nn.init`.
        args: its scalar arguments.
        flat_range: (start, stop) of global flat indices, or None for all.
        value: for `copy_`: the whole source tensor.
    """

    op: str
    args: tuple[float, ...] = ()
    flat_range: tuple[int, int] | None = None
    value: Tensor | None = None


Recipe = list[Instruction]


def recipe_of(parameter: nn.Parameter) -> Recipe | None:
    """The recipe of a parameter; None if its initialisation was not recorded."""
    return getattr(parameter, "_rotorch_recipe", None)


def set_recipe(parameter: nn.Parameter, recipe: Recipe) -> None:
    """Attaches a recipe to a parameter, where modules' operations on meta parameters do not remove it."""
    parameter._rotorch_recipe = recipe  # type: ignore[attr-defined]


class Recorder(TorchDispatchMode):
    """Records in-place operations on known meta parameters as recipes (see [Note: recipes])."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: dict[int, nn.Parameter] = {}
        # Memory that nothing has written yet. Weak references keep the keys of storages from being given out again.
        self._unwritten: dict[int, StorageWeakRef] = {}

    def watch(self, parameter: nn.Parameter) -> None:
        self.parameters[storage_key(parameter)] = parameter

    def is_written(self, tensor: Tensor) -> bool:
        """Returns True if a tensor that was made under this mode has values."""
        return storage_key(tensor) not in self._unwritten

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        op = func._schema.name.removeprefix("aten::")
        given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
        given |= dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            target = given.get(argument.name)
            written = argument.is_out or (argument.alias_info is not None and argument.alias_info.is_write)
            if written and isinstance(target, Tensor):
                self._wrote(target, op, given, into=argument.name)
        if op.startswith(("empty", "new_empty")) and isinstance(result, Tensor):
            self._unwritten[storage_key(result)] = StorageWeakRef(result.untyped_storage())
        return result

    def _wrote(self, target: Tensor, op: str, given: dict[str, Any], *, into: str) -> None:
        self._unwritten.pop(storage_key(target), None)
        parameter = self.parameters.get(storage_key(target)) if target.is_meta else None
        if parameter is not None:
            self.record(parameter, target, op, {k: v for k, v in given.items() if k not in (into, "generator")})

    def record(self, parameter: nn.Parameter, target: Tensor, op: str, given: dict[str, Any]) -> None:
        """Adds the operation `op` on `target`, all of a parameter or a view, to the parameter's recipe."""
        whole = target.numel() == parameter.numel()
        flat_range = None
        if not whole and target.is_contiguous():
            flat_range = (target.storage_offset(), target.storage_offset() + target.numel())
        value, numbers = None, None
        if op == "copy_" and not given["src"].is_meta:
            value, numbers = given["src"].detach().expand(target.shape).clone(), ()
        elif op in _FILLS | _ELEMENTWISE:
            numbers = _numbers(op, given)
        if numbers is None or (not whole and flat_range is None):
            set_recipe(parameter, [Instruction(f"unknown:{op}")])
            return
        instruction = Instruction(op, numbers, flat_range, value)
        if whole and (op in _FILLS or value is not None):
            set_recipe(parameter, [instruction])  # everything before is overwritten
        else:
            set_recipe(parameter, [*(recipe_of(parameter) or ()), instruction])


def _numbers(op: str, given: dict[str, Any]) -> tuple[float, ...] | None:
    """The arguments of an operation as numbers, in the order of its schema; None if one is no number."""
    values = [float(v) if isinstance(v, Tensor) and v.dim() == 0 and not v.is_meta else v for v in given.values()]
    if op == "clamp_":
        low, high = values
        values = [-math.inf if low is None else low, math.inf if high is None else high]
    if not all(isinstance(v, int | float) for v in values):
        return None
    if op in ("add_", "sub_") and "alpha" in given:
        return (values[0] * values[1],)
    return tuple(map(float, values))


@contextmanager
def listening(recorder: Recorder) -> Iterator[None]:
    """Reports functions to the recorder that do nothing to a meta tensor, and so never reach it as operations."""

    def watched(tensor: Tensor, op: str, numbers: tuple[float, ...] | None) -> bool:
        parameter = recorder.parameters.get(storage_key(tensor)) if tensor.is_meta else None
        if parameter is not None:
            given = {"": None} if numbers is None else dict(enumerate(numbers))
            recorder.record(parameter, tensor, op, given)  # type: ignore[arg-type]
        return parameter is not None

    def truncated(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None) -> Tensor:
        heard = watched(tensor, "trunc_normal_", (mean, std, a, b))
        return tensor if heard else originals[TRUNCATED_NORMAL](tensor, mean, std, a, b, generator)

    def silent(name: str) -> Any:
        def function(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return tensor if watched(tensor, name, None) else originals[name](tensor, *args, **kwargs)

        return function

    stand_ins = {TRUNCATED_NORMAL: truncated, **{name: silent(name) for name in _SILENT_ON_META}}
    originals = {name: getattr(nn.init, name) for name in stand_ins}
    try:
        for name, stand_in in stand_ins.items():
            setattr(nn.init, name, stand_in)
        yield
    finally:
        for name, original in originals.items():
            setattr(nn.init, name, original)
