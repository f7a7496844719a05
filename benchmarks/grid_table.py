"""Bytes that 1-D, 2-D, 2.5-D and adaptive 2-D tensor parallelism send and hold, by their Layouts and as measured.

    python benchmarks/grid_table.py --json benchmarks/results/grid-table.json

Writes a table in Markdown beside the JSON. The model has the shapes of Tesseract's strong-scaling table (arXiv
2105.14500) with a hidden size divided by eight: hidden 384, 64 heads, MLPs of 4 x 384; two layers, a vocabulary of
2048, 16 sequences of 64 tokens over all ranks. On 4 and 8 ranks a step really runs, over messages, and again over
shared memory where there is a choice; for 16 and 64 this process stands for one of them (`rotorch.testing.fake`), so
bytes are counted and what tensors take, but nothing is received.

Every figure is of one rank, and the largest of all ranks that were measured. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import rotorch
from rotorch.bench.contender import UnderLayout
from rotorch.bench.rank import load_code
from rotorch.bench.record import describe_origin, load_average
from rotorch.bench.task import Task
from rotorch.bench.tensor_memory import measure_tensors
from rotorch.comm.meter import Meter
from rotorch.core.grid import GridCoordinate
from rotorch.core.layout import Layout
from rotorch.core.spec import Combine, Cut, GridCut, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch, sent_bytes
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.run_config import OptimizerSection
from rotorch.strategies import batch_ranks, num_ranks, parse_parallel
from rotorch.testing.fake import as_rank
from rotorch.testing.ranks import run_ranks

LAYOUTS = {
    4: ["megatron=4", "megatron=4[sequence_parallel=true]", "summa=2x2", "tesseract=2x2x1", "atp=2x2"],
    8: ["megatron=8", "tesseract=2x2x2", "tesseract=2x2x2[zero=true]", "atp=2x4"],
    16: ["megatron=16", "summa=4x4", "tesseract=2x2x4", "atp=4x4"],
    64: ["megatron=64", "summa=8x8", "tesseract=4x4x4", "tesseract=4x4x4[zero=true]", "tesseract=8x8x1", "atp=8x8"],
}
"""By number of ranks. Eight are no square, so 2-D has none there."""

MODEL = {
    "model_type": "gpt_neox",
    "vocab_size": 2048,
    "hidden_size": 384,
    "intermediate_size": 4 * 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 64,
    "use_parallel_residual": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
ROWS, TOKENS = 16, 64
"""Of the global batch."""

REAL = 8
"""Up to so many ranks are started."""

PAPER = {
    "1-D": "2 (p-1) / p",
    "2-D": "6 (q-1) / q",
    "2.5-D": "3 (q-1) (d+1) / (d q)",
}


# ------------------------------------------------------------------ what the Layouts say


def over(parallel: str, transport: str) -> str:
    """A layout with its blocks, or sums, over one transport; one that has no choice sends messages as it is."""
    (strategy,) = parse_parallel(parallel)
    return str(strategy.model_copy(update={"transport": transport})) if hasattr(strategy, "transport") else parallel


def layout_of(strategy: Strategy, spec: ModelSpec, *, rows: int, tokens: int, position: int) -> Layout:
    """The Layouts' bytes of a rank in a step of a global batch."""
    batch = MicroBatch(rows // batch_ranks([strategy]), tokens)
    return strategy.layout_of(strategy.units_of(spec), batch=batch, position=position)


def gathered_blocks(strategy: Strategy, spec: ModelSpec) -> int:
    """Bytes of whole blocks that a step gathers: in the Layout, and measured among what is saved of a forward pass."""
    if not getattr(strategy, "zero", False):
        return 0
    coordinate = GridCoordinate.at(0, size=strategy.rows, depth=strategy.depth, in_shards=True)
    return sum(coordinate.block_bytes(w) for w in spec.weights if coordinate.is_in_shards(w))


def by_axis(layout: Layout) -> dict[str, int]:
    """Bytes sent, by "kind axis"."""
    sent: dict[str, int] = defaultdict(int)
    for transfer in layout.transfers:
        sent[f"{transfer.kind} {transfer.axis}"] += transfer.sent_bytes
    return {name: num_bytes for name, num_bytes in sent.items() if num_bytes}


# ------------------------------------------------------------------ what is measured


def task_of(model: Mapping[str, Any], *, ranks: int, rows: int, tokens: int) -> Task:
    """The work, the same whoever does it. `micro_batch` would be a rank's if all ranks had batches of their own."""
    return SharedBatch(
        name="grid-table",
        model=dict(model),
        vocabulary=model["vocab_size"],
        num_ranks=ranks,
        micro_batch=rows,
        sequence_length=tokens,
        optimizer=OptimizerSection(lr=1e-3),
    )


class SharedBatch(Task):
    """Has as many samples in a step as a rank's micro-batch says, on any number of ranks."""

    @property
    def global_batch(self) -> int:
        return self.micro_batch


def measured(task: Task, parallel: str) -> dict[str, Any]:
    """On this rank: bytes sent by "kind axis", weights, and the highest moment of a step with AdamW."""
    contender = UnderLayout(task, parallel=parallel)
    axes = {contender.model.mesh.get_group(a).group_name: a for a in contender.model.mesh.mesh_dim_names or ()}
    with Meter() as meter:
        contender.forward_backward(0)
    contender.update()  # AdamW has its state now
    memory = measure_tensors(contender, step=1)
    contender.close()
    if meter.not_counted:
        raise AssertionError(f"the meter has no rule for {dict(meter.not_counted)}")
    return {
        "sent": {f"{kind} {axes[name]}": n for (kind, name), n in meter.sent_by_group.items() if n},
        "weights": memory.resident["weights"],
        "slots": memory.slots_bytes,
        "peak": memory.peak_bytes,
        "saved": memory.peak["activations"] + memory.peak["logits"],
    }


def measure(task: Task, parallel: str) -> dict[str, Any]:
    """On the ranks of a layout, or as one of many: the rank with the highest peak, and the most that any sends."""
    ranks = num_ranks(parse_parallel(parallel))
    if ranks <= REAL:
        found = run_ranks(measured, task, parallel, num_ranks=ranks, timeout_s=600)
    else:
        found = []
        for rank in (0, ranks - 1):
            # What runs in this process later is no rank.
            with patch.dict(os.environ, {"RANK": str(rank)}), as_rank(rank, num_ranks=ranks):
                found.append(measured(task, parallel))
    most = max(found, key=lambda of_rank: of_rank["peak"])
    sent = {name: max(of_rank["sent"].get(name, 0) for of_rank in found) for name in most["sent"]}
    return {**most, "sent": sent, "weights": max(of_rank["weights"] for of_rank in found)}


def row_of(spec: ModelSpec, parallel: str, *, model: Mapping[str, Any], rows: int, tokens: int) -> dict[str, Any]:
    """A layout's row: what its Layouts say and what was measured, over messages and over shared memory."""
    ranks = num_ranks(parse_parallel(parallel))
    task = task_of(model, ranks=ranks, rows=rows, tokens=tokens)
    row: dict[str, Any] = {"parallel": parallel, "nproc": ranks, "real_ranks": ranks <= REAL}
    texts = {transport: over(parallel, transport) for transport in ("messages", "shared_memory")}
    for transport, text in texts.items():
        if transport == "shared_memory" and (ranks > REAL or text == texts["messages"]):
            continue
        (strategy,) = parse_parallel(text)
        said = [layout_of(strategy, spec, rows=rows, tokens=tokens, position=k) for k in {0, ranks - 1}]
        row[transport] = {
            "layout": {
                "weights": max(each.resident_bytes for each in said),
                "transient": max(each.transient_bytes for each in said),
                "slots": max(each.slots_bytes for each in said),
                "gathered": gathered_blocks(strategy, spec),
                "sent": by_axis(max(said, key=lambda each: each.sent_bytes())),
            },
            "measured": measure(task, text),
        }
    return row


# ------------------------------------------------------------------ the paper's formulas


def square_product(*, q: int, d: int, size: int) -> tuple[int, int]:
    """Elements that a rank sends for a product of two `size` x `size` matrices, forward and backward.

    Returns:
        Of blocks; of the sum of gradients over depth.
    """
    grid = GridCut(rows=Cut(1, size), columns=Cut(0, size))
    weight = Weight("w", (size, size), 1, grid=grid)
    unit = Unit("w", UnitKind.WEIGHT, Combine.CONCAT, (weight,))
    coordinate = GridCoordinate.at(0, size=q, depth=d)
    batch = MicroBatch(num_rows=1, num_tokens=size // (d * q), itemsize=1)
    weights = coordinate.layout(unit).transfers
    over_depth = sent_bytes(t for t in weights if t.axis == "depth")
    return sent_bytes([*weights, *coordinate.activation_transfers(unit, batch)]) - over_depth, over_depth


def pair_of_products(*, p: int, size: int) -> int:
    """Elements that a rank sends under megatron for two such products in a row, forward and backward."""
    weights = tuple(Weight(name, (size, size), 1, cut=Cut(dim, size)) for name, dim in (("up", 0), ("down", 1)))
    unit = Unit("mlp", UnitKind.MODULE, Combine.SUM, weights)
    (strategy,) = parse_parallel(f"megatron={p}")
    return sent_bytes(strategy.activation_transfers(unit, batch=MicroBatch(1, size, itemsize=1)))


def bandwidth(kind: str, *, p: int, q: int, d: int) -> float:
    """The paper's bandwidth, relative to one matrix; of 2-D and 2.5-D it is q times what one rank sends here."""
    if kind == "1-D":
        return 2 * (p - 1) / p
    return 3 * (q - 1) * (d + 1) / (d * q)


def paper_rows(size: int = 4096) -> list[dict[str, Any]]:
    """For each number of ranks: the paper's bandwidth, and what a rank sends by the Layouts, relative to one matrix."""
    rows = []
    for kind, p, q, d in (
        *(("1-D", p, 1, 1) for p in (4, 8, 16, 64)),
        *(("2-D", q * q, q, 1) for q in (2, 4, 8)),
        *(("2.5-D", q * q * d, q, d) for q, d in ((2, 2), (2, 4), (4, 4))),
    ):
        if kind == "1-D":
            ours, over_depth = pair_of_products(p=p, size=size) / 2 / size**2, 0.0
        else:
            blocks, summed = square_product(q=q, d=d, size=size)
            ours, over_depth = blocks / size**2, summed / size**2
        said = bandwidth(kind, p=p, q=q, d=d)
        rows.append(
            {"kind": kind, "p": p, "q": q, "d": d, "paper": said, "sent": ours, "gradients_over_depth": over_depth}
        )
    return rows


def atp_rows(spec: ModelSpec, layouts: Iterable[str] = ("atp=2x2", "atp=2x4", "atp=4x4", "atp=8x8")) -> list[Any]:
    """For each layout: what one layer sums over either axis, relative to one activation."""
    rows = []
    for parallel in layouts:
        (strategy,) = parse_parallel(parallel)
        batch = MicroBatch(num_rows=1, num_tokens=8)
        units = [u for u in strategy.units_of(spec).units if ".layers.0." in u.name]
        moved = [t for u in units for t in strategy.activation_transfers(u, batch=batch)]
        whole = 8 * spec.weights[0].shape[1] * batch.itemsize
        over = {axis: sum(t.payload_bytes for t in moved if t.axis == axis) / whole for axis in strategy.axes}
        d1, d2 = strategy.axes.values()
        first, second = over.values()
        rows.append({"parallel": parallel, "d1": d1, "d2": d2, "first": first, "second": second})
    return rows


# ------------------------------------------------------------------ as text

_HELD = "ranks layout over weights measured transient slots measured saved predicted peak off"


def to_markdown(record: Mapping[str, Any]) -> str:
    """All tables."""
    shape = record["shape"]
    return f"""# 1-D, 2-D, 2.5-D and adaptive 2-D: what a rank sends and holds

GPT-NeoX of {shape["num_hidden_layers"]} layers, hidden {shape["hidden_size"]}, {shape["num_attention_heads"]} heads,
vocabulary {shape["vocab_size"]}, float32; {record["rows"]} sequences of {record["tokens"]} tokens over all ranks. Bytes
of one rank and step, by `benchmarks/grid_table.py`. On more than {REAL} ranks one process stands for one of them.

## Sent, by kind and axis

By the Layouts, and as a meter counted; = where that is the same to the byte. Over shared memory nothing is sent.

{_table("ranks layout kind axis Layout measured", _sent(record["layouts"]))}

## Held

Weights and slots in shared memory by the Layout, and as measured. "transient": what passes take beyond weights,
gradients, AdamW's two averages and what autograd saves: blocks in flight, slots. "predicted": 4 x weights + transient +
saved, of which the last is measured, since no formula knows what a model's code keeps. "peak": the highest moment of a
step, and how far it is from that: with so many tokens it is often the end of forward, when all is saved and no block is
in flight. Megatron and ATP have no formula for what they take in passes beyond slots.

{_table(_HELD, _held(record["layouts"]))}

## Beside the paper's formulas

Tesseract (arXiv 2105.14500) gives the bandwidth of a product, forward and backward, relative to one matrix:
{", ".join(f"{kind} {formula}" for kind, formula in PAPER.items())}. Here: the elements that one rank sends for a
product of two square matrices of as many elements each, relative to one of them. For 2-D and 2.5-D the paper's figure
is q times that. The sum of gradients over the depth, 2 (d-1) / (d q^2), is not in the paper's.

{_table("kind p q d paper paper/q sent gradients_over_depth", _formulas(record["paper"]))}

ATP (arXiv 2301.08658) sums over a transformer layer, forward and backward, 4 b s h / d2 over the first axis and
12 b s h / d1 over the second. Here, of one layer, payloads relative to b s h:

{_table("layout first 4/d2 second 12/d1", _sums(record["atp"]))}
"""


def _table(columns: str, rows: Iterable[Sequence[Any]]) -> str:
    """Cells as they are read: numbers with separators. "_" in a column's name stands for a space."""
    names = [name.replace("_", " ") for name in columns.split()]
    lines = [names, ["---"] * len(names), *([_cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if isinstance(value, float) else str(value)


def _sent(rows: Iterable[Mapping[str, Any]]) -> Iterator[Sequence[Any]]:
    for row in rows:
        said, found = row["messages"]["layout"]["sent"], row["messages"]["measured"]["sent"]
        one, other = sum(said.values()), sum(found.values())
        yield row["nproc"], f"`{row['parallel']}`", "all", "", one, _unless_equal(one, other)
        for name in sorted({*said, *found}):
            kind, axis = name.split()
            one, other = said.get(name, 0), found.get(name, 0)
            yield "", "", kind, axis, one, _unless_equal(one, other)


def _held(rows: Iterable[Mapping[str, Any]]) -> Iterator[Sequence[Any]]:
    for row in rows:
        for transport in ("messages", "shared_memory"):
            if transport in row:
                said, found = row[transport]["layout"], row[transport]["measured"]
                saved = max(found["saved"] - said["gathered"], 0)  # at the highest moment they may be gone
                predicted = 4 * said["weights"] + said["transient"] + saved
                weights = said["weights"], _unless_equal(said["weights"], found["weights"])
                slots = said["slots"], _unless_equal(said["slots"], found["slots"])
                peak = saved, predicted, found["peak"], f"{found['peak'] / predicted - 1:+.1%}"
                over = transport.replace("_", " ")
                yield row["nproc"], f"`{row['parallel']}`", over, *weights, said["transient"], *slots, *peak


def _formulas(rows: Iterable[Mapping[str, Any]]) -> Iterator[Sequence[Any]]:
    for row in rows:
        kind, p, q, d, paper = (row[name] for name in ("kind", "p", "q", "d", "paper"))
        grid = (q, d, paper, paper / q) if kind != "1-D" else ("", "", paper, "")
        yield kind, p, *grid, row["sent"], row["gradients_over_depth"] if kind == "2.5-D" else ""


def _sums(rows: Iterable[Mapping[str, Any]]) -> Iterator[Sequence[Any]]:
    for row in rows:
        yield f"`{row['parallel']}`", row["first"], 4 / row["d2"], row["second"], 12 / row["d1"]


def _unless_equal(said: int, found: int) -> int | str:
    return "=" if said == found else found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", choices=[*LAYOUTS], help="only so many; repeatable")
    parser.add_argument("--json", type=Path, required=True, help="where every figure goes; .md beside it")
    given = parser.parse_args(arguments)
    origin = describe_origin()
    with rotorch.on_meta():
        spec = describe(causal_lm(config_from_dict(MODEL, source="grid-table")), features=True)
    load_code(task_of(MODEL, ranks=REAL, rows=ROWS, tokens=TOKENS))
    rows = []
    for ranks in given.ranks or LAYOUTS:
        for parallel in LAYOUTS[ranks]:
            print(parallel, flush=True)
            rows.append(row_of(spec, parallel, model=MODEL, rows=ROWS, tokens=TOKENS))
    record = {
        **origin,
        "load_average_after": load_average(),
        "shape": MODEL,
        "rows": ROWS,
        "tokens": TOKENS,
        "layouts": rows,
        "paper": paper_rows(),
        "atp": atp_rows(spec),
    }
    given.json.write_text(json.dumps(record, indent=1) + "\n")
    given.json.with_suffix(".md").write_text(to_markdown(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
