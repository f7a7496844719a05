"""Search over layouts: what fits, what is fastest, and why the others are not chosen; passes are of round numbers."""

from dataclasses import replace

import pytest
from shapes import attending, mixture, on_grids, transformer

from rotorch.core.whole_units import is_whole
from rotorch.planner.cluster import load_cluster
from rotorch.planner.compositions import compositions, sharing_sequences
from rotorch.planner.search import Batch, Task, judged, search, why_nothing_fits
from rotorch.planner.shared_tokens import TracedAttention
from rotorch.planner.speeds import speeds_of
from rotorch.planner.step_time import step_time_if
from rotorch.planner.traced import PerRow, Traced, TracedLayer
from rotorch.strategies import batch_ranks, num_ranks, parse_parallel, with_grids

MIB = float(1 << 20)
LAYER = TracedLayer(stream=PerRow(8 * MIB), interior=PerRow(24 * MIB), given=PerRow(2 * MIB))


def task(*, layers=8, cluster="h100x8", rows=64, budget_bytes=None, width=1024):
    there = load_cluster(cluster)
    return Task(
        spec=transformer(layers=layers, width=width, itemsize=4),
        traced=Traced((LAYER,), PerRow(4 * MIB), PerRow(100 * MIB), PerRow(4 * MIB)),
        cluster=there,
        speeds=speeds_of(there, dtype="bfloat16"),
        batch=Batch(rows, 1024),
        precision="bfloat16",
        budget_bytes=there.device.memory.reached if budget_bytes is None else budget_bytes,
    )


@pytest.mark.parametrize("ranks", [1, 2, 8, 12, 64])
def test_every_composition_uses_all_ranks_and_is_written_once(ranks):
    texts = list(compositions(ranks, num_layers=32, wide=16))
    assert len(texts) == len(set(texts))
    assert {num_ranks(parse_parallel(text)) for text in texts} == {ranks}


def test_layouts_of_three_dimensions_are_among_them():
    texts = set(compositions(8, num_layers=4, wide=8))
    assert {"pp=2,fsdp=2,megatron=2", "pp=2,fsdp=2[recompute=block],megatron=2[sequence_parallel=true]"} <= texts
    assert {"pp=2,rtp=2,megatron=2", "pp=2,megatron=4[sequence_parallel=true]"} <= texts


def test_mixtures_are_tried_with_whole_experts():
    texts = set(compositions(8, num_layers=4, wide=8, num_experts=4))
    assert {"ddp=2,ep=4", "pp=2,ep=4[recompute=block]", "ddp=2,rtp=4[experts=whole]"} <= texts
    assert "ddp=2,rtp=4[recompute=slice,experts=whole]" in texts
    assert not {"ep=8", "rtp=8[experts=whole]"} & texts  # some ranks would have no expert
    found = search(replace(task(), spec=mixture(layers=8, num_experts=8)))
    plans = {plan.parallel: plan for plan in found.plans}
    assert {"ep=8", "rtp=8[experts=whole]"} <= set(plans)
    assert plans["ep=8"].memory.by_category["gathered"] < plans["fsdp=8"].memory.by_category["gathered"]
    assert not any(
        "experts" in text or "ep=" in text for text in (*found.refused, *compositions(8, num_layers=4, wide=8))
    )


def test_slices_of_a_mixture_repeat_what_belongs_to_pairs():
    """Cut through their widths each slice gathers all tokens by expert; sets of whole experts each their own."""
    kept, repeated = PerRow(24 * MIB), PerRow(6 * MIB)
    layer = replace(LAYER, experts=kept, repeated=repeated)
    asked = replace(task(), spec=mixture(layers=8, num_experts=8))
    asked = replace(asked, traced=replace(asked.traced, layers=(layer,)))
    activations = {
        text: judged(asked, text, rows=1, accumulation=1).memory.by_category["activations"]
        for text in ("rtp=8[recompute=none]", "rtp=8[recompute=none,experts=whole]", "megatron=8", "ddp=8")
    }
    whole, alone = activations["rtp=8[recompute=none,experts=whole]"], activations["ddp=8"]
    assert whole == alone
    assert activations["rtp=8[recompute=none]"] == alone + 8 * 7 * 6 * MIB
    assert activations["megatron=8"] == alone - 8 * (24 - 6) * 7 / 8 * MIB


def test_gradients_of_a_slices_experts_are_there_at_once():
    asked = replace(task(rows=16), spec=mixture(layers=8, num_experts=64))
    # Of two micro-batches: in the only backward of a step they are followed by a higher moment, all gradients at home.
    cut = judged(asked, "rtp=8[recompute=slice]", rows=1, accumulation=2).memory.by_category["temporaries"]
    held = sum(weight.num_bytes for weight in asked.spec.experts[0].weights)
    assert held / 8 < cut < held / 8 + 16 * MIB


def test_of_three_dimensions_a_stage_is_gathered_in_slices():
    whole, slices = (
        judged(task(), text, rows=1, accumulation=4).memory.by_category["gathered"]
        for text in ("pp=2,fsdp=2", "pp=2,fsdp=2,megatron=2")
    )
    assert 0.5 * whole <= slices < 0.52 * whole  # norms are whole


def test_plans_that_fit_come_first_by_speed_and_the_others_say_why():
    found = search(task(budget_bytes=600 * MIB))
    fit = [plan for plan in found.plans if plan.fits]
    assert fit and found.chosen is found.plans[0] and not found.chosen.why_not
    assert [plan.step_s for plan in fit] == sorted(plan.step_s for plan in fit)
    assert all("% slower: " in plan.why_not for plan in fit[1:])
    rest = found.plans[len(fit) :]
    assert rest and all(plan.step_s is None and "too much: " in plan.why_not for plan in rest)
    assert all(plan.memory.total_bytes <= 600 * MIB for plan in fit)


def test_less_memory_never_makes_the_best_plan_faster():
    steps = []
    for budget in (8000, 2000, 1000, 600):
        chosen = search(task(budget_bytes=budget * MIB)).chosen
        assert chosen is not None
        steps.append(chosen.step_s)
    assert steps == sorted(steps)


def test_no_plan_of_the_frontier_is_beaten_in_both():
    found = search(task())
    for plan in found.frontier:
        assert not any(
            other.step_s < plan.step_s and other.memory.total_bytes < plan.memory.total_bytes
            for other in found.plans
            if other.fits
        )
    assert len(found.frontier) >= 2


def test_many_layers_are_judged_as_few_are():
    texts = ["fsdp=8", "rtp=8", "ddp=2,fsdp=4", "pp=8"]
    few, many = (search(task(layers=layers, rows=8), texts=texts) for layers in (16, 480))
    for text in texts:
        less, more = (next(p for p in found.plans if p.parallel == text) for found in (few, many))
        assert more.memory.by_category["optimizer"] > 10 * less.memory.by_category["optimizer"]
        if more.fits:
            assert more.step_s > 10 * less.step_s


def test_a_model_that_does_not_say_its_layers_is_planned_without_stages():
    asked = task(rows=8)
    spec = replace(asked.spec, order=replace(asked.spec.order, layers=(), after=(), refused="no pipeline plan"))
    found = search(replace(asked, spec=spec, traced=replace(asked.traced, layers=(), outside=PerRow(300 * MIB))))
    assert found.chosen is not None and all("pp=" not in plan.parallel for plan in found.plans)
    assert {"ddp=8", "fsdp=8", "rtp=8"} <= {plan.parallel for plan in found.plans}
    assert all(plan.memory.by_category["activations"] >= 0.0 for plan in found.plans)
    (ddp,) = search(replace(asked, spec=spec, traced=replace(asked.traced, layers=())), texts=["ddp=8"]).plans
    assert ddp.memory.by_category["weights"] == spec.num_parameters * 4


def test_larger_micro_batches_hold_more():
    asked = task()
    smaller = search(replace(asked, batch=Batch(8, 1024)), texts=["fsdp=8"]).plans[0]
    larger = search(replace(asked, batch=Batch(32, 1024)), texts=["fsdp=8"]).plans[0]
    assert (smaller.micro_batch, larger.micro_batch) == (1, 4)
    assert larger.memory.by_category["activations"] == 4 * smaller.memory.by_category["activations"]
    assert larger.memory.by_category["weights"] == smaller.memory.by_category["weights"]


def test_a_pipeline_counts_the_rank_that_holds_most():
    (plan,) = search(task(cluster="h100x8", rows=8), texts=["pp=8"]).plans
    first_stage = 8 * (LAYER.stream.row_bytes + LAYER.interior.row_bytes)
    assert plan.memory.rank in (0, 7)
    # Once there are gradients, one of eight micro-batches has ended.
    assert plan.memory.by_category["activations"] >= 7 / 8 * first_stage or plan.memory.rank == 7


def test_what_cannot_hold_the_model_is_named():
    found = search(task(layers=4), texts=["pp=8", "ddp=8"])
    assert {plan.parallel for plan in found.plans} == {"ddp=8"}
    assert "8 stages over Transformer, which has 4 layers" in found.refused["pp=8"]


def test_a_budget_for_whole_units_lies_between_a_ring_and_replicas():
    asked = task(rows=8)
    ring = "transport=send_receive"  # over symmetric memory copies in the window come on top
    texts = ["ddp=8", f"rtp=8[{ring}]", f"osdp=8[memory=500MiB,{ring}]", "fsdp=8", "osdp=8[memory=500MiB,inner=fsdp]"]
    ddp, rtp, some, fsdp, gathered = (search(asked, texts=[text]).plans[0] for text in texts)
    held = [sum(p.memory.by_category[c] for c in ("weights", "gradients", "optimizer")) for p in (some, gathered)]
    for plan, inner, num_bytes in ((some, rtp, held[0]), (gathered, fsdp, held[1])):
        least = sum(inner.memory.by_category[c] for c in ("weights", "gradients", "optimizer"))
        assert least < num_bytes <= 500 * MIB
        both = ddp.time.compute_s, inner.time.compute_s
        assert 0.99 * min(both) <= plan.time.compute_s <= 1.01 * max(both)
    assert "Write memory=" in search(asked, texts=["osdp=8[memory=1MiB]"]).refused["osdp=8[memory=1MiB]"]


@pytest.mark.parametrize(
    ("layers", "rows", "budget"), [pytest.param(8, 64, 2000, marks=pytest.mark.slow), (12, 512, 1500)]
)
def test_tables_that_are_not_made_would_change_nothing(layers, rows, budget, monkeypatch):
    asked = task(layers=layers, rows=rows, budget_bytes=budget * MIB)
    found = search(asked)
    least = []

    def always(plan, *, worth):
        bounds = []
        time = step_time_if(plan, worth=lambda least_s: bounds.append(least_s) or True)
        least.extend((bound, time.step_s) for bound in bounds)
        return time

    monkeypatch.setattr("rotorch.planner.search.step_time_if", always)
    everything = search(asked)
    assert found.chosen == everything.chosen and found.frontier == everything.frontier
    left = [plan for plan in everything.plans if plan not in found.plans]
    assert left and all("schedule=" in plan.parallel for plan in left)
    assert len(found.plans) + len(left) == len(everything.plans)
    assert any("schedule=" in plan.parallel for plan in found.plans)
    assert least and all(bound <= step_s * (1 + 1e-9) for bound, step_s in least)


def test_rings_between_gpus_are_tried_with_fewer_visits():
    fewest = [plan for plan in search(task()).plans if "visits=1]" in plan.parallel and "memory=" not in plan.parallel]
    slots = []
    for plan in fewest:
        default = plan.parallel.replace(",visits=1", "").replace("[visits=1]", "")
        beside = judged(task(), default, rows=plan.micro_batch, accumulation=plan.accumulation)
        slots.append((plan.memory.by_category["slots"], beside.memory.by_category["slots"]))
    assert all(one >= several for one, several in slots) and any(one > several for one, several in slots)
    fewer, more = (
        judged(task(), f"rtp=8[transport=send_receive,recompute=slice,visits={visits}]", rows=8, accumulation=1).memory
        for visits in (1, 8)
    )
    assert fewer.by_category["logits"] >= 2 * more.by_category["logits"] > 0  # they are there a visit at a time
    assert "visits=" not in "".join(plan.parallel for plan in search(task(cluster="cpu2")).plans)


def test_rings_of_a_nodes_gpus_are_planned_over_symmetric_memory():
    """As "auto" has them there; beyond a node they are messages, and fetches that are copies take less time."""
    rows = {"rows": 1, "accumulation": 1}
    of_node = task(rows=8)
    auto, symmetric, messages = (
        judged(of_node, f"rtp=8{options}", **rows)
        for options in ("", "[transport=symmetric_memory]", "[transport=send_receive]")
    )
    assert auto.memory == symmetric.memory != messages.memory
    assert auto.step_s == symmetric.step_s < messages.step_s
    of_two = task(cluster="h100x16", rows=16)
    auto, messages = (judged(of_two, f"rtp=16{options}", **rows) for options in ("", "[transport=send_receive]"))
    assert auto.step_s == messages.step_s


@pytest.mark.parametrize("memory", ["400MiB", "700MiB", "1000MiB"])
def test_plans_keep_the_same_units_whole_as_a_run_does(memory):
    """Units are chosen before ranks have met, whatever "auto" will come to."""
    (written,) = parse_parallel(f"osdp=8[memory={memory}]")
    of_run = written.at_precision("bfloat16").on_device("cuda")
    of_plan = of_run.model_copy(update={"transport": "symmetric_memory"})
    spec = task().spec.with_copies(2)
    whole = [[unit.name for unit in s.units_of(spec).units if is_whole(unit)] for s in (of_run, of_plan)]
    assert whole[0] == whole[1]


def test_budgets_for_whole_units_are_tried_where_memory_is_left():
    asked = task(budget_bytes=800 * MIB)
    spec = replace(asked.spec, order=replace(asked.spec.order, refused="no stages"))
    found = search(replace(asked, spec=spec))
    mixed = [plan for plan in found.frontier if "memory=" in plan.parallel]
    ring = min((p for p in found.plans if p.fits and p.parallel == "rtp=8[recompute=slice]"), key=lambda p: p.step_s)
    assert found.chosen is mixed[0] and mixed[0].parallel.startswith("rtp=8[recompute=slice,")
    assert mixed[0].step_s < 0.96 * ring.step_s
    assert ring.memory.total_bytes < mixed[0].memory.total_bytes <= 800 * MIB
    (again,) = [p for p in search(asked, texts=[mixed[0].parallel]).plans if p.micro_batch == mixed[0].micro_batch]
    assert again.memory == mixed[0].memory and again.step_s == mixed[0].step_s
    figures = [(p.micro_batch, p.step_s, p.memory.total_bytes) for p in found.plans if "memory=" in p.parallel]
    assert len(figures) == len(set(figures))


@pytest.mark.parametrize(("fast", "grid"), [(8, "8x1"), (2, "4x2"), (4, "2x4")])
def test_a_grid_is_chosen_by_the_links(fast, grid):
    asked = task(rows=8)
    (link,) = asked.speeds.links
    slow = replace(link, bytes_per_s=link.bytes_per_s / 50)
    links = (link,) if fast == 8 else (replace(link, devices=fast), slow)
    there = replace(asked, spec=on_grids(asked.spec), speeds=replace(asked.speeds, links=links))
    chosen = search(there, texts=with_grids("atp=auto", ranks=8)).chosen
    assert chosen is not None and chosen.parallel == f"atp={grid}"


def test_nothing_fits_says_the_least_that_would_do_and_what_helps():
    asked = task(budget_bytes=10 * MIB)
    found = search(asked)
    said, least = why_nothing_fits(found, asked), min(found.plans, key=lambda p: p.memory.total_bytes)
    assert found.chosen is None and "\n" not in said
    assert f"{least.memory.total_bytes / MIB:.0f} MiB, {least.parallel} with a micro-batch of 1" in said
    assert said.endswith(
        "What helps: weights of 2 bytes each instead of 4 (torch_dtype of its config.json), or more ranks"
    )
    enough = replace(asked, budget_bytes=least.memory.total_bytes)
    assert search(enough).chosen.parallel == least.parallel


def test_a_model_that_no_layout_can_hold_is_said_with_the_reason():
    asked = task(rows=3)
    found = search(asked, texts=["ddp=8"])
    assert why_nothing_fits(found, asked) == (
        "no layout of 8 ranks can hold Transformer: 3 rows are no multiple of its 8 batch ranks"
    )


# ---- ranks that share sequences -------------------------------------------------------------------------------------

KEYS = TracedAttention(query_bytes=512.0, key_bytes=512.0)


def long_task(*, rows, refused="", asked=None, **options):
    """Of sequences that are shared, a rank's part takes what it takes of the whole, divided."""
    alone = task(rows=rows, **options)

    def shared(num_ranks):
        if asked is not None:
            asked.append(num_ranks)
        spec = replace(attending(alone.spec), sequences_stay_whole=refused)
        part = TracedLayer(
            *(PerRow(of.row_bytes / num_ranks) for of in (LAYER.stream, LAYER.interior, LAYER.given)),
            attentions=(KEYS,),
        )
        outside, logits, others = (
            PerRow(of.row_bytes / num_ranks)
            for of in (alone.traced.outside, alone.traced.logits, alone.traced.temporaries)
        )
        return spec, Traced((part,), outside, logits, others)

    return replace(alone, shared=shared)


@pytest.mark.parametrize("ranks", [2, 8, 12, 64])
def test_layouts_that_share_sequences_use_all_ranks_and_all_rows(ranks):
    for rows in (1, 4, 64):
        texts = list(sharing_sequences(ranks, rows=rows, per_node=min(ranks, 8)))
        assert len(texts) == len(set(texts)) <= 40
        for text in texts:
            strategies = parse_parallel(text)
            assert num_ranks(strategies) == ranks and rows % batch_ranks(strategies) == 0
    assert next(sharing_sequences(8, rows=1, per_node=8)) == "rtp=8[context=8]"


def test_one_sequence_on_many_ranks_is_shared():
    asked = []
    found = search(long_task(rows=1, asked=asked))
    shared = {plan.parallel: plan for plan in found.plans if "context=8" in plan.parallel}
    assert {"rtp=8[context=8]", "fsdp=8[recompute=block,context=8]"} <= set(shared)
    assert asked == [8] and all(plan.micro_batch == plan.accumulation == 1 for plan in shared.values())
    assert found.chosen is not None and all(plan.why_not for plan in found.plans if plan is not found.chosen)


def test_sequences_stay_whole_where_they_fit():
    asked = []
    found = search(long_task(rows=64, asked=asked))
    assert not asked and not any("context" in plan.parallel for plan in found.plans)


def test_sequences_that_fit_on_no_rank_are_shared():
    whole = judged(task(), "rtp=8[recompute=slice]", rows=1, accumulation=8)
    less = search(long_task(rows=64, budget_bytes=whole.memory.total_bytes - 8 * MIB))
    fit = [plan for plan in less.plans if plan.fits and "context=" in plan.parallel]
    assert fit and all(batch_ranks(parse_parallel(p.parallel)) * p.micro_batch * p.accumulation == 64 for p in fit)


def test_a_model_whose_sequences_stay_whole_is_asked_once_and_named():
    asked = []
    found = search(long_task(rows=2, refused="its layers pass a state along", asked=asked))
    assert asked == [4]
    assert not any("context" in plan.parallel for plan in found.plans)
    why = {text: said for text, said in found.refused.items() if "context=" in text}
    assert len(why) > 4 and all("its layers pass a state along. Leave context out" in said for said in why.values())


def test_a_rank_keeps_its_part_and_the_keys_of_all_tokens():
    asked = long_task(rows=8)
    whole, shared = (
        judged(asked, text, rows=rows, accumulation=1).memory.by_category["activations"]
        for text, rows in (("fsdp=8", 1), ("fsdp=8[context=8]", 8))
    )
    outputs = KEYS.query_bytes + KEYS.sum_bytes  # of chunks
    assert shared - whole == pytest.approx(8 * 8 * (1024 * KEYS.key_bytes + 1024 // 8 * outputs))


def test_layers_that_are_computed_again_keep_no_keys():
    asked = long_task(rows=8)
    whole, shared = (
        judged(asked, text, rows=rows, accumulation=1).memory.by_category["activations"]
        for text, rows in (("fsdp=8[recompute=block]", 1), ("fsdp=8[recompute=block,context=8]", 8))
    )
    assert shared == whole


def test_sequences_with_fewer_tokens_than_ranks_are_refused():
    asked = replace(long_task(rows=1), batch=Batch(1, 4))
    found = search(asked, texts=["rtp=8[context=8]"])
    assert "4 tokens are fewer than the 8 ranks" in found.refused["rtp=8[context=8]"]
