"""Memory that runs out: noticed on the rank where it does, with what is alive there and what would fit."""

import json
import os
import re
import resource
import sys
from dataclasses import replace

import psutil
import pytest
import torch
from commands import rotorch, write_run
from failures import seen
from three_weights import make

from rotorch.core.errors import ConfigError, HeardFailure, RankFailure
from rotorch.core.quantities import format_bytes
from rotorch.core.spec import Combine, Cut, LayerOrder, ModelSpec, Unit, UnitKind, Weight
from rotorch.planner.prediction import predict
from rotorch.run_config import BatchSizes
from rotorch.strategies import batch_ranks, format_parallel, parse_parallel
from rotorch.testing.ranks import run_ranks
from rotorch.train import loop
from rotorch.train.checkpoint import storage
from rotorch.train.checkpoint.saving import save
from rotorch.train.checks.out_of_memory import (
    ACTIVATIONS,
    CATEGORIES,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    Share,
    asked_bytes,
    bytes_alive,
    changes,
    cheapest_change,
    counted_changes,
    is_out_of_memory,
)

MIB = 1 << 20


@pytest.mark.parametrize(
    ("error", "is_it", "asked"),
    [
        (MemoryError(), True, None),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 ..."), True, 5 << 29),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."), True, 4096),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 12 bytes."), True, 12),
        (RuntimeError("shapes do not match"), False, None),
        (ValueError("out of memory"), False, None),
        (RankFailure("checkpoint: rank 1: RuntimeError: can't allocate memory"), False, None),
    ],
)
def test_what_says_that_memory_ran_out(error, is_it, asked):
    assert (is_out_of_memory(error), asked_bytes(error)) == (is_it, asked)


def test_what_autograd_keeps_are_activations():
    before = bytes_alive(None, vocab_sizes=frozenset({1003}))
    x = torch.ones(1000, 64)
    weight = torch.ones(64, 1003, requires_grad=True)
    hidden = (x * weight[:, 0]).exp().tanh()  # kept: exp's output is not needed after tanh; tanh's output is
    logits = hidden @ weight
    alive = bytes_alive(None, vocab_sizes=frozenset({1003}))
    grown = {name: alive[name] - before[name] for name in CATEGORIES}
    assert grown[LOGITS] == logits.nbytes + weight.nbytes  # nothing tells that this one is a weight
    assert grown[ACTIVATIONS] == x.nbytes + 2 * hidden.nbytes
    assert grown[OTHER] == 0


def mlp(name):
    up, down = Weight(f"{name}.up", (64, 8), 4, Cut(0, 64)), Weight(f"{name}.down", (8, 64), 4, Cut(1, 64))
    return Unit(name, UnitKind.MODULE, Combine.SUM, (up, down))


SPEC = ModelSpec("spec", tuple(mlp(f"mlp.{number}") for number in range(10)))
WHOLE = SPEC.num_bytes


def suggested(layout, *, micro_batch=1, accumulation=2, asked=0, num_layers=1, rank=0, spec=SPEC, **alive):
    strategies = parse_parallel(layout)
    sizes = BatchSizes(micro_batch, accumulation, batch_ranks(strategies))
    share = Share(spec, strategies, sizes, rank=rank, num_layers=num_layers)
    return list(changes(share, {**dict.fromkeys(CATEGORIES, 0), **alive}, asked=asked))


def test_smaller_micro_batches_come_first():
    first, second, *_ = suggested("single", micro_batch=4, activations=800, logits=200, asked=200, num_layers=4)
    assert (first.write, first.saves_bytes) == ("train.micro_batch=2 train.accumulation=4", 600)
    assert (second.write, second.saves_bytes) == ("train.micro_batch=1 train.accumulation=8", 900)


@pytest.mark.parametrize(
    ("layout", "again"),
    [("single", "single[recompute=block]"), ("fsdp=2", "fsdp=2[recompute=block]"), ("rtp=2", "rtp=2[recompute=slice]")],
)
def test_then_to_compute_again(layout, again):
    change = suggested(layout, activations=800, num_layers=4)[0]
    assert (change.write, change.saves_bytes) == (f"parallel.layout={again}", 600)
    assert change.write not in [c.write for c in suggested(again, activations=800, num_layers=4)]


def test_then_another_layout_by_its_formulas_and_more_ranks():
    found = {change.write: change.saves_bytes for change in suggested("ddp=2")}
    assert found["parallel.layout=rtp=4 train.micro_batch=1 train.accumulation=1 --nproc 4"] > 0
    assert found["parallel.layout=rtp=2"] > 0
    assert 2 * WHOLE > found["parallel.layout=fsdp=2"] > 0  # half of weights, gradients and moments, less a unit
    assert "parallel.layout=ddp=4 --nproc 4" not in found  # it saves nothing


def test_more_ranks_take_less_each_so_that_the_global_batch_stays_what_it_was():
    found = [change.write for change in suggested("ddp=2", micro_batch=4, accumulation=1)]
    assert "parallel.layout=rtp=4 train.micro_batch=2 train.accumulation=1 --nproc 4" in found
    found = [change.write for change in suggested("rtp=2", micro_batch=3, accumulation=4)]
    assert "parallel.layout=rtp=4 train.micro_batch=3 train.accumulation=2 --nproc 4" in found
    assert not [write for write in suggested("ddp=2", accumulation=1) if "--nproc" in write.write]  # nothing to share


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_changes_are_written_as_the_user_would_and_counted_as_they_run(device):
    """Options that follow from precision and device are in no text, and in all figures."""
    share = Share(
        SPEC.with_copies(2),
        parse_parallel("rtp=2"),
        BatchSizes(1, 2, 2),
        rank=0,
        num_layers=4,
        dtype_of_passes="bfloat16",
        device=device,
    )
    found = list(changes(share, {**dict.fromkeys(CATEGORIES, 0), "activations": 800}, asked=0))
    texts = [change.write for change in found]
    assert "parallel.layout=rtp=2[recompute=slice]" in texts and len(texts) == len(set(texts))
    assert len([text for text in texts if "rtp=4" in text]) == 1
    assert not [text for text in texts if "compute=bfloat16" in text or "visits" in text]
    (more,) = (change for change in found if "rtp=4" in change.write)
    here, there = (
        predict(
            share.spec,
            strategies=[s.at_precision("bfloat16").on_device(device) for s in parse_parallel(text)],
            rank=0,
        )
        for text in ("rtp=2", "rtp=4")
    )
    at_rest = [sum(each.ledger[name] for name in (WEIGHTS, GRADIENTS, OPTIMIZER)) for each in (here, there)]
    saves = at_rest[0] + here.transient_bytes - at_rest[1] - there.transient_bytes
    assert more.saves_bytes == saves > 0


def test_each_layout_is_named_once():
    found = [change.write for change in suggested("rtp=8", accumulation=8)]
    assert len([write for write in found if "rtp=16" in write]) == 1 and len(found) == len(set(found))


IN_LAYERS = replace(SPEC, order=LayerOrder(layers=tuple(f"mlp.{number}" for number in range(10)), width=8))


@pytest.mark.parametrize(
    ("layout", "rank", "kept"),
    [("pp=2", 0, 1 / 5), ("ddp=2,pp=2[layers=4-6]", 3, 1 / 6), ("pp=2[layers=1-9]", 0, None), ("single", 0, 1 / 10)],
)
def test_a_stage_computes_its_own_layers_again(layout, rank, kept):
    found = suggested(layout, activations=9000, num_layers=10, rank=rank, spec=IN_LAYERS, accumulation=4)
    again = [change.saves_bytes for change in found if "recompute=block" in change.write]
    assert again == ([] if kept is None else [9000 - int(9000 * kept)])


def told(layout="ddp=2", *, asked, activations=0):
    alive = {**dict.fromkeys(CATEGORIES, 0), "weights": WHOLE, "gradients": WHOLE, "activations": activations}
    share = Share(SPEC, parse_parallel(layout), BatchSizes(2, 1, 2), rank=0, num_layers=1)
    return cheapest_change(share, alive, asked=asked)


@pytest.mark.parametrize("saving", [False, True])
def test_what_saves_nothing_is_never_proposed(saving):
    """As where Python cannot allocate, which does not say how much it wanted, and all else is there."""
    whole = {**dict.fromkeys(CATEGORIES, 0), "weights": WHOLE, "gradients": WHOLE, "optimizer": 3 * WHOLE}
    alive = {**whole, "activations": 10 * MIB if saving else 0}  # of a forward that is over
    share = Share(SPEC, parse_parallel("ddp=2"), BatchSizes(2, 1, 2), rank=0, num_layers=4)
    text = cheapest_change(share, alive, asked=None, saving=saving)
    assert text.startswith("How much is missing is not known. Most is saved by parallel.layout=rtp=4 train."), text
    alone = replace(share, strategies=parse_parallel("single"), sizes=BatchSizes(1, 1, 1))
    offered = [change.write for change in changes(alone, alive, asked=0, saving=saving)]
    assert any("recompute" in write for write in offered) is not saving
    assert " 0 B" not in text


def test_what_is_still_to_come_has_to_fit_too():
    """AdamW's moments are not there before its first step: twice the weights, and two numbers of steps."""
    text = told(asked=100, activations=10 * MIB)
    assert text.startswith(f"{(2 * WHOLE + 4 * 20 + 100) / 1024:.1f} KiB are missing with what is to come")
    assert "Cheapest change that fits: train.micro_batch=1 train.accumulation=2" in text
    assert (
        "no single change saves that much. Most is saved by parallel.layout=rtp=4 train.micro_batch=1 train."
        in told(asked=10 * MIB)
    )


FULL = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."


def without_memory(monkeypatch):
    """No memory for the first file that rank 1 writes."""
    write = storage.write_safetensors

    def full(*args):
        if os.environ["RANK"] == "1":
            raise RuntimeError(FULL)
        return write(*args)

    monkeypatch.setattr(storage, "write_safetensors", full)


def save_without_memory(run_dir):
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_memory(monkeypatch)
        with pytest.raises(RuntimeError) as caught:
            save(run_dir, make(), keep=1)
    return type(caught.value), str(caught.value), is_out_of_memory(caught.value)


def test_memory_that_runs_out_in_a_save_does_so_on_one_rank(tmp_path):
    heard, own = run_ranks(save_without_memory, tmp_path, num_ranks=2)
    assert own == (RuntimeError, FULL, True)
    assert heard[0] is HeardFailure and "rank 1: RuntimeError: DefaultCPUAllocator" in heard[1] and not heard[2]


@pytest.mark.slow  # test_a_save_without_address_space_says_what_it_has names it, too
def test_the_rank_without_memory_for_a_save_is_the_one_that_is_named(tmp_path, warm, monkeypatch):
    without_memory(monkeypatch)
    done = rotorch(tmp_path / "log", "train", write_run(tmp_path), "--parallel=rtp=2", "train.checkpoint_every=2")
    assert done.code == 3
    assert done.stderr.startswith("rotorch: rank 1 failed ") and "Alive in tensors" in done.stderr, done.stderr
    assert "more were asked for by a save, and" in done.stderr
    # A layout of more ranks may ask for another micro-batch, to keep the global one; by itself that saves nothing here.
    assert not re.search(r"(fits: |saved by )train\.micro_batch", done.stderr)
    assert "recompute" not in done.stderr and "about 0 B" not in done.stderr


def test_a_save_behind_the_run_says_what_its_copies_take(tmp_path, warm, monkeypatch):
    without_memory(monkeypatch)
    settings = ["--parallel=rtp=2", "train.checkpoint_every=2", "train.async_save=true"]
    done = rotorch(tmp_path / "log", "train", write_run(tmp_path), *settings)
    assert done.code == 3
    assert "more were asked for by a save, and" in done.stderr, done.stderr
    assert "Cheapest change that fits: train.async_save=false (saves about " in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")
def test_a_save_without_address_space_says_what_it_has(tmp_path, warm, monkeypatch):
    write = storage.write_safetensors

    def limited(*args):
        if os.environ["RANK"] == "1":
            limit = psutil.Process().memory_info().vms + MIB
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            torch.empty(1024 * MIB, dtype=torch.uint8)  # more than threads that start or end can have given back
        return write(*args)

    monkeypatch.setattr(storage, "write_safetensors", limited)
    done = rotorch(tmp_path / "log", "train", write_run(tmp_path), "--parallel=rtp=2", "train.checkpoint_every=2")
    assert done.code == 3
    assert re.search(
        r"rank 1 failed in step 2, writing a checkpoint: out of memory: 1\.00 GiB more were asked for by a save, and "
        r"[\d.]+ (KiB|MiB|B) of this process's address space \(ulimit -v\) are left\.",
        done.stderr,
    ), done.stderr
    assert "about 0 B" not in done.stderr and len(done.stderr.strip().splitlines()) == 1
    seen(
        "A rank runs out of memory in a save", done.stderr, instead={r"\(rank 0 was [^)]*\)": "(rank 0 was in step 2)"}
    )


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")
def test_a_rank_without_memory_says_what_it_has(tmp_path, warm, monkeypatch):
    read = loop.read_batches

    def limited(*args, step, **kwargs):
        if os.environ["RANK"] == "1" and step == 2:
            limit = psutil.Process().memory_info().vms + 24 * MIB
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        return read(*args, step=step, **kwargs)

    monkeypatch.setattr(loop, "read_batches", limited)
    run_toml = write_run(tmp_path)
    (tmp_path / "text.txt").write_text("Slices go round; weights stay at home. " * 20_000)
    wide = ["model.config.hidden_size=128", "model.config.intermediate_size=4096", "train.micro_batch=256"]
    done = rotorch(tmp_path / "log", "train", run_toml, "--parallel", "rtp=2", *wide)
    assert done.code == 3
    assert re.search(
        r"rank 1 failed in step 2, computing forward and backward: out of memory: [\d.]+ MiB more were asked for"
        r"( by 'model[\w.]*' \(\w+\))?, and [\d.]+ (KiB|MiB) of this process's address space \(ulimit -v\) are left\. "
        r"Alive in tensors: weights [\d.]+ MiB, gradients [\d.]+ \w+, optimizer [\d.]+ MiB, activations [\d.]+ \w+, "
        r"slots [\d.]+ \w+, logits [\d.]+ \w+, other [\d.]+ \w+\. [\d.]+ MiB are missing with what is to come",
        done.stderr,
    ), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    varies = {
        r"asked for( by '[^)]*\))?": "asked for by 'model.layers.0.mlp.gate_proj' (Linear)",
        r"\(rank 0 was [^)]*\)": "(rank 0 was in step 2, computing forward and backward)",
    }
    seen("A rank runs out of memory", done.stderr, instead=varies)


def highest(run_toml, directory, *settings):
    """Bytes of each rank at its highest moment, by a dry run."""
    said = directory / "said.json"
    done = rotorch(directory / "log", "train", run_toml, *settings, "--dry-run", "--json", said)
    assert (done.code, done.stderr) == (0, "")
    return [sum(rank.values()) for rank in json.loads(said.read_text())["highest"]]


def test_what_would_fit_is_counted_where_memory_for_that_is_left(tmp_path, warm, monkeypatch):
    """A rank on a GPU, or one that has asked for more than there is."""
    read = loop.read_batches

    def without(*args, step, **kwargs):
        if os.environ["RANK"] == "1" and step == 2:
            raise RuntimeError(FULL)
        return read(*args, step=step, **kwargs)

    monkeypatch.setattr(loop, "read_batches", without)
    run_toml, settings = write_run(tmp_path), ["--parallel=rtp=2", "train.micro_batch=4"]
    takes = highest(run_toml, tmp_path, *settings)[1]
    other = ["train.micro_batch=2", "train.accumulation=1"]
    less = max(highest(run_toml, tmp_path, "--parallel=rtp=4", *other))
    done = rotorch(tmp_path / "log", "train", run_toml, *settings)
    assert done.code == 3
    assert f"are missing: a step takes {format_bytes(takes)} at its highest moment" in done.stderr, done.stderr
    saved = f"parallel.layout=rtp=4 {' '.join(other)} --nproc 4 (about {format_bytes(takes - less)} here)"
    assert f"no single change saves that much. Most is saved by {saved}" in done.stderr, done.stderr


def test_counted_changes_fit_every_rank_of_another_layout():
    """Of the same layout this rank's own peak counts, whatever others have."""
    peaks = {"single": [1000], "pp=2": [1000, 900], "rtp=2": [300, 400], "fsdp=2": [700, 650], "rtp=4": [200] * 4}

    def counted(strategies, sizes):
        found = peaks.get(format_parallel(strategies), ())
        if not found:
            raise ConfigError("it cannot be counted")
        return [each * sizes.micro_batch // 2 for each in found]

    share = Share(IN_LAYERS, parse_parallel("pp=2"), BatchSizes(2, 1, 1), rank=1, num_layers=10, peaks=counted)
    found = {change.write: change.saves_bytes for change in counted_changes(share, counted, here=900)}
    assert found["train.micro_batch=1 train.accumulation=2"] == 450
    share = replace(share, strategies=parse_parallel("rtp=2"), sizes=BatchSizes(2, 1, 2))
    found = {change.write: change.saves_bytes for change in counted_changes(share, counted, here=400)}
    assert found["parallel.layout=fsdp=2"] == -300  # the larger rank counts
    assert found["parallel.layout=rtp=4 train.micro_batch=1 train.accumulation=1 --nproc 4"] == 300
    assert not [write for write in found if "recompute" in write]  # which cannot be counted here
    alive = {**dict.fromkeys(CATEGORIES, 0), "weights": 150}
    assert cheapest_change(share, alive, asked=10) == (
        "250 B are missing: a step takes 400 B at its highest moment. Cheapest change that fits: "
        "parallel.layout=rtp=4 train.micro_batch=1 train.accumulation=1 --nproc 4 (saves about 300 B here)"
    )
