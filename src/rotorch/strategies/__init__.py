"""The strategies, their allowed compositions, and the grammar of `--parallel`. No torch.

Grammar: `kind=size` joined by commas, outermost (slowest links) first; options in brackets:
`ddp=2,rtp=4[recompute=slice]`. The size of a grid is written by its axes, `kind=2x4`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, combinations, pairwise
from typing import Any

from pydantic import ValidationError

from rotorch.core.errors import ConfigError, nearest
from rotorch.core.shared_context import SequenceRanks
from rotorch.core.spec import ModelSpec
from rotorch.core.stage_balance import LayerCost
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.strategies.atp.plan import ATP
from rotorch.strategies.ddp.plan import DDP
from rotorch.strategies.fsdp.plan import FSDP
from rotorch.strategies.installed import KIND, with_installed
from rotorch.strategies.megatron.plan import Megatron
from rotorch.strategies.pp.plan import PP
from rotorch.strategies.rtp.plan import RTP
from rotorch.strategies.single.plan import Single
from rotorch.strategies.summa.plan import SUMMA
from rotorch.strategies.tesseract.plan import Tesseract
from rotorch.strategies.zeropp.plan import ZeroPP

STRATEGIES: dict[str, type[Strategy]] = with_installed(
    (Single, DDP, FSDP, RTP, Megatron, ATP, SUMMA, Tesseract, PP, ZeroPP)
)
"""All strategies by kind: those here, and those of other packages (`installed.py`)."""

COMPOSES: frozenset[tuple[str, str]] = frozenset(
    {
        ("ddp", "fsdp"),
        ("ddp", "rtp"),
        ("ddp", "megatron"),
        ("ddp", "atp"),
        ("ddp", "summa"),
        ("ddp", "tesseract"),
        ("ddp", "pp"),
        ("ddp", "zeropp"),
        ("fsdp", "megatron"),
        ("rtp", "megatron"),
        ("pp", "fsdp"),
        ("pp", "rtp"),
        ("pp", "megatron"),
        ("pp", "atp"),
        ("pp", "summa"),
        ("pp", "tesseract"),
        ("zeropp", "rtp"),
    }
)
"""(outer, inner) pairs that work and are tested; every other composition is a ConfigError."""

TSP = "tsp"
"""Short for a ring whose ranks all share a sequence: `tsp=4` is `rtp=4[context=4]`."""

EP = "ep"
"""Short for ranks that keep whole experts, to which tokens travel: `ep=4` is `fsdp=4[experts=whole]`."""

OSDP = "osdp"
"""Short for units that are whole on every rank within a budget: `osdp=4[memory=2GiB]` is `rtp=4[memory=2GiB]`."""

AUTO = "auto"
"""Of a layout: all of it is the planner's choice; of `atp=auto`: the sizes of the grid are."""

_ITEM = re.compile(rf"^(?P<kind>{KIND})(?:=(?P<size>[^\[\]]*))?(?:\[(?P<options>[^\[\]]*)\])?$")


def parse_parallel(text: str) -> tuple[Strategy, ...]:
    """Reads `--parallel` text, e.g. `"ddp=2,rtp=4[recompute=slice]"`, into strategies, outermost first.

    Raises:
        ConfigError: for an unknown kind or option, a size that is not a positive number, or a composition not in
            `COMPOSES`.
    """
    items = _items_of(text)
    strategies = written_out(_parse_item(item, text=text) for item in items)
    check_composition(strategies)
    return strategies


def to_be_planned(text: str) -> bool:
    """True if a layout leaves a choice to the planner: `auto`, or the grid of `atp=auto`."""
    return text == AUTO or any(_is_open_grid(item) for item in _items_of(text))


def with_grids(text: str, *, ranks: int) -> tuple[str, ...]:
    """The layouts that one with `atp=auto` stands for on a number of ranks: every grid, cut in both orders.

    Raises:
        ConfigError: the other strategies of the layout leave no ranks for a grid.
    """
    items = _items_of(text)
    opens = [number for number, item in enumerate(items) if _is_open_grid(item)]
    if len(opens) != 1:
        raise ConfigError(f"parallel: {text!r} has {len(opens)} grids to be chosen. Write atp=auto once")
    (place,) = opens
    others = num_ranks([_parse_item(item, text=text) for number, item in enumerate(items) if number != place])
    inside, rest = divmod(ranks, others)
    if rest or not inside:
        raise ConfigError(f"parallel: {text!r}: its other sizes are {others} ranks, which do not divide {ranks}")
    options = (_ITEM.match(items[place]) or {"options": ""})["options"] or ""
    ways = (options,) if "order" in options else (options, ",".join(filter(None, (options, "order=row_first"))))
    # 1 x n is n x 1 in the other order.
    sides = range(1, inside + 1 if "order" in options or inside == 1 else inside)
    grids = [f"{inside // side}x{side}" for side in sides if inside % side == 0]
    return tuple(
        ",".join([*items[:place], f"{ATP.kind}={grid}{f'[{way}]' if way else ''}", *items[place + 1 :]])
        for grid in grids
        for way in ways
    )


def _items_of(text: str) -> list[str]:
    return [item.strip() for item in re.split(r",(?![^\[]*\])", text)]


def _is_open_grid(item: str) -> bool:
    match = _ITEM.match(item)
    return match is not None and match["kind"] == ATP.kind and match["size"] == AUTO


def written_out(strategies: Iterable[Strategy]) -> tuple[Strategy, ...]:
    """The same strategies, with abbreviations of several (`zeropp=2x4[inner=rtp]`) written out."""
    each = (parse_parallel(strategy.short_for) if strategy.short_for else (strategy,) for strategy in strategies)
    return tuple(chain.from_iterable(each))


def check_composition(strategies: Sequence[Strategy]) -> None:
    """Raises `ConfigError` unless every neighbouring (outer, inner) pair is in `COMPOSES`."""
    if not strategies:
        raise ConfigError("parallel: no strategy given. Write for example 'single' or 'rtp=2'")
    for outer, inner in pairwise(strategies):
        if (outer.kind, inner.kind) not in COMPOSES:
            known = ", ".join(f"{o}=..,{i}=.." for o, i in sorted(COMPOSES))
            raise ConfigError(f"parallel: '{outer},{inner}' cannot be composed. Compositions that work: {known}")
    for outer, inner in combinations(strategies, 2):
        outer.check_around(inner)


def for_batch(
    strategies: Sequence[Strategy],
    spec: ModelSpec,
    *,
    batch: MicroBatch,
    num_micro_batches: int,
    costs: Callable[[], Sequence[LayerCost] | None] | None = None,
) -> tuple[Strategy, ...]:
    """The same strategies for a run's batch: `pp=2[rank_memory=2GiB]` becomes `pp=2[layers=3-5]`.

    Args:
        strategies: outermost first.
        spec: the model.
        batch: one micro-batch of one rank.
        num_micro_batches: of a step.
        costs: gives those of the model's layers, if an option asks for it; None: they are estimated.

    Raises:
        ConfigError: options ask for a step that this batch does not allow.
    """
    found = []
    for number, strategy in enumerate(strategies):
        how: dict[str, Any] = {"batch": batch, "num_micro_batches": num_micro_batches}
        if isinstance(strategy, StageStrategy):
            how["costs"] = costs
        found.append(strategy.for_batch(spec, inside=strategies[number + 1 :], **how))
    return tuple(found)


def as_they_run(
    strategies: Sequence[Strategy], *, transport: str | None, within: str | None, num_hosts: int | None = None
) -> tuple[Strategy, ...]:
    """The same strategies with the transports that "auto" came to.

    Args:
        strategies: outermost first.
        transport: of the innermost, or of one that holds the model for it, too; None: it has no choice.
        within: of the innermost one then.
        num_hosts: that `transport` goes over, where it goes by hosts.
    """

    def over(strategy: Strategy, transport: str | None, num_hosts: int | None = None) -> Strategy:
        if transport is None or getattr(strategy, "transport", None) != "auto":
            return strategy
        return strategy.model_copy(
            update={"transport": transport} | ({} if num_hosts is None else {"hosts": num_hosts})
        )

    *outer, inner = strategies
    if within is None:
        return (*outer, over(inner, transport, num_hosts))
    *outer, around = outer
    return (*outer, over(around, transport, num_hosts), over(inner, within))


def format_parallel(strategies: Sequence[Strategy]) -> str:
    """The inverse of `parse_parallel`."""
    return ",".join(str(s) for s in strategies)


def num_ranks(strategies: Sequence[Strategy]) -> int:
    """Number of ranks that the strategies need together."""
    total = 1
    for strategy in strategies:
        total *= strategy.num_ranks
    return total


def batch_ranks(strategies: Sequence[Strategy]) -> int:
    """Number of shares of a global batch: of ranks that see different data; those that share a sequence count once."""
    total = 1
    for strategy in strategies:
        for axis in strategy.batch_axes:
            total *= strategy.axes[axis] // strategy.context_axes.get(axis, 1)
    return total


def sequence_ranks(strategies: Sequence[Strategy]) -> SequenceRanks:
    """Ranks that share a sequence, each with a part of its tokens; one strategy of a layout at most has some."""
    return next((strategy.sequence_ranks for strategy in strategies if strategy.context_axes), SequenceRanks())


def context_ranks(strategies: Sequence[Strategy]) -> int:
    """Number of ranks that share a sequence."""
    return sequence_ranks(strategies).num_ranks


def check_compiled(strategies: Sequence[Strategy], *, recorded: bool = False) -> None:
    """Raises `ConfigError` if a strategy compiles nothing, for `compile=True`; or, if `recorded`, records nothing."""
    for strategy in strategies:
        if strategy.not_compiled:
            raise ConfigError(f"compile: {strategy}: {strategy.not_compiled}. Leave compile out")
        if isinstance(strategy, StageStrategy) and strategy.cuts_inside:
            raise ConfigError(
                f"compile: {strategy}: layers that are cut inside run with other modules in the place of a half. Write "
                "whole numbers of layers, or leave compile out"
            )
        if recorded and (strategy.not_recorded or not any(s.slices_visit for s in strategies)):
            raise ConfigError(
                f"compile = 'reduce-overhead': {strategy}: {strategy.not_recorded or 'it has no slices that visit'}. "
                "Write compile = true, or rtp"
            )


def cuts_features(strategies: Sequence[Strategy]) -> bool:
    """Returns True if activations are cut along their features; a model's description must then have these cuts."""
    return any(strategy.feature_axes for strategy in strategies)


def cuts_tokens(strategies: Sequence[Strategy]) -> bool:
    """Returns True if activations are cut along the sequence, for which a model must be tried out."""
    return any(strategy.token_axes for strategy in strategies)


def cuts_context(strategies: Sequence[Strategy]) -> bool:
    """Returns True if ranks share sequences; a model must be tried out, and is described for it."""
    return any(strategy.context_axes for strategy in strategies)


def _parse_item(item: str, *, text: str) -> Strategy:
    match = _ITEM.match(item)
    if match is None:
        raise ConfigError(f"parallel: cannot read {item!r} in {text!r}. Write kind=size, e.g. rtp=2 or ddp=2,rtp=4")
    kind, size, options = match["kind"], match["size"], match["options"]
    if kind == TSP:
        if "context" in (option.partition("=")[0].strip() for option in (options or "").split(",")):
            raise ConfigError(f"parallel: {item!r}: all ranks of tsp share a sequence. Write rtp={size}[context=..]")
        kind, options = "rtp", ",".join(filter(None, (options, f"context={size}")))
    if kind == EP:
        if "experts" in (option.partition("=")[0].strip() for option in (options or "").split(",")):
            raise ConfigError(f"parallel: {item!r}: ranks of ep have whole experts. Write ep={size}, or fsdp={size}")
        kind, options = "fsdp", ",".join(filter(None, (options, "experts=whole")))
    if kind == OSDP:
        kind, options = _osdp(size, options or "", item=item)
    if kind not in STRATEGIES:
        known = [*STRATEGIES, TSP, EP, OSDP]
        raise ConfigError(f"parallel: unknown strategy {kind!r}{nearest(kind, known=known)}. Known: {', '.join(known)}")
    cls = STRATEGIES[kind]
    fields: dict[str, object] = {}
    if cls.size_fields:
        fields.update(_sizes(size, item=item, cls=cls))
    elif size is not None:
        raise ConfigError(f"parallel: {kind} takes no size, got {item!r}. Write {kind}")
    for option in filter(None, (options or "").split(",")):
        name, equals, value = (part.strip() for part in option.partition("="))
        known = [f for f in cls.model_fields if f not in cls.size_fields]
        if not equals or name not in known:
            has = f"It has: {', '.join(known)}" if known else "It has none"
            raise ConfigError(f"parallel: {kind} has no option {name!r}{nearest(name, known=known)}. {has}")
        fields[name] = value
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        if not where:  # of the whole strategy
            raise ConfigError(f"parallel: {item!r}: {first['msg'].removeprefix('Value error, ')}") from None
        raise ConfigError(f"parallel: {item!r}: {where}: {first['msg']}, got {first['input']!r}") from None


def _osdp(size: str | None, options: str, *, item: str) -> tuple[str, str]:
    """Kind and options of the strategy that holds the units which are not whole."""
    inner, others, has_memory = "rtp", [], False
    for option in filter(None, options.split(",")):
        name, _, value = (part.strip() for part in option.partition("="))
        has_memory = has_memory or name == "memory"
        if name != "inner":
            others.append(option)
        elif value in ("rtp", "fsdp"):
            inner = value
        else:
            raise ConfigError(f"parallel: {item!r}: inner={value} cuts no units. Write inner=rtp or inner=fsdp")
    if not has_memory:
        more = f",inner={inner}" if inner != "rtp" else ""
        raise ConfigError(
            f"parallel: {item!r} has no budget for units that are whole. Write osdp={size or 2}[memory=2GiB{more}]"
        )
    return inner, ",".join(others)


def _sizes(text: str | None, *, item: str, cls: type[Strategy]) -> dict[str, int]:
    """The fields of a size: one number, or the axes of a grid joined by "x"."""
    parts = [] if text is None else text.split("x")
    if len(parts) == len(cls.size_fields) and all(re.fullmatch(r"[0-9]+", p) and int(p) > 0 for p in parts):
        return dict(zip(cls.size_fields, map(int, parts), strict=True))
    example = f"{cls.kind}={'x'.join('2' * len(cls.size_fields))}"
    if len(cls.size_fields) == 1:
        raise ConfigError(f"parallel: {item!r} needs a positive number of ranks. Write for example {example}")
    names = " x ".join(cls.size_fields)
    if text == AUTO and cls is ATP:
        raise ConfigError(
            f"parallel: {item!r}: only `rotorch train` and `rotorch plan` choose a grid, by the links of a cluster. "
            f"Write its sizes, {names}, for example {example}"
        )
    raise ConfigError(f"parallel: {item!r} needs the sizes of a grid, {names}. Write for example {example}")
