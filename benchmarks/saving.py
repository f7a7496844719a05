"""Cost of a checkpoint of a 135 M model: rotorch's, and torch.distributed.checkpoint's on the same tensors.

    python benchmarks/saving.py --json benchmarks/results/saving-135m-4ranks.json

SmolLM2-135M's shapes with random values, AdamW's two moments beside them, cut by torch's own `fully_shard`
(`--parallel fsdp=4`): both sides save the same DTensors, in the same processes. Ways to save take turns in one run,
each followed by a step of training; the first round is dropped. Times are of the slowest rank, from a barrier on.

    save          until all of it is on the disk (both sides call fsync; ours also takes a sha256 of what it writes)
    async call    what training waits for before it goes on; the copy to host memory alone is measured beside it
    async step    a step of training while the checkpoint is written; with as many ranks as cores or more, what writes
                  takes turns with what computes, so a step then is as much longer as the writing costs CPU time
    memory        the most that a process took while it saved above what it had before, by the kernel's count, in a run
                  of its own whose allocator gives back what is freed
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from rotorch.bench.process_memory import MALLOC_ENVIRONMENT, read_process_memory, reset_peak
from rotorch.bench.record import describe_origin, load_average
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.parallelize import load_step_code, parallelize
from rotorch.shard.materialize import on_meta
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.ranks import run_ranks
from rotorch.train.checkpoint.async_save import Saver
from rotorch.train.checkpoint.saving import save
from rotorch.train.state import TrainState

SMOLLM2_135M = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
OURS, THEIRS = "rotorch", "torch DCP"


class Bench:
    """A trained state on this rank, and the ways to save it. All ranks make one, and call it alike."""

    def __init__(self, parallel: str, *, layers: int, tokens: int, directory: Path) -> None:
        config = config_from_dict({**SMOLLM2_135M, "num_hidden_layers": layers}, source="the benchmark")
        with on_meta():
            module = causal_lm(config)
        self._model = parallelize(module, parallel, device="cpu").materialize(seed=0)
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._state = TrainState(model=self._model, optimizer=optimizer, seed=0)
        self._tokens, self._vocabulary, self._directory = tokens, config.vocab_size, directory
        self._saver = Saver(directory / "behind", keep=1, behind=True, mesh=self._model.mesh)
        self._group = dist.new_group(backend="gloo")
        self._copies: dict[str, Tensor] = {}

    def step(self) -> None:
        """One step of training, on a micro-batch per rank."""
        generator = torch.Generator().manual_seed(self._state.step * 1000 + self._model.batch_rank)
        ids = torch.randint(self._vocabulary, (1, self._tokens), generator=generator)
        self._model.forward_backward({"input_ids": ids, "labels": ids})
        self._update()

    def step_without_passes(self) -> None:
        """One update by gradients of zero: then AdamW has its state."""
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._update()

    def _update(self) -> None:
        optimizer = self._state.optimizer
        assert optimizer is not None
        optimizer.step()
        optimizer.zero_grad()
        self._state.step += 1

    def save(self, side: str) -> Path:
        """Returns when the checkpoint is on the disk."""
        if side == OURS:
            return save(self._directory / "at-once", self._state, keep=1)
        path = self._directory / "dcp"
        dcp.save(self._tensors(), checkpoint_id=path, process_group=self._group)
        return path

    def save_behind(self, side: str) -> Callable[[], Path]:
        """Returns when training may go on; what is returned waits until the checkpoint is on the disk."""
        if side == OURS:
            path = self._saver.save(self._state)
            return lambda: (self._saver.wait(), path)[1]
        path = self._directory / "dcp-behind"
        future: Any = dcp.async_save(self._tensors(), checkpoint_id=path, process_group=self._group)
        return lambda: (future.result(), path)[1]

    def copy(self) -> None:
        """Least cost of a save behind training: a copy of this rank's tensors into memory that is there already."""
        for name, tensor in self._tensors().items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._copies.setdefault(name, torch.empty_like(local)).copy_(local)

    def _tensors(self) -> dict[str, Tensor]:
        """The state as torch saves it: DTensors by name, no copies."""
        assert self._state.optimizer is not None
        named = {name: parameter.detach() for name, parameter in self._model.named_parameters()}
        moments = {
            f"optimizer.{key}.{name}": value
            for name, parameter in self._model.named_parameters()
            for key, value in self._state.optimizer.state[parameter].items()
        }
        return {**named, **moments}


# ------------------------------------------------------------------ in each rank


def times(parallel: str, layers: int, tokens: int, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Seconds of this rank's ways, by name, one figure a round."""
    bench = Bench(parallel, layers=layers, tokens=tokens, directory=directory)
    found: dict[str, list[float]] = {}

    def timed(name: str, do: Callable[[], Any], *, since: float | None = None) -> Any:
        if since is None:
            dist.barrier()
        begin = time.perf_counter() if since is None else since
        result = do()
        dist.barrier()
        found.setdefault(name, []).append(time.perf_counter() - begin)
        return result

    for number in range(rounds + 1):
        timed("step", bench.step)
        timed("copy", bench.copy)
        for side in (OURS, THEIRS) if number % 2 else (THEIRS, OURS):
            path = timed(f"{side} save", partial(bench.save, side))
            found.setdefault(f"{side} bytes", []).append(_bytes_of(path))
            remove(path)
            begin = time.perf_counter()
            wait = timed(f"{side} async call", partial(bench.save_behind, side))
            timed(f"{side} async step", bench.step)
            remove(timed(f"{side} async save", wait, since=begin))
    return {name: values[1:] for name, values in found.items()}


def memory(parallel: str, layers: int, directory: Path) -> dict[str, int]:
    """The most bytes that this rank's process took above what it had before, by ways to save."""
    bench = Bench(parallel, layers=layers, tokens=1, directory=directory)
    bench.step_without_passes()
    found: dict[str, int] = {}
    for _ in range(2):  # a copy that stays is made by the first save; what that loads of code is little beside it
        for side in (OURS, THEIRS):
            for name, do in (("save", bench.save), ("async save", lambda side: bench.save_behind(side)())):
                dist.barrier()
                reset_peak()
                before = read_process_memory()
                path = do(side)
                peak = read_process_memory().peak_bytes
                key = f"{side} {name}"
                found[key] = max(found.get(key, 0), peak - before.pss_bytes)
                remove(path)
    return found


def remove(path: Path) -> None:
    """Removes a checkpoint that all ranks have written. All ranks."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
        os.sync()  # what is left to write would be somebody else's time
    dist.barrier()


def _bytes_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# ------------------------------------------------------------------ the record


def record(by_rank: list[dict[str, list[float]]], of_memory: list[dict[str, int]]) -> dict[str, Any]:
    """Medians over rounds of the slowest rank's time, and what follows from them."""
    slowest = {name: [max(values) for values in zip(*(r[name] for r in by_rank), strict=True)] for name in by_rank[0]}
    middle = {name: statistics.median(values) for name, values in slowest.items()}
    rows = []
    for side in (OURS, THEIRS):
        beyond = middle[f"{side} async call"] - middle["copy"]
        rows.append(
            {
                "what": side,
                "save_s_median": middle[f"{side} save"],
                "async_call_s_median": middle[f"{side} async call"],
                "async_call_beyond_copy_of_step": max(0.0, beyond) / middle["step"],
                "async_step_s_median": middle[f"{side} async step"],
                "async_step_longer_of_step": statistics.median(
                    a / b - 1 for a, b in zip(slowest[f"{side} async step"], slowest["step"], strict=True)
                ),
                "async_save_s_median": middle[f"{side} async save"],
                "written_bytes": int(middle[f"{side} bytes"]),
                "save_extra_bytes_per_rank": max(r[f"{side} save"] for r in of_memory),
                "async_extra_bytes_per_rank": max(r[f"{side} async save"] for r in of_memory),
                "all_s": {name: values for name, values in slowest.items() if name.startswith(f"{side} ")},
            }
        )
    return {
        "step_s_median": middle["step"],
        "step_s_all": slowest["step"],
        "copy_s_median": middle["copy"],
        "copy_s_all": slowest["copy"],
        "rows": rows,
    }


def table(found: dict[str, Any]) -> str:
    """The record as Markdown."""
    load = found["load_average_before"]
    lines = [
        f"{found['num_parameters'] / 1e6:.1f} M parameters and AdamW's moments, `{found['parallel']}`, "
        f"{found['machine']['cores']} cores, {found['rounds']} rounds, load average before {load[0]:.1f}. A step of "
        f"{found['tokens_per_rank']} tokens a rank takes {found['step_s_median']:.1f} s, the copy to host memory "
        f"{1e3 * found['copy_s_median']:.0f} ms.",
        "",
        "| | " + " | ".join(row["what"] for row in found["rows"]) + " |",
        "|---" * (1 + len(found["rows"])) + "|",
    ]
    for name, text in {
        "save, on the disk": lambda r: f"{r['save_s_median']:.2f} s",
        "written": lambda r: f"{r['written_bytes'] / 1e6:.0f} MB",
        "memory while it saves, a rank": lambda r: f"{r['save_extra_bytes_per_rank'] / 2**20:.0f} MiB",
        "async: training waits": lambda r: f"{r['async_call_s_median']:.2f} s",
        "async: beyond the copy, of a step": lambda r: f"{r['async_call_beyond_copy_of_step']:.1%}",
        "async: a step meanwhile is longer by": lambda r: f"{r['async_step_longer_of_step']:.1%}",
        "async: on the disk after": lambda r: f"{r['async_save_s_median']:.2f} s",
        "async: memory, a rank": lambda r: f"{r['async_extra_bytes_per_rank'] / 2**20:.0f} MiB",
    }.items():
        lines.append(f"| {name} | " + " | ".join(text(row) for row in found["rows"]) + " |")
    return "\n".join(lines)


def main() -> int:
    """Runs all ways in turns and prints them as a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", default="fsdp=4")
    parser.add_argument("--layers", type=int, default=30, help="fewer make another model, for a trial")
    parser.add_argument("--tokens", type=int, default=128, help="of a step, per rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where checkpoints go, for a while; a temporary directory by default")
    parser.add_argument("--json", type=Path, help="where every figure goes")
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    origin = describe_origin()
    strategies = parse_parallel(given.parallel)
    load_step_code(strategy.kind for strategy in strategies)
    with tempfile.TemporaryDirectory(dir=given.dir, prefix="saving-") as name:
        directory = Path(name)
        if given.only_memory:
            found = run_ranks(memory, given.parallel, given.layers, directory, num_ranks=num_ranks(strategies))
            print(json.dumps(found))
            return 0
        settings = (given.parallel, given.layers, given.tokens, given.rounds, directory)
        by_rank = run_ranks(times, *settings, num_ranks=num_ranks(strategies), timeout_s=3600.0)
    again = [sys.executable, __file__, "--only-memory", "--parallel", given.parallel, "--layers", str(given.layers)]
    done = subprocess.run(
        [*again, *(["--dir", str(given.dir)] if given.dir else [])],
        env={**os.environ, **MALLOC_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdout=subprocess.PIPE,
        check=True,
    )
    of_memory = json.loads(done.stdout.splitlines()[-1])
    result = {
        **origin,
        "load_average_before": origin["machine"]["load_average"],
        "load_average_after": load_average(),
        "parallel": given.parallel,
        "tokens_per_rank": given.tokens,
        "rounds": given.rounds,
        "num_parameters": num_parameters(given.layers),
        **record(by_rank, of_memory),
    }
    print(table(result))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return 0


def num_parameters(layers: int) -> int:
    """Of the model, tied weights once."""
    config = config_from_dict({**SMOLLM2_135M, "num_hidden_layers": layers}, source="the benchmark")
    with on_meta():
        return sum(parameter.numel() for parameter in causal_lm(config).parameters())


if __name__ == "__main__":
    raise SystemExit(main())
