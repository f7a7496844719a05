"""Numbers of visits by size: as many as are asked for of the largest unit, few of small ones, tables one by one."""

import json
from pathlib import Path

import pytest
import torch
from one_process import build

import rotorch
from rotorch.comm.meter import Meter
from rotorch.core import row_parts
from rotorch.core.layout import combine_layouts
from rotorch.core.row_parts import num_parts
from rotorch.core.spec import UnitKind
from rotorch.core.visits_by_size import Visits, visits_of
from rotorch.core.whole_units import is_whole
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.strategies import parse_parallel
from rotorch.testing.conformance import examine, make_case
from rotorch.testing.parity import parity_batch
from rotorch.testing.ranks import run_ranks
from rotorch.testing.reference import plain_config
from rotorch.testing.traffic import traffic_problems
from rotorch.testing.verify import verify


@pytest.fixture
def shaped(tiny, tmp_path):
    """Returns the file of the tiny llama's configuration with other sizes."""

    def of(**sizes):
        path = tmp_path / "llama.json"
        path.write_text(json.dumps({**json.loads(Path(tiny("llama")).read_text()), **sizes}))
        return path

    return of


def strategy_and_units(path, layout):
    (strategy,) = parse_parallel(layout)
    return strategy, strategy.units_of(describe(build(plain_config(path, layers=1)))).cut_units


def visits_in(path, layout):
    """Visits of a table, an attention, an MLP and the head."""
    strategy, units = strategy_and_units(path, layout)
    return [visits_of(unit, num_slices=strategy.size) for unit in units]


def test_small_units_come_in_few_visits_and_tables_in_many(tiny, shaped):
    """Heads in no fewer than were asked for: logits exist a visit at a time."""
    # Slices of the tiny llama on four ranks: table and head 41 KB, attention 49 KB, MLP 99 KB.
    assert visits_in(tiny("llama"), "rtp=4[transport=send_receive,visits=2]") == [1, 1, 2, 2]
    assert visits_in(tiny("llama"), "rtp=4[transport=send_receive,visits=1]") == [1, 1, 1, 1]
    assert visits_in(tiny("llama"), "rtp=4[transport=send_receive,visits=4]") == [2, 2, 4, 4]
    assert visits_in(tiny("llama"), "rtp=4[transport=send_receive]") == [4, 4, 4, 4]
    # A table's slice of 256 KB, where a visit of the MLP is one of 198.
    assert visits_in(shaped(vocab_size=2000), "rtp=4[transport=send_receive,visits=2]") == [4, 1, 2, 4]


def test_the_interiors_that_backward_makes_again_stay_small(tiny):
    for recompute in ("slice", "all_but_attention"):
        layout = f"rtp=4[transport=send_receive,visits=2,recompute={recompute}]"
        assert visits_in(tiny("llama"), layout) == [1, 2, 2, 2]


def test_visits_below_those_of_the_largest_take_no_memory(tiny):
    strategy, units = strategy_and_units(tiny("llama"), "rtp=4[transport=send_receive,visits=2]")
    mlp = next(unit for unit in units if unit.name.endswith("mlp"))
    assert combine_layouts(map(strategy.layout, units)).slots_bytes == strategy.layout(mlp).slots_bytes


def test_a_table_larger_than_a_slot_comes_in_parts_one_by_one(shaped, monkeypatch):
    monkeypatch.setattr(row_parts, "LEAST_BYTES", 1)
    layout = "rtp=4[transport=send_receive,visits=2]"
    strategy, units = strategy_and_units(shaped(vocab_size=6000), layout)
    found = {unit.name.rpartition("layers.0.")[2]: (unit.note(Visits).count, num_parts(unit)) for unit in units}
    tables = {"model.embed_tokens.weight": (4, 4), "lm_head.weight": (4, 4)}
    assert found == {**tables, "self_attn": (1, 1), "mlp": (2, 1)}
    assert combine_layouts(map(strategy.layout, units)).slots_bytes <= 1.01 * max(
        strategy.layout(unit).slots_bytes for unit in units if num_parts(unit) == 1
    )


def test_slices_that_replace_each_other_are_planned_as_they_visit(shaped, monkeypatch):
    """With `buffering=in_place` tables come whole, also if "auto" comes to symmetric memory."""
    monkeypatch.setattr(row_parts, "LEAST_BYTES", 1)
    path = shaped(vocab_size=6000)
    for layout in ("rtp=4[buffering=in_place]", "rtp=4[buffering=in_place,transport=symmetric_memory]"):
        (strategy,) = parse_parallel(layout)
        strategy = strategy.on_device("cuda").model_copy(update={"visits": None})
        units = strategy.units_of(describe(build(plain_config(path, layers=1)))).cut_units
        assert {strategy.num_parts(unit) for unit in units} == {1} == {num_parts(unit) for unit in units}


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ("", 0.36e9),
        ("[transport=symmetric_memory]", 0.36e9),
        ("[transport=symmetric_memory,recompute=slice]", 0.36e9),
        ("[transport=symmetric_memory,visits=4]", 0.71e9),  # a slice of the head is 1.5 times as large as a visit
    ],
)
def test_slots_of_a_large_model_between_gpus(options, most):
    """Llama-3-8B on 8 ranks, passes in bfloat16, gradients in float32: no more than slices of its MLP need."""
    shapes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    shapes |= {"vocab_size": 128256, "num_hidden_layers": 1, "tie_word_embeddings": False}
    with rotorch.on_meta():
        spec = describe(causal_lm(config_from_dict({"model_type": "llama", **shapes}, source="test"))).with_copies(2)
    (strategy,) = parse_parallel(f"rtp=8{options}")
    strategy = strategy.at_precision("bfloat16").on_device("cuda")
    slots = combine_layouts(map(strategy.layout, strategy.units_of(spec).units)).slots_bytes
    assert most - 0.1e9 < slots <= most


@pytest.mark.parametrize("recompute", ["head", pytest.param("slice", marks=pytest.mark.slow)])
def test_tables_in_parts_beside_units_whose_slices_come_together(shaped, monkeypatch, tmp_path, recompute, warm):
    monkeypatch.setattr(row_parts, "LEAST_BYTES", 1)
    monkeypatch.setattr(row_parts, "LEAST_TIMES", 1)
    layout = f"rtp=4[transport=send_receive,visits=2,recompute={recompute}]"
    path = shaped(vocab_size=1201, intermediate_size=96)  # a prime: neither slices nor parts are even
    assert any(num_parts(unit) > 1 for unit in strategy_and_units(path, layout)[1])
    problems = examine(make_case(path, directory=tmp_path / "case"), parallel=layout, scratch=tmp_path)
    assert [f"{name}: {found[:3]}" for name, found in problems.items() if found] == []


def test_ranks_without_any_part_of_an_attention(shaped, warm):
    """Two groups of heads on four ranks: what some ranks have of a visit is nothing."""
    path = shaped(num_key_value_heads=2)
    report = verify(path, parallel="rtp=4[transport=send_receive,visits=2]", layers=2, steps=2, timeout_s=300)
    assert report.ok, (report.verdict, report.first_divergence, report.worst_weights)


def test_a_budget_for_whole_units_weighs_messages_as_they_are(tiny):
    """Units that are chosen to be whole have no visits, and the others have theirs."""
    spec = describe(build(plain_config(tiny("llama"), layers=2)))
    (strategy,) = parse_parallel("rtp=4[transport=send_receive,visits=2,memory=4MiB]")
    units = strategy.units_of(spec).units
    whole = [unit for unit in units if is_whole(unit)]
    assert whole and all(unit.note(Visits) is None for unit in whole)
    assert all(unit.note(Visits) is not None for unit in units if unit.kind is not UnitKind.REPLICATED)


def continued(config, layout):
    torch.manual_seed(0)
    model = causal_lm(config).eval()
    if layout is not None:
        model = rotorch.parallelize(model, layout, device="cpu")
    with torch.no_grad():
        return model.generate(torch.arange(1, 9).view(1, 8), max_new_tokens=6, do_sample=False).tolist()


def test_keys_and_values_of_larger_slices_are_cached(tiny, warm):
    """Attention comes in one visit here, and the MLP in two."""
    config = plain_config(tiny("llama"), layers=2)
    layout = "rtp=4[transport=send_receive,visits=2]"
    assert run_ranks(continued, config, layout, num_ranks=4) == [continued(config, None)] * 4


def in_bfloat16(config, layout, num_ranks):
    """Problems of a rank's traffic, and bytes of its slots beyond the Layout's."""
    model = rotorch.parallelize(build(config), layout, device="cpu", param_dtype=torch.bfloat16).materialize(seed=0)
    rows = {
        k: v.tensor_split(num_ranks)[model.batch_rank]
        for k, v in parity_batch(step=0, vocab_size=config.vocab_size).items()
    }
    with Meter() as meter:
        model.forward_backward([rows])
    strategy = model.strategies[-1]
    said = combine_layouts(strategy.layout(unit, position=model.batch_rank) for unit in model.spec.units)
    slots = sum(slot.numel() * slot.element_size() for slot in model.sharded.slots())
    found = list(traffic_problems(model, meter)), slots - said.slots_bytes, said.outbox_bytes
    model.close()
    return found


def test_slices_leave_from_a_buffer_as_large_as_the_largest_of_them(shaped, warm):
    """The table has the largest slice here, and the MLP the largest visit."""
    # Of the biases of keys a message has 32 bytes, which the meter takes for a count of tokens.
    config = plain_config(shaped(vocab_size=1200, attention_bias=False), layers=1)
    layout = "rtp=4[transport=send_receive,visits=2]"
    for problems, beyond, outbox in run_ranks(in_bfloat16, config, layout, 4, num_ranks=4):
        assert (problems, beyond, outbox) == ([], 0, 1200 // 4 * 128 * 2)
