"""Measured iteration times of public clusters, predicted by the planner's own estimator.

    python benchmarks/planner_truth.py --fit single.csv [multi.csv ...] --predict withheld.csv --out predicted.csv

Rows are in the format of vTrain's validation data (https://github.com/VIA-Research/vTrain): GPUs, batches, a GPT's
shape, degrees of tensor, data and pipeline parallelism, and milliseconds of an iteration of Megatron-DeepSpeed on A100
GPUs. `planner/step_time.py` predicts them, as for `rotorch plan`; what is fitted are efficiencies and constants of
links (`BOUNDS`), which are printed. `--leave-out` predicts each group of rows with as many GPUs from all others.

[Note: the vocabulary]
    The data do not say how many words the models have. Rows without tensor parallelism take about 3.4 times as long
    per operation for the head as others, as products of GPT-2's 50,257 words do whose rows are not aligned; Megatron
    fills a vocabulary up where it cuts it. So it is taken as 50,257 there, and as 51,200 elsewhere. That was seen in
    the rows to fit, and is an assumption.

[Note: the fit]
    Least absolute errors of logarithms, by least squares with weights anew in each round (Gauss-Newton, damped). Files
    count alike, however many rows they have. Nothing may be faster than its datasheet.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rotorch.bench.record import describe_origin
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Combine, Cut, LayerOrder, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.traffic import MicroBatch
from rotorch.planner.cluster import load_cluster
from rotorch.planner.planned import Planned
from rotorch.planner.speeds import Group, LinkSpeed, Speeds, speeds_of
from rotorch.planner.step_time import step_time
from rotorch.planner.workload import FoldedModel, Numerics, fold
from rotorch.strategies import parse_parallel

VOCABULARY, FILLED_VOCABULARY = 50257, 51200
"""See [Note: the vocabulary]."""

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


@lru_cache(maxsize=4096)
def gpt(*, layers: int, hidden: int, sequence: int, vocabulary: int) -> FoldedModel:
    """GPT-2's shape in half precision, with an embedding tied to the head."""
    units: list[Unit] = [
        Unit(
            "embed.weight",
            UnitKind.WEIGHT,
            Combine.CONCAT,
            (Weight("embed.weight", (vocabulary, hidden), 2, Cut(0, vocabulary), aliases=("head.weight",)),),
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


BOUNDS = {
    "flops_per_s": (60e12, 312e12),
    "half_size": (1.0, 512.0),
    "unaligned": (0.1, 1.0),
    "bytes_per_s": (0.4e12, 2.039e12),
    "launch_s": (1e-6, 3e-5),
    "operator_s": (1e-6, 2e-4),
    "node_bytes_per_s": (60e9, 300e9),
    "node_latency_s": (2e-6, 2e-4),
    "network_bytes_per_s": (2e9, 25e9),
    "network_latency_s": (2e-6, 5e-4),
}
"""What is fitted, and between what: datasheets of the A100 (SXM, 80 GB) and of HDR InfiniBand give the most."""

_MOST_ROWS = 120
"""Of a file that are fitted: every second, third ... one where there are more."""


@dataclass(frozen=True)
class Estimator:
    """The planner's estimator with these values in place of a cluster's.

    Attributes:
        values: by the names of `BOUNDS`.
    """

    values: dict[str, float]

    def milliseconds(self, row: Row) -> float:
        """Of one iteration."""
        return 1e3 * step_time(self.planned(row)).step_s

    def planned(self, row: Row) -> Planned:
        """Prediction of `rotorch plan` for a row."""
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
            unaligned=v["unaligned"],
            links=links,
        )
        model = gpt(
            layers=row.layers,
            hidden=row.hidden,
            sequence=row.sequence,
            vocabulary=FILLED_VOCABULARY if row.tensor > 1 else VOCABULARY,
        )
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
                recompute=row.is_multi,
            ),
            parts=tuple(range(int(a), int(b)) for a, b in pairwise(starts)) if p > 1 else (),
            groups=groups,
            ddp_overlaps=False,
        )


Floats = NDArray[np.float64]


def first_guess() -> dict[str, float]:
    """Start of the fit: figures of the cluster of A100s that rotorch brings, and of a host that runs Python."""
    speeds = speeds_of(load_cluster("a100x64"), dtype="float16")
    node, network = speeds.links
    return {
        "flops_per_s": speeds.flops_per_s,
        "half_size": 30.0,
        "unaligned": speeds.unaligned,
        "bytes_per_s": speeds.bytes_per_s,
        "launch_s": speeds.launch_s,
        "operator_s": 45e-6,
        "node_bytes_per_s": node.bytes_per_s,
        "node_latency_s": node.latency_s,
        "network_bytes_per_s": network.bytes_per_s,
        "network_latency_s": network.latency_s,
    }


def fitted(files: Sequence[Sequence[Row]], *, rounds: int = 10) -> Estimator:
    """The estimator whose values fit measured rows best (see [Note: the fit])."""
    rows: list[Row] = []
    shares: list[float] = []
    for each in files:
        some = each[:: -(-len(each) // _MOST_ROWS)] if each else []
        rows += some
        shares += [1 / len(some)] * len(some)
    names, weight = list(BOUNDS), np.array(shares) / sum(shares)
    least, most = (np.log([BOUNDS[name][side] for name in names]) for side in (0, 1))
    measured = np.log([row.measured_ms for row in rows])

    def errors(x: Floats) -> Floats:
        estimator = _estimator(x)
        return np.log([estimator.milliseconds(row) for row in rows]) - measured

    x = np.clip(np.log([first_guess()[name] for name in names]), least, most)
    error, damping = errors(x), 1e-2
    for number in range(rounds):
        slopes = np.stack([(errors(x + step) - error) / 1e-3 for step in 1e-3 * np.eye(len(x))], axis=1)
        scale = weight / np.maximum(np.abs(error), 0.01)
        scale /= scale.sum()
        loss = float(weight @ np.abs(error))
        for _ in range(5):
            curve = slopes.T @ (scale[:, None] * slopes)
            curve += damping * np.diag(np.diag(curve)) + 1e-6 * np.eye(len(x))
            to = x - np.clip(np.linalg.solve(curve, slopes.T @ (scale * error)), -0.7, 0.7)
            to = np.clip(to, least, most)
            found = errors(to)
            if (better := loss - float(weight @ np.abs(found))) > 0:
                break
            damping *= 6
        else:
            break
        x, error, damping = to, found, max(damping / 5, 1e-6)
        print(f"  round {number + 1}: mean error {float(weight @ np.abs(error)):.4f}", file=sys.stderr, flush=True)
        if better < 1e-5:
            break
    return _estimator(x)


def _estimator(x: Floats) -> Estimator:
    return Estimator(dict(zip(BOUNDS, map(float, np.exp(x)), strict=True)))


def errors_of(rows: Sequence[Row], *, estimator: Estimator) -> dict[str, float]:
    """Relative errors of predictions, in magnitude and (bias) in the mean."""
    measured = np.array([row.measured_ms for row in rows])
    ratio = np.array([estimator.milliseconds(row) for row in rows]) / measured
    error = np.abs(ratio - 1)
    return {
        "rows": len(rows),
        "mean": float(error.mean()),
        "median": float(np.median(error)),
        "p90": float(np.percentile(error, 90)),
        "max": float(error.max()),
        "bias": float((ratio - 1).mean()),
    }


def left_out(files: Sequence[Sequence[Row]]) -> dict[str, dict[str, float]]:
    """Of each number of GPUs: errors of its rows, predicted by what the others give."""
    found = {}
    for gpus in sorted({row.gpus for rows in files for row in rows}):
        others = [[row for row in rows if row.gpus != gpus] for rows in files]
        out = [row for rows in files for row in rows if row.gpus == gpus]
        found[f"{gpus} GPUs"] = errors_of(out, estimator=fitted([rows for rows in others if rows]))
    return found


def halves(files: Sequence[Sequence[Row]], *, seed: int = 0) -> dict[str, dict[str, float]]:
    """Of each file: errors of its rows, a random half predicted by all that is not in that half."""
    found = {}
    for number, rows in enumerate(files):
        order = np.random.default_rng(seed).permutation(len(rows))
        ratios: list[dict[str, float]] = []
        for part in (order[: len(rows) // 2], order[len(rows) // 2 :]):
            out = set(map(int, part))
            others = [row for place, row in enumerate(rows) if place not in out]
            estimator = fitted([others if each is rows else each for each in files])
            ratios.append(errors_of([rows[place] for place in sorted(out)], estimator=estimator))
        found[f"file {number + 1}"] = {key: float(np.mean([each[key] for each in ratios])) for key in ratios[0]}
    return found


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fit", nargs="+", type=Path, required=True, help="measured rows")
    parser.add_argument("--predict", type=Path, help="rows to predict")
    parser.add_argument("--out", type=Path, help="the same with predicted milliseconds")
    parser.add_argument("--leave-out", action="store_true", help="predict groups of the measured rows from the others")
    parser.add_argument("--record", type=Path, help="write all figures as JSON")
    arguments = parser.parse_args()
    if (arguments.predict is None) != (arguments.out is None):
        parser.error("--predict and --out go together")
    files = [read_rows(path)[1] for path in arguments.fit]
    for path, rows in zip(arguments.fit, files, strict=True):
        if any(not row.measured_ms > 0 for row in rows) or not rows:
            raise ConfigError(f"{path}: rows to fit need 'iteration time (ms)' above 0")
    estimator = fitted(files)
    record: dict[str, Any] = {
        **describe_origin(),
        "fitted": estimator.values,
        "errors": {
            path.name: errors_of(rows, estimator=estimator) for path, rows in zip(arguments.fit, files, strict=True)
        },
    }
    if arguments.predict is not None:
        raw, rows = read_rows(arguments.predict)
        with arguments.out.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, [*raw[0], "predicted (ms)"] if raw else [])
            writer.writeheader()
            for line, row in zip(raw, rows, strict=True):
                writer.writerow({**line, "predicted (ms)": f"{estimator.milliseconds(row):.3f}"})
        known = [row for row in rows if row.measured_ms > 0]
        if known:
            record["errors"][f"{arguments.predict.name} (predicted)"] = errors_of(known, estimator=estimator)
    if arguments.leave_out:
        record["left_out"] = {**left_out(files), **halves(files)}
    text = json.dumps(record, indent=2)
    print(text)
    if arguments.record is not None:
        arguments.record.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(f"planner_truth: {error}")
