"""Our baselines hold the same rows as torch's generators, where torch has them."""

from itertools import product
from types import SimpleNamespace

import pytest
from torch import nn
from torch.distributed.pipelining import schedules as torchs

from rotorch.core.errors import ConfigError
from rotorch.pipelining.baselines import make_schedule

IN_TORCH = {
    "gpipe": ("ScheduleGPipe", [1]),
    "1f1b": ("Schedule1F1B", [1]),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", [1, 2, 3]),
    "looped_bfs": ("ScheduleLoopedBFS", [1, 2]),
    "zb_h1": ("ScheduleInterleavedZeroBubble", [1]),
    "zbv": ("ScheduleZBVZeroBubble", [2]),
}


def torch_rows(class_name, *, num_ranks, num_chunks, num_micro_batches):
    def stage(chunk):
        return SimpleNamespace(
            group_size=num_ranks,
            num_stages=num_ranks * num_chunks,
            group_rank=0,
            stage_index=chunk * num_ranks,
            is_first=chunk == 0,
            is_last=False,
            has_backward=True,
            submod=nn.Identity(),
        )

    make = getattr(torchs, class_name)
    stages = [stage(chunk) for chunk in range(num_chunks)]
    if issubclass(make, torchs.PipelineScheduleSingle):
        table = make(stages[0], num_micro_batches, loss_fn=None)._get_pipeline_order()
    else:
        table = make(stages, num_micro_batches, loss_fn=lambda *_: None).pipeline_order
    return [
        [str(action) for action in table[rank] if action is not None and "REDUCE" not in str(action)]
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("name", IN_TORCH)
def test_rows_are_those_of_torch(name):
    class_name, chunks = IN_TORCH[name]
    compared = 0
    for num_ranks, num_chunks, num_micro_batches in product([1, 2, 3, 4], chunks, [1, 2, 3, 4, 7, 8, 13]):
        shape = {"num_ranks": num_ranks, "num_chunks": num_chunks, "num_micro_batches": num_micro_batches}
        try:
            ours = make_schedule(name, **shape)
        except ConfigError:
            ours = None
        try:
            theirs = torch_rows(class_name, **shape)
        except ValueError:  # torch asks more: 1F1B's micro-batches fill the pipeline, zero bubble's make whole rounds
            assert ours is None or name in ("1f1b", "zb_h1")
            continue
        assert ours is not None
        # torch 2.13 prints 1F1B's last rank one micro-batch off (2F1 2B0 2F2 ...), though it runs it right
        ranks = range(num_ranks - 1 if name == "1f1b" else num_ranks)
        for rank in ranks:
            assert [str(action) for action in ours.rows[rank]] == theirs[rank], (shape, rank)
            compared += 1
    assert compared > 20
