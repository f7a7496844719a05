"""Estimated seconds of a step: what follows from figures of hardware, checked by hand where that is possible."""

from dataclasses import replace

import pytest
from shapes import transformer

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Combine, Cut, LayerOrder, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.traffic import MicroBatch, Phase, all_reduce
from rotorch.core.whole_experts import WholeExperts
from rotorch.planner.cluster import load_cluster
from rotorch.planner.lanes import Lane, Lanes
from rotorch.planner.memory_at_rest import at_rest
from rotorch.planner.planned import Planned
from rotorch.planner.speeds import Group, LinkSpeed, Speeds, Work, speeds_of
from rotorch.planner.step_time import step_time
from rotorch.planner.unit_time import UnitTimes
from rotorch.planner.workload import Cutting, Numerics, fold, layer_passes
from rotorch.strategies import parse_parallel

SPEEDS = Speeds(
    flops_per_s=100e12,
    bytes_per_s=1e12,
    half_size=0.0,
    launch_s=0.0,
    operator_s=0.0,
    overlap=0.0,
    links=(LinkSpeed(8, 200e9, 0.0, 0.0), LinkSpeed(64, 20e9, 0.0, 0.0)),
)


def planned(text, *, layers=4, speeds=SPEEDS, accumulation=1, rows=4, **others):
    (*_, inner) = strategies = parse_parallel(text)
    model = fold(transformer(layers=layers)).short()
    held = model if any(s.kind in ("pp", "zeropp") for s in strategies) else model.under(inner)
    return Planned(
        model=held,
        strategies=strategies,
        batch=MicroBatch(rows, 1024, itemsize=2),
        accumulation=accumulation,
        speeds=speeds,
        numerics=Numerics(),
        **others,
    )


def seconds(text, **others):
    return step_time(planned(text, **others)).step_s


# ---------------------------------------------------------------- operators and messages


def test_a_product_takes_its_flops_or_its_bytes():
    assert SPEEDS.device_s(Work.of((1e12, 0.0, 1e9, 1.0))) == pytest.approx(1e-2)
    assert SPEEDS.device_s(Work.of((1e9, 0.0, 1e10, 1.0))) == pytest.approx(1e-2)


def test_small_sides_and_odd_sides_make_a_product_slower():
    speeds = replace(SPEEDS, half_size=64.0, unaligned=0.25)
    assert speeds.device_s(Work.of((1e12, 1 / 64, 0.0, 1.0))) == pytest.approx(2e-2)
    assert speeds.device_s(Work.of((1e12, 0.0, 0.0, 1.0, 1.0))) == pytest.approx(4e-2)


def test_a_group_has_the_link_that_it_needs():
    assert SPEEDS.bytes_per_s_of(Group(8, 1)) == 200e9
    assert SPEEDS.bytes_per_s_of(Group(2, 8)) == 20e9


def test_hidden_states_are_gathered_once_behind_all_layers_that_cut_tokens():
    """A layer gathers and scatters them twice in forward, and in backward, where inputs are gathered once more."""
    slow = replace(SPEEDS, links=(LinkSpeed(8, 2e9, 0.0, 0.0), LinkSpeed(64, 2e9, 0.0, 0.0)))
    one = 4 * 1024 * 1024 * 2 / 2 / 2e9  # half of the hidden states
    busy = [
        step_time(planned("megatron=2[sequence_parallel=true]", layers=n, speeds=slow)).busy_s["collective"]
        for n in (1, 2, 3, 8)
    ]
    assert busy[1] - busy[0] == pytest.approx(10 * one, rel=0.01)
    assert busy[3] - busy[2] == pytest.approx(50 * one, rel=0.01)


def test_ranks_of_a_group_behind_links_of_their_own_use_all_of_them():
    assert SPEEDS.bytes_per_s_of(Group(16, 1)) == 160e9  # eight links between two nodes
    assert SPEEDS.bytes_per_s_of(Group(16, 4)) == 40e9


def test_a_transfer_takes_latency_and_bytes():
    speeds = replace(SPEEDS, links=(LinkSpeed(8, 1e9, 1e-3, 1e-4),))
    sum_of = all_reduce(8_000_000, axis="ddp", size=4, phase=Phase.STEP)
    assert speeds.transfer_s(sum_of, Group(4, 1)) == pytest.approx(1e-3 + 2e-4 + 12_000_000 / 1e9)
    assert speeds.transfer_s(sum_of, Group(1, 1)) == 0.0


def test_a_cluster_without_figures_for_a_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"no device\.flops\.float16\. It has: float32"):
        speeds_of(load_cluster("cpu2"), dtype="float16")


# ---------------------------------------------------------------- lanes


def test_lanes_work_side_by_side_and_wait_for_each_other():
    lanes = Lanes()
    fetched = lanes.put(Lane.FETCH, 3.0)
    assert lanes.put(Lane.COMPUTE, 2.0) == 2.0
    assert lanes.put(Lane.COMPUTE, 2.0, after=[fetched]) == 5.0


def test_a_computation_ends_no_earlier_than_it_is_issued():
    lanes = Lanes()
    assert lanes.put(Lane.COMPUTE, 1.0, issue_s=4.0) == 4.0
    assert lanes.put(Lane.COMPUTE, 1.0, issue_s=0.5) == 5.0


# ---------------------------------------------------------------- copies and sums beside messages


def attention_of(text, *, itemsize=2):
    """Times of a layer's attention, of two matrices of 1,048,576 elements each, on 8 ranks."""
    spec = transformer(layers=2, itemsize=itemsize).with_copies(2 if itemsize > 2 else None)
    (*_, inner) = strategies = parse_parallel(text)
    model = fold(spec).short()
    held = model if inner.kind == "zeropp" else model.under(inner)
    plan = Planned(held, strategies, MicroBatch(4, 1024, itemsize=2), 1, SPEEDS, Numerics())
    (layer,) = model.classes
    units = UnitTimes(plan).layer(layer, again=False)
    return next(t for u, t in zip(layer.units, units, strict=True) if u.name.endswith("attention"))


ATTENTION = 2 * 1024 * 1024


@pytest.mark.parametrize("text", ["fsdp=8", "zeropp=2x8"])
def test_gathered_weights_are_copied_to_their_place_and_gradients_into_the_order_of_ranks(text):
    """Both read and write memory of the device that computes, on the stream on which it does."""
    found = attention_of(text)
    assert found.unpack_s[0] == pytest.approx(2 * 2 * ATTENTION / 1e12)
    assert found.pack_s == pytest.approx(2 * 2 * ATTENTION / 1e12)
    mixed = attention_of(text, itemsize=4)
    assert mixed.unpack_s == found.unpack_s
    assert mixed.pack_s == pytest.approx((2 + 4) * ATTENTION / 1e12)


def test_weights_that_stay_gathered_are_copied_once():
    assert attention_of("fsdp=8").unpack_s[1] > 0
    assert attention_of("fsdp=8[reshard=false]").unpack_s[1] == 0


@pytest.mark.parametrize(("options", "itemsize"), [("", 4), (",hops=bfloat16", 2)])
def test_a_sum_that_came_into_a_window_is_read_beside_a_ranks_part_and_written(options, itemsize):
    over = attention_of(f"rtp=8[transport=symmetric_memory{options}]", itemsize=4)
    assert over.add_s == pytest.approx(3 * itemsize * ATTENTION * 7 / 8 / 1e12)
    assert attention_of("rtp=8[transport=send_receive]", itemsize=4).add_s == 0  # products add to what has come


@pytest.mark.parametrize("text", ["fsdp=8", "rtp=8[transport=symmetric_memory]"])
def test_copies_and_sums_keep_the_device_from_computing(text):
    fast, slow = (replace(SPEEDS, bytes_per_s=s, links=(LinkSpeed(8, 1e18, 0.0, 0.0),)) for s in (1e18, 1e11))
    of_layers = [[step_time(planned(text, layers=n, speeds=s)) for n in (4, 8)] for s in (fast, slow)]
    passes = [[found.step_s - found.optimizer_s for found in row] for row in of_layers]
    more = (passes[1][1] - passes[1][0] - passes[0][1] + passes[0][0]) / 4
    weights = 2 * (2 + 8) * 1024 * 1024
    least = 6 if text == "fsdp=8" else 3 * 7 / 8
    assert more >= least * weights / 1e11


# ---------------------------------------------------------------- steps


def test_a_step_takes_the_flops_of_its_products():
    spec = transformer(layers=4)
    matrices = sum(w.numel for w in spec.weights if len(w.shape) == 2 and not w.name.startswith("embed"))
    attention = 4 * 4 * 1024 * 1024 * 1024 / 2
    flops = 4 * 1024 * 2 * matrices + 4 * attention
    speeds = replace(SPEEDS, bytes_per_s=1e18)
    assert seconds("single", speeds=speeds) == pytest.approx((3 * flops + 0.5 * 4 * attention) / 100e12, rel=1e-6)


def test_many_layers_take_as_long_as_if_all_were_scheduled(monkeypatch):
    texts = ["ddp=8", "fsdp=8", "rtp=8", "megatron=8", "pp=2,fsdp=4", "ddp=2,rtp=4"]
    few = [seconds(t, layers=24, accumulation=4, parts=(range(12), range(12, 24))) for t in texts]
    monkeypatch.setattr("rotorch.planner.step_time._MOST_LAYERS", 1000)
    assert few == pytest.approx(
        [seconds(t, layers=24, accumulation=4, parts=(range(12), range(12, 24))) for t in texts], rel=1e-3
    )


def test_slower_links_make_no_layout_faster():
    slow = replace(SPEEDS, links=(LinkSpeed(8, 20e9, 1e-4, 0.0), LinkSpeed(64, 2e9, 1e-3, 0.0)))
    for text in ("ddp=8", "fsdp=8", "rtp=8", "megatron=8", "ddp=2,megatron=8", "pp=2,rtp=4"):
        parts = (range(2), range(2, 4)) if "pp" in text else ()
        assert seconds(text, speeds=slow, parts=parts) > seconds(text, parts=parts)


def test_sums_of_activations_over_the_slow_link_cost_more_than_over_the_fast_one():
    assert seconds("ddp=2,megatron=8") < seconds("ddp=2,megatron=8", groups={"megatron": Group(8, 2)})


@pytest.mark.parametrize("text", ["ddp=8", "ddp=2,rtp=8", "ddp=2,fsdp=8", "ddp=2,megatron=8", "ddp=2,rtp=2,megatron=4"])
def test_sums_over_replicas_hide_under_backward(text):
    """Sums of a long backward leave only those of the first layer behind it, or of what no layer has."""
    early, behind = (step_time(planned(text, layers=12, ddp_overlaps=overlaps)) for overlaps in (True, False))
    assert behind.sums_s > 0 and behind.busy_s[Lane.SUM] == 0 < early.busy_s[Lane.SUM]
    assert early.sums_s + early.busy_s[Lane.SUM] == pytest.approx(behind.sums_s)
    hidden = (behind.step_s - early.step_s) / behind.sums_s
    assert 0.4 < hidden <= 1 - early.sums_s / behind.sums_s + 1e-9


@pytest.mark.parametrize("text", ["ddp=2,tesseract=2x2x2", "ddp=2,fsdp=2,megatron=4", "ddp=2,summa=2x2"])
def test_sums_wait_where_nobody_says_when_gradients_are_complete(text):
    early, behind = (step_time(planned(text, ddp_overlaps=overlaps)) for overlaps in (True, False))
    assert early.step_s == behind.step_s and early.sums_s == behind.sums_s > 0


def test_more_micro_batches_shrink_the_bubble():
    parts = (range(16), range(16, 30))
    few, many = (step_time(planned("pp=2", layers=30, accumulation=n, parts=parts)) for n in (2, 16))
    assert few.bubble_s / few.step_s > 2 * many.bubble_s / many.step_s > 0


def test_recompute_takes_one_more_forward():
    once = step_time(planned("single"))
    again = step_time(replace(planned("single"), numerics=Numerics(recompute=True)))
    assert 1.2 * once.compute_s < again.compute_s < 1.4 * once.compute_s


def test_an_odd_vocabulary_makes_the_head_slower():
    speeds = replace(SPEEDS, unaligned=0.3)
    base = planned("single", speeds=speeds)
    odd = replace(base, model=fold(transformer(layers=4, vocabulary=31999)).short().under(base.inner))
    assert step_time(odd).step_s > 1.05 * step_time(base).step_s


@pytest.mark.parametrize("text", ["pp=4", "pp=2[schedule=zb_h1]", "pp=2[schedule=interleaved_1f1b]", "zeropp=2x2"])
def test_many_micro_batches_take_as_long_as_if_all_were_in_the_table(monkeypatch, text):
    (stages,) = parse_parallel(text)
    starts = range(0, 24, 24 // stages.num_stages)
    parts = tuple(range(start, start + 24 // stages.num_stages) for start in starts)
    few = seconds(text, layers=24, accumulation=60, parts=parts)
    monkeypatch.setattr("rotorch.planner.pipeline_time._MOST_PERIODS", 1000)
    assert few == pytest.approx(seconds(text, layers=24, accumulation=60, parts=parts), rel=2e-3)


def test_fewer_visits_make_larger_products_and_bring_every_part():
    text = "rtp=8[recompute=none,transport=send_receive,visits={}]"
    small = replace(SPEEDS, half_size=64.0, launch_s=1e-6)
    compute = [step_time(planned(text.format(g), speeds=small)).compute_s for g in (8, 4, 2)]
    assert compute[0] > compute[1] > compute[2]
    one_by_one = step_time(planned("rtp=8[recompute=none,transport=send_receive]", speeds=small)).compute_s
    assert one_by_one > compute[0]  # of eight visits attention has fewer: it is smaller than the MLP
    # In one visit everything comes before the first product, in eight a rank begins with its own slice.
    waiting = [step_time(planned(text.format(g))).waiting_s for g in (8, 1)]
    assert waiting[1] > waiting[0]


def test_whole_experts_are_multiplied_once_whatever_the_number_of_ranks():
    stacked = Weight("layers.0.experts.up", (8, 256, 64), 2, Cut(1, 256))
    biases = Weight("layers.0.experts.bias", (8, 256), 2, Cut(1, 256))
    cut = Unit("layers.0.experts", UnitKind.MODULE, Combine.SUM, (stacked, biases))
    parts = tuple(replace(w, cut=Cut(0, 8)) for w in cut.weights)
    whole = replace(cut, weights=parts, notes=(WholeExperts(8),))
    order = LayerOrder(layers=("layers.0",), width=64, experts_per_token=2)
    spec = ModelSpec("Mixture", (cut,), experts=(whole,), order=order)
    batch = MicroBatch(num_rows=1, num_tokens=512, itemsize=2)
    numbers = {}
    for text in ("rtp=4", "rtp=4[experts=whole]", "rtp=1"):
        (strategy,) = parse_parallel(text)
        model = fold(strategy.units_of(spec))
        (layer,) = model.classes
        passes = layer_passes(model, layer, batch=batch, cutting=Cutting(slices=strategy.size), numerics=Numerics())
        (of_unit,) = passes
        numbers[text] = int((of_unit.forward.table[:, 0] > 0).sum())
    assert numbers["rtp=4[experts=whole]"] == numbers["rtp=1"] - 1 == 8  # cut biases look like one matrix more
    assert numbers["rtp=4"] == 4 * numbers["rtp=1"]


@pytest.mark.parametrize("layout", ["rtp=2[experts=whole]", "ep=2"])
def test_layers_that_are_alike_count_once_with_whole_experts(layout):
    """Of one layer of each class, not the experts of all layers with it; and they are never whole on a rank."""
    (strategy,) = parse_parallel(layout)
    units, experts = [], []
    for layer in ("layers.0", "layers.1", "layers.2"):
        stacked = Weight(f"{layer}.experts.up", (4, 32, 16), 4, Cut(1, 32))
        units.append(Unit(f"{layer}.experts", UnitKind.MODULE, Combine.SUM, (stacked,)))
        whole = replace(units[-1], weights=(replace(stacked, cut=Cut(0, 4)),), notes=(WholeExperts(4, 2, 16),))
        experts.append(whole)
    order = LayerOrder(layers=("layers.0", "layers.1", "layers.2"), width=16, experts_per_token=2)
    spec = ModelSpec("Mixture", tuple(units), experts=tuple(experts), order=order)
    held = fold(spec).short().under(strategy)
    assert held.num_parameters == spec.num_parameters
    (rank,) = at_rest(held, strategies=[strategy])
    assert rank.by_category["weights"] == spec.num_bytes / 2
    assert rank.gathered.block == 0


def test_layers_of_another_kind_are_a_class_of_their_own():
    spec = transformer(layers=4)
    model = fold(replace(spec, order=replace(spec.order, kinds=("full", "sliding", "sliding", "full")))).short()
    assert fold(spec).pattern == (0, 0, 0, 0) and model.pattern == (0, 1, 1, 0)
    assert model.spec.order.kinds == ("full", "sliding")
    held = model.under(*parse_parallel("rtp=2"))
    assert (held.pattern, [layer.count for layer in held.classes]) == (model.pattern, [2, 2])
