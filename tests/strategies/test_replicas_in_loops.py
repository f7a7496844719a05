"""Loops of a user's own over replicas: each backward is a step whose sums leave under it, however forwards come."""

import copy
import socket
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from one_process import build, mean_gradients
from test_replicas import SEED, batch_of
from test_replicas_that_differ import ALL, EXACT, PLAN, made_for, share_of, squares
from torch.utils.checkpoint import checkpoint

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.hold.early_sums import EarlySums
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.parity import my_micro_batches
from rotorch.testing.ranks import run_ranks
from rotorch.testing.reference import plain_config


def loss_of(module, share):
    return F.mse_loss(module(**share), share["labels"])


def backward_of_each(module, shares):
    for share in shares:
        loss_of(module, share).backward()


def backward_of_the_sum(module, shares):
    sum(loss_of(module, share) for share in shares).backward()


def backward_of_each_behind_all_forwards(module, shares):
    losses = [loss_of(module, share) for share in shares]
    for loss in losses:
        loss.backward()


def backward_behind_a_look(module, shares):
    loss = sum(loss_of(module, share) for share in shares)
    with torch.no_grad():
        module(**shares[0])
    loss.backward()


def backward_twice(module, shares):
    loss = sum(loss_of(module, share) for share in shares)
    loss.backward(retain_graph=True)
    loss.backward()


def backward_of_what_is_left(module, shares):
    """Of the last forward alone; the graphs of the others are there when it begins."""
    losses = [loss_of(module, share) for share in shares]
    losses[-1].backward()


def backward_that_breaks_off(module, shares):
    def fail(_):
        raise KeyError("hook")

    loss = loss_of(module, shares[0])
    handle = module.layers[0].register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
    broken = loss_of(module, shares[0])
    handle.remove()
    with suppress(KeyError):
        broken.backward()
    module.zero_grad()
    loss.backward()


TWICE = [0, 1, 1, 2, 3]
STEPS = [
    (backward_of_each, [ALL]),
    (backward_of_each, [ALL]),
    (backward_of_each, [ALL, ALL]),
    (backward_of_each_behind_all_forwards, [ALL, ALL]),
    (backward_behind_a_look, [ALL]),
    (backward_of_what_is_left, [ALL, ALL]),
    (backward_twice, [ALL]),
    (backward_that_breaks_off, [ALL]),
    (backward_of_each, [ALL]),
    (backward_of_the_sum, [ALL, ALL]),
    (backward_of_the_sum, [ALL, ALL]),
    (backward_of_each, [TWICE, ALL]),
    (backward_of_the_sum, [TWICE, ALL]),
    (backward_of_the_sum, [TWICE, ALL]),
]
HIDE_NOTHING = {0, 9, 12}
"""Steps that use other things than those before, or as often as none of them."""


def parts_that_left(patch):
    """Has it noted from now on of each backward how many parts have left before its end."""
    left, send_rest = [], EarlySums.send_rest

    def noted(self):
        left.append(self._num_left)
        send_rest(self)

    patch.setattr(EarlySums, "send_rest", noted)
    return left


def compared(layout):
    """Per step: largest error of this rank's gradients, and parts that left under its last backward."""
    with pytest.MonkeyPatch.context() as patch:
        left = parts_that_left(patch)
        if layout == "ddp=2":  # sums leave early between hosts
            patch.setattr(socket, "gethostname", lambda: f"host {dist.get_rank()}")
        plain = made_for(layout)
        model = rotorch.parallelize(copy.deepcopy(plain), layout, device="cpu", plan=PLAN)
        parallel, found = model.parallel, []
        num_shares = parallel.num_batch_ranks

        def shares_of(step, share, orders):
            return [share_of(10 * step + number, share, order) for number, order in enumerate(orders)]

        for step, (backward, orders) in enumerate(STEPS):
            if backward is backward_twice and "send_receive" in layout:  # refused there: slices are not kept
                backward = backward_of_each
            model.zero_grad()
            backward(model, shares_of(step, parallel.batch_rank, orders))
            total = mean_gradients(plain, backward, [shares_of(step, share, orders) for share in range(num_shares)])
            worst = max(float((parallel.full_tensor(n, grad=True) - right).abs().max()) for n, right in total.items())
            found.append((worst, left[-1]))
        parallel.close()
    return found


@pytest.mark.parametrize(
    "layout",
    [
        "ddp=2",
        "ddp=2,rtp=2[transport=send_receive]",
        *(  # other steps between those of ddp=2,fsdp=2: below
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in ("ddp=2,fsdp=2", "ddp=2,megatron=2", "ddp=2,rtp=2", "ddp=2,rtp=1")
        ),
    ],
)
def test_sums_leave_under_each_backward_and_are_those_of_one_process(layout):
    for steps in run_ranks(compared, layout, num_ranks=num_ranks(parse_parallel(layout))):
        assert max(worst for worst, _ in steps) < EXACT
        if layout != "ddp=2,rtp=2":  # where time decides
            # Leaves of autograd have a gradient once, however often a forward uses them.
            hide_nothing = {number for number, (_, num_left) in enumerate(steps) if num_left == 0}
            assert hide_nothing == (HIDE_NOTHING - {12} if layout in ("ddp=2", "ddp=2,megatron=2") else HIDE_NOTHING)


def on_a_grid(config):
    """Per backward of a loop: distance of its gradients from those of `forward_backward`; parts that left under it."""
    with pytest.MonkeyPatch.context() as patch, exact_arithmetic():
        left = parts_that_left(patch)
        model = rotorch.parallelize(build(config), "tesseract=1x1x2[transport=messages]", device="cpu")
        parallel, found = model.parallel.materialize(seed=SEED), []
        for step in range(3):
            rows, *_ = my_micro_batches(parallel, batch_of(config, step))
            rows["labels"] = rows["input_ids"]  # as many targets on each rank: then the mean of means is that of all
            parallel.forward_backward([rows])
            right = {name: held.local_grad.clone() for name, held in parallel.weights.items()}
            model.zero_grad()
            model(**rows).loss.backward()
            worst = max(float((held.local_grad - right[name]).abs().max()) for name, held in parallel.weights.items())
            found.append((worst, left[-1]))
            model.zero_grad()
        parallel.close()
    return found


def test_sums_over_the_depth_of_a_grid_leave_under_it_too(tiny):
    for steps in run_ranks(on_a_grid, plain_config(tiny("llama"), layers=2), num_ranks=2):
        assert all(worst < EXACT and num_left > 0 for worst, num_left in steps)


def beside_the_engine(layout):
    """Largest distance of a loop's gradients behind other kinds of steps from those that it has by itself."""
    found = []
    for steps in ((), ("engine", "engine"), ("penalty", "penalty")):
        model = rotorch.parallelize(
            made_for(layout), layout, device="cpu", plan=PLAN, loss=lambda module, share, _: loss_of(module, share)
        )
        share = share_of(0, model.batch_rank, ALL)
        for kind in steps:
            if kind == "engine":
                model.forward_backward([share])
            else:
                (loss_of(model, share) + 0.1 * squares(model)).backward()
            model.zero_grad()
        for _ in range(2):
            model.zero_grad()
            loss_of(model, share).backward()
        found.append({name: held.local_grad.clone() for name, held in model.parallel.weights.items()})
        model.parallel.close()
    alone, *others = found
    return max(float((each[n] - alone[n]).abs().max()) for each in others for n in alone if alone[n].numel())


@pytest.mark.parametrize(
    "layout", ["ddp=2,fsdp=2", pytest.param("ddp=2,rtp=2[transport=send_receive]", marks=pytest.mark.slow)]
)
def test_steps_of_other_kinds_may_come_between(layout):
    assert max(run_ranks(beside_the_engine, layout, num_ranks=4)) < EXACT


def around_a_call(layout):
    model = rotorch.parallelize(made_for(layout), layout, device="cpu", plan=PLAN)
    share = {name: t.requires_grad_() if name == "x" else t for name, t in share_of(0, model.batch_rank, ALL).items()}
    again = checkpoint(lambda x: model(**{**share, "x": x}), share["x"], use_reentrant=True)
    with pytest.raises(ConfigError, match="Write use_reentrant=False"):
        (again.sum() + loss_of(model, share)).backward()


@pytest.mark.parametrize("layout", ["ddp=2", "rtp=2"])
def test_a_backward_within_one_is_refused(layout):
    """Its gradients would lack what makes means of sums."""
    run_ranks(around_a_call, layout, num_ranks=2)
