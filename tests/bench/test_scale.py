"""Steps that a run does once per rank: what they cost as ranks are added, counted, and the page that says so."""

import json
import sys
from pathlib import Path

import pytest

from rotorch.core.spec import Combine, Cut, ModelSpec, Unit, UnitKind, Weight

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import scale  # noqa: E402


def spec():
    """Layers of one product and one norm each, and a table that is as large as all of them."""
    cut = [Weight(f"layers.{n}.up", (64, 8), 4, Cut(0, 64)) for n in range(30)]
    whole = tuple(Weight(f"layers.{n}.norm", (8,), 4) for n in range(30))
    table = Weight("table", (64 * 30, 8), 4, Cut(0, 64 * 30))
    units = [Unit(w.name, UnitKind.WEIGHT, Combine.CONCAT, (w,)) for w in [table, *cut]]
    return ModelSpec("Layers", (*units, Unit("replicated", UnitKind.REPLICATED, Combine.NONE, whole)))


def test_groups_of_a_rank_do_not_grow_with_other_replicas():
    few, many = (scale.groups_of(f"ddp={n},rtp=8") for n in (8, 32))
    assert few["groups_joined"] == many["groups_joined"] == 2
    assert (few["peers"], many["peers"]) == (7 + 7, 31 + 7)
    assert (few["ranks_listed"], many["ranks_listed"]) == (2 * 64, 2 * 256)  # once per axis, whatever its groups


def test_groups_of_neighbours_list_each_rank_once():
    few, many = (scale.groups_of(f"fsdp={n}[context=8]") for n in (64, 256))
    assert (few["ranks_listed"], many["ranks_listed"]) == (64, 256)  # the one axis has the group of all ranks


def test_joining_costs_a_rank_the_same_however_many_there_are():
    found = {n: scale.joining(spec(), f"ddp={n // 8},rtp=8") for n in (16, 64)}
    # It asks, takes the answer, enters and arrives twice; who arrives last says so.
    assert all(5 <= each["writes_of_rank_1"] <= 7 for each in found.values())
    # An answer to each, however late it takes it, and about ten writes of its own.
    for n, each in found.items():
        assert n + 8 <= each["writes_of_rank_0"] <= n + 12


@pytest.mark.parametrize("layout", ["ddp={},rtp=8", "ddp={},fsdp=8"])
def test_rank_0_plans_a_chunk_once_however_many_hold_it(layout):
    """Beside them come a random state per rank, and counters from each rank that saves a part of a weight."""
    received = {}
    for replicas in (2, 16):
        plans = [scale.local_plan(spec(), layout.format(replicas), rank=rank) for rank in range(8 * replicas)]
        chunks = [
            (i.index.fqn, tuple(i.index.offset or ())) for p in plans for i in p.items if "rng/" not in i.index.fqn
        ]
        tensors = [chunk for chunk in chunks if not chunk[0].startswith("optimizer/step/")]
        assert len(set(tensors)) == len(tensors)
        assert {name for name, _ in tensors if name.startswith("model/")} == {f"model/{w.name}" for w in spec().weights}
        received[replicas] = len(chunks)
    assert received[2] == received[16]


def test_replicas_save_equal_shares():
    plans = [scale.local_plan(spec(), "ddp=4,rtp=8", rank=rank) for rank in range(32)]
    sizes = [sum(i.tensor_storage_size() for i in plan.items if i.index.fqn.startswith("model/")) for plan in plans]
    assert max(sizes) <= 2 * sum(sizes) / len(sizes)  # the table is half of the model, and stays in one piece


def test_a_dry_run_says_little_more_of_more_replicas():
    few, many = (scale.dry(scale.shapes(), f"ddp={n},rtp=8") for n in (2, 16))
    assert (few["ranks"], many["ranks"]) == (16, 128)
    assert few["kinds_of_ranks"] == many["kinds_of_ranks"]


def test_a_failure_is_told_in_a_line_that_does_not_grow():
    few, many = (scale.status_and_failure(spec(), f"ddp={n},rtp=8") for n in (8, 32))
    for what in ("line_characters", "hang_characters"):
        assert many[what] - few[what] <= 4  # digits
    assert many["page_bytes"] < 4.2 * few["page_bytes"]


def test_a_step_that_fails_is_not_left_out(monkeypatch):
    row = {"step": "x", "layout": scale.MUST}
    within = {**row, "cpu_s": 1.0, "peak_bytes": 5}
    assert scale.too_much([within]) == []
    for bad in ({"error": "ended"}, {**within, "cpu_s": 11.0}, {**within, "peak_bytes": 2 << 30}):
        assert len(scale.too_much([within, {**row, **bad}])) == 1
    assert scale.too_much([{**within, "layout": "fsdp=1024", "cpu_s": 99.0}]) == []


def test_the_record_has_every_step_within_its_bounds():
    record = json.loads(scale.OUT.read_text("utf-8"))
    assert {row["step"] for row in record["rows"] if row["layout"] == scale.MUST} == {
        *scale.STEPS,
        *scale.OF_CHECKPOINTS,
    }
    assert scale.too_much(record["rows"]) == []
    assert record["commit"] and record["machine"]["load_average"] and record["versions"]["torch"]


def test_replicas_of_a_ring_hold_and_send_the_same_from_64_ranks_on():
    rows = json.loads(scale.OUT.read_text("utf-8"))["layouts"]
    ring = {row["ranks"]: row for row in rows if row["family"] == "ddp=n,rtp=8"}
    assert list(ring) == [8, 16, 32, 64, 128, 256, 512, 1024]
    for what in ("at_rest_bytes", "transient_bytes", "sent_bytes", "messages"):
        flat = [row[what] for ranks, row in ring.items() if ranks >= 64]
        assert max(flat) <= 1.03 * min(flat), what


def test_figures_of_the_record_are_those_of_the_layouts():
    small = spec()
    ring, many, sharded = (scale.figures_of(small, layout) for layout in ("rtp=8", "ddp=16,rtp=8", "fsdp=64"))
    whole, counters = 4 * small.num_bytes, 4 * len(small.weights)  # weights, gradients and two moments
    norms = 4 * 30 * 8 * 4  # whole on every rank
    assert ring["at_rest_bytes"] == many["at_rest_bytes"] == (whole - norms) // 8 + norms + counters
    assert many["messages"] == ring["messages"] + len(small.units)
    assert sharded["at_rest_bytes"] < ring["at_rest_bytes"] / 4
