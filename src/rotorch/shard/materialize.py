"""First values: building a model without memory, and filling each rank's slices independently of who holds what.

[Note: recipes]
    A model's own initialisation code runs on `meta` tensors while a dispatch mode writes down what it does to each
    parameter: `normal_(0, 0.02)`, then `zero_` of one row, and so on. This recipe is replayed on the slices that a
    rank holds. Random numbers are a function of (seed, weight name, global index of the element), so every strategy
    and world size gets the same weights, and no rank ever makes a tensor larger than what it keeps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rotorch._torch_private import TorchDispatchMode, storage_key
from rotorch.core.errors import ConfigError
from rotorch.shard.held import HeldWeight, Piece

_RECIPE = "_rotorch_recipe"
_KEPT_ELEMENTS = 1 << 18
"""Values that a constructor writes directly (`nn.Parameter(torch.ones(n))`) are kept up to this size."""
_CHUNK_ELEMENTS = 1 << 20
"""Random numbers are made this many at a time, so that float64 temporaries stay small."""

_FILLS = {"normal_", "uniform_", "fill_", "zero_"}
_ELEMENTWISE = {"mul_", "add_", "sub_", "div_", "clamp_", "erfinv_", "neg_", "log_", "exp_", "sqrt_"}


@dataclass(frozen=True)
class Instruction:
    """One step of a recipe: an in-place operation on a whole parameter, or on a flat range of its elements.

    Attributes:
        op: name of the in-place torch operation.
        args: its scalar arguments.
        flat_range: (start, stop) of global flat indices, or None for all.
        value: for `copy_`: the whole source tensor.
    """

    op: str
    args: tuple[float, ...] = ()
    flat_range: tuple[int, int] | None = None
    value: Tensor | None = None


Recipe = list[Instruction]


class _Recorder(TorchDispatchMode):
    """Writes down in-place operations on known meta parameters as recipes (see [Note: recipes])."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: dict[int, nn.Parameter] = {}

    def watch(self, parameter: nn.Parameter) -> None:
        self.parameters[storage_key(parameter)] = parameter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        target = args[0] if args and isinstance(args[0], Tensor) else None
        if target is not None and func._schema.is_mutable and target.is_meta:
            parameter = self.parameters.get(storage_key(target))
            if parameter is not None:
                self._record(parameter, target, func._schema.name.removeprefix("aten::"), args[1:], kwargs or {})
        return result

    def _record(self, parameter: nn.Parameter, target: Tensor, op: str, args: Any, kwargs: Any) -> None:
        whole = target.numel() == parameter.numel()
        flat_range = None
        if not whole and target.is_contiguous():
            flat_range = (target.storage_offset(), target.storage_offset() + target.numel())
        scalars = tuple(float(a) for a in args if isinstance(a, (int, float)))
        if op == "clamp_":
            low, high = (*args, *([None] * 2))[:2]
            scalars = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
        source = args[0] if op == "copy_" and isinstance(args[0], Tensor) and not args[0].is_meta else None
        known = op in _FILLS | _ELEMENTWISE or source is not None
        if not known or (not whole and flat_range is None):
            setattr(parameter, _RECIPE, [Instruction(f"unknown:{op}")])
            return
        instruction = Instruction(op, scalars, flat_range, source)
        if whole and (op in _FILLS or source is not None):
            setattr(parameter, _RECIPE, [instruction])  # everything before is overwritten
        else:
            getattr(parameter, _RECIPE, []).append(instruction)


@contextmanager
def on_meta() -> Iterator[None]:
    """Builds a model without memory for its parameters: they are `meta` tensors, buffers are real.

    Unlike `torch.device("meta")`, buffers computed in constructors (rotary frequencies, masks) keep their values, and
    what the constructors do to parameters is remembered, so that `ParallelModel.materialize(seed=...)` can do it to
    slices.

    Example:
        >>> with rotorch.on_meta():
        ...     model = AutoModelForCausalLM.from_config(config)
    """
    recorder = _Recorder()
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            on_device = parameter
            parameter = nn.Parameter(on_device.to("meta"), requires_grad=on_device.requires_grad)
            parameter.__dict__.update(on_device.__dict__)
            small = on_device.numel() <= _KEPT_ELEMENTS
            kept = [Instruction("copy_", value=on_device.detach().clone())] if small else []
            setattr(parameter, _RECIPE, kept)
            recorder.watch(parameter)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        with recorder:
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def take_recipes(module: nn.Module) -> dict[str, Recipe]:
    """Returns how each meta parameter of `module` is initialised, by name.

    Runs the initialisation code on meta if nobody watched it.

    Call before a strategy replaces the parameters. Parameters that already have values are not in the result.
    """
    on_meta_device = {name: p for name, p in module.named_parameters() if p.is_meta}
    unwatched = [p for p in on_meta_device.values() if not hasattr(p, _RECIPE)]
    if unwatched:
        recorder = _Recorder()
        for parameter in unwatched:
            setattr(parameter, _RECIPE, [])
            recorder.watch(parameter)
        with torch.no_grad(), recorder:
            _run_initialisation(module)
    return {name: getattr(p, _RECIPE) for name, p in on_meta_device.items()}


def _run_initialisation(module: nn.Module) -> None:
    for child in module.modules():
        reset = getattr(child, "reset_parameters", None) or getattr(child, "_reset_parameters", None)
        if callable(reset):
            reset()
        child.__dict__.pop("_is_hf_initialized", None)
    if hasattr(module, "initialize_weights"):
        module.initialize_weights()


@torch.no_grad()
def initialise(weights: Mapping[str, HeldWeight], *, recipes: Mapping[str, Recipe], seed: int) -> None:
    """Fills what this rank holds of each weight by its recipe. Every rank alone; sends nothing.

    Raises:
        ConfigError: if a weight's initialisation is not known; names it.
    """
    for name, held in weights.items():
        recipe = recipes.get(name)
        if recipe is None:
            continue  # had a value when the model was handed over
        if not recipe or recipe[0].op.startswith("unknown:") or recipe[0].flat_range is not None:
            did = f"its constructor calls {recipe[0].op.removeprefix('unknown:')!r}" if recipe else "nothing sets it"
            raise ConfigError(
                f"materialize: cannot tell how {name!r} is initialised ({did}). "
                "Initialise it with torch.nn.init in reset_parameters(), or load weights from a directory"
            )
        for piece in held.pieces:
            _replay(recipe, piece.of_local(held.local), piece=piece, shape=held.weight.shape, key=_key(name, seed=seed))


def _key(name: str, *, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _replay(recipe: Recipe, target: Tensor, *, piece: Piece, shape: tuple[int, ...], key: int) -> None:
    """Runs a recipe on one piece, in chunks of rows so that temporaries stay small."""
    if not piece.sizes:
        values = _values(recipe, torch.zeros(1, dtype=torch.int64), key=key, shape=shape, piece=None)
        target.copy_(values.reshape(()))
        return
    row_elements = max(math.prod(piece.sizes[1:]), 1)
    step = max(1, _CHUNK_ELEMENTS // row_elements)
    for first in range(0, piece.sizes[0], step):
        rows = min(step, piece.sizes[0] - first)
        part = Piece((piece.offsets[0] + first, *piece.offsets[1:]), (rows, *piece.sizes[1:]))
        values = _values(recipe, _flat_indices(part, shape=shape), key=key, shape=shape, piece=part)
        target.narrow(0, first, rows).copy_(values.reshape(part.sizes))


def _flat_indices(piece: Piece, *, shape: tuple[int, ...]) -> Tensor:
    """Global row-major indices of a piece's elements, int64, in the piece's own row-major order."""
    index, stride = torch.zeros(piece.sizes, dtype=torch.int64), 1
    for dim in reversed(range(len(shape))):
        line = torch.arange(piece.offsets[dim], piece.offsets[dim] + piece.sizes[dim], dtype=torch.int64) * stride
        index += line.reshape([-1 if d == dim else 1 for d in range(len(shape))])
        stride *= shape[dim]
    return index.reshape(-1)


def _values(recipe: Recipe, index: Tensor, *, key: int, shape: tuple[int, ...], piece: Piece | None) -> Tensor:
    values = torch.zeros(index.shape, dtype=torch.float64)
    for instruction in recipe:
        if instruction.value is not None:
            source = instruction.value if piece is None else piece.of_whole(instruction.value.reshape(shape))
            done = source.reshape(-1).double()
        else:
            done = _apply(instruction, values, index, key=key)
        if instruction.flat_range is None:
            values = done
        else:
            start, stop = instruction.flat_range
            values = torch.where((index >= start) & (index < stop), done, values)
    return values


def _apply(instruction: Instruction, values: Tensor, index: Tensor, *, key: int) -> Tensor:
    op, args = instruction.op, instruction.args
    if op == "normal_":
        mean, std = (*args, 0.0, 1.0)[: max(len(args), 2)] if len(args) >= 2 else (args[0] if args else 0.0, 1.0)
        return _normal(index, key=key) * std + mean
    if op == "uniform_":
        low, high = args if len(args) == 2 else (0.0, 1.0)
        return _uniform(index, key=key) * (high - low) + low
    if op == "zero_":
        return torch.zeros_like(values)
    if op == "fill_":
        return torch.full_like(values, args[0])
    return getattr(values.clone(), op)(*args)


def _uniform(index: Tensor, *, key: int, stream: int = 0) -> Tensor:
    """float64 in [0, 1): 53 bits of a hash of (key, stream, index). SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    x = index * -7046029254386353131 + (key ^ stream * 0x1851F42D4C957F2D)
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).double() * 2.0**-53


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _normal(index: Tensor, *, key: int) -> Tensor:
    """float64 standard normal numbers by Box and Muller's transform of two uniform streams."""
    radius = torch.sqrt(-2.0 * torch.log1p(-_uniform(index, key=key, stream=1)))
    return radius * torch.cos(2.0 * math.pi * _uniform(index, key=key, stream=2))
