"""Trial on a tiny model of the same kind: does the model's code run on slices of its weights?

[Note: trial of slices]
    A plan cuts a module's weights, but does not promise that its forward runs on slices: the code may reshape with the
    whole number of heads, or normalise over all heads at once. So a model with the same configuration but smaller
    sizes is built and run once, and every module that is to become a unit runs again on three slices of its
    weights, with the same input. If the outputs of the slices do not add up to its own output
    (`models/trial/sums.py`), no module of its class runs on slices in the real model, and its weights rotate one by
    one, which is right for any code.
    The same holds for classes that the tiny model did not run, and for models without a tiny one.

    In the same way modules of stacked experts run on sets of whole experts (`models/whole_experts.py`).

    The same tiny model shows the uses of weights without a role in the plan (`models/trial/uses.py`), and the places
    where it may be cut between layers (`models/trial/stages.py`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from rotorch.core.spec import Half, ModelSpec, Unit, UnitKind, Weight
from rotorch.models.trial.stages import find_halves, why_not_in_stages
from rotorch.models.trial.sums import adds_up, copied
from rotorch.models.trial.tiny import inputs_for, shrunk_like, with_values
from rotorch.models.trial.uses import Use, uses_in_passes
from rotorch.models.whole_experts import stacked_experts, whole_expert_units
from rotorch.shard.materialize import off_meta
from rotorch.shard.sites import find_sites

_log = logging.getLogger(__name__)

_ROWS_AND_TOKENS = ((2, 12), (2, 12), (1, 1), (1, 2))
"""Of the passes in which uses of weights are watched: what depends on values or on their number differs among them."""


@dataclass(frozen=True)
class Trial:
    """Result of the trials on a tiny model of the same kind.

    Attributes:
        on_slices: classes of modules whose forward runs on slices of their weights.
        on_experts: classes of modules of experts whose forward runs on some of these, with the names of the parameters
            that are stacked.
        uses: of weights in a pass, by `pattern_of` their names; None: no tiny model runs.
        not_in_stages: why it cannot be cut between layers, in words; "" if it can, or if nobody knows.
        halves: both halves of each layer, if it can be cut inside of these.
        not_in_halves: why it cannot be; "" if it can, or if nobody knows.
    """

    on_slices: frozenset[type] = frozenset()
    uses: Mapping[str, Use] | None = field(default=None, hash=False)
    not_in_stages: str = ""
    halves: tuple[Half, ...] = ()
    not_in_halves: str = ""
    on_experts: Mapping[type, frozenset[str]] = field(default_factory=dict, hash=False)


_known: dict[str, Trial] = {}


def try_tiny(module: nn.Module, *, describe: Callable[[nn.Module], ModelSpec]) -> Trial:
    """Tries a tiny model like `module` (see [Note: trial of slices]); once per class and configuration in a process.

    Deterministic, the same on all ranks; draws from no random generator of the caller's.

    Args:
        module: a Hugging Face model.
        describe: makes the spec of another model alike, with every unit that could run on slices.
    """
    key = f"{type(module).__module__}.{type(module).__qualname__} {_text(module.config)}"
    if key not in _known:
        _known[key] = _try(module, describe=describe)
    return _known[key]


def _text(config: Any) -> str:
    return repr(sorted(config.to_dict().items(), key=lambda item: item[0]))


def _try(module: nn.Module, *, describe: Callable[[nn.Module], ModelSpec]) -> Trial:
    error: Exception | None = None
    with torch.random.fork_rng(devices=[]), torch.no_grad(), off_meta(), one_thread():
        # In float32 as well: some code converts to it and goes on with weights of another dtype.
        for config, embedded, dtype in product(
            shrunk_like(module.config), (False, True), (torch.float64, torch.float32)
        ):
            config.use_cache = False
            config._experts_implementation = "eager"  # others know no float64
            try:
                torch.default_generator.manual_seed(0)
                tiny = with_values(type(module), config).to(dtype).eval()
                run = partial(_pass, tiny, dtype=dtype, embedded=embedded)
                short = partial(run, num_rows=2, num_tokens=12)
                on_slices = _run_on_slices(tiny, describe(tiny).units, run=short)
                on_experts = _run_on_experts(tiny, run=short)
                not_in_stages = _why_not_in_stages(tiny, run=short)
                halves, not_in_halves = ((), "") if not_in_stages else find_halves(tiny, run=short)
            except Exception as failed:
                error = error or failed
                continue
            uses = _watched(tiny, run=run)
            return Trial(frozenset(on_slices), uses, not_in_stages, halves, not_in_halves, on_experts)
    _log.warning("no tiny %s runs (%s): its weights rotate one by one", type(module).__name__, error)
    return Trial()


def _why_not_in_stages(tiny: nn.Module, *, run: Callable[..., Any]) -> str:
    """Returns the reason why it cannot be cut between its layers, in words; tries padding, with a mask and without."""
    why = why_not_in_stages(tiny, run=run)
    takes_mask = "attention_mask" in inspect.signature(tiny.forward).parameters
    for where, tried in {
        "padding is masked": takes_mask,
        "padding is not masked": _padding_of(tiny) is not None,
    }.items():
        if why or not tried:
            continue
        padded = partial(run, padded=True, masked=where == "padding is masked")
        try:
            padded()
        except Exception as error:  # a mask of another form, or for other inputs: nobody knows
            _log.info("a tiny %s was not tried in stages where %s (%s)", type(tiny).__name__, where, error)
            continue
        why = why_not_in_stages(tiny, run=padded)
        why = why and f"{why} (where {where})"
    return why


def _padding_of(tiny: nn.Module) -> int | None:
    """The token that stands where there is none, if there is one."""
    config: Any = tiny.config
    token = getattr(config.get_text_config(), "pad_token_id", None)
    return token if isinstance(token, int) and token >= 0 else None


def _watched(tiny: nn.Module, *, run: Callable[..., Any]) -> Mapping[str, Use] | None:
    """Uses of the model's weights in training; None if the model does not run in training mode."""
    tiny.train()
    passes = [
        partial(run, num_rows=rows, num_tokens=tokens, seed=seed)
        for seed, (rows, tokens) in enumerate(_ROWS_AND_TOKENS)
    ]
    try:
        return uses_in_passes(tiny, passes)
    except Exception as error:
        _log.info("how a tiny %s uses its weights was not seen (%s)", type(tiny).__name__, error)
        return None


def _pass(
    tiny: nn.Module,
    *,
    dtype: torch.dtype,
    embedded: bool,
    num_rows: int,
    num_tokens: int,
    seed: int = 0,
    padded: bool = False,
    masked: bool = False,
) -> Any:
    sizes = {"num_rows": num_rows, "num_tokens": num_tokens}
    made = inputs_for(type(tiny), tiny.config, **sizes, seed=seed, embedded=embedded)
    end = (0, slice(num_tokens // 2, None))  # of the first row, so that every token still looks at some
    if padded and "input_ids" in made and (padding := _padding_of(tiny)) is not None:
        made["input_ids"][end] = padding
    if masked:
        made["attention_mask"] = torch.ones(num_rows, num_tokens, dtype=torch.int64)
        made["attention_mask"][end] = 0
    return tiny(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in made.items()})


@contextmanager
def one_thread() -> Iterator[None]:
    """Starts no threads: a process that has some cannot be forked into ranks, which would wait for them for ever."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _run_on_experts(tiny: nn.Module, *, run: Callable[[], Any]) -> dict[type, frozenset[str]]:
    """The classes of modules of experts that run on some of them, with the parameters that are stacked."""
    weights = {name: Weight(name, tuple(p.shape), p.element_size()) for name, p in tiny.named_parameters()}
    units = list(whole_expert_units(tiny, weights))
    able = _run_on_slices(tiny, units, run=run) if units else set()
    found = {type(tiny.get_submodule(name)): cut for name, (_, cut) in stacked_experts(tiny).items()}
    return {kind: cut for kind, cut in found.items() if kind in able}


def _run_on_slices(tiny: nn.Module, all_units: Iterable[Unit], *, run: Callable[[], Any]) -> set[type]:
    """The classes of units all of whose calls in one pass are sums over slices."""
    units = {u.name: u for u in all_units if u.kind is UnitKind.MODULE}
    calls: list[tuple[str, Any, Any, Any]] = []
    handles = []
    for name in units:
        # Before and after, since a module may change its arguments.
        given: list[Any] = []

        def before(_: Any, args: Any, kwargs: Any, given: list[Any] = given) -> None:
            given.append(copied((args, kwargs)))

        def after(_: Any, args: Any, kwargs: Any, output: Any, name: str = name, given: list[Any] = given) -> None:
            calls.append((name, *given.pop(), copied(output)))

        child = tiny.get_submodule(name)
        handles.append(child.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(child.register_forward_hook(after, with_kwargs=True))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    sites = find_sites(tiny)
    ran = {type(tiny.get_submodule(name)) for name, *_ in calls}
    return ran - {
        type(tiny.get_submodule(name))
        for name, args, kwargs, output in calls
        if not adds_up(tiny.get_submodule(name), units[name], sites, args, kwargs, output)
    }
