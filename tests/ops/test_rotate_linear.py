"""A linear layer and an embedding that go round, against dense ones on one process in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist

from rotorch.ops.linear import rotate_embedding, rotate_linear
from rotorch.testing.ranks import run_ranks

EXACT = {"rtol": 1e-12, "atol": 1e-12}
NUM_TOKENS, IN, OUT = 5, 4, 7


def tokens_of(rank, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * seed + rank), dtype=torch.float64)


def whole_weights(*shapes):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def leaves(tensors):
    return [t.clone().requires_grad_() for t in tensors]


def linear(make, transport, with_bias, shape):
    whole = whole_weights((OUT, IN), (OUT,))[: 2 if with_bias else 1]
    rotating = make(whole, [(0, OUT)] * len(whole), transport=transport)
    dense = leaves(whole)
    for fresh in (True, False):  # the second step adds to the first
        for rank in range(dist.get_world_size()):
            x = tokens_of(rank, *shape, IN).requires_grad_()
            y = F.linear(x, *dense)
            (y.sin() * (rank + 1)).sum().backward()
            if rank == dist.get_rank():
                mine = x.detach().clone().requires_grad_()
                expected, expected_dx = y.detach(), x.grad
        out = []

        def run(mine=mine, out=out):
            out.append(rotate_linear(rotating.unit, mine).mul_(1.0))  # models write into outputs
            return (out[0].sin() * (dist.get_rank() + 1)).sum()

        rotating.step(run, fresh=fresh)
        torch.testing.assert_close(out[0].detach(), expected, **EXACT)
        torch.testing.assert_close(mine.grad, expected_dx, **EXACT)
        rotating.check_gradients(dense, **EXACT)
    with torch.no_grad():
        torch.testing.assert_close(rotate_linear(rotating.unit, mine), expected, **EXACT)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("transport", ["shared_memory", "send_receive"])
def test_linear_is_exact(transport, n, rotating):
    run_ranks(linear, rotating, transport, True, (NUM_TOKENS,), num_ranks=n)


@pytest.mark.parametrize("shape", [(2, 3), (0,), (2, 0), ()], ids=str)
def test_linear_takes_any_leading_dims(shape, rotating):
    run_ranks(linear, rotating, "shared_memory", False, shape, num_ranks=2)


def more_ranks_than_rows(make, transport):
    whole = whole_weights((2, IN))
    rotating = make(whole, [(0, 2)], transport=transport)
    dense = leaves(whole)
    x = tokens_of(0, 3, IN)
    for _ in range(dist.get_world_size()):
        F.linear(x, *dense).square().sum().backward()
    rotating.step(lambda: rotate_linear(rotating.unit, x).square().sum())
    rotating.check_gradients(dense, **EXACT)


@pytest.mark.parametrize("transport", ["shared_memory", "send_receive"])
def test_ranks_that_hold_nothing_take_part(transport, rotating):
    run_ranks(more_ranks_than_rows, rotating, transport, num_ranks=4)


def frozen(make):
    whole = whole_weights((OUT, IN))
    rotating = make(whole, [(0, OUT)], trained=False)
    x = tokens_of(dist.get_rank(), 3, IN)
    assert not rotate_linear(rotating.unit, x).requires_grad, "nothing here needs a backward"
    x.requires_grad_()
    rotating.step(lambda: rotate_linear(rotating.unit, x).sum())
    torch.testing.assert_close(x.grad, whole[0].sum(0).expand(3, IN), **EXACT)
    assert rotating.ring.home_gradients(0).isnan().all(), "a frozen weight got a gradient"


def test_a_frozen_linear_passes_gradients_on(rotating):
    run_ranks(frozen, rotating, num_ranks=2)


def autocast_linear(make):
    whole = [w.float() for w in whole_weights((OUT, IN), (OUT,))]
    rotating = make(whole, [(0, OUT), (0, OUT)])
    dense = leaves(whole)
    x = tokens_of(0, 6, IN).float().requires_grad_()
    mine = x.detach().clone().requires_grad_()

    def loss(y):
        assert y.dtype == torch.bfloat16
        return y.float().square().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = loss(F.linear(x, *dense))
    expected.backward()
    for w in dense:
        w.grad *= dist.get_world_size()

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(rotate_linear(rotating.unit, mine))

    got = rotating.step(run)
    close = {"rtol": 3e-2, "atol": 3e-2}  # bfloat16 has 8 bits; sums over slices round in another order
    torch.testing.assert_close(got.detach(), expected.detach(), **close)
    torch.testing.assert_close(mine.grad, x.grad, rtol=3e-2, atol=0.1)
    rotating.check_gradients(dense, rtol=3e-2, atol=0.2)
    assert mine.grad.dtype == torch.float32


def test_linear_under_autocast_is_close(rotating):
    run_ranks(autocast_linear, rotating, num_ranks=2)


def embedding(make, transport, padding_idx):
    whole = whole_weights((OUT, IN))
    rotating = make(whole, [(0, OUT)], transport=transport)
    dense = leaves(whole)
    for rank in range(dist.get_world_size()):
        ids = torch.randint(0, OUT, (2, 4), generator=torch.Generator().manual_seed(rank))
        y = F.embedding(ids, dense[0], padding_idx=padding_idx)
        (y.cos() * (rank + 1)).sum().backward()
        if rank == dist.get_rank():
            mine, expected = ids, y.detach()
    out = []

    def run():
        out.append(rotate_embedding(rotating.unit, mine, padding_idx=padding_idx))
        return (out[0].cos() * (dist.get_rank() + 1)).sum()

    rotating.step(run)
    assert torch.equal(out[0].detach(), expected)
    rotating.check_gradients(dense, **EXACT)
    assert rotate_embedding(rotating.unit, mine[:, :0]).shape == (2, 0, IN)


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("transport", ["shared_memory", "send_receive"])
def test_embedding_is_exact(transport, padding_idx, rotating):
    run_ranks(embedding, rotating, transport, padding_idx, num_ranks=3)


def outside(make):
    rotating = make(whole_weights((OUT, IN)), [(0, OUT)])
    errors = []
    for ids in ([0, OUT], [-1, 0]):
        try:
            rotate_embedding(rotating.unit, torch.tensor(ids))
        except IndexError as error:
            errors.append(str(error))
    return errors


def test_a_token_outside_of_the_vocabulary_is_an_error(rotating):
    errors = run_ranks(outside, rotating, num_ranks=2)[0]
    assert errors == [f"'w0': token {bad} is outside of a vocabulary of 7" for bad in (7, -1)]


def twice(make):
    """Second derivatives, and a second backward over the same graph."""
    rotating = make(whole_weights((OUT, IN)), [(0, OUT)])
    x = tokens_of(0, 3, IN).requires_grad_()
    (first,) = torch.autograd.grad(rotate_linear(rotating.unit, x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_second_derivatives_are_an_error(rotating):
    run_ranks(twice, rotating, num_ranks=1)
