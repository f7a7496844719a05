"""One model trained under a layout, saved, and trained on under another: what each side does, and what it finds.

Everything is float64, so that a wrong sum and rounding do not look alike. What was written is read a second time
here, past rotorch's own reader: each file is safetensors, and a tensor's name says which box of the whole it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor

from rotorch.parallelize import load_step_code, parallelize
from rotorch.run_config import OptimizerSection
from rotorch.shard.materialize import on_meta
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.batches import share_of
from rotorch.testing.ranks import run_ranks
from rotorch.testing.reference import plain_config
from rotorch.testing.subjects import CausalLM, compute_exactly
from rotorch.train.checkpoint.saving import load, save
from rotorch.train.optim import make_optimizer
from rotorch.train.state import TrainState

BAR = 1e-10
"""On the relative difference of losses, as of all comparisons in float64."""

STEPS = 2
"""Before the save, and after it."""

_CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "tiny"
_VOCAB_SIZE = 320  # of all tiny models, at least
_NUM_ROWS, _NUM_TOKENS, _MICRO_BATCHES = 24, 8, 2
_KEYS = {"model/": "weight", "optimizer/exp_avg/": "exp_avg", "optimizer/exp_avg_sq/": "exp_avg_sq"}


@dataclass(frozen=True)
class Written:
    """A checkpoint, and the losses of the run that wrote it: `before` the save, and undisturbed `after` it."""

    path: Path
    before: list[float]
    after: list[float]


@dataclass(frozen=True)
class Cell:
    """Result of reading one layout's checkpoint under another.

    Attributes:
        error: largest relative difference of the losses after it from those of the run that wrote it.
        wrong: names of weights and moments that are not to the bit what was written, or that no rank holds whole.
    """

    error: float
    wrong: tuple[str, ...]

    @property
    def is_exact(self) -> bool:
        return self.error <= BAR and not self.wrong


def matrix(
    layouts: Sequence[str], directory: Path, *, readers: Literal["next", "others", "all"] = "all", kind: str = "qwen3"
) -> dict[tuple[str, str], Cell]:
    """Saves under each layout, and goes on from each save under other ones; by (written by, read by).

    Ranks are forked once per number of ranks to write, and once to read.

    Args:
        layouts: the layouts.
        directory: of the checkpoints.
        readers: layouts that read a checkpoint: the one after that which wrote it, all others, or that one too.
        kind: of the model, one of `configs/tiny`; qwen3 has tied weights, and norms inside attention.
    """
    written: dict[str, Written] = {}
    for size, group in _by_size(layouts).items():
        written.update(run_ranks(_write, group, directory, kind, num_ranks=size, timeout_s=1800.0)[0])
    undisturbed = next(iter(written.values()))
    for layout, each in written.items():  # all of them are the same run
        if _error([*each.before, *each.after], [*undisturbed.before, *undisturbed.after]) > BAR:
            raise AssertionError(f"{layout} does not train as {next(iter(written))} does")
    whole = {layout: whole_tensors(each.path) for layout, each in written.items()}
    cells: dict[tuple[str, str], Cell] = {}
    for size, group in _by_size(layouts).items():
        pairs = [(source, layout) for layout in group for source in _sources(layouts, layout, readers)]
        found = run_ranks(_read, pairs, written, whole, kind, num_ranks=size, timeout_s=1800.0)
        for pair in found[0]:
            error = max(_error(of_rank[pair][0], written[pair[0]].after) for of_rank in found)
            wrong = {name for of_rank in found for name in of_rank[pair][1]}
            boxes = [of_rank[pair][2] for of_rank in found]
            cells[pair] = Cell(error, tuple(sorted(wrong | _not_covered(boxes, whole[pair[0]]))))
    return cells


def _by_size(layouts: Sequence[str]) -> dict[int, list[str]]:
    groups: dict[int, list[str]] = {}
    for layout in layouts:
        groups.setdefault(num_ranks(parse_parallel(layout)), []).append(layout)
    return groups


def _sources(layouts: Sequence[str], layout: str, readers: str) -> Sequence[str]:
    if readers == "next":
        return [layouts[layouts.index(layout) - 1]]
    return [source for source in layouts if source != layout or readers == "all"]


def _error(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


# ---------------------------------------------------------------- in each rank


def build(layout: str, kind: str) -> TrainState:
    """The model with the same first values under every layout, and the optimizer that `rotorch train` makes."""
    load_step_code(strategy.kind for strategy in parse_parallel(layout))
    config = plain_config(_CONFIGS / f"{kind}.json", layers=2)
    compute_exactly(config)
    with on_meta():
        module = widen(CausalLM(config).build()).train()
    model = parallelize(module, layout, device="cpu").materialize(seed=0)
    return TrainState(model=model, optimizer=make_optimizer(model, settings=OptimizerSection(lr=1e-2)), seed=11)


def train(state: TrainState) -> list[float]:
    """Takes `STEPS` steps on batches that are a function of the step; returns the losses."""
    losses, model = [], state.model
    assert state.optimizer is not None
    for _ in range(STEPS):
        ids = torch.randint(_VOCAB_SIZE, (_NUM_ROWS, _NUM_TOKENS), generator=torch.Generator().manual_seed(state.step))
        batch = {"input_ids": ids, "labels": ids}
        mine = share_of(
            batch, share=model.batch_rank, num_shares=model.num_batch_ranks, num_micro_batches=_MICRO_BATCHES
        )
        with exact_arithmetic():
            losses.append(float(model.forward_backward(mine)))
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.step += 1
        state.tokens += _NUM_ROWS * _NUM_TOKENS
    return losses


def _write(layouts: Sequence[str], directory: Path, kind: str) -> dict[str, Written]:
    written = {}
    for layout in layouts:
        state = build(layout, kind)
        before = train(state)
        path = save(directory / layout, state, keep=1)
        written[layout] = Written(path, before, train(state))
        state.model.close()
    return written


def _read(
    pairs: Sequence[tuple[str, str]], written: dict[str, Written], whole: dict[str, dict[str, Tensor]], kind: str
):
    found = {}
    for source, layout in pairs:
        state = build(layout, kind)
        load(written[source].path, state)
        wrong, boxes = _compare(state, whole[source])
        if (state.step, state.tokens) != (STEPS, STEPS * _NUM_ROWS * _NUM_TOKENS):
            wrong.append("step and tokens")
        found[source, layout] = (train(state), wrong, boxes)
        state.model.close()
    return found


def _compare(state: TrainState, whole: dict[str, Tensor]) -> tuple[list[str], dict[str, set[tuple[int, ...]]]]:
    """Chunks of this rank that differ by a bit from those of whole tensors, and the boxes that it holds."""
    wrong, boxes = [], {}
    assert state.optimizer is not None
    for name, held in state.model.weights.items():
        boxes[name] = {(*chunk.offsets, *chunk.sizes) for chunk in held.chunks}
        moments = state.optimizer.state[held.local_parameter]
        for prefix, key in _KEYS.items():
            local = held.local if key == "weight" else moments[key]
            for chunk in held.chunks:
                if not torch.equal(chunk.of_local(local), chunk.of_whole(whole[prefix + name])):
                    wrong.append(prefix + name)
        if float(moments["step"]) != STEPS:
            wrong.append(f"optimizer/step/{name}")
    return wrong, boxes


# ---------------------------------------------------------------- past rotorch's own reader


def whole_tensors(path: Path) -> dict[str, Tensor]:
    """Weights and moments of a checkpoint, put together from its files by the boxes in their tensors' names."""
    parts: dict[str, list[tuple[list[slice], Tensor]]] = {}
    for file in sorted(path.glob("rank-*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                match = re.fullmatch(r"(?P<name>[^\[]+)(\[(?P<box>[\d:,]+)\])?", name)
                box = [slice(*map(int, r.split(":"))) for r in match["box"].split(",")] if match["box"] else []
                parts.setdefault(match["name"], []).append((box, opened.get_tensor(name)))
    whole = {}
    for name, chunks in parts.items():
        if not name.startswith(tuple(_KEYS)):
            continue
        if not chunks[0][0]:
            whole[name] = chunks[0][1]
            continue
        shape = [max(box[dim].stop for box, _ in chunks) for dim in range(chunks[0][1].dim())]
        tensor = torch.full(shape, math.nan, dtype=chunks[0][1].dtype)
        for box, part in chunks:
            tensor[tuple(box)] = part
        assert not tensor.isnan().any(), f"{path}: {name} has holes"
        whole[name] = tensor
    return whole


def _not_covered(by_rank: list[dict[str, set[tuple[int, ...]]]], whole: dict[str, Tensor]) -> set[str]:
    """Weights of which the ranks do not hold each element between them."""
    missing = set()
    for name, tensor in whole.items():
        if name.startswith("model/"):
            boxes = set().union(*(boxes.get(name.removeprefix("model/"), set()) for boxes in by_rank))
            if sum(math.prod(box[tensor.dim() :]) for box in boxes) != tensor.numel():
                missing.add(name)
    return missing
