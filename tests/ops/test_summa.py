"""Products of blocks on a grid of ranks against the whole product, in float64: values, gradients and bytes."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from rotorch.comm.meter import Meter
from rotorch.comm.shared_axis_group import make_axis_group
from rotorch.core.errors import RankFailure
from rotorch.core.spec import Cut
from rotorch.core.traffic import Kind
from rotorch.ops.conjugates import gather_from_region, sum_of_parts
from rotorch.ops.cut_features import cut_cross_entropy, look_up_on_grid
from rotorch.ops.summa import Grid, summa_linear, summa_table_linear
from rotorch.testing.ranks import run_ranks

B, IN, OUT, V = 6, 12, 18, 11  # of the rows of one grid row, and whole


TRANSPORTS = ("messages", "shared_memory")
ON_SIDES = [
    (2, "messages"),
    (3, "shared_memory"),
    pytest.param(2, "shared_memory", marks=pytest.mark.slow),
    pytest.param(3, "messages", marks=pytest.mark.slow),
]


def grid_of(q, transport="messages"):
    mesh = init_device_mesh("cpu", (q, q), mesh_dim_names=("row", "col"))
    axis_groups = [
        make_axis_group(mesh, axis, transport=transport, device=torch.device("cpu")) for axis in ("row", "col")
    ]
    assert q == 1 or {axis_group.transport for axis_group in axis_groups} == {transport}
    return Grid(*axis_groups)


def values(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(whole, dim, axis_group):
    return whole.tensor_split(axis_group.size, dim)[axis_group.position].clone()


def close(ours, theirs):
    return bool((ours - theirs).abs().max() <= 1e-12 * theirs.abs().max()) if ours.numel() else True


def linear(q, transport):
    grid = grid_of(q, transport)
    x, w, b, dy = values(B * q, IN, seed=0), values(OUT, IN, seed=1), values(OUT, seed=2), values(B * q, OUT, seed=3)
    for leaf in (x, w, b):
        leaf.requires_grad_()
    F.linear(x, w, b).backward(dy)
    mine = [
        part(part(x.detach(), 0, grid.down), 1, grid.across).view(2, B // 2, -1),
        part(part(w.detach(), 1, grid.down), 0, grid.across),
        part(b.detach(), 0, grid.across),
    ]
    for leaf in mine:
        leaf.requires_grad_()
    summa_linear(grid, *mine).sum().backward()  # memory that ranks share is made when it is first needed
    for leaf in mine:
        leaf.grad = None
    with Meter(smallest_counted_bytes=0) as forward:
        y = summa_linear(grid, *mine)
    with Meter(smallest_counted_bytes=0) as backward:
        y.backward(part(part(dy, 0, grid.down), 1, grid.across).view_as(y))
    whole_bias_grad = grid.down.all_reduce(mine[2].grad.clone())
    problems = [
        not close(y.flatten(0, 1), part(part(F.linear(x, w, b).detach(), 0, grid.down), 1, grid.across)),
        not close(mine[0].grad.flatten(0, 1), part(part(x.grad, 0, grid.down), 1, grid.across)),
        not close(mine[1].grad, part(part(w.grad, 1, grid.down), 0, grid.across)),
        not close(whole_bias_grad, part(b.grad, 0, grid.across)),
    ]
    sizes = [t.numel() * 8 for t in mine[:2]]
    return problems, sizes, dict(forward.sent_bytes), dict(backward.sent_bytes)


@pytest.mark.parametrize(("q", "transport"), [*((1, transport) for transport in TRANSPORTS), *ON_SIDES])
def test_a_linear_layer_in_blocks(q, transport):
    for problems, (x, w), forward, backward in run_ranks(linear, q, transport, num_ranks=q * q):
        assert not any(problems), problems
        sent = (q - 1) * (x + w)
        moves = q > 1 and transport == "messages"
        assert forward == ({Kind.BROADCAST: sent} if moves else {})
        assert backward == ({Kind.BROADCAST: sent, Kind.REDUCE: sent} if moves else {})


def frozen_in_part():
    grid = grid_of(2)
    x, w = values(B, IN // 2, seed=0), values(OUT // 2, IN // 2, seed=1).requires_grad_()
    summa_linear(grid, x, w).sum().backward()
    of_weight = w.grad.clone()
    x, w = x.requires_grad_(), w.detach()
    summa_linear(grid, x, w).sum().backward()
    return of_weight.shape == w.shape, x.grad.shape == x.shape


def test_what_needs_no_gradient_gets_none():
    assert run_ranks(frozen_in_part, num_ranks=4) == [(True, True)] * 4


def table(q, transport):
    grid = grid_of(q, transport)
    cut = Cut(0, V)  # uneven: 11 rows
    rows = [cut.ranges(V, num_slices=q, index=k)[0] for k in range(q)]
    x, e, dy = values(B * q, IN, seed=0), values(V, IN, seed=1), values(B * q, V, seed=3)
    ids = torch.randint(V, (B * q,), generator=torch.Generator().manual_seed(5))
    x.requires_grad_()
    e.requires_grad_()
    ((x + F.embedding(ids, e, padding_idx=3)) @ e.t()).backward(dy)
    mine = part(part(x.detach(), 0, grid.down), 1, grid.across).requires_grad_()
    own = rows[grid.down.position]
    block = part(e.detach()[own.start : own.stop], 1, grid.across).requires_grad_()
    looked_up = look_up_on_grid(grid, part(ids, 0, grid.down), block, rows=own, padding_idx=3)
    y = summa_table_linear(grid, mine + looked_up, block, num_rows=[r.length for r in rows])
    columns = rows[grid.across.position]
    whole = (x + F.embedding(ids, e)).detach() @ e.detach().t()
    all_columns = gather_from_region(y, dim=-1, lengths=[r.length for r in rows], axis_group=grid.across)
    y.backward(part(dy, 0, grid.down)[:, columns.start : columns.stop])
    return [
        not close(y, part(whole, 0, grid.down)[:, columns.start : columns.stop]),
        not close(all_columns, part(whole, 0, grid.down)),
        not close(mine.grad, part(part(x.grad, 0, grid.down), 1, grid.across)),
        not close(block.grad, part(e.grad[own.start : own.stop], 1, grid.across)),
    ]


@pytest.mark.parametrize(("q", "transport"), ON_SIDES)
def test_a_table_with_two_uses_in_uneven_blocks(q, transport):
    for problems in run_ranks(table, q, transport, num_ranks=q * q):
        assert not any(problems), problems


def loss_and_norm(q, transport):
    grid = grid_of(q, transport)
    rows = [Cut(0, V).ranges(V, num_slices=q, index=k)[0] for k in range(q)]
    logits, target = 30 * values(B, V, seed=0), torch.tensor([0, 10, -100, 4, 5, 6])
    logits.requires_grad_()
    scale = values(B, seed=1)
    expected = F.cross_entropy(logits, target, reduction="none")
    expected.backward(scale)
    columns = rows[grid.across.position]
    mine = logits.detach()[:, columns.start : columns.stop].clone().requires_grad_()
    found = cut_cross_entropy(grid.across, mine, target, columns=columns)
    found.backward(scale)
    x = values(B, V, seed=2).requires_grad_()
    (x * x.pow(2).sum(-1, keepdim=True).rsqrt()).backward(logits.detach())
    my_x = x.detach()[:, columns.start : columns.stop].clone().requires_grad_()
    y = my_x * sum_of_parts(my_x.pow(2).sum(-1, keepdim=True), axis_group=grid.across).rsqrt()
    y.backward(logits.detach()[:, columns.start : columns.stop])
    return [
        not close(found, expected.detach()),
        not close(mine.grad, logits.grad[:, columns.start : columns.stop]),
        not close(my_x.grad, x.grad[:, columns.start : columns.stop]),
    ]


@pytest.mark.parametrize(("q", "transport"), ON_SIDES)
def test_cross_entropy_and_sums_over_cut_features(q, transport):
    for problems in run_ranks(loss_and_norm, q, transport, num_ranks=q * q):
        assert not any(problems), problems


def uneven_batches():
    grid = grid_of(2)
    ids = torch.zeros(4 + grid.down.position, dtype=torch.int64)
    try:
        rows = Cut(0, 6).ranges(6, num_slices=2, index=grid.down.position)[0]
        look_up_on_grid(grid, ids, values(3, 2, seed=0), rows=rows)
    except RankFailure as error:
        dist.barrier()
        return str(error)


def test_micro_batches_of_several_shapes_are_refused_on_all_ranks():
    for said in run_ranks(uneven_batches, num_ranks=4):
        assert "Give all ranks micro-batches of one shape" in said
