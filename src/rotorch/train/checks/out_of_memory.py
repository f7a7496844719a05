"""Message when memory runs out: the operation and its bytes, all live tensors, the cheapest change that would fit.

[Note: what is alive]
    Python's garbage collector knows every tensor with a name, also in the frames that the error has passed; tensors
    saved for backward are read from autograd's graph, node by node. Weights, gradients, optimizer state and slots are
    known from the model; logits are as wide as the vocabulary; all other saved tensors are activations. Under
    activation checkpointing, reading saved tensors would recompute them: then activations are among "other".

[Note: what would fit]
    Changes are tried from the cheapest on: the same numbers in more passes, then a third more computation, then another
    layout, then more ranks. Where passes can be counted (`counted_memory.py`), which takes some host memory, the need
    is what a step takes at its highest moment beyond what is alive and what is left, and a change saves as much as its
    own highest moment is lower. Elsewhere the need is the failed allocation, and memory that will be allocated later:
    gradients, and the optimizer's state before its first step; the Layouts' formulas give the savings at rest of other
    layouts, and smaller micro-batches and recomputation save parts of the live activations. In a save no tensor of a
    batch is alive, so only memory at rest counts, and the copy from which a background save writes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from rotorch._torch_private import storage_key
from rotorch.core.errors import ConfigError, FinalFailure, RotorchError
from rotorch.core.quantities import format_bytes
from rotorch.core.spec import ModelSpec
from rotorch.core.strategy import Strategy
from rotorch.planner.prediction import Prediction, part_of_rank, predict
from rotorch.process.host_memory import address_space_left_bytes, available_bytes
from rotorch.run_config import BatchSizes
from rotorch.shard.storages import PLAIN, SharedMappings, all_tensors, local_part, owned_bytes
from rotorch.strategies import batch_ranks, format_parallel, num_ranks, parse_parallel
from rotorch.strategies.resize import resized
from rotorch.train.state import TrainState

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, SLOTS, LOGITS, OTHER = CATEGORIES = (
    *("weights", "gradients", "optimizer", "activations", "slots", "logits", "other"),
)
"""As in the ledger of `rotorch bench`."""

_RESERVE_BYTES = 16 << 20
_COUNTING_BYTES = 256 << 20  # of host memory; with less, passes are not counted
_SAVES = (
    "rotorch.train.checkpoint.async_save"  # its functions save, and do nothing else; it cannot be imported from here
)
_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|B)")
_ALLOCATORS = re.compile(r"can't allocate memory|not enough memory|out of memory|std::bad_alloc", re.IGNORECASE)


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that memory has run out: Python's, or of one of torch's allocators.

    An error of rotorch's is none, though it may tell in those words what another rank said: memory is that rank's.
    """
    if isinstance(error, RotorchError):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _ALLOCATORS.search(str(error)) is not None


def asked_bytes(error: BaseException) -> int | None:
    """Returns the bytes of the allocation that failed; None if the error does not say."""
    found = _ASKED.search(str(error))
    return round(float(found[1]) * _UNITS[found[2]]) if found else None


@dataclass
class Running:
    """State that a post-mortem looks at: the rank fills it in while it builds and trains."""

    state: TrainState | None = None


Peaks = Callable[[Sequence[Strategy], BatchSizes], Sequence[float]]
"""Counts the bytes of each rank at the highest moment of a step, under strategies as they are written and a batch."""


@dataclass(frozen=True)
class Share:
    """A rank's share of a run.

    Attributes:
        spec: the model.
        strategies: strategies of the model, as they are written.
        sizes: of the batch.
        rank: this one.
        num_layers: repeated blocks of the model, of which activation checkpointing keeps the inputs; 0 if unknown.
        copies_to_save: True if a save behind the run has copies of all that it writes (`train.async_save`).
        dtype_of_passes: of products, if it is not the weights' own.
        device: of ranks: "cpu" or "cuda".
        peaks: of ranks, if they can be counted.
    """

    spec: ModelSpec
    strategies: tuple[Strategy, ...]
    sizes: BatchSizes
    rank: int
    num_layers: int
    copies_to_save: bool = False
    dtype_of_passes: str | None = None
    device: str = "cpu"
    peaks: Peaks | None = None

    def predicted(self) -> Prediction:
        """The bytes of this rank, by the Layouts."""
        in_passes = [s.at_precision(self.dtype_of_passes).on_device(self.device) for s in self.strategies]
        return predict(self.spec, strategies=in_passes, rank=self.rank)


@contextmanager
def explained_out_of_memory(share: Share) -> Iterator[Running]:
    """Turns an error of memory within the block into a `RankFailure` with a post-mortem. This rank only."""
    running = Running()
    reserve: bytearray | None = bytearray(_RESERVE_BYTES)  # to have something to say it with; takes no pages
    try:
        yield running
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reserve = None
        asked = asked_bytes(error)
        text = "out of memory" if asked is None else f"out of memory: {format_bytes(asked)} more were asked for"
        # What it is explained with may run out of memory itself: then that much is said.
        with suppress(Exception):
            alive = bytes_alive(running.state, vocab_sizes=_vocab_sizes(share.spec))
            where = _innermost_module(error.__traceback__, running.state)
            saving = _is_saving(error.__traceback__)
            device = _device(running.state)
            left, whole, sharers = _left(device, share)
            where = "a save" if saving else where
            text = describe(alive, asked=asked, where=where, left=f"{format_bytes(left)} of {whole}")
            text = f"{text}. {cheapest_change(share, alive, asked=asked, saving=saving, left=left // sharers)}"
        raise FinalFailure(text) from error
    finally:
        del reserve


# ---------------------------------------------------------------- what is alive


def bytes_alive(state: TrainState | None, *, vocab_sizes: frozenset[int] = frozenset()) -> dict[str, int]:
    """Bytes of the tensors of this process by category (see [Note: what is alive])."""
    owned: dict[str, list[Tensor]] = {WEIGHTS: [], GRADIENTS: [], OPTIMIZER: [], SLOTS: []}
    if state is not None:
        held = list(state.model.weights.values())
        owned[WEIGHTS] = [*(weight.local for weight in held), *state.model.sharded.copies()]
        owned[GRADIENTS] = [grad for weight in held if (grad := weight.local_grad) is not None]
        kept = state.optimizer.state.values() if state.optimizer is not None else ()
        owned[OPTIMIZER] = [value for of_weight in kept for value in of_weight.values() if isinstance(value, Tensor)]
        owned[SLOTS] = list(state.model.sharded.slots())
    alive = dict.fromkeys(CATEGORIES, 0)
    alive.update((category, owned_bytes(tensors)) for category, tensors in owned.items())
    seen = {storage_key(local_part(tensor)) for tensors in owned.values() for tensor in tensors}
    mappings = SharedMappings()

    def count(tensor: Tensor, category: str) -> None:
        key, storage = storage_key(tensor), tensor.untyped_storage()
        if key in seen or tensor.device.type == "meta" or mappings.contains(storage):
            return
        seen.add(key)
        is_logits = tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[-1] in vocab_sizes
        alive[LOGITS if is_logits else category] += storage.nbytes()

    known = [tensor for tensor in all_tensors() if tensor.layout is torch.strided]
    if not _computes_again(state):
        for tensor in _kept_for_backward(known):
            count(tensor, ACTIVATIONS)
    for tensor in known:
        count(tensor, OTHER)
    return alive


def _kept_for_backward(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Yields the tensors that autograd keeps for the backward of some tensors."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions if following is not None]
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    found = getattr(node, name)
                except Exception:  # freed by a backward that has passed here, or kept in a way of its own
                    continue
                yield from (t for t in (found if isinstance(found, tuple) else (found,)) if type(t) in PLAIN)


def _computes_again(state: TrainState | None) -> bool:
    return state is not None and any(getattr(s, "recompute", "none") == "block" for s in state.model.strategies)


def _vocab_sizes(spec: ModelSpec) -> frozenset[int]:
    return frozenset(weight.shape[0] for unit in spec.units if unit.logits for weight in unit.weights if weight.shape)


def _innermost_module(traceback: TracebackType | None, state: TrainState | None) -> str:
    """Names the module in whose forward an error arose, if it was one's."""
    found: nn.Module | None = None
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        found = owner if isinstance(owner, nn.Module) else found
        traceback = traceback.tb_next
    if found is None or state is None:
        return ""
    name = next((name for name, module in state.model.module.named_modules() if module is found), "")
    return f"{name!r} ({type(found).__name__})" if name else ""


def _is_saving(traceback: TracebackType | None) -> bool:
    """True if an error arose where a checkpoint is written, perhaps by the thread of an async save."""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_globals.get("__name__") == _SAVES:
            return True
        traceback = traceback.tb_next
    return False


# ---------------------------------------------------------------- what is said


def describe(alive: Mapping[str, int], *, asked: int | None, where: str, left: str) -> str:
    """Says what asked for memory and what has it, as a sentence without its end."""
    parts = ", ".join(f"{category} {format_bytes(alive[category])}" for category in CATEGORIES)
    amount = format_bytes(asked) if asked is not None else "some"
    text = f"out of memory: {amount} more {'was' if asked is None else 'were'} asked for"
    text += f" by {where}" if where else ""
    return f"{text}, and {left} are left. Alive in tensors: {parts}"


def _left(device: torch.device, share: Share) -> tuple[int, str, int]:
    """Free bytes, the memory they belong to, and the number of ranks that share it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, f"the GPU's {format_bytes(total)}", 1
    if (left := address_space_left_bytes()) is not None:
        return left, "this process's address space (ulimit -v)", 1
    here = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks(share.strategies)))
    return available_bytes(), "this machine's memory", here


def _host_bytes_left() -> int:
    left = address_space_left_bytes()
    return available_bytes() if left is None else min(left, available_bytes())


def _device(state: TrainState | None) -> torch.device:
    return state.model.device if state is not None else torch.device("cpu")


# ---------------------------------------------------------------- what would fit


@dataclass(frozen=True)
class Change:
    """Something to write in the run's configuration, and about how many bytes that saves on this rank."""

    write: str
    saves_bytes: int


def cheapest_change(
    share: Share, alive: Mapping[str, int], *, asked: int | None, saving: bool = False, left: int = 0
) -> str:
    """Says what to write instead, as a sentence without its end (see [Note: what would fit]).

    Args:
        share: of this rank.
        alive: bytes of its tensors by category.
        asked: bytes of the allocation that failed, if they are known.
        saving: it failed in a save.
        left: bytes that there still are for this rank.
    """
    if share.peaks is not None and not saving and _host_bytes_left() >= _COUNTING_BYTES:
        with suppress(Exception):  # passes that cannot be counted
            return _cheapest_counted(share, share.peaks, alive, asked=asked or 0, left=left)
    ledger = share.predicted().ledger
    needed = (asked or 0) + sum(max(0, (ledger[name] or 0) - alive[name]) for name in (GRADIENTS, OPTIMIZER))
    found = changes(share, alive, asked=asked or 0, saving=saving)
    return _cheapest_of(found, needed=needed, missing=f"{format_bytes(needed)} are missing with what is to come")


def _cheapest_counted(share: Share, peaks: Peaks, alive: Mapping[str, int], *, asked: int, left: int) -> str:
    here = round(peaks(share.strategies, share.sizes)[share.rank])
    to_come = max(asked, here - sum(alive.values()))
    needed = to_come - left if to_come > left else to_come  # else what is left is in pieces, or not for this rank
    missing = f"{format_bytes(needed)} are missing"
    if here - sum(alive.values()) >= asked:
        missing += f": a step takes {format_bytes(here)} at its highest moment"
    return _cheapest_of(counted_changes(share, peaks, here=here), needed=needed, missing=missing)


def _cheapest_of(found: Iterator[Change], *, needed: int, missing: str) -> str:
    """Says which is the first of some changes that saves enough; `missing`: says how much that is."""
    useful = [change for change in found if change.saves_bytes > 0]
    missing = missing if needed else "How much is missing is not known"
    if not useful:
        return f"{missing}, and no setting saves any: more memory is needed"
    most = max(useful, key=lambda change: change.saves_bytes)
    if not needed:
        return f"{missing}. Most is saved by {most.write} (about {format_bytes(most.saves_bytes)} here)"
    for change in useful:
        if change.saves_bytes >= needed:
            return (
                f"{missing}. Cheapest change that fits: {change.write} "
                f"(saves about {format_bytes(change.saves_bytes)} here)"
            )
    return (
        f"{missing}, and no single change saves that much. Most is saved "
        f"by {most.write} (about {format_bytes(most.saves_bytes)} here)"
    )


def counted_changes(share: Share, peaks: Peaks, *, here: float) -> Iterator[Change]:
    """Changes of the run that lower the highest moment of a rank, the cheapest first.

    Args:
        share: of the rank.
        peaks: counts them.
        here: the rank's highest moment as it is.
    """
    for other in _alternatives(share):
        with suppress(Exception):  # one that cannot be counted says nothing of others
            found = peaks(other.strategies, other.sizes)
            # Another layout has other ranks, and has to fit on each.
            highest = max(found) if other.is_layout else found[share.rank]
            yield Change(other.write, round(here - highest))


def changes(share: Share, alive: Mapping[str, int], *, asked: int, saving: bool = False) -> Iterator[Change]:
    """Changes of the run that save memory on a rank, by formulas, the cheapest first (see [Note: what would fit])."""
    passing = 0 if saving else alive[ACTIVATIONS] + alive[LOGITS] + asked
    if saving and share.copies_to_save:
        saved = alive[WEIGHTS] + alive[OPTIMIZER] - share.predicted().copies_bytes  # copies for passes are not saved
        yield Change("train.async_save=false", saved)
    here = _at_rest(share)
    for other in _alternatives(share):
        saved = passing - passing * other.sizes.micro_batch // share.sizes.micro_batch
        if other.is_layout:
            with suppress(ConfigError):
                at_rest = here - _at_rest(replace(share, strategies=other.strategies))
                if at_rest > 0:
                    yield Change(other.write, at_rest + saved)
        elif other.strategies != share.strategies:
            if not saving:
                yield Change(other.write, alive[ACTIVATIONS] - alive[ACTIVATIONS] // _num_layers(share))
        elif passing:
            yield Change(other.write, saved)


@dataclass(frozen=True)
class _Alternative:
    """Another way to run.

    Attributes:
        write: in the run's configuration.
        strategies: of the model, as they are written.
        sizes: of the batch, as large over all ranks as now.
        is_layout: another layout, not the same one with an option more.
    """

    write: str
    strategies: tuple[Strategy, ...]
    sizes: BatchSizes
    is_layout: bool = False


def _alternatives(share: Share) -> Iterator[_Alternative]:
    """Yields other ways to run, the cheapest first."""
    sizes, strategies = share.sizes, share.strategies
    for micro_batch in range(sizes.micro_batch - 1, 0, -1):
        if sizes.micro_batch % micro_batch == 0:
            accumulation = sizes.accumulation * sizes.micro_batch // micro_batch
            write = f"train.micro_batch={micro_batch} train.accumulation={accumulation}"
            yield _Alternative(write, strategies, BatchSizes(micro_batch, accumulation, sizes.batch_ranks))
    *outer, innermost = strategies
    option = {"rtp": "slice"}.get(innermost.kind, "block")
    if _num_layers(share) > 1 and getattr(innermost, "recompute", option) != option:
        again = (*outer, type(innermost).model_validate({**innermost.model_dump(), "recompute": option}))
        yield _Alternative(f"parallel.layout={format_parallel(again)}", again, sizes)
    for other in _other_layouts(strategies):
        try:
            for strategy in other:
                strategy.check(share.spec)
            there = _same_global_batch(share, strategies=other)
        except ConfigError:
            continue
        write = f"parallel.layout={format_parallel(other)}"
        if (there.micro_batch, there.accumulation) != (sizes.micro_batch, sizes.accumulation):
            write += f" train.micro_batch={there.micro_batch} train.accumulation={there.accumulation}"
        if num_ranks(other) != num_ranks(strategies):
            write += f" --nproc {num_ranks(other)}"
        yield _Alternative(write, other, there, is_layout=True)


def _other_layouts(strategies: tuple[Strategy, ...]) -> Iterator[tuple[Strategy, ...]]:
    """Yields alternatives to a layout: on its ranks, then on twice as many. Each once."""
    size = num_ranks(strategies)
    found = [parse_parallel(f"{kind}={size}") for kind in ("rtp", "fsdp")] if size > 1 else []
    # Another batch per rank would be another amount of activations, of which nothing is known.
    found = [other for other in found if batch_ranks(other) == batch_ranks(strategies)]
    with suppress(ConfigError):  # layers are written for each stage, and there would be another number of them
        if (larger := resized(strategies, num_ranks=2 * size)) is not None:
            found.append(larger)
    found.append(parse_parallel(f"rtp={2 * size}"))
    yield from dict.fromkeys(found)


def _same_global_batch(share: Share, *, strategies: Sequence[Strategy]) -> BatchSizes:
    """A batch under another layout that is as large over all ranks, since a run goes on with no other.

    Its micro-batches are no larger than now, and as large as that allows.

    Raises:
        ConfigError: there is none.
    """
    per_rank, rest = divmod(share.sizes.global_batch, batch_ranks(strategies))
    for micro_batch in range(share.sizes.micro_batch, 0, -1):
        if rest == 0 and per_rank % micro_batch == 0:
            sizes = BatchSizes(micro_batch, per_rank // micro_batch, batch_ranks(strategies))
            with suppress(ConfigError):
                for strategy in strategies:
                    strategy.check_micro_batches(sizes.accumulation)
                return sizes
    raise ConfigError(f"no batch of {share.sizes.global_batch} under {format_parallel(strategies)}")


def _num_layers(share: Share) -> int:
    """Repeated blocks of the model that this rank computes: of a pipeline those of its stages."""
    spec = part_of_rank(share.spec, strategies=share.strategies, rank=share.rank)
    layers = {spec.order.layer_number(weight.name) for weight in spec.weights}
    return len(layers & set(range(len(spec.order.layers)))) or share.num_layers


def _at_rest(share: Share) -> int:
    found = share.predicted()
    return sum(found.ledger[name] or 0 for name in (WEIGHTS, GRADIENTS, OPTIMIZER)) + found.transient_bytes
