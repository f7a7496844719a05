import json
import os
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rotorch._torch_private import functional_collectives
from rotorch.bench.contender import make_contender
from rotorch.bench.trace import SHARES, RankTrace, shares, together, trace_steps
from rotorch.bench.trace_files import LANES, RowTrace, file_stem, summary, write_traces
from rotorch.comm.observe import Activity, Observer, Span
from rotorch.pipelining.actions import COMPUTE
from rotorch.testing.ranks import run_ranks

# Two steps of two ranks, in seconds: everything that a share is made of, some of it over one another.
ONE = RankTrace(
    [
        Span(Activity.FORWARD, "forward", 0.1, 0.4),
        Span(Activity.SLICE, "mlp", 0.2, 0.3),
        Span(Activity.FETCH, "8 B from 1", 0.1, 0.3),
        Span(Activity.FETCH, "8 B from 1", 0.2, 0.45),
        Span(Activity.BACKWARD, "backward", 0.4, 0.8),
        Span(Activity.VISIT, "mlp slice 0 backward", 0.4, 0.6),
        Span(Activity.GRADIENT, "mlp slice 0", 0.5, 0.6),
        Span(Activity.COLLECTIVE, "collective", 0.55, 0.7),
        Span(Activity.HOP, "8 B from 1", 0.5, 0.6),
        Span(Activity.OPTIMIZER, "optimizer", 0.8, 0.9),
        Span(Activity.FORWARD, "forward", 1.0, 2.0),
    ],
    [(0.0, 0.9), (1.0, 2.0)],
)
OTHER = RankTrace([Span(Activity.FORWARD, "forward", 0.0, 1.0)], [(0.05, 1.0), (1.1, 1.9)])
ROW = RowTrace("rtp=2[transport=send_receive]", [ONE, OTHER])


def test_a_step_lasts_from_the_first_rank_to_the_last():
    assert together([ONE, OTHER]) == [(0.0, 1.0), (1.0, 2.0)]


def test_shares_add_up_and_waiting_comes_before_computing():
    found = shares(ONE, steps=[(0.0, 1.0)])
    assert tuple(found) == SHARES
    expected = {"waiting for a slice": 0.1, "waiting for a gradient": 0.1, "collectives": 0.1, "optimizer": 0.1}
    assert found == pytest.approx({**expected, "compute": 0.4, "other": 0.2})
    assert sum(shares(OTHER, steps=ROW.steps).values()) == pytest.approx(1.0)


def test_a_waiting_inside_of_another_is_part_of_it():
    observer = Observer()
    waited = observer.wait(
        Activity.SLICE, "outer", lambda: observer.wait(Activity.COLLECTIVE, "inner", lambda: time.sleep(0.01) or 3)
    )
    assert waited == 3
    assert [(span.doing, span.name) for span in observer.spans] == [(Activity.SLICE, "outer")]
    assert observer.waiting is None


def test_the_perfetto_file_has_a_process_per_rank_and_lanes_that_nest(tmp_path):
    files = write_traces(ROW, directory=tmp_path / "new")
    events = json.loads((tmp_path / "new" / "rtp-2-transport-send-receive.trace.json").read_text())["traceEvents"]
    processes = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert processes == [f"{ROW.row} rank 0", f"{ROW.row} rank 1"]
    lanes = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert lanes == [LANES[0], LANES[1], f"{LANES[1]} (2)", LANES[2]]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == len(ONE.spans) + len(OTHER.spans)
    named = next(e for e in spans if e["name"] == "mlp slice 0 backward")
    assert (named["ts"], named["dur"], named["cat"]) == (pytest.approx(4e5), pytest.approx(2e5), "visit")
    assert set(files) == {"perfetto", "page", "picture"} and file_stem("ddp=2,rtp=4") == "ddp-2-rtp-4"


def test_the_page_and_the_picture_stand_alone_and_say_the_percentages(tmp_path):
    files = write_traces(ROW, directory=tmp_path)
    page, picture = (Path(files[kind]).read_text() for kind in ("page", "picture"))
    assert ROW.headline[0].startswith("rank 0: compute 70.0 %, waiting for a slice 5.0 %")
    assert ROW.headline[0] in picture
    assert "rank 0: compute 70.0 %" in page
    assert len(page) < 50_000 and "src=" not in page
    rectangles = ElementTree.fromstring(picture).findall("{http://www.w3.org/2000/svg}rect")
    assert len(rectangles) > len(ONE.spans) / 2
    assert summary(ROW, files=files)["shares_by_rank"] == ROW.shares_by_rank


class Late:
    """A rank that dawdles in the forward of a block."""

    def __init__(self, contender, *, rank, late_s):
        if int(os.environ["RANK"]) == rank:
            block = contender.module.get_submodule("model.layers.0")
            block.register_forward_pre_hook(lambda *_: time.sleep(late_s))


def _traced(task, row, late_s):
    contender = make_contender(task, row=row, rank=int(os.environ["RANK"]))
    contender.forward_backward(0)
    contender.update()
    if late_s:
        Late(contender, rank=1, late_s=late_s)
    before = _patchable(contender)
    trace = trace_steps(contender, steps=[1, 2], meet=lambda: None)
    assert _patchable(contender) == before
    return trace


def _patchable(contender):
    """All that tracing puts something in front of."""
    ring = getattr(contender.model.sharded, "ring", None)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in contender.module.modules()]
    parameters = [p for p in contender.module.parameters() if type(p) is torch.nn.Parameter]
    of_gradients = [len(p._post_accumulate_grad_hooks or ()) for p in parameters]
    functions = (Tensor.backward, dist.Work.wait, dist.batch_isend_irecv, functional_collectives().wait_tensor)
    return functions, sorted(vars(ring or object)), hooks, of_gradients


def of(trace, doing):
    return [span for span in trace.spans if span.doing is doing]


@pytest.mark.parametrize("row", ["single", "ddp=2", "fsdp=2[recompute=block]", "rtp=2", "ddp=2,rtp=1"])
def test_every_row_has_its_phases(task, row):
    num_ranks = 1 if row == "single" else 2
    traces = run_ranks(_traced, replace(task, num_ranks=num_ranks), row, 0.0, num_ranks=num_ranks)
    for trace, found in zip(traces, RowTrace(row, traces).shares_by_rank, strict=True):
        assert [len(of(trace, d)) for d in (Activity.FORWARD, Activity.BACKWARD, Activity.OPTIMIZER)] == [2, 2, 2]
        blocks = [span.name for span in of(trace, Activity.BLOCK)]
        assert blocks == ["model.layers.0 forward", "model.layers.1 forward"] * 2
        for (start, end), step in zip(trace.steps, together(traces), strict=True):
            assert step[0] <= start < end <= step[1]
        assert all(span.start_s <= span.end_s for span in trace.spans)
        assert 0.0 < found["compute"] < 1.0 and sum(found.values()) == pytest.approx(1.0)
        assert bool(of(trace, Activity.COLLECTIVE)) == (num_ranks > 1)
        assert "rtp" in row or not of(trace, Activity.SLICE)


def test_a_pipeline_is_drawn_as_its_schedule(task, tmp_path):
    row = "pp=2[schedule=zb_h1]"
    traces = run_ranks(_traced, replace(task, accumulation=2), row, 0.0, num_ranks=2)
    first = [str(done.action) for done in traces[0].actions if done.action.kind in COMPUTE]
    assert first == ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"] * 2
    for trace in traces:
        assert all(before.end_s <= after.start_s for before, after in pairwise(trace.actions))
        assert len(of(trace, Activity.BACKWARD)) == 2 * 4 and len(of(trace, Activity.FORWARD)) == 2 * 2
    files = write_traces(RowTrace(row, traces), directory=tmp_path)
    page = Path(files["schedule"]).read_text()
    assert "src=" not in page
    assert all(f"</i>{name}</span>" in page for name in ("forward", "input gradient", "weight gradient"))


def test_a_ring_tells_every_visit_and_message(task):
    row = "rtp=2[transport=send_receive,recompute=slice]"
    for rank, trace in enumerate(run_ranks(_traced, task, row, 0.0, num_ranks=2)):
        visits = [span.name for span in of(trace, Activity.VISIT)]
        mlp = f"model.layers.1.mlp slice {rank} "
        assert visits.count(mlp + "forward") == visits.count(mlp + "backward") == 2  # one in each step
        units = {name.rpartition(" slice ")[0] for name in visits}
        modules = {f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn", "mlp")}
        assert units == {"model.embed_tokens.weight", "lm_head.weight", *modules}
        assert len(visits) == 2 * 2 * 2 * len(units)  # steps x directions x slices
        # Each visit of another's slice is a message, but for the embedding's backward, which needs no weights.
        assert len(of(trace, Activity.FETCH)) == 2 * (2 * len(units) - 1)
        assert len(of(trace, Activity.HOP)) == 2 * len(units)


@pytest.mark.parametrize(
    ("row", "waits_for"),
    [
        ("rtp=2[transport=send_receive]", Activity.SLICE),
        ("rtp=2[transport=shared_memory]", Activity.GRADIENT),
        ("ddp=2", Activity.COLLECTIVE),
        pytest.param("fsdp=2", Activity.COLLECTIVE, marks=pytest.mark.slow),
    ],
)
def test_who_waits_for_a_late_rank_is_seen(task, row, waits_for):
    for late_s in (0.4, 1.6, 6.4):  # later, where a busy machine makes both wait as long
        in_time, late = run_ranks(_traced, task, row, late_s, num_ranks=2)
        waited = [sum(span.end_s - span.start_s for span in of(trace, waits_for)) for trace in (in_time, late)]
        if waited[0] - waited[1] > late_s:  # twice as much, but for what else the machine does
            return
    pytest.fail(
        f"a rank that is {late_s} s late in two steps is waited for {waited[0]:.2f} s, and waits {waited[1]:.2f} s"
    )
