"""Which modules of a model can run on slices of their weights: tried on a tiny model of the same kind.

[Note: probe]
    A plan says how a module's weights may be cut, not that its forward runs on the pieces: it may reshape with the
    whole number of heads, or normalise over all heads at once. So a model with the same configuration but for its
    sizes is built and run once, and every module that is to become a unit runs again on two slices of its weights,
    with the input that it had. If the outputs of the slices do not add up to its own output, no module of its class
    runs on slices in the real model, and its weights go round one by one, which is right whatever the code does with
    them. The same holds for classes that the tiny model did not run, and for models of which there is no tiny one.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rotorch._torch_private import tree_flatten, tree_unflatten
from rotorch.core.spec import ModelSpec, Unit, UnitKind
from rotorch.models.tiny import inputs_for, shrunk_like
from rotorch.shard.held import cut_pieces
from rotorch.shard.materialize import off_meta
from rotorch.shard.sites import find_sites

_log = logging.getLogger(__name__)

_NUM_SLICES = 2
_TOLERANCE = 1e-4
"""Relative, of outputs in float64, where norms and rotary positions may compute in float32."""

_known: dict[str, frozenset[type]] = {}


def classes_that_run_on_slices(
    module: nn.Module, spec: ModelSpec, *, describe: Callable[[nn.Module], ModelSpec]
) -> set[type]:
    """The classes of `spec`'s MODULE units whose forward runs on slices, by trial (see [Note: probe]).

    Deterministic, the same on all ranks; draws from no random generator of the caller's.

    Args:
        module: a Hugging Face model.
        spec: its units, if all of them could.
        describe: makes the spec of another model alike.
    """
    classes = {type(module.get_submodule(u.name)) for u in spec.units if u.kind is UnitKind.MODULE}
    if not classes:
        return set()
    key = f"{type(module).__module__}.{type(module).__qualname__} {_text(module.config)}"
    if key not in _known:
        _known[key] = frozenset(_try(module, describe=describe))
    for each in sorted(c.__name__ for c in classes - _known[key]):
        _log.info("%s does not run on slices of its weights: they go round one by one", each)
    return classes & _known[key]


def _text(config: Any) -> str:
    return repr(sorted(config.to_dict().items(), key=lambda item: item[0]))


def _try(module: nn.Module, *, describe: Callable[[nn.Module], ModelSpec]) -> set[type]:
    error: Exception | None = None
    with torch.random.fork_rng(devices=[]), torch.no_grad(), off_meta(), _one_thread():
        for config in shrunk_like(module.config):
            config.use_cache = False
            config._experts_implementation = "eager"  # others know no float64
            try:
                torch.manual_seed(0)
                tiny = type(module)._from_config(config).double().eval()
                return _run_on_slices(tiny, describe(tiny))
            except Exception as failed:
                error = failed
    _log.warning("no tiny %s runs (%s): its weights go round one by one", type(module).__name__, error)
    return set()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Starts no threads: a process that has some cannot be forked into ranks, which would wait for them for ever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run_on_slices(tiny: nn.Module, spec: ModelSpec) -> set[type]:
    """The classes of units all of whose calls in one pass are sums over slices."""
    units = {u.name: u for u in spec.units if u.kind is UnitKind.MODULE}
    calls: list[tuple[str, Any, Any, Any]] = []
    handles = []
    for name in units:
        # Before and after, since a module may change its arguments.
        given: list[Any] = []

        def before(_: Any, args: Any, kwargs: Any, given: list[Any] = given) -> None:
            given.append(_copied((args, kwargs)))

        def after(_: Any, args: Any, kwargs: Any, output: Any, name: str = name, given: list[Any] = given) -> None:
            calls.append((name, *given.pop(), _copied(output)))

        child = tiny.get_submodule(name)
        handles.append(child.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(child.register_forward_hook(after, with_kwargs=True))
    try:
        tiny(**inputs_for(type(tiny), tiny.config, num_rows=2, num_tokens=12))
    finally:
        for handle in handles:
            handle.remove()
    sites = find_sites(tiny)
    ran = {type(tiny.get_submodule(name)) for name, *_ in calls}
    return ran - {
        type(tiny.get_submodule(name))
        for name, args, kwargs, output in calls
        if not _adds_up(tiny.get_submodule(name), units[name], sites, args, kwargs, output)
    }


def _adds_up(module: nn.Module, unit: Unit, sites: Any, args: Any, kwargs: Any, output: Any) -> bool:
    """Whether a module's outputs on the slices of its weights sum to its output on all of them.

    Of a tuple the first element does. What else it holds must be maps of single heads, as many as a slice has: such
    are left out, while anything else may be what later layers ask for.
    """
    whole = {w.name: sites[w.name][0].module._parameters[sites[w.name][0].attribute] for w in unit.weights}
    once = {name: sites[name][0].module._parameters[sites[name][0].attribute] for name in unit.added_once}
    try:
        first, *others = _tensors(output)
        total = torch.zeros_like(first)
        for name in once:
            for site in sites[name]:
                site.put(None)
        for index in range(_NUM_SLICES):
            for weight in unit.weights:
                pieces = cut_pieces(weight, num_slices=_NUM_SLICES, index=index)
                if not pieces:
                    continue
                part = torch.cat([piece.of_whole(whole[weight.name]) for piece in pieces], dim=pieces[0].dim)
                for site in sites[weight.name]:
                    site.put(nn.Parameter(part))
            again, kwargs_again = _copied((args, kwargs))
            part, *more = _tensors(module(*again, **kwargs_again))
            if part.shape != total.shape or any(a.shape == b.shape for a, b in zip(others, more, strict=True)):
                return False
            total += part
        for bias in once.values():
            total += bias
    except Exception:  # whatever its code does not like about slices
        return False
    finally:
        for name, tensor in (whole | once).items():
            for site in sites[name]:
                site.put(tensor)
    return bool((total - first).norm() <= _TOLERANCE * first.norm())


def _tensors(output: Any) -> list[Tensor]:
    """The output, or the tensors in the tuple that it is, which must begin with one."""
    outputs = output if isinstance(output, tuple) else (output,)
    if not isinstance(outputs[0], Tensor):
        raise TypeError(f"returns a {type(outputs[0]).__name__}")
    return [each for each in outputs if isinstance(each, Tensor)]


def _copied(values: Any) -> Any:
    leaves, tree = tree_flatten(values)
    return tree_unflatten([copy.copy(leaf) if not isinstance(leaf, Tensor) else leaf.clone() for leaf in leaves], tree)
