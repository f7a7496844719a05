"""Cost with the number of ranks: what one rank, rank 0 and the launcher do once per rank, with a 70B's shapes.

    python benchmarks/scale.py                            # 64 and 1,024 ranks; writes benchmarks/results/scale

Ranks are faked: each step is the code that a run calls, in one process, given what the other ranks would have sent it.
A step runs in a forked process of its own.

    cpu_s        processor time of the step
    seconds      on the clock, beside whatever else the machine does
    peak_bytes   highest resident memory during the step, less what was resident before it
    counts       what does not depend on the machine: groups, operations on the store, planned items, bytes

Exit code 1: a step of `MUST` takes more than 10 s of processor time or more than 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from rotorch.bench.process_memory import read_process_memory, reset_peak
from rotorch.bench.record import describe_origin
from rotorch.comm.agreement import Agreement
from rotorch.comm.axis_group import AxisGroup
from rotorch.comm.fresh_store import fresh_store
from rotorch.core.spec import ModelSpec, Weight
from rotorch.core.traffic import MicroBatch
from rotorch.mesh import make_mesh, sum_in_one_message
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.planner.prediction import predict
from rotorch.run_config import RunConfig, batch_sizes
from rotorch.shard.materialize import on_meta
from rotorch.shard.sharded_weight import Chunk, ChunkedTensor, cut_chunks
from rotorch.strategies import batch_ranks, num_ranks, parse_parallel
from rotorch.testing.fake import as_rank
from rotorch.train.checkpoint.manifest import (
    FileEntry,
    Manifest,
    ModelEntry,
    OptimizerEntry,
    StoredChunk,
    read_manifest,
)
from rotorch.train.checkpoint.storage import CheckpointWriter, ChunksSavePlanner, _Stored
from rotorch.train.checks.dry_run import dry_run
from rotorch.train.checks.preflight import CheckedRun
from rotorch.train.launch.exit_status import ProcessExit, explain
from rotorch.train.launch.failure_report import write_report
from rotorch.train.launch.joining import rank_settings
from rotorch.train.launch.status import FailureKind, RankPhase, StatusBoard
from rotorch.train.launch.watchdog import StallClock, explain_hang
from rotorch.train.state import names_to_save, rng_name

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "scale" / "scale.json"
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
"""The shapes of Llama-3 70B."""

MUST = "ddp=128,rtp=8"
"""The layout whose steps have bounds; others are there for comparison."""
MOST_S, MOST_BYTES = 10.0, 1 << 30
_STACK = "  File layer.py, line 10 in forward\n" * 40
_MOMENTS = ("exp_avg", "exp_avg_sq")

Counts = dict[str, int]


def layouts(ranks: int) -> list[str]:
    """Layouts of `ranks` ranks that are measured."""
    return [f"ddp={ranks // 8},rtp=8", f"fsdp={ranks}"]


# ---------------------------------------------------------------- steps of one rank, or of each


def model_and_units(spec: ModelSpec, layout: str) -> Counts:
    """Building the model on meta and describing it: every rank, whatever their number."""
    return {"units": len(shapes().units)}


def mesh_and_groups(spec: ModelSpec, layout: str) -> Counts:
    """Mesh and process groups of a layout, as one rank makes them."""
    return groups_of(layout)


def neighbours(spec: ModelSpec, layout: str) -> Counts:
    """Groups of neighbours that share a sequence, beside mesh and groups."""
    return groups_of(f"fsdp={num_ranks(parse_parallel(layout))}[context=8]")


def groups_of(layout: str) -> Counts:
    """Makes a layout's mesh and groups as one rank of all; counts groups made and joined, and the ranks they list."""
    strategies = parse_parallel(layout)
    made: list[Sequence[int]] = []
    joined: list[int] = []
    real = dist.new_group

    def counted(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        group = real(ranks, *args, **kwargs)
        made.append(ranks or ())
        if ranks is not None and dist.get_rank() in ranks:
            joined.append(len(ranks))
        return group

    import torch.distributed.device_mesh as of_mesh

    cpu = torch.device("cpu")
    originals = dist.new_group, of_mesh.new_group
    dist.new_group = of_mesh.new_group = counted
    try:
        with as_rank(0, num_ranks=num_ranks(strategies)):
            mesh = make_mesh(strategies, device=cpu)
            sum_in_one_message(mesh, device=cpu)
            for strategy in strategies:
                for axis, size in strategy.context_axes.items():
                    AxisGroup.of_neighbours(mesh, axis, size, device=cpu)
    finally:
        dist.new_group, of_mesh.new_group = originals
    return {
        "new_group_calls": len(made),
        "ranks_listed": sum(map(len, made)),
        "groups_joined": len(joined),
        "peers": sum(size - 1 for size in joined),
    }


def prediction(spec: ModelSpec, layout: str) -> Counts:
    """The prediction for one rank."""
    found = predict(spec, strategies=parse_parallel(layout), rank=0)
    return {"weights_bytes": found.weights_bytes, "sent_bytes": found.total_sent_bytes}


def joining(spec: ModelSpec, layout: str) -> Counts:
    """Finding each other and comparing configurations, all ranks as threads over one store; rank 0 counted apart."""
    ranks = num_ranks(parse_parallel(layout))
    table = rank_settings({"model": MODEL, "parallel": {"layout": layout}}, resume=False, num_ranks=ranks)
    store = CountingStore()

    def rank_main(rank: int) -> None:
        shared = fresh_store(store, rank=rank, num_ranks=ranks, timeout_s=300)
        agreement = Agreement(shared, rank=rank, num_ranks=ranks)
        agreement.enter()
        for number in range(2):
            agreement.compare(table, round_number=number, timeout_s=300)

    stack_bytes = threading.stack_size(1 << 18)
    threads = [threading.Thread(target=rank_main, args=(rank,), name=f"rank-{rank}") for rank in range(ranks)]
    with counted_pauses() as pauses:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    threading.stack_size(stack_bytes)
    writes = store.writes
    return {
        "writes_of_rank_0": writes["rank-0"],
        "writes_of_rank_1": writes["rank-1"],
        "pauses_of_rank_0": pauses["rank-0"],
        "table_bytes": len(json.dumps(table)),
    }


class CountingStore(dist.Store):
    """A store in this process's memory that counts writes by thread; one wakes those who wait for its key alone."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._there: dict[str, threading.Event] = {}
        self.writes: Counter[str] = Counter()

    def set(self, key: str, value: str | bytes) -> None:
        with self._lock:
            self._write(key, value)

    def get(self, key: str) -> bytes:
        with self._lock:
            there = self._there.setdefault(key, threading.Event())
        there.wait()
        return self._values[key]

    def add(self, key: str, value: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + value
            if value:
                self._write(key, str(total))
            return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        with self._lock:
            if key not in self._values and not expected:
                self._write(key, desired)
            return self._values.get(key, b"")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _write(self, key: str, value: str | bytes) -> None:
        self.writes[threading.current_thread().name] += 1
        self._values[key] = value if isinstance(value, bytes) else value.encode()
        self._there.setdefault(key, threading.Event()).set()


@contextmanager
def counted_pauses() -> Iterator[Counter[str]]:
    """Counts, by thread, how often `time.sleep` is called within the block."""
    pauses: Counter[str] = Counter()
    real = time.sleep

    def counted(seconds: float) -> None:
        pauses[threading.current_thread().name] += 1
        real(seconds)

    time.sleep = counted
    try:
        yield pauses
    finally:
        time.sleep = real


# ---------------------------------------------------------------- steps of rank 0, and of the launcher


def dry(spec: ModelSpec, layout: str) -> Counts:
    """`--dry-run` of a run that resumes from a checkpoint of equally many ranks."""
    found = dry_run(run_of(spec, layout, manifest=manifest_of(spec, layout)))
    return {"ranks": len(found["ranks"]), "kinds_of_ranks": len({json.dumps({**r, "rank": 0}) for r in found["ranks"]})}


def run_of(spec: ModelSpec, layout: str, *, manifest: Manifest) -> CheckedRun:
    """The parts of a checked run that a dry run reads."""
    config = RunConfig.model_validate(
        {"model": {"config": "70b.json"}, "train": {"out": "runs/70b", "steps": 1, "device": "cpu"}}
    )
    nothing, out = cast(Any, None), Path(config.train.out)
    model, resume = config_from_dict(MODEL, source="a 70B"), SimpleNamespace(checkpoint="step-1", manifest=manifest)
    strategies = parse_parallel(layout)
    sizes = batch_sizes(config.train, batch_ranks=batch_ranks(strategies))
    return CheckedRun(config, strategies, sizes, model, spec, nothing, out, out, cast(Any, resume), "")


def manifest_of(spec: ModelSpec, layout: str) -> Manifest:
    """A manifest with an entry per tensor and per rank, without chunks: as much as a dry run reads of it."""
    ranks = num_ranks(parse_parallel(layout))
    names = [f"model/{w.name}" for w in spec.weights] + [
        f"optimizer/{key}/{w.name}" for w in spec.weights for key in _MOMENTS
    ]
    shapes_by_name = {w.name: w.shape for w in spec.weights}
    tensors = {name: {"dtype": "F32", "shape": shapes_by_name[name.split("/")[-1]], "chunks": ()} for name in names} | {
        rng_name(rank): {"dtype": "U8", "shape": (5056,), "chunks": ()} for rank in range(ranks)
    }
    files = {f"rank-{rank:05d}.safetensors": FileEntry(num_bytes=1 << 30, sha256="0" * 64) for rank in range(ranks)}
    return blank_manifest(layout).model_validate(
        {
            **blank_manifest(layout).model_dump(),
            "tensors": tensors,
            "files": {k: f.model_dump() for k, f in files.items()},
        }
    )


def blank_manifest(layout: str) -> Manifest:
    """The manifest of a run before its first tensor."""
    return Manifest(
        step=1,
        tokens=1,
        seed=0,
        parallel=layout,
        num_ranks=num_ranks(parse_parallel(layout)),
        versions={},
        model=ModelEntry(name="LlamaForCausalLM", config=None, config_sha256=None),
        optimizer=OptimizerEntry(
            name="AdamW", groups=[], kinds={**dict.fromkeys(_MOMENTS, "weight"), "step": "tensor"}
        ),
        schedule={},
        data={},
        run={},
    )


def local_plan(spec: ModelSpec, layout: str, *, rank: int) -> Any:
    """Offer of a rank to save, as torch's planner writes it down: weights, moments, counters, its random state."""
    *outer, inner = parse_parallel(layout)
    replicas = num_ranks(outer) if outer else 1
    replica, position = divmod(rank, inner.num_ranks)
    held = {
        weight.name: SimpleNamespace(
            weight=weight, chunks=chunks, num_holders=holders * replicas, holder=holder + holders * replica
        )
        for weight, chunks, holders, holder in held_at(spec, inner.kind, size=inner.num_ranks, position=position)
    }
    tensors: dict[str, Any] = {rng_name(rank): torch.zeros(5056, dtype=torch.uint8)}
    for name in sorted(names_to_save(SimpleNamespace(spec=spec, weights=held))):  # type: ignore[arg-type]
        weight, chunks = held[name].weight, held[name].chunks
        if not chunks:
            continue
        sizes = list(weight.shape)
        sizes[chunks[0].dim] = sum(chunk.sizes[chunk.dim] for chunk in chunks)
        local = torch.empty(sizes, device="meta")
        for key in (f"model/{name}", *(f"optimizer/{key}/{name}" for key in _MOMENTS)):
            tensors[key] = ChunkedTensor(local, shape=weight.shape, chunks=chunks)
        tensors[f"optimizer/step/{name}"] = torch.zeros(())
    with ChunksSavePlanner() as planner:
        planner.set_up_planner(tensors, is_coordinator=rank == 0)
        return planner.create_local_plan()


@lru_cache(maxsize=8)
def held_at(
    spec: ModelSpec, kind: str, *, size: int, position: int
) -> list[tuple[Weight, tuple[Chunk, ...], int, int]]:
    """`held_chunks` of all weights."""
    return [(weight, *held_chunks(weight, kind, size=size, position=position)) for weight in spec.weights]


def held_chunks(weight: Weight, kind: str, *, size: int, position: int) -> tuple[tuple[Chunk, ...], int, int]:
    """A rank's chunks of a weight under `rtp` or `fsdp`, how many hold the same, and its number among them."""
    if kind == "rtp":
        chunks = cut_chunks(weight, num_slices=size, index=position)
        return (chunks, 1, 0) if weight.cut is not None else (chunks, size, position)
    rows = -(-weight.shape[0] // size)
    start = min(position * rows, weight.shape[0])
    stop = min(start + rows, weight.shape[0])
    rest = weight.shape[1:]
    chunk = Chunk((start, *(0 for _ in rest)), (stop - start, *rest))
    return ((chunk,) if stop > start else ()), 1, 0


def plans_of_ranks(spec: ModelSpec, layout: str, directory: Path) -> None:
    """Plans that all ranks send to rank 0 before a save."""
    ranks = range(num_ranks(parse_parallel(layout)))
    received = [pickle.dumps(local_plan(spec, layout, rank=rank)) for rank in ranks]
    (directory / "received").write_bytes(pickle.dumps(received))


def plan_of_a_save(layout: str, directory: Path) -> Counts:
    """Rank 0's plan of a checkpoint, from the plans that all ranks send."""
    received = pickle.loads((directory / "received").read_bytes())
    with ChunksSavePlanner() as planner:
        planner.rest_of_collector()  # as when this rank has made its own plan
        plans = [pickle.loads(plan) for plan in received]
        planned, _ = planner.create_global_plan(plans)
    return {
        "received_bytes": sum(map(len, received)),
        "received_items": sum(len(plan.items) for plan in plans),
        "written_items": sum(len(plan.items) for plan in planned),
    }


def results_of_ranks(spec: ModelSpec, layout: str, directory: Path) -> None:
    """Results that all ranks send to rank 0 after they have written their files, by the plans that they sent before."""
    received = pickle.loads((directory / "received").read_bytes())
    results = written([pickle.loads(plan) for plan in received])
    (directory / "results").write_bytes(pickle.dumps(results))


def manifest_written(layout: str, directory: Path) -> Counts:
    """Rank 0's manifest of a checkpoint, from what all ranks have written."""
    results = pickle.loads((directory / "results").read_bytes())
    path = directory / "checkpoints" / "step-00000001"
    writer = CheckpointWriter(path, manifest=blank_manifest(layout), copies={})
    writer.prepare_global_plan([])
    writer.finish(None, results)  # type: ignore[arg-type]
    return {"manifest_bytes": (path / "manifest.json").stat().st_size, "chunks": sum(map(len, results))}


def manifest_read(layout: str, directory: Path) -> Counts:
    """A manifest read and checked, as each rank does before it loads."""
    manifest = read_manifest(directory / "checkpoints" / "step-00000001")
    return {"chunks": sum(len(entry.chunks) for entry in manifest.tensors.values())}


def written(received: list[SavePlan]) -> list[list[WriteResult]]:
    """Reports of each rank to rank 0 after it has written its file."""
    plans, _ = ChunksSavePlanner().create_global_plan(received)
    results = []
    for rank, plan in enumerate(plans):
        name, start, of_rank = f"rank-{rank:05d}.safetensors", 0, []
        file = FileEntry(num_bytes=1 << 60, sha256="0" * 64)  # nothing is read of it
        for item in plan.items:
            data = item.tensor_data
            offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            dtype, itemsize = ("U8", 1) if data.properties.dtype is torch.uint8 else ("F32", 4)
            chunk = StoredChunk(offsets=offsets, sizes=sizes, file=name, start=start)
            of_rank.append(WriteResult(item.index, 0, _Stored((dtype, tuple(data.size)), chunk, file)))
            start += math.prod(sizes) * itemsize
        results.append(of_rank)
    return results


def status_and_failure(spec: ModelSpec, layout: str) -> Counts:
    """The launcher's board of all ranks, its looks at them, and a failure's line and page."""
    ranks = num_ranks(parse_parallel(layout))
    board = StatusBoard(ranks)
    for rank in range(ranks):
        board.enter(rank, pid=os.getpid())
        board.doing(RankPhase.FORWARD_BACKWARD, step=7)
        board.name_units([unit.name for unit in spec.units])
    clock = StallClock(board)
    for _ in range(10):
        still_s = clock.look()
    hang = explain_hang(board.all(), still_s=still_s, states={})
    board.own_rank = 5
    board.fail("RuntimeError: a reason", kind=FailureKind.OWN)
    error = explain(board.all(), exits={5: ProcessExit(exit_code=1)})
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "failure.txt"
        write_report(
            page,
            headline=str(error),
            statuses=board.all(),
            stacks=dict.fromkeys(range(ranks), _STACK),
            records={},
            still_s=still_s,
        )
        page_bytes = page.stat().st_size
    return {"line_characters": len(str(error)), "hang_characters": len(str(hang)), "page_bytes": page_bytes}


# ---------------------------------------------------------------- measuring

Step = Callable[[ModelSpec, str], Counts]
STEPS: dict[str, tuple[str, Step]] = {
    "model and units": ("each rank", model_and_units),
    "mesh and groups": ("each rank", mesh_and_groups),
    "groups of neighbours": ("each rank", neighbours),
    "prediction": ("each rank", prediction),
    "join and compare": ("all ranks together", joining),
    "dry run": ("launcher", dry),
    "status and failure": ("launcher", status_and_failure),
}

OfCheckpoint = tuple[str, Callable[[ModelSpec, str, Path], None] | None, Callable[[str, Path], Counts]]
OF_CHECKPOINTS: dict[str, OfCheckpoint] = {
    "plan of a save": ("rank 0", plans_of_ranks, plan_of_a_save),
    "manifest written": ("rank 0", results_of_ranks, manifest_written),
    "manifest read": ("each rank", None, manifest_read),
}
"""Steps of one checkpoint, in order, behind the work of other ranks, which a process of its own does before them."""


def shapes() -> ModelSpec:
    """The 70B's units."""
    with on_meta():
        return describe(causal_lm(config_from_dict(MODEL, source="a 70B")))


def measured(step: Callable[[], Counts]) -> dict[str, Any]:
    """Runs a step in a forked process."""

    def child(connection: Any) -> None:
        reset_peak()
        before, began, began_cpu = read_process_memory().rss_bytes, time.monotonic(), time.process_time()
        counts = step()
        seconds, cpu_s = time.monotonic() - began, time.process_time() - began_cpu
        peak = read_process_memory().highest_rss_bytes - before
        connection.send({"seconds": round(seconds, 3), "cpu_s": round(cpu_s, 3), "peak_bytes": peak, "counts": counts})

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(there,))
    process.start()
    there.close()
    try:
        found: dict[str, Any] = here.recv()
    except EOFError:
        found = {}
    process.join()
    return found or {"error": f"ended with exit code {process.exitcode}"}


def measured_steps(names: Sequence[str], spec: ModelSpec, layout: str) -> Iterator[dict[str, Any]]:
    """Rows of the record: steps under a layout."""
    row = {"layout": layout, "ranks": num_ranks(parse_parallel(layout))}
    for name in names:
        if name in STEPS:
            whose, step = STEPS[name]
            yield {"step": name, "whose": whose, **row, **measured(partial(step, spec, layout))}
    if not set(names) & OF_CHECKPOINTS.keys() or (layout.startswith("fsdp") and row["ranks"] > 64):
        return  # a chunk of each weight per rank: 2.2 million on 1,024, more than rank 0 can hold (docs/scale.md)
    with tempfile.TemporaryDirectory() as directory:
        for name, (whose, prepare, of_checkpoint) in OF_CHECKPOINTS.items():
            before = {} if prepare is None else measured(partial(prepared, prepare, spec, layout, Path(directory)))
            found = before if "error" in before else measured(partial(of_checkpoint, layout, Path(directory)))
            yield {"step": name, "whose": whose, **row, **found}


def prepared(prepare: Callable[[ModelSpec, str, Path], None], spec: ModelSpec, layout: str, directory: Path) -> Counts:
    """Does the other ranks' work."""
    prepare(spec, layout, directory)
    return {}


# ---------------------------------------------------------------- layouts by their formulas

ROWS = MicroBatch(1, 8192)
"""A rank's micro-batch, of which activations are sent where a layout sends them."""


def layout_figures(spec: ModelSpec) -> list[dict[str, Any]]:
    """Bytes, messages and memory per rank by the Layouts, from 8 to 1,024 ranks; the largest of any rank."""
    rows = []
    for text in COMPARED:
        inner = num_ranks(parse_parallel(text.format(1)))
        for ranks in SHOWN:
            if ranks >= inner:
                layout = text.format(ranks // inner).removeprefix("ddp=1,")
                rows.append({"family": text.format("n"), "layout": layout, "ranks": ranks, **figures_of(spec, layout)})
    return rows


def figures_of(spec: ModelSpec, layout: str) -> Counts:
    """A layout's figures: the largest of any rank. Of ranks that gather the first holds most, by how fsdp cuts."""
    *outer, inner = parse_parallel(layout)
    stages = [strategy for strategy in outer if not strategy.ranks_alike]
    step = inner.num_ranks if inner.kind == "fsdp" else 1
    positions = range(0, num_ranks([*stages, inner]), step)
    found = [predict(spec, strategies=[*outer, inner], rank=rank, batch=ROWS) for rank in positions]
    return {
        "at_rest_bytes": max(sum(v or 0 for k, v in each.ledger.items() if k != "slots") for each in found),
        "transient_bytes": max(each.transient_bytes for each in found),
        "sent_bytes": max(each.total_sent_bytes for each in found),
        "messages": max(each.num_messages for each in found),
    }


SHOWN = (8, 16, 32, 64, 128, 256, 512, 1024)
COMPARED = ("ddp={},rtp=8", "ddp={},megatron=8", "ddp={},fsdp=8", "ddp={},fsdp=64", "fsdp={}", "pp=8,fsdp={}")


def too_much(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Steps of `MUST` above the bounds, in words."""
    return [
        f"{row['step']}: {row.get('cpu_s')} s, {row.get('peak_bytes')} bytes {row.get('error', '')}"
        for row in rows
        if row["layout"] == MUST and ("error" in row or row["cpu_s"] > MOST_S or row["peak_bytes"] > MOST_BYTES)
    ]


def main() -> int:
    """Reads the command line, measures, and writes the record."""
    every = [*STEPS, *OF_CHECKPOINTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 1024])
    parser.add_argument("--steps", nargs="*", choices=every, default=every)
    parser.add_argument("--record", type=Path, default=OUT)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {**describe_origin(), "model": MODEL}
    spec = shapes()
    record["layouts"] = layout_figures(spec)
    record["rows"] = rows = []
    for layout in (layout for ranks in arguments.ranks for layout in layouts(ranks)):
        for row in measured_steps(arguments.steps, spec, layout):
            rows.append(row)
            print(json.dumps(row), flush=True)
    arguments.record.parent.mkdir(parents=True, exist_ok=True)
    arguments.record.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    missed = too_much(rows)
    for line in missed:
        print(f"too much: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
