"""Backwards that leave their sums over replicas to a later one: gradients of all of them in the end, sent once."""

import copy
import socket
from contextlib import nullcontext, suppress

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from one_process import mean_gradients
from test_replicas_that_differ import ALL, EXACT, PLAN, made_for, share_of, squares

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.hold.early_sums import EarlySums
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.ranks import RankFailure, run_ranks


def loss_of(module, share):
    return F.mse_loss(module(**share), share["labels"])


def alone(module):
    return getattr(module, "no_sync", nullcontext)()


def all_but_the_last(module, shares):
    *first, last = shares
    with alone(module):
        for share in first:
            loss_of(module, share).backward()
    loss_of(module, last).backward()


def behind_one_that_sums(module, shares):
    loss_of(module, shares[0]).backward()
    all_but_the_last(module, shares[1:])


def twice(module, shares):
    all_but_the_last(module, shares[:2])
    all_but_the_last(module, shares[2:])


def with_penalties(module, shares):
    with alone(module):
        (loss_of(module, shares[0]) + 0.1 * squares(module)).backward()
    (loss_of(module, shares[1]) + 0.1 * squares(module)).backward()


def with_gradients_of_inputs(module, shares):
    with alone(module):
        loss_of(module, shares[0]).backward()
        share = dict(shares[1], x=shares[1]["x"].clone().requires_grad_())
        torch.autograd.grad(loss_of(module, share), share["x"])
    torch.autograd.grad(loss_of(module, share), share["x"])
    loss_of(module, shares[1]).backward()


def with_zeros_in_between(module, shares):
    with alone(module):
        loss_of(module, shares[0]).backward()
    module.zero_grad()
    all_but_the_last(module, shares[1:])


def with_a_hook(module, shares):
    """The gradients that it sees are those of one process, so each backward sums."""
    handle = next(module.parameters()).register_hook(lambda gradient: 2 * gradient)
    all_but_the_last(module, shares)
    handle.remove()


def broken_off(module, shares):
    def fail(_):
        raise KeyError("hook")

    handle = module.layers[0].register_forward_hook(lambda _, __, output: output.register_hook(fail) and None)
    with alone(module), suppress(KeyError):
        loss_of(module, shares[0]).backward()
    handle.remove()
    module.zero_grad()
    all_but_the_last(module, shares)


def frozen_in_between(module, shares):
    """Its gradient of the first backward is summed by the last one."""
    weight = module.layers[1].a
    with alone(module):
        loss_of(module, shares[0]).backward()
    weight.requires_grad_(False)
    loss_of(module, shares[1]).backward()
    weight.requires_grad_(True)
    loss_of(module, shares[2]).backward()


def frozen_behind_a_sum(module, shares):
    weight = module.layers[1].a
    loss_of(module, shares[0]).backward()
    weight.requires_grad_(False)
    all_but_the_last(module, shares[1:])
    weight.requires_grad_(True)


CASES = [
    (all_but_the_last, [ALL, ALL, ALL]),
    (all_but_the_last, [ALL, ALL, ALL]),
    (behind_one_that_sums, [ALL, ALL, ALL]),
    (twice, [ALL, ALL, ALL, ALL]),
    (with_penalties, [ALL, ALL]),
    (with_gradients_of_inputs, [ALL, ALL]),
    (with_zeros_in_between, [ALL, ALL, ALL]),
    (with_a_hook, [ALL, ALL]),
    (broken_off, [ALL, ALL]),
    (all_but_the_last, [[0, 1, 2, 3], [3, 2], [0]]),
    (all_but_the_last, [ALL, ALL]),
    (frozen_in_between, [ALL, ALL, ALL]),
    (frozen_behind_a_sum, [ALL, ALL, ALL]),
]
LAYOUTS = [
    "ddp=2",
    "ddp=2,fsdp=2",
    "ddp=2,rtp=2",
    *(
        pytest.param(layout, marks=pytest.mark.slow)
        for layout in (
            "ddp=2,rtp=2[transport=send_receive]",
            "ddp=2,megatron=2",
            "ddp=2,fsdp=2,megatron=1",
            "rtp=2",
        )
    ),
]


def orders_of(orders, share, num_shares, *, differ):
    """One of two replicas leaves a layer out where a step has it; then the last micro-batch of none uses it."""
    return [[n for n in order if not (differ and share >= num_shares // 2 and n == 1)] for order in orders]


def compared(layout, between_hosts):
    """Per case: largest error of this rank's gradients, and how many parts each backward has sent."""
    with pytest.MonkeyPatch.context() as patch:
        if between_hosts:
            patch.setattr(socket, "gethostname", lambda: f"host {dist.get_rank()}")
        sent, send = [], EarlySums._send

        def noted(self):
            sent.append(self._num_left)
            send(self)

        patch.setattr(EarlySums, "_send", noted)
        plain = made_for(layout)
        model = rotorch.parallelize(copy.deepcopy(plain), layout, device="cpu", plan=PLAN)
        parallel, found = model.parallel, []
        num_shares = parallel.num_batch_ranks

        def shares_of(number, share, orders):
            given = orders_of(orders, share, num_shares, differ=number == 9 and layout != "rtp=2")
            return [share_of(10 * number + place, share, order) for place, order in enumerate(given)]

        for number, (backwards, orders) in enumerate(CASES):
            sent.clear()
            model.zero_grad()
            backwards(model, shares_of(number, parallel.batch_rank, orders))
            total = mean_gradients(plain, backwards, [shares_of(number, share, orders) for share in range(num_shares)])
            ours = {name: parallel.full_tensor(name, grad=True) for name in total}
            worst = max(float((ours[name] - right).abs().max()) for name, right in total.items())
            found.append((worst, sent.count(0)))
        parallel.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_all_backwards_and_leave_once(layout):
    for cases in run_ranks(compared, layout, layout == "ddp=2", num_ranks=num_ranks(parse_parallel(layout))):
        assert max(worst for worst, _ in cases) < EXACT, [worst for worst, _ in cases]
        if layout != "rtp=2":  # without replicas there is nothing to put off
            assert [times for _, times in cases] == [1, 1, 2, 2, 1, 2, 1, 2, 1, 1, 1, 2, 2]


def test_sums_within_a_host_are_put_off_too():
    for cases in run_ranks(compared, "ddp=2", False, num_ranks=2):
        assert max(worst for worst, _ in cases) < EXACT


def refused(layout):
    model = rotorch.parallelize(made_for(layout), layout, device="cpu", plan=PLAN, loss=lambda m, b, _: loss_of(m, b))
    optimizer, share, said = torch.optim.SGD(model.parameters(), lr=0.1), share_of(0, model.batch_rank, ALL), []

    def note(call):
        with pytest.raises(ConfigError) as caught:
            call()
        said.append(str(caught.value))

    with model.no_sync():
        loss_of(model, share).backward()
    note(optimizer.step)
    note(lambda: optimizer.step(lambda: 0.0))
    note(lambda: model.forward_backward([share], accumulate=True))
    handle = next(model.parameters()).register_hook(lambda gradient: gradient)
    note(loss_of(model, share).backward)
    handle.remove()
    model.zero_grad()
    with model.no_sync():
        loss_of(model, share).backward()
    model.zero_grad()
    handle = next(model.parameters()).register_hook(lambda gradient: gradient)  # between steps again
    loss_of(model, share).backward()
    handle.remove()
    model.zero_grad()
    frozen = model.layers[0].a
    with model.no_sync():
        loss_of(model, share).backward()
    frozen.requires_grad_(False)
    loss_of(model, share).backward()
    note(optimizer.step)  # with a gradient of its own on each replica
    frozen.requires_grad_(True)
    model.zero_grad()
    with model.no_sync():
        loss_of(model, share).backward()
    optimizer.step(lambda: loss_of(model, share).backward())  # summed by the backward within
    model.parallel.close()
    return said


@pytest.mark.parametrize("layout", ["ddp=2", "ddp=2,rtp=2"])
def test_what_cannot_be_right_is_refused_on_all_ranks(layout):
    for step, closure, engine, hook, frozen in run_ranks(refused, layout, num_ranks=num_ranks(parse_parallel(layout))):
        assert step.startswith("torch.optim.SGD.step: the last backward was within no_sync()")
        assert closure == frozen == step
        assert engine.startswith("forward_backward: the last backward was within no_sync()")
        assert hook.startswith("no_sync: hooks of gradients see those of all ranks")


def differing(layout):
    model = rotorch.parallelize(made_for(layout), layout, device="cpu", plan=PLAN)
    loss = loss_of(model, share_of(0, model.batch_rank, ALL))
    with model.no_sync() if dist.get_rank() == 0 else nullcontext():
        loss.backward()


def test_ranks_that_differ_in_it_are_named():
    with pytest.raises(RankFailure, match=r"rank 0 calls backward within no_sync\(\), rank 1 calls backward\."):
        run_ranks(differing, "ddp=2", num_ranks=2)
