"""First values: building a model without memory, and filling each rank's slices alike under every layout.

[Note: counter-based]
    A model's own initialisation code is recorded as recipes (shard/recipes.py), which are replayed here on the slices
    that a rank holds. Random numbers are a function of (seed, weight name, global index of the element), so
    every strategy and world size gets the same weights, and no rank ever makes a tensor larger than its own part.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from rotorch.core.errors import ConfigError
from rotorch.shard.recipes import Instruction, Recipe, Recorder, listening, recipe_of, set_recipe
from rotorch.shard.sharded_weight import Chunk, ShardedWeight

_KEPT_ELEMENTS = 1 << 18
"""Values that a constructor writes directly (`nn.Parameter(torch.ones(n))`) are kept up to this size."""
_BOX_ELEMENTS = 1 << 14
"""Random numbers are made this many at a time on one thread, so that float64 temporaries stay in its cache."""
_THREAD_ELEMENTS = 1 << 15
"""The least that torch gives to a thread."""
_VECTOR_ELEMENTS = 64
"""A multiple of the numbers that torch computes at once on any processor."""
_GOLDEN, _STREAM = -7046029254386353131, 0x1851F42D4C957F2D
"""Steps of a hash from number to number (2**64 over the golden ratio), and from stream to stream."""
_RANDOM = ("normal_", "uniform_", "trunc_normal_")


_register = nn.Module.register_parameter


@contextmanager
def off_meta() -> Iterator[None]:
    """Builds modules with real parameters on CPU, also within `on_meta` or `torch.device("meta")`."""
    register = nn.Module.register_parameter
    nn.Module.register_parameter = _register  # type: ignore[method-assign]
    try:
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def on_meta() -> Iterator[None]:
    """Builds a model without memory for its parameters: they are `meta` tensors, buffers are real.

    Unlike `torch.device("meta")`, buffers computed in constructors (rotary frequencies, masks) keep their values, and
    the constructors' operations on parameters are recorded, so that `ParallelModel.materialize(seed=...)` can replay
    them on slices.

    Example:
        >>> with rotorch.on_meta():
        ...     model = AutoModelForCausalLM.from_config(config)

    Numbers that a constructor draws directly (`nn.Parameter(torch.randn(n))`) are the same in every process, for any
    state of torch's generator, which is left as it was.
    """
    recorder = Recorder()
    register = nn.Module.register_parameter
    moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            original, on_meta = moved.get(id(parameter), (None, None))
            if original is None or original() is not parameter:  # else one parameter under several names: it stays one
                on_meta = _on_meta(parameter, recorder)
                moved[id(parameter)] = (weakref.ref(parameter), on_meta)
            parameter = on_meta
        register(module, name, parameter)

    random_state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(0)
    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        with recorder, listening(recorder):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        torch.default_generator.set_state(random_state)


def _on_meta(parameter: nn.Parameter, recorder: Recorder) -> nn.Parameter:
    on_meta = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
    on_meta.__dict__.update(parameter.__dict__)
    kept = parameter.numel() <= _KEPT_ELEMENTS and recorder.is_written(parameter)
    set_recipe(on_meta, [Instruction("copy_", value=parameter.detach().clone())] if kept else [])
    recorder.watch(on_meta)
    return on_meta


def take_recipes(module: nn.Module) -> dict[str, Recipe]:
    """Returns the recipe of each meta parameter of `module`, by name.

    Runs the initialisation code on meta if it was not recorded before.

    Call before a strategy replaces the parameters. Parameters that already have values are not in the result.
    """
    on_meta_device = {name: p for name, p in module.named_parameters() if p.is_meta}
    unwatched = [p for p in on_meta_device.values() if recipe_of(p) is None]
    if unwatched:
        recorder = Recorder()
        for parameter in unwatched:
            set_recipe(parameter, [])
            recorder.watch(parameter)
        with torch.no_grad(), recorder, listening(recorder):
            _run_initialisation(module)
    return {name: recipe_of(p) or [] for name, p in on_meta_device.items()}


def _run_initialisation(module: nn.Module) -> None:
    for child in module.modules():
        reset = getattr(child, "reset_parameters", None) or getattr(child, "_reset_parameters", None)
        if callable(reset) and any(p.is_meta for p in child.parameters(recurse=False)):
            reset()
        own = list(child.parameters(recurse=False))
        if own and not any(p.is_meta for p in own):
            child._is_hf_initialized = True  # transformers leaves its values alone
        else:
            child.__dict__.pop("_is_hf_initialized", None)
    if hasattr(module, "initialize_weights"):
        module.initialize_weights()


@torch.no_grad()
def initialise(weights: Mapping[str, ShardedWeight], *, recipes: Mapping[str, Recipe], seed: int) -> None:
    """Fills this rank's part of each weight by its recipe. Every rank alone; sends nothing.

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
        for chunk in held.chunks:
            _replay(recipe, chunk.of_local(held.local), chunk=chunk, shape=held.weight.shape, key=_key(name, seed=seed))


def _key(name: str, *, seed: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _replay(recipe: Recipe, target: Tensor, *, chunk: Chunk, shape: tuple[int, ...], key: int) -> None:
    """Runs a recipe on one chunk, a small box at a time."""
    if not chunk.sizes:
        values = _values(recipe, torch.zeros(1, dtype=torch.int64), key=key, shape=shape, chunk=None)
        target.copy_(values.reshape(()))
        return
    threads = torch.get_num_threads()
    for box in _boxes(chunk, most=_BOX_ELEMENTS if threads == 1 else threads * _THREAD_ELEMENTS):
        values = _values(recipe, _flat_indices(box, shape=shape), key=key, shape=shape, chunk=box)
        part = target
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            if size != chunk.sizes[dim]:
                part = part.narrow(dim, offset - chunk.offsets[dim], size)
        part.copy_(values.reshape(box.sizes))


def _boxes(chunk: Chunk, *, most: int) -> Iterator[Chunk]:
    """Boxes of at most so many elements that make up a chunk, each one run along dims behind the one that is split."""
    for dim in range(len(chunk.sizes)):
        inner = math.prod(chunk.sizes[dim + 1 :])
        if inner <= most or dim == len(chunk.sizes) - 1:
            break
    step = max(1, most // max(inner, 1))
    lines = list(range(0, chunk.sizes[dim], step))
    for outer in itertools.product(*map(range, chunk.sizes[:dim])):
        before = tuple(offset + i for offset, i in zip(chunk.offsets, outer, strict=False))
        for first in lines:
            size = min(step, chunk.sizes[dim] - first)
            offsets = (*before, chunk.offsets[dim] + first, *chunk.offsets[dim + 1 :])
            yield Chunk(offsets, (*[1] * dim, size, *chunk.sizes[dim + 1 :]))


def _flat_indices(chunk: Chunk, *, shape: tuple[int, ...]) -> Tensor:
    """Global row-major indices of a chunk's elements, int64, in the chunk's own row-major order."""
    index, stride = torch.zeros(1, dtype=torch.int64), 1
    for dim in reversed(range(len(shape))):
        start, stop = chunk.offsets[dim] * stride, (chunk.offsets[dim] + chunk.sizes[dim]) * stride
        line = torch.arange(start, stop, stride, dtype=torch.int64)
        index = (line.unsqueeze(1) + index).reshape(-1)  # of the dims so far
        stride *= shape[dim]
    return index


def _values(recipe: Recipe, index: Tensor, *, key: int, shape: tuple[int, ...], chunk: Chunk | None) -> Tensor:
    values = torch.zeros(index.shape, dtype=torch.float64)
    for instruction in recipe:
        if instruction.flat_range is None:
            if instruction.value is None:
                values = _apply(instruction, values, index, key=key)
            else:
                source = instruction.value if chunk is None else chunk.of_whole(instruction.value.reshape(shape))
                values = source.reshape(-1).double()
            continue
        start, stop = instruction.flat_range
        inside = (index >= start) & (index < stop)
        if instruction.value is None:
            done = _apply(instruction, values, index, key=key)
        else:
            done = values.masked_scatter(inside, instruction.value.double().reshape(-1)[index[inside] - start])
        values = torch.where(inside, done, values)
    return values


def _apply(instruction: Instruction, values: Tensor, index: Tensor, *, key: int) -> Tensor:
    op, args = instruction.op, instruction.args
    if op in _RANDOM:
        # Whole vectors for each thread: torch computes the rest by other functions, whose last bit may differ.
        rest = -len(index) % (_VECTOR_ELEMENTS * torch.get_num_threads())
        return _random(op, args, functional.pad(index, (0, rest)) if rest else index, key=key)[: len(index)]
    if op == "zero_":
        return torch.zeros_like(values)
    if op == "fill_":
        return torch.full_like(values, args[0])
    return getattr(values.clone(), op)(*args)


def _random(op: str, args: Sequence[float], index: Tensor, *, key: int) -> Tensor:
    if op == "normal_":
        mean, std = args
        return _normal(index, key=key).mul_(std).add_(mean)
    if op == "uniform_":
        low, high = args
        return _uniform(index, key=key).mul_(high - low).add_(low)
    mean, std, low, high = args
    below, above = (math.erf((end - mean) / (std * math.sqrt(2.0))) for end in (low, high))
    uniform = _uniform(index, key=key).mul_(above - below).add_(below)
    return uniform.erfinv_().mul_(std * math.sqrt(2.0)).add_(mean).clamp_(low, high)


def _uniform(index: Tensor, *, key: int) -> Tensor:
    """float64 in [0, 1): 53 bits of a hash of (key, index)."""
    return _hashed(index * _GOLDEN + key)


def _hashed(x: Tensor) -> Tensor:
    """The end of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), as float64 in [0, 1). Writes over `x`."""
    x ^= _shift_right(x, 30)
    x *= -4658895280553007687
    x ^= _shift_right(x, 27)
    x *= -7723592293110705685
    x ^= _shift_right(x, 31)
    return _shift_right(x, 11).double().mul_(2.0**-53)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (torch's own is arithmetic)."""
    shifted = x >> bits
    shifted &= (1 << (64 - bits)) - 1
    return shifted


def _normal(index: Tensor, *, key: int) -> Tensor:
    """float64 standard normal numbers by Box and Muller's transform of two uniform streams."""
    place = index * _GOLDEN
    radius = _hashed(place + (key ^ _STREAM)).neg_().log1p_().mul_(-2.0).sqrt_()
    return radius.mul_(_hashed(place.add_(key ^ 2 * _STREAM)).mul_(2.0 * math.pi).cos_())
