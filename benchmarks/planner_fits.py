"""Random layouts under a hard limit of memory: 5 % more than predicted must do, and 10 % less must not.

    python benchmarks/planner_fits.py [--cases 50] [--seed 0] [--record benchmarks/results/planner-fits.json]

[Note: limit]
    Every rank is a process in a control group of its own, whose limit the kernel enforces: on pages of tensors, of
    shared memory that the rank has taken, and of all else. A group counts what a process takes from when it enters, so
    a rank enters when it has trained a tiny model of the same kind: imports, threads and buffers of libraries are there
    then. glibc is told to give back what is freed: memory that it keeps would be the allocator's, not the layout's. It
    needs version 1 of control groups, mounted, and the right to make one.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from planner_bench import planned_task
from rich.progress import track

from rotorch.bench.contender import UnderLayout
from rotorch.bench.record import describe_origin
from rotorch.bench.task import Task
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.models.hf import config_from_dict
from rotorch.planner.search import judged
from rotorch.run_config import OptimizerSection
from rotorch.strategies import batch_ranks, num_ranks, parse_parallel
from rotorch.testing.ranks import run_ranks

ENOUGH, TOO_LITTLE = 1.05, 0.90
"""Of the predicted bytes."""

LEAST, MOST = 200e6, 800e6
"""Predicted bytes of a rank. What processes take beside tensors, a few MB, is not to decide."""

GROUPS = Path("/sys/fs/cgroup/memory")

LAYOUTS = (
    *("single", "ddp=2", "ddp=2[recompute=block]", "fsdp=2", "fsdp=2[recompute=block]", "fsdp=2[reshard=false]"),
    *("rtp=2", "rtp=2[recompute=none]", "rtp=2[recompute=slice]", "rtp=2[transport=send_receive]", "megatron=2"),
    *("megatron=2[sequence_parallel=true]", "pp=2", "pp=2[recompute=block]", "ddp=2,rtp=2", "rtp=2,megatron=2"),
    *("pp=2,fsdp=2", "ddp=2,megatron=2", "fsdp=2,megatron=2"),
)

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True},
    "gpt_neox": {"hidden_act": "gelu", "tie_word_embeddings": False},
    "gemma2": {"sliding_window": 64},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "grouped_mm"},
}

_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Case:
    """A model and a batch under a layout, and what was predicted.

    Attributes:
        task: model and batch.
        parallel: the layout.
        predicted_bytes: of the rank that holds most.
    """

    task: Task
    parallel: str
    predicted_bytes: float


def cases(*, seed: int) -> Iterator[Case]:
    """Random cases of that size, without end."""
    draw = random.Random(seed)
    while True:
        kind, parallel = draw.choice(list(KINDS)), draw.choice(LAYOUTS)
        strategies = parse_parallel(parallel)
        heads, hidden = draw.choice((4, 8)), draw.choice((256, 384, 512))
        model = {
            "model_type": kind,
            "hidden_size": hidden,
            "intermediate_size": hidden * draw.choice((2, 3, 4)),
            "num_hidden_layers": draw.randint(2, 8),
            "num_attention_heads": heads,
            "num_key_value_heads": draw.choice((2, heads)),
            "head_dim": hidden // heads,
            "vocab_size": draw.choice((512, 2048, 8192, 16384)),
            "max_position_embeddings": 1024,
            **KINDS[kind],
        }
        if kind == "gpt_neox":
            del model["num_key_value_heads"], model["head_dim"]
        task = Task(
            name=kind,
            model=model,
            vocabulary=int(str(model["vocab_size"])),
            num_ranks=num_ranks(strategies),
            micro_batch=draw.choice((1, 2, 4)),
            accumulation=2 if parallel.startswith("pp") else draw.choice((1, 2)),
            sequence_length=draw.choice((64, 128, 256, 512)),
            precision="bfloat16" if draw.random() < 0.25 else "float32",
            optimizer=OptimizerSection(clip_norm=0.0),
        )
        try:
            predicted = _in_a_process_of_its_own(task, parallel)
        except ConfigError:
            continue  # a model that this layout cannot hold
        if LEAST <= predicted <= MOST:
            yield Case(task, parallel, predicted)


def predicted_bytes(task: Task, parallel: str) -> float:
    """Bytes of the rank that holds most, as `rotorch plan` says."""
    config = config_from_dict(task.model, source=task.name)
    planned = planned_task(config, rows=task.global_batch, tokens=task.sequence_length, precision=task.precision)
    rows = task.global_batch // batch_ranks(parse_parallel(parallel)) // task.accumulation
    return judged(planned, parallel, rows=rows, accumulation=task.accumulation).memory.total_bytes


def _in_a_process_of_its_own(task: Task, parallel: str) -> float:
    """The same; the process that forks ranks has computed nothing."""
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def send() -> None:
        try:
            sender.send(predicted_bytes(task, parallel))
        except Exception as error:  # to be raised where it is asked for
            sender.send(error)

    process = multiprocessing.get_context("fork").Process(target=send)
    process.start()
    sender.close()
    found: float | Exception = receiver.recv()
    process.join()
    if isinstance(found, Exception):
        raise found
    return found


# ---------------------------------------------------------------- training under a limit


def trains(case: Case, *, limit_bytes: int) -> tuple[bool, int]:
    """Two steps on ranks with that limit: True if they came through, and the most bytes that a rank took."""
    groups = [GROUPS / f"rotorch_fits_{os.getpid()}_{rank}" for rank in range(case.task.num_ranks)]
    for group in groups:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
    try:
        run_ranks(partial(_train, case, groups), num_ranks=len(groups))
        came_through = True
    except RankFailure:
        if not any(int((group / "memory.failcnt").read_text()) for group in groups):
            raise  # not for want of memory
        came_through = False
    finally:
        most = max(int((group / "memory.max_usage_in_bytes").read_text()) for group in groups)
        for group in groups:
            group.rmdir()
    return came_through, most


def _train(case: Case, groups: list[Path]) -> None:
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    if "head_dim" in case.task.model:
        tiny["head_dim"] = 64 // case.task.model["num_attention_heads"]
    small = replace(case.task, model={**case.task.model, **tiny}, vocabulary=256, sequence_length=32)
    _steps(small, case.parallel)
    gc.collect()
    (groups[int(os.environ["RANK"])] / "cgroup.procs").write_text(str(os.getpid()))
    _steps(case.task, case.parallel)


def _steps(task: Task, parallel: str) -> None:
    contender = UnderLayout(task, parallel=parallel)
    for step in range(2):
        contender.forward_backward(step)
        contender.update()
    contender.close()


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="write a JSON file")
    arguments = parser.parse_args()
    if not (GROUPS / "memory.limit_in_bytes").exists() or not os.access(GROUPS, os.W_OK):
        print(f"planner_fits: no group can be made in {GROUPS}: it needs version 1 of control groups, and root")
        return 2
    if any(os.environ.get(name) != value for name, value in _ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_ENVIRONMENT})
    origin, drawn, rows = describe_origin(), cases(seed=arguments.seed), []
    for _ in track(range(arguments.cases), description="cases"):
        case = next(drawn)
        fits, taken = trains(case, limit_bytes=int(ENOUGH * case.predicted_bytes))
        too_little, _ = trains(case, limit_bytes=int(TOO_LITTLE * case.predicted_bytes))
        task = case.task
        rows.append(
            {
                "model": task.model,
                "parallel": case.parallel,
                "precision": task.precision,
                "micro_batch": task.micro_batch,
                "accumulation": task.accumulation,
                "tokens": task.sequence_length,
                "predicted_bytes": round(case.predicted_bytes),
                "taken_bytes": taken,
                "trains_with_enough": fits,
                "trains_with_too_little": too_little,
            }
        )
        print(
            f"{task.name:9} {case.parallel:34} {task.precision:9} {case.predicted_bytes / 1e6:6.0f} MB predicted, "
            f"{taken / case.predicted_bytes:.3f} of it taken, with 5 % more: {fits}, with 10 % less: {too_little}",
            flush=True,
        )
    enough = sum(row["trains_with_enough"] for row in rows)
    failed = sum(not row["trains_with_too_little"] for row in rows)
    print(f"of {len(rows)}: {enough} train with 5 % more than predicted, {failed} fail with 10 % less")
    if arguments.record is not None:
        record = {**origin, "seed": arguments.seed, "enough": ENOUGH, "too_little": TOO_LITTLE, "rows": rows}
        arguments.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
