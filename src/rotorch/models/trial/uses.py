"""Uses of each of a model's weights in a pass: tried on a tiny model of the same kind.

[Note: uses]
    Any weight that a layer multiplies with, looks up or convolves with may rotate, wherever it is (see
    `ops/weight_proxy.py`), if all ranks use it in every pass, equally often and in the same order, whatever their data:
    another rank waits for every slice that a rank does not ask for. A module that runs only for some tokens (an expert
    in a list of its own) breaks this rule, and its code does not declare that. So a tiny
    model runs on several inputs, down to a single token, and every function that gets a weight is recorded.
    Uses that differ between inputs depend on the data.

    A product with a weight's transpose counts as a product with the weight. One with a weight that lies `[inputs,
    outputs]` counts as another function: no model that declares a plan is known to have such a layer. A product
    without the layer's bias is one of the matrix alone, and the bias must not travel with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rotorch._torch_private import tree_flatten
from rotorch.models.products import as_linear, is_transpose

_PRODUCTS = {
    F.linear,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
}
"""Functions that are answered slice by slice, and need the slices again in backward."""

_ABOUT = {
    "size",
    "dim",
    "numel",
    "nelement",
    "ndimension",
    "is_floating_point",
    "is_complex",
    "element_size",
    "__len__",
}
_TAKES_HOLD = {"data", "real", "imag"}
_VALUES = {*_TAKES_HOLD, "T", "mT", "H", "mH"}
"""Properties that are more than facts about a tensor."""

_WRITES = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ipow__", "__set__"}

_MOST_WHOLE_USES = 2
"""In a pass. A weight that is made whole for more of them would be brought over and over again."""


@dataclass(frozen=True)
class Use:
    """Use of a weight by a pass.

    Attributes:
        products: linear layers and convolutions.
        lookups: of an embedding.
        others: names of other functions, for which it must be whole.
        varies: True if the use differs between inputs.
        obstacle: reason why it cannot rotate; "" if there is none.
        alone: number of products without a bias.
    """

    products: int = 0
    lookups: int = 0
    others: tuple[str, ...] = ()
    varies: bool = False
    obstacle: str = ""
    alone: int = 0


def uses_in_passes(module: nn.Module, passes: Iterable[Callable[[], Any]]) -> dict[str, Use]:
    """Runs every pass of `module` and returns how its weights are used, by their patterns (`pattern_of`).

    A weight that no pass uses is left out. The first pass must run; a later one that fails shows nothing.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    first, *others = (_traced(run, names) for run in passes)
    if isinstance(first, Exception):
        raise first
    compared = [trace for trace in others if not isinstance(trace, Exception)]
    by_name: dict[str, list[_Call]] = {name: [] for name, _ in first}
    for name, call in first:
        by_name[name].append(call)
    varying = _that_differ(first, compared) if compared else set(by_name)
    varying |= {name for trace in compared for name, _ in trace} - set(by_name)
    found: dict[str, Use] = {}
    for name in sorted(varying | set(by_name)):
        use = _use(by_name.get(name, ()), varying=name in varying)
        known = found.get(pattern_of(name))
        found[pattern_of(name)] = use if known is None else _of_both(known, use)
    return found


def pattern_of(name: str) -> str:
    """A weight's name without the numbers of its layers: the same for that weight of all layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _of_both(one: Use, other: Use) -> Use:
    """Joins the uses of weights of two layers that have the same name in them."""
    return Use(
        max(one.products, other.products),
        max(one.lookups, other.lookups),
        max(one.others, other.others, key=len),
        one.varies or other.varies,
        one.obstacle or other.obstacle,
        max(one.alone, other.alone),
    )


@dataclass(frozen=True)
class _Call:
    """A function that a weight was given to; a product is one of a layer, or of the matrix `alone`."""

    func: Any
    is_product: bool = False
    alone: bool = False


Trace = list[tuple[str, _Call]]
"""(name of a weight, what it was given to), in order."""


def _traced(run: Callable[[], Any], names: Mapping[int, str]) -> Trace | Exception:
    watch = _Watch(names)
    try:
        with watch:
            run()
    except Exception as error:  # whatever its code does not like about the input
        return error
    return watch.trace


class _Watch(TorchFunctionMode):
    """Writes down which functions are given one of some tensors, by id. The transposes of matrices are followed."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names
        self._transposes: dict[int, tuple[Tensor, Tensor]] = {}  # with what each is of; alive, so that ids stay theirs
        self.trace: Trace = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and self._is_known(args[0]) and is_transpose(func, args, kwargs):
            return self._transpose(args[0], func(*args))
        if not _only_asks(func):
            given = [leaf for leaf in tree_flatten((args, kwargs))[0] if self._is_known(leaf)]
            found = as_linear(func, args, kwargs, is_matrix=lambda leaf: id(leaf) in self._transposes)
            for leaf in {id(leaf): leaf for leaf in given}.values():
                call = _Call(func, found is not None) if func not in _PRODUCTS else _Call(func, True)
                if call.is_product:
                    bias = found[2] if found is not None else kwargs.get("bias", args[2] if len(args) > 2 else None)
                    call = _Call(func, True, alone=bias is None)
                elif id(leaf) in self._transposes:
                    call = _Call(Tensor.t)  # as a proxy has it: whole for that time
                whole = self._transposes[id(leaf)][1] if id(leaf) in self._transposes else leaf
                self.trace.append((self._names[id(whole)], call))
        return func(*args, **kwargs)

    def _is_known(self, leaf: Any) -> bool:
        return id(leaf) in self._names or id(leaf) in self._transposes

    def _transpose(self, of: Tensor, made: Tensor) -> Tensor:
        if id(of) in self._transposes:
            return self._transposes[id(of)][1]
        self._transposes[id(made)] = (made, of)
        return made


def _name(func: Any) -> str:
    """Name of a function; of a property its own, not `__get__`."""
    name = getattr(func, "__name__", str(func))
    return getattr(getattr(func, "__self__", None), "__name__", name) if name in ("__get__", "__set__") else name


def _only_asks(func: Any) -> bool:
    """True if a function asks about a tensor (its shape, its dtype) and not for its values."""
    name = getattr(func, "__name__", "")
    return name in _ABOUT or (name == "__get__" and _name(func) not in _VALUES)


def _that_differ(first: Trace, others: Sequence[Trace]) -> set[str]:
    """The weights that not every trace uses alike; all, if the order of their uses differs beyond that."""
    different: set[str] = set()
    for trace in others:
        counts, more = Counter(first), Counter(trace)
        different |= {name for name, _ in (counts - more) | (more - counts)}
    alike = [[use for use in trace if use[0] not in different] for trace in (first, *others)]
    return different if all(trace == alike[0] for trace in alike) else {name for name, _ in first}


def _use(calls: Sequence[_Call], *, varying: bool) -> Use:
    products = [call for call in calls if call.is_product]
    lookups = sum(call.func is F.embedding for call in calls)
    others = [call.func for call in calls if not call.is_product and call.func is not F.embedding]
    named = tuple(_name(func) for func in others)
    obstacle = _obstacle(others, named, varying=varying)
    return Use(len(products), lookups, named, varying, obstacle, alone=sum(call.alone for call in products))


def _obstacle(others: Sequence[Any], named: Sequence[str], *, varying: bool) -> str:
    if varying:
        return "how often a pass uses it depends on the data, and ranks would not agree"
    for func, name in zip(others, named, strict=True):
        raw = getattr(func, "__name__", "")
        if raw in _WRITES or (raw.endswith("_") and not raw.endswith("__")):
            return f"a pass changes it by {name!r}"
        if raw == "__get__" and name in _TAKES_HOLD:
            return f"a pass takes hold of its {name!r}"
    if len(others) > _MOST_WHOLE_USES:
        return f"{named[0]!r}, which takes no slices, uses it; {len(others)} such uses in a pass"
    return ""
