"""The one table of layouts and models, made from `STRATEGIES` and `COMPOSES`: a newcomer is in it at once."""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Callable

import pytest

from rotorch.core.errors import ConfigError
from rotorch.core.strategy import Strategy
from rotorch.strategies import COMPOSES, STRATEGIES, format_parallel, num_ranks, parse_parallel

MODELS = ("llama", "qwen3", "gemma2", "gpt_neox")
"""A bias everywhere and uneven cuts; tied weights and norms inside attention; soft caps; heads fused in one matrix."""


LEFT_OUT = ("auto", "hierarchical", "whole")
"""Values of options that `options` leaves out; whole experts need a model that has some: `WHOLE_EXPERTS`."""

PIPELINES = {
    ("pp=2", "gpt_neox"),
    ("pp=2[schedule=zb_h1]", "llama"),
    ("pp=2,rtp=2", "llama"),
    ("pp=2,fsdp=2", "llama"),
    ("pp=2,tesseract=1x1x2", "llama"),
    ("pp=2,fsdp=2,megatron=2[sequence_parallel=true]", "qwen3"),
    ("pp=2,rtp=2,megatron=2", "gemma2"),
    ("zeropp=2x2", "gemma2"),
    ("zeropp=2x1,rtp=2", "qwen3"),
    ("ddp=2,zeropp=2x1", "gpt_neox"),
}
"""Of pipelines, what says most: most of them is one code, `hold/pipeline.py`, on four ranks.

tests/strategies/test_pipelines.py has stages around the other grid.
"""


THREE_DIMS = {
    ("pp=2,fsdp=2,megatron=2", "llama"),
    ("pp=2,fsdp=2,megatron=2[sequence_parallel=true]", "qwen3"),
    ("pp=2,rtp=2,megatron=2", "gemma2"),
    ("zeropp=2x1,rtp=2,megatron=2", "gpt_neox"),
}
"""Of stages whose ranks share slices of another strategy; their invariants are among the slow ones."""

SHARED_SEQUENCES = {
    ("rtp=2[context=2]", "qwen3"),
    ("fsdp=2[context=2]", "llama"),
    ("rtp=2[context=2,exchange=heads]", "llama"),
    ("pp=2,rtp=2[context=2]", "qwen3"),
}
"""Of sequences that ranks share; tests/strategies/test_context.py has more models, sizes and transports."""

WHOLE_UNITS = {
    ("osdp=3[memory=4700KiB]", "llama"),
    ("osdp=2[memory=4500KiB]", "qwen3"),
    ("osdp=3[memory=4700KiB,inner=fsdp]", "llama"),
    ("osdp=2[memory=4500KiB,inner=fsdp]", "qwen3"),
    ("ddp=2,osdp=2[memory=4500KiB,recompute=slice]", "qwen3"),
}
"""Of units that are whole within a budget: some, never all; tests/core/test_whole_units.py has other budgets."""


WHOLE_EXPERTS = {
    ("rtp=2[experts=whole]", "mixtral"),
    ("rtp=3[recompute=slice,transport=send_receive,experts=whole]", "mixtral"),  # four experts: 2 + 1 + 1
    ("pp=2,rtp=2[experts=whole]", "mixtral"),
    ("ep=3[recompute=block]", "mixtral"),
    ("ddp=2,ep=2", "mixtral"),
    ("pp=2,ep=2", "mixtral"),
}
"""Of experts that rotate whole, or to which tokens travel.

tests/strategies/test_whole_experts.py and tests/strategies/test_travelling_tokens.py have more models.
"""


GROUPED_VISITS = {
    ("rtp=3[transport=send_receive,visits=1]", "llama"),
    ("rtp=4[transport=send_receive,visits=2]", "gpt_neox"),
    ("rtp=4[transport=send_receive,visits=2,recompute=slice,ahead=2]", "qwen3"),
}
"""Of slices that visit together; tests/strategies/test_rtp_visits.py has their bytes and memory."""

INPUTS_FIRST = {
    ("rtp=3[transport=send_receive,recompute=slice]", "gpt2"),
    ("rtp=2", "gpt2"),
    ("megatron=3", "gpt2"),
    ("rtp=2[transport=send_receive],megatron=2", "gpt2"),
}
"""Of linear layers whose weights lie with their inputs first, on GPT-2: of each way to multiply with a part of one.

What megatron sends for these is in tests/strategies/test_megatron.py: GPT-2 looks positions up once for all rows of a
batch, which no Layout knows.
"""


def of_size(kind: str, size: int) -> str | None:
    """The layout of one strategy on so many ranks; None if it has no size."""
    match STRATEGIES[kind].size_fields:
        case ():
            return kind if size == 1 else None
        case ("size",):
            return f"{kind}={size}"
        case ("stages",):
            return f"{kind}={size}" if size <= 2 else None  # the models have two layers
        case ("stages", "shards"):
            return f"{kind}={min(size, 2)}x{size // min(size, 2)}" if size == 1 or size % 2 == 0 else None
        case ("rows", "columns"):
            side = math.isqrt(size)
            return f"{kind}={side}x{side}" if side * side == size else None
        case ("rows", "columns", "depth"):
            side = max(q for q in (1, 2, 4) if size % (q * q) == 0)
            return f"{kind}={side}x{side}x{size // (side * side)}"
        case ("d1", "d2"):
            d2 = max(q for q in range(1, math.isqrt(size) + 1) if size % q == 0)
            return f"{kind}=1x2" if size == 2 else f"{kind}={size // d2}x{d2}"
        case other:
            raise AssertionError(f"say here how {kind} is written on {size} ranks: {other}")


def smallest(kind: str, *, least: int = 2) -> str:
    """The layout of one strategy on the fewest ranks, `least` or more, that it has one for."""
    return next(layout for size in range(least, 65) if (layout := of_size(kind, size)))


def is_grid(kind: str) -> bool:
    """True if a strategy has two sides, so that fewer than four ranks say little."""
    return len(STRATEGIES[kind].size_fields) > 1 and not is_pipeline(kind)


def is_pipeline(kind: str) -> bool:
    """True if a strategy cuts between layers, of which the models have two."""
    return "stages" in STRATEGIES[kind].size_fields


def options(strategy: type[Strategy]) -> list[dict[str, object]]:
    """Every combination of a strategy's options that have finitely many values, except all defaults.

    "auto" is left out: it stands for one of the others, and the layouts without options have it. What needs a GPU (the
    strategy refuses the device "cpu") is left out too: tests/gpu has it. So is what changes the model, and what needs
    several hosts, which tests/strategies/test_rtp_hierarchical.py has. Nor are there
    combinations that the strategy says are another one: tests/strategies/test_layouts.py holds it to that.
    """
    defaults = {name: field.default for name, field in strategy.model_fields.items() if not field.is_required()}
    choices: dict[str, list[object]] = {}
    for name in defaults:
        kind = strategy.model_fields[name].annotation
        if kind is bool:
            choices[name] = [False, True]
        elif typing.get_origin(kind) is typing.Literal:
            choices[name] = [value for value in typing.get_args(kind) if value not in LEFT_OUT]
    every = (dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values()))
    other = (chosen for chosen in every if any(value != defaults[name] for name, value in chosen.items()))
    held = (works_on_cpu, can_be_written, is_exact)
    return [c for c in other if all(works(strategy, c) for works in held) and not has_idle_options(strategy, c)]


def works_on_cpu(strategy: type[Strategy], chosen: dict[str, object]) -> bool:
    try:
        on_two_ranks(strategy, chosen).on_device("cpu")
    except ConfigError:
        return False
    return True


def is_exact(strategy: type[Strategy], chosen: dict[str, object]) -> bool:
    """True if one process computes the same; other layouts have tests of their own."""
    return not on_two_ranks(strategy, chosen).changes_the_model


def can_be_written(strategy: type[Strategy], chosen: dict[str, object]) -> bool:
    """True if options that are short for several strategies go together with the others."""
    try:
        parse_parallel(str(on_two_ranks(strategy, chosen)))
    except ConfigError:
        return False
    return True


def has_idle_options(strategy: type[Strategy], chosen: dict[str, object]) -> bool:
    made = on_two_ranks(strategy, chosen)
    return made.without_idle_options() != made


def on_two_ranks(strategy: type[Strategy], chosen: dict[str, object]) -> Strategy:
    sizes = {"size": 2} if "size" in strategy.size_fields else dict.fromkeys(strategy.size_fields, 1)
    sizes.update({"depth": 2} if "depth" in sizes else {})
    return strategy(**sizes, **chosen)


def table() -> list[tuple[str, str]]:
    """All (layout, model) pairs: two ranks and compositions on every model, the rest where it is most telling."""
    pairs: list[tuple[str, str]] = []
    for kind, strategy in STRATEGIES.items():
        # Of square grids the one with a depth has all that the others have.
        telling_size = (0 if strategy.size_fields == ("rows", "columns") else 4) if is_grid(kind) else 2
        for size in (1, 2, 4, 8) if is_grid(kind) else (1, 2, 3, 4):
            layout, on_all = of_size(kind, size), size == telling_size
            if layout is not None:
                pairs += [(layout, model) for model in (MODELS if on_all or layout == kind else MODELS[:1])]
        for chosen in options(strategy) if telling_size else []:
            made = strategy(**for_options(strategy, chosen), **chosen)
            if getattr(made, "num_stages", 0) > 2:  # the models have two layers: chunks on one rank
                made = strategy(**{**for_options(strategy, chosen), "stages": 1}, **chosen)
            pairs.append((format_parallel([made]), "llama"))
    pairs += sorted(THREE_DIMS | SHARED_SEQUENCES | WHOLE_UNITS | GROUPED_VISITS | WHOLE_EXPERTS | INPUTS_FIRST)
    for outer, inner in sorted(COMPOSES):
        models = MODELS[:1] if is_grid(inner) else MODELS
        pairs += [(f"{of_size(outer, 2)},{smallest(inner)}", model) for model in models]
    return pairs


ELSEWHERE = {
    *SHARED_SEQUENCES,  # tests/strategies/test_context.py has more models
    ("rtp=3[transport=send_receive,visits=1]", "llama"),  # tests/strategies/test_rtp_visits.py
    ("rtp=4[transport=send_receive,visits=2]", "gpt_neox"),
    # tests/conformance/test_buffering.py has all that a ring does again, over each transport.
    ("rtp=3[transport=send_receive]", "llama"),
    ("rtp=3[recompute=none,transport=shared_memory]", "llama"),
    ("rtp=3[recompute=slice,transport=shared_memory]", "llama"),
    ("rtp=3[recompute=all_but_attention,transport=send_receive,buffering=in_place]", "llama"),
    ("osdp=3[memory=4700KiB]", "llama"),  # uneven as with its inner strategy, which is here
    ("tesseract=2x2x1", "llama"),  # of tied weights
    ("tesseract=2x2x1[transport=messages]", "llama"),  # tests/strategies/test_grids.py; here they run along a depth
    ("atp=2x2", "llama"),  # in the other order, and of tied weights
    # Among the invariants, too, in float32: when blocks are computed is no matter of precision, and in float64 each
    # part of a composition is here by itself, or in another one.
    ("rtp=1", "llama"),
    ("single[recompute=block]", "llama"),
    ("ddp=3[recompute=block]", "llama"),
    ("osdp=2[memory=4500KiB]", "qwen3"),
    ("osdp=2[memory=4500KiB,inner=fsdp]", "qwen3"),
    ("rtp=2", "gpt2"),
    ("rtp=2[experts=whole]", "mixtral"),
    ("pp=2,ep=2", "mixtral"),
    ("ddp=2,rtp=2", "llama"),
    ("pp=2,rtp=2", "llama"),  # here with whole experts
    ("rtp=2,megatron=2", "llama"),  # here of GPT-2
    ("ddp=2,fsdp=2", "llama"),  # tests/strategies/test_replicas.py has replicas of shards
    ("ddp=2,summa=2x2", "llama"),  # tests/strategies/test_zero_over_depth.py has replicas of a grid
    ("ddp=2,tesseract=1x1x2", "llama"),
    ("ddp=2,megatron=2", "llama"),  # tests/strategies/test_sequence_parallel.py has replicas of it
}
"""Pairs whose loss and gradients other quick tests hold to one process's."""


def says_new(layout: str, model: str) -> bool:
    """True if loss and gradients of a pair of `more` say what those of others do not.

    Each strategy is held on one rank and on two, and against every model if it cuts computation, too; if ranks run the
    whole model, tied weights are among the invariants, and uneven cuts among the options. Of compositions one model is
    enough, since each of their parts is examined by itself; of options the layouts that change one of them are.
    """
    if (layout, model) in ELSEWHERE:
        return False
    if (layout, model) in WHOLE_UNITS | GROUPED_VISITS | WHOLE_EXPERTS | INPUTS_FIRST:
        return True
    strategies = parse_parallel(layout)
    kind, size = strategies[0].kind, num_ranks(strategies)
    if any(is_pipeline(s.kind) for s in strategies):
        return (layout, model) in PIPELINES
    if len(strategies) > 1:
        return model == MODELS[0]
    if "[" in layout:
        return strategies[0].model_dump() in one_by_one(type(strategies[0]))
    if is_grid(kind):
        # A depth beside sides shows on eight ranks, which tests/strategies/test_zero_over_depth.py has.
        return (model == MODELS[0] and size in (2, 4)) or (size, model) == (4, "qwen3")
    # Ranks that run the whole model compute the same on three ranks and on four.
    runs_whole = not strategies[0].cuts_weights or strategies[0].gathers_weights
    telling = {(2, "gpt_neox")} | (set() if runs_whole else {(3, "qwen3"), (4, "gemma2")})
    return size == 1 or (size, model) in telling


EXAMINED = {
    ("rtp=1", "llama"),
    ("osdp=2[memory=4500KiB]", "qwen3"),
    ("osdp=2[memory=4500KiB,inner=fsdp]", "qwen3"),
    ("rtp=2[experts=whole]", "mixtral"),
    ("rtp=2", "gpt2"),
    ("ddp=2,rtp=2", "llama"),  # replicas around another strategy are shown around rotation
    ("pp=2,ep=2", "mixtral"),  # stages around one, and tokens that travel
    ("rtp=2,megatron=2", "qwen3"),  # slices of parts
}
"""Of the invariants, beside each strategy alone and each value of its options.

Of slices that visit together tests/strategies/test_rtp_visits.py has bytes and a step that breaks off; of sequences
that ranks share tests/strategies/test_context.py has gradients and calls without any; of shards of slices
tests/strategies/test_fsdp_around.py has gradients, bytes at rest, and a pass that breaks off.
"""


def says_new_of_invariants(layout: str, model: str) -> bool:
    """The same of the invariants, which have less to do with the model: tied weights and uneven cuts are enough.

    Each strategy is examined on its fewest ranks, and its options together. They hold whatever the options are, so
    what breaks with one of them breaks beside others too. A depth shows in options of a grid, which then is not
    examined without.
    """
    strategies = parse_parallel(layout)
    kind, size = strategies[0].kind, num_ranks(strategies)
    if (layout, model) in EXAMINED:
        return True
    elsewhere = SHARED_SEQUENCES | WHOLE_UNITS | GROUPED_VISITS | WHOLE_EXPERTS | INPUTS_FIRST
    if len(strategies) > 1 or (layout, model) in elsewhere:
        return False
    if is_pipeline(kind):
        return "[" not in layout and (size, model) == (2, "qwen3")
    if "[" in layout:
        return strategies[0].model_dump() in _examined_options(type(strategies[0]))
    if is_grid(kind):
        return (layout, model) == (smallest(kind), "llama") and not _examined_options(type(strategies[0]))
    return (size, model) == (2, "qwen3") or (kind, model) == ("single", "llama")


def _examined_options(strategy: type[Strategy]) -> list[dict[str, object]]:
    """Fields of a strategy with the options that are examined: of a grid, what is cut over its depth."""
    return [fields for fields in together(strategy) if not is_grid(strategy.kind) or fields.get("zero")]


def for_options(strategy: type[Strategy], chosen: dict[str, object] | None = None) -> dict[str, int]:
    """The size at which options are looked at.

    On three ranks neighbours before and after differ, and the tiny llama's four groups are cut 2 + 1 + 1. What is cut
    over the depth of a grid needs one, and three layers share unevenly.
    """
    if "depth" in strategy.size_fields and (chosen or {}).get("zero"):
        return {"rows": 1, "columns": 1, "depth": 3}
    sizes = {"size": 3, "stages": 2, "shards": 1, "rows": 2, "columns": 2, "depth": 1, "d1": 2, "d2": 2}
    return {name: sizes[name] for name in strategy.size_fields}


def one_by_one(strategy: type[Strategy]) -> list[dict[str, object]]:
    """Fields of a strategy in its layouts of `table` that change one option, and of some more.

    Between them they have every value of each option.
    """
    size = for_options(strategy)
    default = strategy(**size).model_dump()
    # Ranks of tests share a host, so it is what "auto" takes, on grids with every option.
    every = [fields for fields in _with_options(strategy) if not (is_grid(strategy.kind) and _shares(fields))]
    kept = [fields for fields in every if len(fields.items() - default.items()) == 1 and not _shares(fields)]
    return _covering(every, kept, {item for fields in every for item in fields.items()})


def together(strategy: type[Strategy]) -> list[dict[str, object]]:
    """Fields of a strategy in few layouts of `table` that have between them every value that is not its default."""
    size = for_options(strategy)
    every = _with_options(strategy)
    default = strategy(**size).model_dump() | {"transport": "shared_memory"}  # what "auto" takes on one host
    left = {item for fields in every for item in fields.items() if item[0] not in size} - default.items()
    return _covering(every, [], left)


def _with_options(strategy: type[Strategy]) -> list[dict[str, object]]:
    return [strategy(**for_options(strategy, chosen), **chosen).model_dump() for chosen in options(strategy)]


def _shares(fields: dict[str, object]) -> bool:
    return fields.get("transport") == "shared_memory"


def _covering(
    every: list[dict[str, object]], kept: list[dict[str, object]], items: set[tuple[str, object]]
) -> list[dict[str, object]]:
    """Adds to those that are kept, until they have all items, what has most of the others."""
    kept = list(kept)
    left = items - {item for fields in kept for item in fields.items()}
    while left:
        kept.append(max(every, key=lambda fields: len(left & fields.items())))
        left -= kept[-1].items()
    return kept


def cells(pairs: list[tuple[str, str]], *, says_new: Callable[[str, str], bool]) -> list[typing.Any]:
    """The pairs as a test's parameters; those that repeat what others say are slow."""
    return [pair if says_new(*pair) else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


def more() -> list[tuple[str, str]]:
    """Pairs for what takes less time: uneven cuts and tied weights on three and four ranks."""
    sizes = [
        (layout, model)
        for kind in STRATEGIES
        for n, model in ((3, "qwen3"), (4, "gemma2"))
        if (layout := of_size(kind, n))
    ]
    composed = [
        (f"{of_size(outer, 2)},{layout}", "gpt_neox")
        for outer, inner in sorted(COMPOSES)
        if (layout := of_size(inner, 3))
    ]
    return list(dict.fromkeys([*table(), *sizes, *composed]))
