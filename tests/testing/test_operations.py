"""Counts of operations: each kind once, and the same whether anything is computed or not."""

import pytest
import torch

from rotorch.testing.operations import Operations, WithoutArithmetic, counted_waits


def _of_fsdp(name):
    import torch.distributed.fsdp._fully_shard._fsdp_collectives  # defines them

    return getattr(torch.ops.fsdp, name)


def _two(first, second):
    return [torch.empty(4, first), torch.empty(4, second)]


def counts(operations):
    return operations.num_ops, operations.num_casts, operations.num_copies, operations.elementwise_bytes


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda x, w: x @ w, (1, 0, 0, 0)),
        (lambda x, w: x.t()[1:], (0, 0, 0, 0)),
        (lambda x, w: torch.empty(3), (0, 0, 0, 0)),
        (lambda x, w: x + 1.0, (1, 0, 0, 2 * 64)),
        (lambda x, w: x.add_(x), (1, 0, 0, 3 * 64)),
        (lambda x, w: x.zero_(), (1, 0, 0, 64)),
        (lambda x, w: x.to(torch.bfloat16), (1, 1, 0, 64 + 32)),
        (lambda x, w: x.copy_(w.bfloat16()), (2, 2, 0, 64 + 32 + 32 + 64)),
        (lambda x, w: x.clone(), (1, 0, 1, 2 * 64)),
        (lambda x, w: torch.cat([x, w]), (1, 0, 1, 4 * 64)),
        (lambda x, w: x[:1].expand(4, 4) + w, (1, 0, 0, 16 + 2 * 64)),
        (lambda x, w: torch.mm(x, w, out=torch.empty(4, 4)), (1, 0, 0, 0)),
        (lambda x, w: torch.add(x, w, out=torch.empty(4, 4)), (1, 0, 0, 3 * 64)),
        (lambda x, w: x.view(2, 2, 4) @ w, (1, 0, 0, 0)),
        # What `fully_shard` does to a message, by operations of its own: whole weights out of it, gradients into it.
        (lambda x, w: _of_fsdp("split_with_sizes_copy")(x, [3, 1], 1, out=_two(3, 1)), (1, 0, 1, 2 * 64)),
        (lambda x, w: _of_fsdp("chunk_cat")([x, w], 0, 2, out=torch.empty(2, 16)), (1, 0, 1, 4 * 64)),
    ],
)
def test_each_operation_counts_for_what_it_moves(run, expected):
    x, w = torch.ones(4, 4), torch.ones(4, 4)
    with Operations() as operations:
        run(x, w)
    assert counts(operations) == expected


def test_what_is_paused_does_not_count():
    with Operations() as operations, operations.paused():
        torch.ones(4).add_(1.0)
    assert counts(operations) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x[x > 0], "index"),
        (lambda x: x.sum().item(), "_local_scalar_dense"),
        (lambda x: int(x.sum()), "_local_scalar_dense"),
        (lambda x: bool((x > 0).any()), "_local_scalar_dense"),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: x.cpu(), "cpu"),
        (lambda x: x.tolist(), "tolist"),
    ],
)
def test_calls_that_wait_for_a_gpu_are_named(run, name):
    with counted_waits() as waits:
        run(torch.ones(4))
        torch.where(torch.ones(4) > 0, 1.0, 0.0).masked_fill(torch.ones(4) > 0, 0.0).sum()  # masks wait for nothing
    assert dict(waits) == {name: 1}


def layer_pass(width):
    """Forward and backward of a layer in bfloat16; returns its gradients' shapes."""
    layer = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.LayerNorm(width), torch.nn.GELU())
    x = torch.zeros(8, width, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(x).float().sum()
    loss.backward()
    return [tuple(p.grad.shape) for p in (x, *layer.parameters())]


def test_counts_need_no_arithmetic():
    with Operations() as computed:
        shapes = layer_pass(1024)
    with WithoutArithmetic(), Operations() as shaped:
        assert layer_pass(1024) == shapes
    assert counts(shaped) == counts(computed)
    with WithoutArithmetic():
        assert torch.arange(3).sum() == 3 and torch.ones(3).sum() == 3  # small ones are computed
