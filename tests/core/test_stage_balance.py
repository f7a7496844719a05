"""Cuts of layers into stages, held against trying every cut."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Combine, LayerOrder, ModelSpec, Unit, UnitKind, Weight
from rotorch.core.stage_balance import LayerCost, balanced, balanced_within, layer_costs
from rotorch.core.traffic import MicroBatch
from rotorch.pipelining.actions import ActionKind
from rotorch.strategies import for_batch, format_parallel, parse_parallel

COSTS = st.builds(LayerCost, *[st.integers(0, most) for most in (9, 18, 9, 9, 9)])


def every_cut(num_layers, num_stages):
    for ends in combinations(range(1, num_layers), num_stages - 1):
        edges = [0, *ends, num_layers]
        yield tuple(range(a, b) for a, b in pairwise(edges))


def measures(costs, parts, *, kept, shared_by, gathered):
    """Of the slowest stage, of the largest, and how uneven they are in time."""
    each = [[costs[i] for i in part] for part in parts]
    times = [sum(c.flops for c in part) for part in each]
    bytes_ = [
        sum(c.state_bytes for c in part) / shared_by
        + gathered * sum(c.gathered_bytes for c in part)
        + number * sum(c.activation_bytes for c in part)
        for part, number in zip(each, kept, strict=True)
    ]
    return max(times), max(bytes_), sum(t * t for t in times)


@given(st.lists(COSTS, min_size=1, max_size=7), st.integers(1, 4), st.none() | st.integers(1, 80), st.data())
def test_no_other_cut_within_the_limit_is_faster_then_smaller_then_more_even(costs, shared_by, limit, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    kept = data.draw(st.lists(st.integers(0, 4), min_size=num_stages, max_size=num_stages))
    how = {"kept": kept, "shared_by": shared_by, "gathered": data.draw(st.sampled_from([0, 0.5, 1]))}
    each = [measures(costs, parts, **how) for parts in every_cut(len(costs), num_stages)]
    if limit is not None and not any(largest <= limit for _, largest, _ in each):
        with pytest.raises(ConfigError, match="keeps each within"):
            balanced(costs, limit_bytes=limit, **how)
        return
    parts = balanced(costs, limit_bytes=limit, **how)
    assert [i for part in parts for i in part] == list(range(len(costs)))
    assert len(parts) == num_stages and all(len(part) for part in parts)
    found = measures(costs, parts, **how)
    assert found == min(m for m in each if limit is None or m[1] <= limit)
    as_good = (other for other in every_cut(len(costs), num_stages) if measures(costs, other, **how) == found)
    assert parts == min(as_good, key=lambda cut: [part.start for part in reversed(cut)])


AGAIN = st.builds(LayerCost, *[st.integers(0, most) for most in (9, 18, 9, 9, 9, 9, 9, 4, 9, 3)])


def measures_within(costs, parts, *, kept, shared_by, gathered, limit, grain=1):
    """Of a cut whose stages compute their first layers again to keep to a limit: as above, and numbers of layers.

    A layer is `grain` entries, and computed again if the stage has all of them.
    """
    times, bytes_, numbers = [], [], []
    for part, number in zip(parts, kept, strict=True):
        each = [costs[i] for i in part]
        held = sum(c.state_bytes for c in each) / shared_by + gathered * sum(c.gathered_bytes for c in each)
        held += number * sum(c.activation_bytes for c in each)
        held += number * max(c.output_bytes for c in costs) * (part.stop < len(costs))
        firsts = [i for i in part if i % grain == 0 and i + grain <= part.stop]
        passing, redone = max(c.passing_bytes for c in each), max(c.redone_bytes for c in each)
        of_again = []
        for again in range(1, len(firsts) + 1):
            saved = number * sum(costs[i].saved_bytes for i in firsts[:again])
            of_again.append(held - saved + (redone if again == len(firsts) else passing))
        sizes = [held + passing, *(of_again if number else [])]
        again = next((place for place, size in enumerate(sizes) if size <= limit), None)
        if again is None:
            return None
        numbers.append(again)
        bytes_.append(sizes[again])
        times.append(sum(c.flops for c in each) + sum(costs[i].again_flops for i in firsts[:again]))
    return (max(times), max(bytes_), sum(t * t for t in times)), tuple(numbers)


@given(st.lists(AGAIN, min_size=2, max_size=7), st.booleans(), st.integers(1, 4), st.integers(1, 80), st.data())
def test_no_other_cut_that_computes_as_few_layers_again_as_it_takes_is_better(costs, halves, shared_by, limit, data):
    if halves:  # a whole number of layers, whose first half has what computing both again takes and saves
        nothing = {"again_flops": 0, "saved_bytes": 0, "redone_bytes": 0}
        costs = [replace(c, **nothing) if i % 2 else c for i, c in enumerate(costs[: len(costs) // 2 * 2])]
    num_stages = data.draw(st.integers(1, len(costs)))
    kept = data.draw(st.lists(st.integers(0, 4), min_size=num_stages, max_size=num_stages))
    how = {"kept": kept, "shared_by": shared_by, "gathered": data.draw(st.sampled_from([0, 0.5, 1]))}
    grain = 2 if halves else 1
    every = every_cut(len(costs), num_stages)
    each = {parts: measures_within(costs, parts, **how, limit=limit, grain=grain) for parts in every}
    each = {parts: found for parts, found in each.items() if found is not None}
    if not each:
        with pytest.raises(ConfigError, match="keeps each within"):
            balanced_within(costs, limit_bytes=limit, halves=halves, **how)
        return
    parts, numbers = balanced_within(costs, limit_bytes=limit, halves=halves, **how)
    best = min(found for found, _ in each.values())
    as_good = [other for other, (found, _) in each.items() if found == best]
    assert parts == min(as_good, key=lambda cut: [part.start for part in reversed(cut)])
    assert numbers == each[parts][1]


def test_many_layers_are_cut_into_many_stages():
    costs = [LayerCost(2 * flops, 4 * flops, 16, 1) for flops in (7, 3, 3, 5, 2) * 200]
    costs[-1] = LayerCost(60, 120, 90, 1)
    cuts = {stages: balanced(costs, kept=[1] * stages) for stages in (2, 50, 1000)}
    assert [len(cut) for cut in cuts.values()] == [2, 50, 1000]
    assert all(cut[-1].stop == 1000 and all(cut) for cut in cuts.values())
    large = [LayerCost(c.forward_flops << 60, c.backward_flops << 60, c.state_bytes, 1) for c in costs]
    assert balanced(large, kept=[1] * 50) == cuts[50]  # beyond 64 bits


def model(*, num_layers, vocabulary, tied=False, experts=0, width=8):
    """Layers of one matrix, with an embedding and a head."""
    names = [f"layers.{n}" for n in range(num_layers)]
    shape = (4, 3 * width, width) if experts else (3 * width, width)
    table = Weight("embed.weight", (vocabulary, width), 4, aliases=("head.weight",) if tied else ())
    weights = [table, *(Weight(f"{name}.up", shape, 4) for name in names)]
    if not tied:
        weights.append(Weight("head.weight", (vocabulary, width), 4))
    order = LayerOrder(tuple(names), ("head",), width=width, attention_width=width, experts_per_token=experts)
    units = [Unit(w.name, UnitKind.WEIGHT, Combine.SUM, (w,)) for w in weights]
    return ModelSpec("Model", tuple(units), order=order)


BATCH = MicroBatch(num_rows=2, num_tokens=4)


def test_flops_and_bytes_as_counted_by_hand():
    first, _, last = layer_costs(model(num_layers=3, vocabulary=100), batch=BATCH)
    tokens = 2 * 4
    of_layer = 2 * tokens * 3 * 8 * 8 + 2 * tokens * 4 * 8  # the matrix; scores and values of half of the tokens
    of_head = 2 * tokens * 100 * 8
    assert (first.forward_flops, first.backward_flops) == (of_layer, 2 * of_layer)
    assert (last.forward_flops, last.backward_flops) == (of_layer + of_head, 2 * (of_layer + of_head))
    assert first.state_bytes == last.state_bytes == 4 * 4 * (3 * 8 * 8 + 100 * 8)
    kept = tokens * 4 * (2 * 8 + 3 * 8)
    assert (first.activation_bytes, last.activation_bytes) == (kept, kept + 2 * tokens * 4 * 100)


def test_what_is_computed_again_takes_time_and_saves_memory():
    plain, again = (layer_costs(model(num_layers=2, vocabulary=100), batch=BATCH, recompute=r) for r in (False, True))
    assert again[0].flops * 3 == plain[0].flops * 4
    assert again[1].backward_flops - plain[1].backward_flops == plain[0].forward_flops  # the head is not run again
    assert again[0].activation_bytes < plain[0].activation_bytes


def test_a_token_meets_some_experts_only_and_a_tied_head_computes_where_it_is_borrowed():
    every, some = (layer_costs(model(num_layers=2, vocabulary=9, experts=k), batch=BATCH)[0] for k in (4, 1))
    attention = 2 * 8 * 4 * 8
    assert every.forward_flops - attention == 4 * (some.forward_flops - attention)
    tied, own = (layer_costs(model(num_layers=2, vocabulary=100, tied=t), batch=BATCH) for t in (True, False))
    assert [c.flops for c in tied] == [c.flops for c in own]
    assert own[1].state_bytes - tied[1].state_bytes == 2 * 4 * 100 * 8  # its optimizer is at home


def test_a_head_takes_layers_from_the_last_stage_and_an_embedding_none_from_the_first():
    (pipeline,) = parse_parallel("pp=2")
    cut = pipeline.parts_of(model(num_layers=8, vocabulary=10))
    assert [len(part) for part in cut] == [4, 4]
    assert [len(part) for part in pipeline.parts_of(model(num_layers=8, vocabulary=3000, width=64))] == [5, 3]
    (by_hand,) = parse_parallel("pp=2[layers=3-5]")
    assert [len(part) for part in by_hand.parts_of(model(num_layers=8, vocabulary=10))] == [3, 5]


def test_the_first_stages_of_1f1b_keep_more_micro_batches_and_get_fewer_layers_where_memory_is_short():
    spec = model(num_layers=12, vocabulary=10)
    (pipeline,) = parse_parallel("pp=4")
    assert pipeline.kept_by_stages(8) == (4, 3, 2, 1)
    assert parse_parallel("zeropp=2x1[chunks=2,unit=2]")[0].kept_by_stages(4)[0] >= 2
    fast = pipeline.balanced(spec, batch=BATCH, num_micro_batches=8)
    assert fast.layers == "3-3-3-3"
    small = pipeline.balanced(spec, batch=BATCH, num_micro_batches=8, limit_bytes=21_000)
    counts = [int(n) for n in small.layers.split("-")]
    assert counts[0] < 3 and sum(counts) == 12
    assert small.parts_of(spec)[0] == range(counts[0])
    with pytest.raises(
        ConfigError, match=r"no cut of 12 layers into 4 stages keeps each within 4\.88 KiB.*, or recompute=auto"
    ):
        pipeline.balanced(spec, batch=BATCH, num_micro_batches=8, limit_bytes=5000)


def counted(table):
    """Per stage, the most micro-batches between a forward and the last part of its backward, action by action."""
    ends = ActionKind.BACKWARD_WEIGHT if table.splits_backward else ActionKind.BACKWARD
    most, now = [0] * table.num_stages, [0] * table.num_stages
    for action in (action for row in table.rows for action in row):
        now[action.stage] += (action.kind is ActionKind.FORWARD) - (action.kind is ends)
        most[action.stage] = max(most[action.stage], now[action.stage])
    return tuple(most)


@pytest.mark.parametrize("text", ["pp=4", "pp=2[schedule=zbv]", "pp=4[schedule=zb_h1]", "zeropp=2x2[chunks=2]"])
def test_what_stages_keep_together_is_no_more_than_the_most_of_each(text):
    (pipeline,) = parse_parallel(text)
    most = pipeline.kept_by_stages(8)
    assert most == counted(pipeline.table(8))
    for mine, moments in zip(pipeline.stages_by_rank, pipeline.kept_together(8), strict=True):
        for place, stage in enumerate(mine):
            assert max(sum(moment[place]) for moment in moments) == most[stage]
        assert any(late for moment in moments for _, late in moment) == pipeline.splits_backward
        assert moments[-1] == ((0, 0),) * len(mine)


def fitted(parallel, spec, *, num_micro_batches=4):
    return format_parallel(for_batch(parse_parallel(parallel), spec, batch=BATCH, num_micro_batches=num_micro_batches))


def test_a_limit_of_memory_becomes_layers_once_the_batch_is_known():
    spec = model(num_layers=12, vocabulary=10)
    assert fitted("pp=4[rank_memory=21kB]", spec, num_micro_batches=8) == "pp=4[layers=2-3-3-4]"
    assert fitted("ddp=2,pp=4[rank_memory=1MiB]", spec) == "ddp=2,pp=4[layers=3-3-3-3]"
    assert fitted("pp=4,rtp=2", spec) == "pp=4,rtp=2"
    with pytest.raises(ConfigError, match=r"^pp=4\[rank_memory=5kB\]: no cut of 12 layers into 4 stages keeps each"):
        fitted("pp=4[rank_memory=5kB]", spec)
    with pytest.raises(ConfigError, match=r"^pp=2\[rank_memory=1MiB\]: 2 stages over Model, which has 1 layers"):
        fitted("pp=2[rank_memory=1MiB]", model(num_layers=1, vocabulary=10))
    (unknown,) = parse_parallel("pp=4[rank_memory=1MiB]")
    with pytest.raises(ConfigError, match=r"depends on the batch, which only a run has. Write layers=\.\.\."):
        unknown.check(spec)


def test_ranks_inside_share_weights_and_what_they_gather_counts_whole():
    """Weights that are all there is to hold: a layer is W bytes, with gradient and optimizer 4 W."""
    spec = model(num_layers=4, vocabulary=1, width=256)
    layer = 3 * 256 * 256 * 4
    for parallel, held in (
        ("pp=2[{}]", 8),
        ("pp=2[chunks=2,schedule=interleaved_1f1b,{}]", 8),
        ("pp=2[{}],rtp=4", 2),
        ("pp=2[{}],megatron=4", 2),
        ("pp=2[{}],fsdp=4", 2 + 4),
        ("pp=2[chunks=2,schedule=interleaved_1f1b,{}],fsdp=4", 2 + 2),  # one of two stages at a time
        ("pp=2[{}],fsdp=4,megatron=2", 1 + 2),  # a stage's slices
        ("ddp=2,pp=2[{}],rtp=2,megatron=2", 2),
        ("zeropp=2x4[{}]", 2 + 4),
        ("zeropp=2x4[inner=rtp,{}]", 2),
    ):
        fits, does_not = (parallel.format(f"rank_memory={int(part * held * layer)}") for part in (1.25, 0.99))
        assert "layers=" in fitted(fits, spec, num_micro_batches=2), fits
        with pytest.raises(ConfigError, match="no cut of 4 layers"):
            fitted(does_not, spec, num_micro_batches=2)
