"""Memory as RTP's paper measures it (arXiv 2311.01635): models, batches, largest model, memory while building.

    python benchmarks/papers/rtp.py                      # writes benchmarks/results/papers/rtp.json
    python benchmarks/papers/rtp.py --only capacity      # one part of it, the others kept

One rank is real, the others are faked, and nothing is computed (`rotorch.testing.operations`): every tensor of a step
with AdamW is made, counted by `rotorch.traced.live_storages`, and never written. So GPT-2 XL on eight ranks takes no
memory here, and bytes do not depend on the machine. The rank is the first, which holds most where a cut is uneven.

    peaks      GPT-2 355M to 1.5B and BERT-large on 8 ranks, four sequences a rank (the smallest 1 to 8): the highest
               moment of a step. "ideal" is an eighth of what one process holds with the sequences of all ranks
    shares     the same of a Llama on 2, 4 and 8 ranks with as much computed again on one process as on a rank
    capacity   the most layers of that Llama that fit into the memory of one process, and of each of 8 ranks, with one
               sequence of 128 tokens each as in the authors' public benchmark; blocks are computed again. That depth
               and the next one are both run
    building   resident memory that a process takes until its part of the model is there, beside that of a process that
               builds the whole model and cuts it

The peers are the authors': replicas (DDP), and FSDP with the whole model as one unit; beside them FSDP2 block by block.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from gpu_rank import unsent_gradients  # noqa: E402

import rotorch  # noqa: E402
import rotorch.bench.contender as of_contenders  # noqa: E402
from rotorch.bench.contender import Contender, PlainLoop, UnderLayout, whole_model  # noqa: E402
from rotorch.bench.process_memory import read_process_memory, reset_peak  # noqa: E402
from rotorch.bench.record import describe_origin  # noqa: E402
from rotorch.bench.task import Task  # noqa: E402
from rotorch.bench.tensor_memory import measure_tensors  # noqa: E402
from rotorch.models.hf import causal_lm, config_from_dict  # noqa: E402
from rotorch.parallel_model import ParallelModel  # noqa: E402
from rotorch.run_config import OptimizerSection  # noqa: E402
from rotorch.testing.fake import as_rank  # noqa: E402
from rotorch.testing.operations import WithoutArithmetic  # noqa: E402

OUT = HERE.parents[1] / "benchmarks" / "results" / "papers" / "rtp.json"
RANKS = 8
BATCHES, ONE_BATCH = (1, 4, 8), 4
"""Sequences of a rank: of the smallest model, and of the others."""
ONE_UNIT = "fsdp, one unit"
MESSAGES, IN_PLACE = "transport=send_receive", "transport=send_receive,buffering=in_place"
ROWS = (f"ddp={RANKS}", ONE_UNIT, f"fsdp={RANKS}", f"rtp={RANKS}[{MESSAGES}]", f"rtp={RANKS}[{IN_PLACE}]")

LEFT_OUT = {"GPT-2 1.5B": (ONE_UNIT, f"fsdp={RANKS}")}
"""FSDP2 gathers by operations that are not torch's own: they really copy, and this model is too large for that here."""

Model = dict[str, Any]


def gpt2(*, width: int, layers: int, heads: int) -> Model:
    """A GPT-2 of 1,024 positions, as its configuration."""
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": 1024,
        "use_cache": False,
        **dropout,
    }


MODELS: dict[str, tuple[Model, int]] = {
    "GPT-2 355M": (gpt2(width=1024, layers=24, heads=16), 1024),
    "GPT-2 774M": (gpt2(width=1280, layers=36, heads=20), 1024),
    "GPT-2 1.5B": (gpt2(width=1600, layers=48, heads=25), 1024),
    "BERT-large": (
        {
            "model_type": "bert",
            "architectures": ["BertForMaskedLM"],
            "vocab_size": 30522,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "max_position_embeddings": 512,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        512,
    ),
}
"""Configurations, each with the tokens of a sequence."""

LLAMA: Model = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "use_cache": False,
}
LLAMA_TOKENS = 256
SHARES = {"none": ("single", "none"), "blocks": ("single[recompute=block]", "slice")}
"""What is computed again: on one process, and under rtp."""

CAPACITY_BYTES, CAPACITY_TOKENS = 4 << 30, 128
DEPTHS = (4, 8)
"""Two depths, from which the number of layers that will fit is guessed."""


# ---------------------------------------------------------------- one rank's peak


class OneUnit(PlainLoop):
    """Torch's `fully_shard` around the model alone: gathered whole for forward, and whole until backward ends."""

    def __init__(self, task: Task) -> None:
        with WithoutArithmetic():
            module = whole_model(task)
            fully_shard(module, mesh=init_device_mesh("cpu", (task.num_ranks,)))
        super().__init__(task, module=module, shares=[0])


def task_of(model: Model, *, ranks: int, rows: int, tokens: int) -> Task:
    """A step of `rows` sequences on each rank."""
    return Task(
        name="paper",
        model=model,
        vocabulary=model["vocab_size"],
        num_ranks=ranks,
        micro_batch=rows,
        sequence_length=tokens,
        optimizer=OptimizerSection(lr=1e-3, clip_norm=0),
    )


def peak(model: Model, parallel: str, *, rows: int, tokens: int, ranks: int = RANKS) -> dict[str, int]:
    """The highest moment of a step on the first rank, by category, and "peak_bytes"."""
    task = task_of(model, ranks=ranks, rows=rows, tokens=tokens)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"RANK": "0"}))  # what runs in this process later is no rank
        stack.enter_context(as_rank(0, num_ranks=ranks))
        stack.enter_context(unsent_gradients())
        # First values of weights that nothing is computed with.
        stack.enter_context(mock.patch.object(ParallelModel, "materialize", lambda *_, **__: None))
        stack.enter_context(mock.patch.object(of_contenders, "initialise", lambda *_, **__: None))
        contender: Contender = OneUnit(task) if parallel == ONE_UNIT else UnderLayout(task, parallel=parallel)
        with WithoutArithmetic():
            contender.forward_backward(0)
            contender.update()  # AdamW has its state now
            memory = measure_tensors(contender, step=1)
        contender.close()
    return {"peak_bytes": memory.peak_bytes, **memory.peak}


def beside(found: dict[str, int], *, alone: int, ranks: int) -> dict[str, Any]:
    """A rank's figures, and its share of what one process holds with the sequences of all ranks."""
    return {**found, "ideal_bytes": alone // ranks, "of_ideal": alone / ranks / found["peak_bytes"]}


def peaks() -> Iterator[dict[str, Any]]:
    """Rows of all models, batches and layouts."""
    for name, (model, tokens) in MODELS.items():
        for rows in BATCHES if name == next(iter(MODELS)) else (ONE_BATCH,):
            alone = peak(model, "single", rows=RANKS * rows, tokens=tokens, ranks=1)["peak_bytes"]
            for parallel in (row for row in ROWS if row not in LEFT_OUT.get(name, ())):
                found = beside(peak(model, parallel, rows=rows, tokens=tokens), alone=alone, ranks=RANKS)
                yield {"model": name, "rows": rows, "tokens": tokens, "parallel": parallel, **found}


def shares() -> Iterator[dict[str, Any]]:
    """Rows of the Llama: with nothing computed again, and with all blocks."""
    for again, (single, recompute) in SHARES.items():
        for ranks in (2, 4, 8):
            alone = peak(LLAMA, single, rows=ranks, tokens=LLAMA_TOKENS, ranks=1)["peak_bytes"]
            for transport in (MESSAGES, IN_PLACE):
                parallel = f"rtp={ranks}[recompute={recompute},{transport}]"
                found = peak(LLAMA, parallel, rows=1, tokens=LLAMA_TOKENS, ranks=ranks)
                yield {"again": again, "ranks": ranks, "parallel": parallel, **beside(found, alone=alone, ranks=ranks)}


# ---------------------------------------------------------------- the largest model


def capacity() -> Iterator[dict[str, Any]]:
    """The most layers that fit, by ranks; the first row is one process."""
    alone = 0
    for ranks, parallel in ((1, SHARES["blocks"][0]), (RANKS, f"rtp={RANKS}[recompute=slice,{MESSAGES}]")):

        def at(layers: int, parallel: str = parallel, ranks: int = ranks) -> int:
            model = {**LLAMA, "num_hidden_layers": layers}
            return peak(model, parallel, rows=1, tokens=CAPACITY_TOKENS, ranks=ranks)["peak_bytes"]

        layers, bytes_there, bytes_behind = most_layers(at, limit=CAPACITY_BYTES)
        parameters = causal_lm_parameters({**LLAMA, "num_hidden_layers": layers})
        alone = alone or parameters
        yield {
            "ranks": ranks,
            "parallel": parallel,
            "limit_bytes": CAPACITY_BYTES,
            "layers": layers,
            "parameters": parameters,
            "peak_bytes": bytes_there,
            "peak_bytes_one_layer_more": bytes_behind,
            "times_one_process": parameters / alone,
        }


def most_layers(at: Callable[[int], int], *, limit: int) -> tuple[int, int, int]:
    """The most layers whose peak is within `limit`, that peak, and the peak of one layer more; both were run."""
    less, more = map(at, DEPTHS)
    a_layer = (more - less) / (DEPTHS[1] - DEPTHS[0])
    layers = max(1, DEPTHS[0] + int((limit - less) / a_layer))
    here = at(layers)
    while here > limit:
        layers -= 1
        here = at(layers)
    while (behind := at(layers + 1)) <= limit:
        layers, here = layers + 1, behind
    return layers, here, behind


def causal_lm_parameters(model: Model) -> int:
    """The parameters of a model, tied ones once."""
    with rotorch.on_meta():
        return sum(parameter.numel() for parameter in causal_lm(config_from_dict(model, source=__file__)).parameters())


# ---------------------------------------------------------------- memory while building


def building() -> Iterator[dict[str, Any]]:
    """Resident memory of a process until its part of GPT-2 355M is there: built on meta, and built whole and cut."""
    model, _ = MODELS["GPT-2 355M"]
    config = config_from_dict(model, source=__file__)
    for way, on_meta in (("on meta", True), ("whole, then cut", False)):
        found = in_a_process(partial(built_part, on_meta=on_meta), config)
        yield {"model": "GPT-2 355M", "parallel": f"rtp={RANKS}[{MESSAGES}]", "way": way, **found}


def built_part(config: Any, *, on_meta: bool) -> int:
    """A rank's slices, from a model without memory, or from one that is there; returns their bytes."""
    with as_rank(0, num_ranks=RANKS):
        with rotorch.on_meta() if on_meta else nullcontext():
            module = causal_lm(config)
        model = rotorch.parallelize(module, f"rtp={RANKS}[{MESSAGES}]", device="cpu")
        if on_meta:
            model.materialize(seed=0)
        held = sum(weight.local.nbytes for weight in model.weights.values())
        model.close()
    return held


def in_a_process(built: Callable[[Any], int], config: Any) -> dict[str, int]:
    """Runs `built` in a forked process: bytes held in the end, and the most that it was larger than before."""

    def child(connection: Any) -> None:
        reset_peak()
        before = read_process_memory().rss_bytes
        held = built(config)
        connection.send({"held_bytes": held, "peak_bytes": read_process_memory().highest_rss_bytes - before})

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(there,))
    process.start()
    there.close()
    found: dict[str, int] = here.recv()
    process.join()
    return found


# ---------------------------------------------------------------- the record

PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "building": building,  # first: it forks, from a process that has computed nothing
    "peaks": peaks,
    "shares": shares,
    "capacity": capacity,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line, measures, and writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--record", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    options.record.parent.mkdir(parents=True, exist_ok=True)
    for name in (name for name in PARTS if name in options.only):
        found = []
        for row in PARTS[name]():
            found.append(row)
            print(json.dumps({"part": name, **row}), flush=True)
        # After each part: a later one that does not fit into this machine's address space costs the others nothing.
        kept = json.loads(options.record.read_text("utf-8")) if options.record.exists() else {}
        origin = describe_origin()
        commits = {**kept.get("commits", {}), name: origin["commit"]}  # parts may be of several runs
        record = {**kept, **origin, "commits": commits, "ranks": RANKS, name: found}
        options.record.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
