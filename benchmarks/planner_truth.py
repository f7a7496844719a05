"""Measured iteration times of public clusters, predicted by the planner's own estimator.

    python benchmarks/planner_truth.py --fit single.csv [multi.csv ...] --predict withheld.csv --out predicted.csv

Rows are in the format of vTrain's validation data (https://github.com/VIA-Research/vTrain): GPUs, batches, a GPT's
shape, degrees of tensor, data and pipeline parallelism, and milliseconds of an iteration of Megatron-DeepSpeed on A100
GPUs. `planner/step_time.py` predicts them, as for `rotorch plan`; what is fitted are efficiencies and constants of
links (`FITTED`), which are printed. With `--leave-out` each group of rows is predicted from the others.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Combine, Cut, LayerOrder, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.traffic import MicroBatch
from rotorch.planner.cluster import load_cluster
from rotorch.planner.speeds import Group, LinkSpeed, Speeds, speeds_of
from rotorch.planner.step_time import Planned, step_time
from rotorch.planner.workload import FoldedModel, Numerics, fold
from rotorch.strategies import parse_parallel

VOCABULARY = 51200
"""GPT-2's 50,257 tokens, filled up to a multiple of 1,024 as Megatron does."""

PER_NODE = 8


@dataclass(frozen=True)
class Row:
    """One measured iteration."""

    gpus: int
    global_batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    pipeline: int
    measured_ms: float
    is_multi: bool

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        return self.global_batch // (self.data * self.micro_batch)


_COLUMNS = {
    "# GPUs": "gpus",
    "global batch": "global_batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "# layers": "layers",
    "sequence length": "sequence",
    "tensor parallelism": "tensor",
    "data parallelism": "data",
    "pipeline parallelism": "pipeline",
}


def read_rows(path: Path) -> tuple[list[dict[str, str]], list[Row]]:
    """The rows of a file, as they are written and as they are read; times may be missing.

    Raises:
        ConfigError: a column is missing, or a number is none.
    """
    with path.open(newline="", encoding="utf-8-sig") as stream:
        raw = [{(key or "").strip(): value for key, value in line.items()} for line in csv.DictReader(stream)]
    if missing := [name for name in _COLUMNS if raw and name not in raw[0]]:
        raise ConfigError(f"{path}: no column {missing[0]!r}. It takes the columns of vTrain's validation data")
    rows = []
    for number, line in enumerate(raw, start=2):
        try:
            values = {field: int(line[name]) for name, field in _COLUMNS.items()}
            measured = float(line.get("iteration time (ms)") or "nan")
        except ValueError as error:
            raise ConfigError(f"{path}: line {number}: {error}") from None
        rows.append(Row(**values, measured_ms=measured, is_multi="Parameters (billion)" in line))
    return raw, rows


def gpt(*, layers: int, hidden: int, sequence: int) -> FoldedModel:
    """GPT-2's shape in half precision, with an embedding tied to the head."""
    units: list[Unit] = [
        Unit(
            "embed.weight",
            UnitKind.WEIGHT,
            Combine.CONCAT,
            (Weight("embed.weight", (VOCABULARY, hidden), 2, Cut(0, VOCABULARY), aliases=("head.weight",)),),
            uses=2,
            logits=True,
        )
    ]
    whole = [Weight("positions.weight", (sequence, hidden), 2)]
    for number in range(layers):
        name = f"layers.{number}"
        for module, inside, outside in (("attention", 3 * hidden, hidden), ("mlp", 4 * hidden, 4 * hidden)):
            first = Weight(f"{name}.{module}.first.weight", (inside, hidden), 2, Cut(0, hidden))
            second = Weight(f"{name}.{module}.second.weight", (hidden, outside), 2, Cut(1, hidden))
            units.append(Unit(f"{name}.{module}", UnitKind.MODULE, Combine.SUM, (first, second)))
        whole += [Weight(f"{name}.norm{k}.{what}", (hidden,), 2) for k in (1, 2) for what in ("weight", "bias")]
    whole += [Weight(f"norm.{what}", (hidden,), 2) for what in ("weight", "bias")]
    units.append(Unit("replicated", UnitKind.REPLICATED, Combine.NONE, tuple(whole)))
    order = LayerOrder(
        layers=tuple(f"layers.{number}" for number in range(layers)),
        after=("norm", "head"),
        width=hidden,
        attention_width=hidden,
    )
    return fold(ModelSpec("GPT", tuple(units), order=order))


FITTED = (
    "flops_per_s",
    "half_size",
    "bytes_per_s",
    "launch_s",
    "operator_s",
    "node_bytes_per_s",
    "node_latency_s",
    "network_bytes_per_s",
    "network_latency_s",
    "optimizer_bytes",
)


@dataclass(frozen=True)
class Estimator:
    """The planner's estimator with these values in place of a cluster's.

    Attributes:
        values: by the names of `FITTED`.
    """

    values: dict[str, float]

    def milliseconds(self, row: Row) -> float:
        """Of one iteration."""
        return 1e3 * step_time(self.planned(row)).step_s

    def planned(self, row: Row) -> Planned:
        """What `rotorch plan` would make of a row."""
        v = self.values
        links = (
            LinkSpeed(PER_NODE, v["node_bytes_per_s"], v["node_latency_s"], 0.3 * v["node_latency_s"]),
            LinkSpeed(1 << 20, v["network_bytes_per_s"], v["network_latency_s"], 0.3 * v["network_latency_s"]),
        )
        speeds = Speeds(
            flops_per_s=v["flops_per_s"],
            bytes_per_s=v["bytes_per_s"],
            half_size=v["half_size"],
            launch_s=v["launch_s"],
            operator_s=v["operator_s"],
            overlap=0.0,
            links=links,
        )
        model = _model(row.layers, row.hidden, row.sequence)
        t, d, p = row.tensor, row.data, row.pipeline
        each, more = divmod(row.layers, p)
        sizes = [each + (stage < more) for stage in range(p)]
        texts = [f"ddp={d}"] if d > 1 or t * p == 1 else []
        texts += [f"pp={p}[layers={'-'.join(map(str, sizes))}]"] if p > 1 else []
        texts += [f"megatron={t}"] if t > 1 else []
        starts = np.cumsum([0, *sizes])
        # Megatron's order of ranks: tensors on neighbours, then data, then stages.
        groups = {"megatron": Group(t, 1), "ddp": Group(d, t), "pp": Group(p, t * d)}
        return Planned(
            model=model,
            strategies=parse_parallel(",".join(texts)),
            batch=MicroBatch(row.micro_batch, row.sequence, itemsize=2),
            accumulation=row.accumulation,
            speeds=speeds,
            numerics=Numerics(
                fused_attention=False,
                heads=row.heads,
                optimizer_bytes=v["optimizer_bytes"],
                recompute=row.is_multi,
            ),
            parts=tuple(range(int(a), int(b)) for a, b in zip(starts[:-1], starts[1:], strict=True)) if p > 1 else (),
            groups=groups,
            ddp_overlaps=False,
        )


_models: dict[tuple[int, int, int], FoldedModel] = {}


def _model(layers: int, hidden: int, sequence: int) -> FoldedModel:
    key = (layers, hidden, sequence)
    if key not in _models:
        _models[key] = gpt(layers=layers, hidden=hidden, sequence=sequence)
    return _models[key]


def first_guess() -> dict[str, float]:
    """The figures of the cluster of A100s that rotorch brings."""
    speeds = speeds_of(load_cluster("a100x64"), dtype="float16")
    node, network = speeds.links
    return {
        "flops_per_s": speeds.flops_per_s,
        "half_size": speeds.half_size,
        "bytes_per_s": speeds.bytes_per_s,
        "launch_s": speeds.launch_s,
        "operator_s": speeds.operator_s,
        "node_bytes_per_s": node.bytes_per_s,
        "node_latency_s": node.latency_s,
        "network_bytes_per_s": network.bytes_per_s,
        "network_latency_s": network.latency_s,
        "optimizer_bytes": 40.0,
    }


if __name__ == "__main__":
    pass
