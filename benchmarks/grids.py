"""An MLP's products on a grid of ranks: ours, ColossalAI's 2.5-D layers, torch's and Megatron-Core's 1-D.

    python benchmarks/grids.py --depth 2 --json benchmarks/results/grids-8ranks.json

All rows compute `gelu(x W1) W2` forward and backward on the same global batch, in turns within the same processes.
The shapes are those of Tesseract's strong-scaling table (arXiv 2105.14500) divided by eight: hidden 384, batch 12
(rounded up to what the grid divides), sequence 64. Their processes keep what they free, and gloo's threads wait for
their turn, as `parallelize` has it (`bench/process_settings.py`): one process runs all rows. Times are medians over
the rounds of the slowest rank's time; with more ranks than cores they measure oversubscription as well, so the bytes
that each rank sends stand beside them.

ColossalAI 0.5.0 (`pip install --no-deps colossalai==0.5.0`) is left out if it is not there. Only its file of block
products is loaded, since the rest wants a GPU; what that file asks of the rest, process groups and a device, is given
to it here. Its backward leaves out the sum of weight gradients over depth, so
a second row adds it, as its user would have to: without it the gradients are wrong, and `error` says so.

Megatron-Core 0.16.1 (`pip install --no-deps megatron-core==0.16.1`) is left out alike. Its linear layers run on CPU as
they are, but for the device of buffers, which they ask CUDA for; so that call answers "cpu" here.

A row whose gradients are not those of one process is marked `wrong`, and makes the exit code 1 if it is not the one
that is known to be.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rotorch.bench.process_settings import ProcessSetter
from rotorch.bench.record import describe_origin, load_average
from rotorch.comm.axis_group import AxisGroup
from rotorch.comm.meter import Meter
from rotorch.comm.shared_axis_group import make_axis_group
from rotorch.ops.summa import Grid, summa_linear
from rotorch.testing.ranks import run_ranks

SIDE = 2
"""Rows and columns of the grid."""

PEERS = {"colossalai": "colossalai==0.5.0", "megatron": "megatron-core==0.16.1"}
"""Libraries that need not be there: what is imported, and what installs it."""


@dataclass(frozen=True)
class Shape:
    """Tokens of the global batch, features outside and inside the MLP."""

    batch: int
    sequence: int
    hidden: int
    inner: int

    def whole(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Input, both weights as layers hold them, and the output's gradient; the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        sizes = [
            (self.batch, self.sequence, self.hidden),
            (self.inner, self.hidden),
            (self.hidden, self.inner),
            (self.batch, self.sequence, self.hidden),
        ]
        x, up, down, grad = (torch.randn(size, generator=generator) for size in sizes)
        return x, up * self.hidden**-0.5, down * self.inner**-0.5, grad


@dataclass
class Row:
    """One way to compute the MLP on this rank.

    Attributes:
        name: of the row.
        inputs: this rank's part of the input, and of the output's gradient.
        weights: this rank's parts of both weights, as the row wants them.
        forward: from the input's part to the output's.
        finish: after backward, what completes the weights' gradients.
        of_whole: from a whole weight's gradient (0: up, 1: down) to this rank's part of it.
        known_wrong: its gradients are known not to be those of one process.
    """

    name: str
    inputs: tuple[Tensor, Tensor]
    weights: tuple[Tensor, Tensor]
    forward: Callable[[Tensor], Tensor]
    finish: Callable[[], None]
    of_whole: Callable[[int, Tensor], Tensor]
    known_wrong: bool = False

    def timed(self) -> tuple[float, float]:
        """Seconds of forward and of backward with what completes it; all ranks start together."""
        for leaf in (self.inputs[0], *self.weights):
            leaf.grad = None
        dist.barrier()
        begin = time.perf_counter()
        output = self.forward(self.inputs[0])
        dist.barrier()
        between = time.perf_counter()
        output.backward(self.inputs[1])
        self.finish()
        dist.barrier()
        return between - begin, time.perf_counter() - between

    def error(self, gradients: tuple[Tensor, Tensor]) -> float:
        """The largest difference of a weight's gradient from the whole one's part, relative to its largest value."""
        worst = 0.0
        for number, whole in enumerate(gradients):
            grad = self.weights[number].grad
            part = self.of_whole(number, whole)
            worst = max(worst, float((grad - part).abs().max() / whole.abs().max()))
        return worst


def part(whole: Tensor, dim: int, index: int, of: int) -> Tensor:
    """This rank's part of a tensor cut along one dim, with memory of its own."""
    return whole.chunk(of, dim)[index].clone(memory_format=torch.contiguous_format)


# ------------------------------------------------------------------ rows


def ours(shape: Shape, mesh: DeviceMesh, *, transport: str) -> Row:
    """Tesseract by `ops/summa.py`: depth layers have rows of their own, so their weight gradients are summed."""
    cpu = torch.device("cpu")
    depth, row, col = (make_axis_group(mesh, axis, transport=transport, device=cpu) for axis in ("depth", "row", "col"))
    grid = Grid(row, col)
    x, up, down, grad = shape.whole()

    def mine(whole: Tensor) -> Tensor:
        return part(part(whole, 0, depth.position * SIDE + row.position, depth.size * SIDE), 2, col.position, SIDE)

    def block(_: int, weight: Tensor) -> Tensor:
        return part(part(weight, 0, col.position, SIDE), 1, row.position, SIDE)

    weights = tuple(block(i, w).requires_grad_() for i, w in enumerate((up, down)))

    def sum_over_depth() -> None:
        for weight in weights:
            depth.all_reduce(weight.grad)

    return Row(
        name=f"rotorch {SIDE}x{SIDE}x{depth.size}, {transport.replace('_', ' ')}",
        inputs=(mine(x).requires_grad_(), mine(grad)),
        weights=weights,
        forward=lambda a: summa_linear(grid, F.gelu(summa_linear(grid, a, weights[0])), weights[1]),
        finish=sum_over_depth,
        of_whole=block,
    )


def tensor_parallel(shape: Shape, mesh: DeviceMesh) -> Row:
    """Megatron's MLP by torch's DTensor: columns, then rows; every rank has the whole batch."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    flat = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("tp",))
    x, up, down, grad = shape.whole()
    mlp = torch.nn.Sequential(
        torch.nn.Linear(shape.hidden, shape.inner, bias=False),
        torch.nn.GELU(),
        torch.nn.Linear(shape.inner, shape.hidden, bias=False),
    )
    with torch.no_grad():
        mlp[0].weight.copy_(up)
        mlp[2].weight.copy_(down)
    parallelize_module(mlp, flat, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    class Local:
        """A DTensor parameter whose `grad` is this rank's part."""

        def __init__(self, parameter: Any) -> None:
            self.parameter = parameter

        @property
        def grad(self) -> Tensor:
            return self.parameter.grad.to_local()

        @grad.setter
        def grad(self, value: None) -> None:
            self.parameter.grad = value

    return Row(
        name=f"torch tensor parallel {mesh.size()}",
        inputs=(x.requires_grad_(), grad),
        weights=(Local(mlp[0].weight), Local(mlp[2].weight)),
        forward=mlp,
        finish=lambda: None,
        of_whole=lambda number, whole: part(whole, number, flat.get_local_rank(), mesh.size()),
    )


def colossalai(shape: Shape, mesh: DeviceMesh, *, sums_over_depth: bool) -> Row:
    """ColossalAI's block products; its weights are transposed, and with `sums_over_depth` right."""
    operation = colossalai_products(mesh)
    depth, row, col = (AxisGroup.along(mesh, axis) for axis in ("depth", "row", "col"))
    x, up, down, grad = shape.whole()

    def mine(whole: Tensor) -> Tensor:
        return part(part(whole, 0, depth.position * SIDE + row.position, depth.size * SIDE), 2, col.position, SIDE)

    def block(_: int, weight: Tensor) -> Tensor:
        return part(part(weight.t(), 0, row.position, SIDE), 1, col.position, SIDE)

    weights = tuple(block(i, w).requires_grad_() for i, w in enumerate((up, down)))
    place = (row.position, col.position, depth.position, "row", "col", 0, 0, 1, mesh.size())

    def product(a: Tensor, weight: Tensor) -> Tensor:
        return operation.Matmul_AB_2p5D.apply(a, weight, SIDE, (*a.shape[:-1], weight.shape[1]), *place)

    def finish() -> None:
        for weight in weights if sums_over_depth else ():
            depth.all_reduce(weight.grad)

    return Row(
        name=f"colossalai {SIDE}x{SIDE}x{depth.size}" + (", summed over depth by hand" if sums_over_depth else ""),
        inputs=(mine(x).requires_grad_(), mine(grad)),
        weights=weights,
        forward=lambda a: product(F.gelu(product(a, weights[0])), weights[1]),
        finish=finish,
        of_whole=block,
        known_wrong=depth.size > 1 and not sums_over_depth,
    )


def megatron_core(shape: Shape, mesh: DeviceMesh, *, sequence_parallel: bool) -> Row:
    """Megatron's MLP by its own linear layers: columns, then rows, of tokens in front, `[tokens, 1, features]`.

    With `sequence_parallel` each rank begins and ends with a shard of the tokens.
    """
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    torch.cuda.current_device = lambda: torch.device("cpu")  # where it makes what it gathers into
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:  # else made with all of its groups, of which we want one
        parallel_state._set_global_memory_buffer()
    flat = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("mcore",))
    config = ModelParallelConfig(
        tensor_model_parallel_size=mesh.size(),
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    given = {"config": config, "init_method": None, "bias": False, "skip_bias_add": False, "tp_group": flat.get_group()}
    first = ColumnParallelLinear(shape.hidden, shape.inner, gather_output=False, **given)
    second = RowParallelLinear(shape.inner, shape.hidden, input_is_parallel=True, **given)
    x, up, down, grad = shape.whole()

    def mine(number: int, weight: Tensor) -> Tensor:
        return part(weight, number, flat.get_local_rank(), mesh.size())

    def tokens(whole: Tensor) -> Tensor:
        of_tokens = whole.reshape(-1, 1, shape.hidden)
        return part(of_tokens, 0, flat.get_local_rank(), mesh.size()) if sequence_parallel else of_tokens

    with torch.no_grad():
        first.weight.copy_(mine(0, up))
        second.weight.copy_(mine(1, down))
    return Row(
        name=f"megatron-core tensor parallel {mesh.size()}" + (", sequence parallel" if sequence_parallel else ""),
        inputs=(tokens(x).requires_grad_(), tokens(grad)),
        weights=(first.weight, second.weight),
        forward=lambda a: second(F.gelu(first(a)[0]))[0],
        finish=lambda: None,
        of_whole=mine,
    )


@cache
def colossalai_products(mesh: DeviceMesh) -> Any:
    """ColossalAI's module of block products, with our process groups for its own."""
    found = importlib.util.find_spec("colossalai")
    assert found is not None and found.origin is not None
    groups = {"row": mesh.get_group("col"), "col": mesh.get_group("row")}  # theirs are named by what stays the same

    def stub(name: str, **members: Any) -> None:
        module = types.ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module

    device = types.SimpleNamespace(get_current_device=lambda: torch.device("cpu"))
    for package in ("colossalai", "colossalai.legacy", "colossalai.legacy.communication", "colossalai.legacy.context"):
        stub(package, __path__=[])
    stub("colossalai.accelerator", get_accelerator=lambda: device)
    stub("colossalai.legacy.communication.collective", all_gather=None, all_reduce=None, reduce_scatter=None)
    stub("colossalai.legacy.context.parallel_mode", ParallelMode=Any)
    stub("colossalai.legacy.core", global_context=types.SimpleNamespace(get_group=groups.__getitem__))
    file = Path(found.origin).parent / "legacy" / "nn" / "layer" / "parallel_2p5d" / "_operation.py"
    spec = importlib.util.spec_from_file_location("colossalai_products", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch.cuda.amp moved since
        spec.loader.exec_module(module)
    return module


def load_megatron_core() -> None:
    """Imports it once, before there are ranks; it says much of what else it would like to have."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as it wants for its order of streams
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core.tensor_parallel")
    warnings.filterwarnings("ignore", message=".*(_into_tensor|_scatter_tensor)` is deprecated", category=FutureWarning)


# ------------------------------------------------------------------ measuring


LARGEST_ERROR = 1e-4
"""Of a weight's gradient in float32, relative to its largest value."""


def measure(shape: Shape, depth: int, rounds: int, peers: frozenset[str]) -> dict[str, Any]:
    """This rank's measurements of every row; `peers` are those that are installed."""
    process = ProcessSetter("cpu")
    mesh = init_device_mesh("cpu", (depth, SIDE, SIDE), mesh_dim_names=("depth", "row", "col"))
    rows = [ours(shape, mesh, transport=transport) for transport in ("shared_memory", "messages")]
    rows.append(tensor_parallel(shape, mesh))
    if "megatron" in peers:
        rows += [megatron_core(shape, mesh, sequence_parallel=cut) for cut in (False, True)]
    if "colossalai" in peers:
        rows += [colossalai(shape, mesh, sums_over_depth=sums) for sums in ((False, True) if depth > 1 else (False,))]
    gradients = whole_gradients(shape)
    results: dict[str, Any] = {}
    for row in rows:
        row.timed()
        with Meter(smallest_counted_bytes=1024) as meter:
            row.timed()
        results[row.name] = {
            "error": row.error(gradients),
            "known_wrong": row.known_wrong,
            "sent_bytes": meter.total_sent_bytes,
            "not_counted": dict(meter.not_counted),
            "weight_bytes": sum(w.numel() for w in gradients)
            * 4
            // (mesh.size() if "parallel" in row.name else SIDE**2),
            "forward_s": [],
            "backward_s": [],
        }
    process.settings()  # now that all groups are open
    for number in range(rounds):
        for row in rows[number % len(rows) :] + rows[: number % len(rows)]:
            forward_s, backward_s = row.timed()
            results[row.name]["forward_s"].append(forward_s)
            results[row.name]["backward_s"].append(backward_s)
    return results


def whole_gradients(shape: Shape) -> tuple[Tensor, Tensor]:
    """Of both weights, on one process."""
    x, up, down, grad = shape.whole()
    up.requires_grad_()
    down.requires_grad_()
    F.linear(F.gelu(F.linear(x, up)), down).backward(grad)
    return up.grad, down.grad


def main() -> int:
    """Runs all rows and prints them as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=2, help="layers of the grid: 1 for 4 ranks, 2 for 8 (2)")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--batch", type=int, default=12, help="sequences of the global batch")
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", type=Path, help="where every figure goes")
    given = parser.parse_args()
    origin = describe_origin()
    batch = -(-given.batch // (SIDE * given.depth)) * SIDE * given.depth
    shape = Shape(batch, given.sequence, given.hidden, 4 * given.hidden)
    peers = frozenset(name for name in PEERS if importlib.util.find_spec(name) is not None)
    for name in sorted(PEERS.keys() - peers):
        print(f"{name} is not installed: left out (pip install --no-deps {PEERS[name]})")
    if "megatron" in peers:
        load_megatron_core()
    by_rank = run_ranks(measure, shape, given.depth, given.rounds, peers, num_ranks=SIDE**2 * given.depth)
    rows = [summary(name, [ranks[name] for ranks in by_rank]) for name in by_rank[0]]
    print(f"{shape}, {len(by_rank)} ranks, float32")
    print(f"{'':44} {'forward':>10} {'backward':>10} {'sent a rank':>12} {'weights':>10} {'error':>9}")
    for row in rows:
        print(
            f"{row['name']:44} {row['forward_s_median'] * 1e3:7.2f} ms {row['backward_s_median'] * 1e3:7.2f} ms "
            f"{row['sent_bytes_per_rank']:12,} {row['weight_bytes_per_rank']:10,} {row['error']:9.1e}"
            + ("" if row["right"] else " wrong")
        )
    for own in rows[:2]:
        for peer in rows[2:]:
            ratios = {p: ratio(own, peer, p) for p in ("forward_s", "backward_s")}
            print(
                f"{own['name']} against {peer['name']}: "
                f"forward x{ratios['forward_s']:.2f}, backward x{ratios['backward_s']:.2f}"
            )
    if given.json:
        record = {**origin, "load_average_after": load_average(), "shape": vars(shape), "rows": rows}
        given.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return int(any(not row["right"] and not row["known_wrong"] for row in rows))


def summary(name: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of all ranks: the slowest rank's time of every round."""
    slowest = {
        p: [max(times) for times in zip(*(r[p] for r in ranks), strict=True)] for p in ("forward_s", "backward_s")
    }
    return {
        "name": name,
        "error": max(r["error"] for r in ranks),
        "right": max(r["error"] for r in ranks) <= LARGEST_ERROR,
        "known_wrong": ranks[0]["known_wrong"],
        "sent_bytes_per_rank": max(r["sent_bytes"] for r in ranks),
        "not_counted": ranks[0]["not_counted"],
        "weight_bytes_per_rank": ranks[0]["weight_bytes"],
        **{f"{p}_median": statistics.median(times) for p, times in slowest.items()},
        **{f"{p}_all": times for p, times in slowest.items()},
    }


def ratio(ours_: dict[str, Any], peer: dict[str, Any], phase: str) -> float:
    """Speed of ours relative to the other: the median of the rounds' ratios."""
    both = zip(peer[f"{phase}_all"], ours_[f"{phase}_all"], strict=True)
    return statistics.median(theirs / mine for theirs, mine in both)


if __name__ == "__main__":
    raise SystemExit(main())
