"""Replicas of what another strategy holds: their sums leave under backward, and are those of one process.

test_replicas_that_differ.py has replicas whose steps are not alike.
"""

import platform

import pytest
import torch
import torch.distributed as dist
from one_process import build, one_process

import rotorch
from rotorch._torch_private import in_backward
from rotorch.comm.axis_group import AxisGroup
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.batches import global_batch
from rotorch.testing.compare import gradient_errors
from rotorch.testing.parity import my_micro_batches
from rotorch.testing.ranks import run_ranks
from rotorch.testing.reference import plain_config

pytestmark = pytest.mark.usefixtures("warm")

SEED, STEPS, EXACT = 5, 3, 1e-10


HOSTS = "aabbaabb"


def batch_of(config, step):
    """The global batch of a step: 16 rows."""
    return global_batch(
        seed=0,
        step=step,
        num_shares=1,
        num_micro_batches=1,
        num_rows=16,
        num_tokens=12,
        vocab_size=config.vocab_size,
    )


def reference(config):
    return one_process(config, [batch_of(config, step) for step in range(STEPS)], seed=SEED)


def sums_of_replicas(patch):
    """Has every sum over replicas noted from now on: its elements, and whether backward was under way."""
    sent, later = [], AxisGroup.all_reduce_later

    def noted(self, tensor):
        if self.axis == "ddp":
            sent.append((tensor.numel(), in_backward()))
        return later(self, tensor)

    patch.setattr(AxisGroup, "all_reduce_later", noted)
    return sent


def compared(config, layout, expected):
    """Largest error on this rank; per step, elements summed over replicas under backward and behind it."""
    with pytest.MonkeyPatch.context() as patch:
        if "hierarchical" in layout:
            patch.setattr(platform, "node", lambda: HOSTS[dist.get_rank()])
        sent = sums_of_replicas(patch)
        model = rotorch.parallelize(build(config), layout, device="cpu").materialize(seed=SEED)
        optimizer, worst, steps = torch.optim.SGD(model.parameters(), lr=0.1), 0.0, []
        for step, (loss, gradients) in enumerate(expected):
            sent.clear()
            batch = batch_of(config, step)
            with exact_arithmetic():
                ours = float(model.forward_backward(my_micro_batches(model, batch)))
            worst = max(worst, abs(ours - loss) / loss, *gradient_errors(model.weights, gradients).values())
            steps.append([sum(numel for numel, early in sent if early is which) for which in (True, False)])
            if step != 1:  # once a step adds to gradients of the one before, which are summed already
                optimizer.step()
                optimizer.zero_grad()
            else:
                before = {name: held.local_grad.clone() for name, held in model.weights.items()}
                with exact_arithmetic():
                    model.forward_backward(my_micro_batches(model, batch), accumulate=True)
                twice = (held.local_grad - 2 * before[name] for name, held in model.weights.items())
                worst = max(worst, *(float(each.abs().max()) for each in twice if each.numel()))
                optimizer.zero_grad()
                for name, held in model.weights.items():
                    held.parameter.grad = None
                    held.attach(before[name])
                optimizer.step()
                optimizer.zero_grad()
        model.close()
    return worst, steps


LAYOUTS = [
    "ddp=2,rtp=2[transport=send_receive]",
    "ddp=2,fsdp=2",
    *(
        pytest.param(layout, marks=pytest.mark.slow)
        for layout in (
            "ddp=2,rtp=2[transport=send_receive,recompute=slice,buffering=in_place]",
            "ddp=2,rtp=2[transport=send_receive,visits=1]",
            "ddp=2,rtp=4[transport=hierarchical]",  # test_rtp_hierarchical.py has replicas of two hosts
            "ddp=2,fsdp=2[recompute=block]",
            "ddp=2,megatron=2",  # test_replicas_that_differ.py has such replicas
            "ddp=2,megatron=2[sequence_parallel=true]",
        )
    ),
]
"""Those in which it follows from the order of operations alone when a gradient is complete."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_leave_under_backward_and_are_those_of_one_process(layout, tiny):
    config = plain_config(tiny("llama"), layers=4)
    for worst, steps in run_ranks(
        compared, config, layout, reference(config), num_ranks=num_ranks(parse_parallel(layout))
    ):
        assert worst < EXACT
        (early, late), *later = steps
        total = early + late
        assert early == 0 and total > 0  # the first step finds out what there is
        for early, late in later:
            assert early + late == total and early > 0.4 * total


@pytest.mark.parametrize(
    "layout",
    [
        "ddp=2,rtp=2",
        pytest.param("ddp=2,rtp=2[recompute=none]", marks=pytest.mark.slow),
        pytest.param("ddp=2,rtp=2,megatron=2", marks=pytest.mark.slow),  # exact: test_rtp_around.py
    ],
)
def test_over_shared_memory_they_leave_when_other_ranks_are_ready(layout, tiny):
    """The share that leaves early is a matter of time there; what is summed is not."""
    config = plain_config(tiny("qwen3"), layers=3)
    for worst, steps in run_ranks(
        compared, config, layout, reference(config), num_ranks=num_ranks(parse_parallel(layout))
    ):
        assert worst < EXACT and len({sum(step) for step in steps}) == 1
