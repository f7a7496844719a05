"""Tables that visit in parts of rows: exact under every invariant, with slots as large as those of a layer."""

import json
from pathlib import Path

import pytest
import torch

from rotorch.comm import transports
from rotorch.comm.shared_file import SharedMemoryUnavailable
from rotorch.comm.status_word import StatusWord
from rotorch.core import row_parts
from rotorch.core.row_parts import RowParts, num_parts
from rotorch.core.spec import Range
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, load_config
from rotorch.parallelize import parallelize
from rotorch.shard.flat import FlatSlices
from rotorch.shard.materialize import on_meta
from rotorch.strategies import parse_parallel
from rotorch.testing.conformance import examine, make_case
from rotorch.testing.ranks import run_ranks

SHAPES = {"vocab_size": 601, "intermediate_size": 96}
"""A vocabulary that is larger than a layer; a prime, so that neither slices nor their parts are even."""


@pytest.fixture
def small_parts(monkeypatch):
    """Has parts of any size, which ranks that are forked from here have, too."""
    monkeypatch.setattr(row_parts, "LEAST_BYTES", 1)
    monkeypatch.setattr(row_parts, "LEAST_TIMES", 1)


@pytest.fixture
def large_vocabulary(tiny, tmp_path):
    """Returns the file of a tiny model's configuration with a vocabulary larger than its layers."""

    def of(family):
        path = tmp_path / f"{family}.json"
        path.write_text(json.dumps({**json.loads(Path(tiny(family)).read_text()), **SHAPES}))
        return path

    return of


def spec_of(path):
    with on_meta():
        return describe(causal_lm(load_config(path)))


def parts_of(path, layout):
    """Parts of the model's units that have some, by name."""
    (strategy,) = parse_parallel(layout)
    units = strategy.units_of(spec_of(path)).units
    return {unit.name: num_parts(unit) for unit in units if num_parts(unit) > 1}


@pytest.mark.parametrize("rows", [Range(0, 10), Range(7, 3), Range(5, 0)])
def test_parts_are_the_slice(rows):
    parts = RowParts(4).of(rows)
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (rows.start, rows.stop)
    assert max(part.length for part in parts) - min(part.length for part in parts) <= 1


@pytest.mark.parametrize("layout", ["rtp=3", "rtp=3[transport=send_receive]"])
def test_tables_are_in_parts_about_as_large_as_a_layers_slices(large_vocabulary, small_parts, layout):
    (strategy,) = parse_parallel(layout)
    path = large_vocabulary("llama")
    units = strategy.units_of(spec_of(path)).cut_units
    slices = {
        unit.name: max(unit.slice_bytes(num_slices=strategy.size, index=k) for k in range(strategy.size))
        for unit in units
    }
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    largest = max(num_bytes for name, num_bytes in slices.items() if name not in tables)
    assert parts_of(path, layout) == {name: -(-slices[name] // largest) for name in tables & slices.keys()}


@pytest.mark.parametrize(
    "layout",
    [
        "rtp=3[transport=shared_memory]",
        "rtp=3[buffering=in_place]",
        "rtp=1",
        "rtp=4[transport=hierarchical]",
    ],
)
def test_there_are_none_where_slices_have_no_slots_of_their_own(large_vocabulary, small_parts, layout):
    assert not parts_of(large_vocabulary("llama"), layout)


def test_tables_are_not_in_parts_where_that_would_spare_little(large_vocabulary, tiny, monkeypatch):
    assert not parts_of(large_vocabulary("llama"), "rtp=2")  # small parts
    monkeypatch.setattr(row_parts, "LEAST_BYTES", 1)
    assert not parts_of(tiny("llama"), "rtp=2")
    assert parts_of(large_vocabulary("llama"), "rtp=2")
    monkeypatch.setattr(row_parts, "LEAST_TIMES", 2)
    assert not parts_of(large_vocabulary("llama"), "rtp=2")  # less than twice as large as a layer's slices


def test_slots_are_as_large_as_those_of_a_layer_and_a_row(large_vocabulary, small_parts):
    path = large_vocabulary("qwen3")
    (strategy,) = parse_parallel("rtp=3[transport=send_receive]")
    units = strategy.units_of(spec_of(path)).cut_units
    tables = [strategy.layout(unit).slots_bytes for unit in units if num_parts(unit) > 1]
    others = [strategy.layout(unit).slots_bytes for unit in units if num_parts(unit) == 1]
    row = 2 * 128 * 4  # of a weight's and a gradient's two slots each, of the tiny model's width
    assert tables and max(tables) <= max(others) + 2 * row


def test_the_parts_of_a_shard_lie_in_it_one_after_another(large_vocabulary):
    unit = next(u for u in spec_of(large_vocabulary("llama")).units if u.logits)
    flat = FlatSlices(unit.weights, num_slices=3)
    parts = flat.in_parts(RowParts(4))
    for index in range(3):
        assert sum(part.numels[index] for part in parts) == flat.numels[index]
        rows = [part.ranges(unit.weights[0], index=index)[0] for part in parts]
        assert [r.start for r in rows[1:]] == [r.stop for r in rows[:-1]]
        (whole,) = flat.ranges(unit.weights[0], index=index)
        assert (rows[0].start, rows[-1].stop) == (whole.start, whole.stop)
    assert flat.in_parts(None) == [flat]


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("rtp=2[recompute=none,transport=send_receive,ahead=2]", "qwen3"),  # tied
        pytest.param("rtp=3[transport=send_receive]", "qwen3", marks=pytest.mark.slow),
        pytest.param("rtp=2[recompute=none,transport=send_receive,ahead=2]", "llama", marks=pytest.mark.slow),
        pytest.param("rtp=2", "llama", marks=pytest.mark.slow),  # over shared memory, where there are no parts
        pytest.param("rtp=4[recompute=slice,transport=send_receive]", "gemma2", marks=pytest.mark.slow),  # soft caps
        pytest.param("rtp=2[transport=send_receive]", "gpt2", marks=pytest.mark.slow),
        pytest.param("ddp=2,rtp=2[transport=send_receive]", "gpt_neox", marks=pytest.mark.slow),
        pytest.param("pp=2,rtp=2[transport=send_receive]", "qwen3", marks=pytest.mark.slow),  # a borrowed table
        pytest.param("rtp=2[transport=send_receive],megatron=2", "qwen3", marks=pytest.mark.slow),
        pytest.param("rtp=2[context=2,transport=send_receive]", "llama", marks=pytest.mark.slow),
    ],
)
def test_invariants_hold(large_vocabulary, small_parts, tmp_path, layout, family, warm):
    path = large_vocabulary(family)
    assert any(parts_of(path, f"rtp={strategy.size}") for strategy in parse_parallel(layout) if strategy.kind == "rtp")
    case = make_case(path, directory=tmp_path / "case")
    problems = examine(case, parallel=layout, scratch=tmp_path)
    assert [f"{name}: {found[:3]}" for name, found in problems.items() if found] == []


@pytest.mark.slow
def test_parts_come_where_auto_comes_to_messages(large_vocabulary, small_parts, tmp_path, monkeypatch, warm):
    """As between hosts: what is predicted follows from the transport that it has come to."""

    def none(*_, **__):
        raise SharedMemoryUnavailable("not between these")

    monkeypatch.setattr(transports, "SharedMemoryRing", none)
    case = make_case(large_vocabulary("llama"), directory=tmp_path / "case")
    problems = examine(case, parallel="rtp=2", scratch=tmp_path)
    assert [f"{name}: {found[:3]}" for name, found in problems.items() if found] == []
    for items, transport in run_ranks(items_of, large_vocabulary("llama"), num_ranks=2):
        assert transport == "send_receive"
        assert [name for name in items if name.startswith("lm_head")] == [
            f"lm_head.weight (part {number} of 2)" for number in (1, 2)
        ]


def items_of(path):
    """Names of the items of a ring, and its transport."""
    with on_meta():
        module = causal_lm(load_config(path))
    model = parallelize(module, "rtp=2", device="cpu")
    names = model.sharded.write_status_to(StatusWord())
    model.close()
    return names, model.sharded.transport


def test_parts_of_a_shard_are_read_and_written_where_they_lie(large_vocabulary):
    unit = next(u for u in spec_of(large_vocabulary("llama")).units if u.logits)
    (weight,) = unit.weights
    flat = FlatSlices(unit.weights, num_slices=3)
    whole = torch.arange(weight.numel, dtype=torch.float64).view(weight.shape)
    for index in range(3):
        (rows,) = flat.ranges(weight, index=index)
        home = whole[rows.start : rows.stop].reshape(-1)
        for part in flat.in_parts(RowParts(4)):
            ours, home = home[: part.numels[index]], home[part.numels[index] :]
            (view,) = part.views(ours, index=index)
            (chunk,) = part.chunks(weight, index=index)
            torch.testing.assert_close(chunk.of_whole(whole), chunk.of_local(view), rtol=0, atol=0)
        assert not home.numel()
