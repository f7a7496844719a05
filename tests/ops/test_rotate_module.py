"""A module's forward over visiting slices: exact, with the same dropout, in slots that are used again, and freed."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist

from rotorch.core.errors import ConfigError
from rotorch.ops import rotate
from rotorch.ops.rotate import SliceGradient, rotate_module
from rotorch.ops.slice_linear import Layer, SliceLinears
from rotorch.testing.ranks import run_ranks

EXACT = {"rtol": 1e-11, "atol": 1e-12}
NUM_TOKENS, D, HIDDEN = 6, 4, 7


def mlp(weights, inputs):
    """Two inputs, nothing linear in between; saves weights, and views and products of weights, for backward."""
    up, gate, down = weights
    x, scale = inputs
    inside = F.silu(x @ gate.t()) * torch.sin((x * scale) @ (up * up).t())
    return inside @ down.t()


def mlp_of(make, **options):
    generator = torch.Generator().manual_seed(3)
    shapes = [(HIDDEN, D), (HIDDEN, D), (D, HIDDEN)]
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return make(whole, [(0, HIDDEN), (0, HIDDEN), (1, HIDDEN)], **options)


def inputs_of(rank):
    generator = torch.Generator().manual_seed(50 + rank)
    x, scale = torch.randn(2, NUM_TOKENS, D, generator=generator, dtype=torch.float64)
    return [x.requires_grad_(), scale.requires_grad_()]


def exact(make, n, transport, recompute, num_uses):
    rotating = mlp_of(make, transport=transport, recompute=recompute)
    whole = [w.clone().requires_grad_() for w in rotating.whole]

    def loss(apply, inputs, rank):
        x, scale = inputs
        for _ in range(num_uses):
            x = x + 0.1 * apply(x, scale)
        return (x.cos() * (rank + 1)).sum()

    for fresh in (True, False):
        for rank in range(n):
            inputs = inputs_of(rank)
            value = loss(lambda *given: mlp(whole, given), inputs, rank)
            value.backward()
            if rank == dist.get_rank():
                expected, expected_grads = value.detach(), [x.grad for x in inputs]
        mine = inputs_of(dist.get_rank())
        got = rotating.step(
            lambda mine=mine: loss(
                lambda *given: rotate_module(rotating.unit, mlp, given), mine, rotating.ring.position
            ),
            fresh=fresh,
        )
        torch.testing.assert_close(got.detach(), expected, **EXACT)
        torch.testing.assert_close([x.grad for x in mine], expected_grads, **EXACT)
        rotating.check_gradients(whole, **EXACT)


@pytest.mark.parametrize("n", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("transport", ["shared_memory", "send_receive"])
def test_a_module_is_exact(transport, recompute, n, rotating):
    """With kept graphs and moving slices, what autograd has saved in a slot is overwritten before it is used."""
    run_ranks(exact, rotating, n, transport, recompute, 1, num_ranks=n)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("transport", ["shared_memory", "send_receive"])
def test_a_unit_may_be_used_several_times(transport, recompute, rotating):
    run_ranks(exact, rotating, 3, transport, recompute, 3, num_ranks=3)


def noisy(weights, inputs):
    return F.dropout(mlp(weights, inputs), 0.5)


def masks_drawn(make, recompute):
    """Gradients under dropout; what a later draw gives says where the generator stands."""
    rotating = mlp_of(make, recompute=recompute)
    inputs = inputs_of(dist.get_rank())
    torch.manual_seed(5)
    rotating.step(lambda: rotate_module(rotating.unit, noisy, inputs).square().sum())
    return [x.grad for x in inputs], rotating.ring.home_gradients(0).clone(), torch.rand(3)


def test_recomputing_draws_the_same_masks_and_leaves_the_generator_alone(rotating):
    kept = run_ranks(masks_drawn, rotating, False, num_ranks=3)
    again = run_ranks(masks_drawn, rotating, True, num_ranks=3)
    torch.testing.assert_close(again, kept, **EXACT)


def unused_part(weights, inputs):
    """Slices whose weights take no part in the result (experts that no token chose)."""
    _, gate, down = weights
    return mlp(weights, inputs) if down.shape[1] < 3 else (inputs[0] @ gate.t()) @ down.t()


def zero_gradients(make, recompute):
    rotating = mlp_of(make, recompute=recompute)
    inputs = inputs_of(0)
    rotating.step(lambda: rotate_module(rotating.unit, unused_part, inputs).sum())
    up_grad = rotating.home(rotating.ring.home_gradients(0))[0]
    assert not up_grad.isnan().any()
    assert (rotating.ring.position > 0) == bool(up_grad.any())


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_that_a_slice_does_not_use_get_zeros(recompute, rotating):
    run_ranks(zero_gradients, rotating, recompute, num_ranks=3)  # slices of 3, 2, 2


# ---------------------------------------------------------------- memory


def saved_of_frozen(make, recompute):
    """Number of tensors that autograd saves of a frozen unit whose inputs need no gradients, and its exact output."""
    rotating = mlp_of(make, recompute=recompute, trained=False)
    inputs = [x.detach() for x in inputs_of(0)]
    saved, linears = [], SliceLinears(rotating.unit)

    def layers(weights, inputs):
        x, _ = inputs
        with linears.running(weights):
            return linears(Layer(2, None), F.silu(linears(Layer(0, None), x)))

    rotating.ring.start(fresh=[True])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = rotate_module(rotating.unit, layers, inputs)
    up, _, down = rotating.whole
    torch.testing.assert_close(y, F.silu(inputs[0] @ up.t()) @ down.t(), **EXACT)
    return len(saved), y.requires_grad


@pytest.mark.parametrize("recompute", [False, True])
def test_a_frozen_unit_over_inputs_without_gradients_saves_nothing(recompute, rotating):
    """Also where gradients are enabled, for layers behind it."""
    assert run_ranks(saved_of_frozen, rotating, recompute, num_ranks=2) == [(0, False)] * 2


class FromArray(torch.autograd.Function):
    """Gives a copy whose memory can be watched: numpy's arrays have weak references, storages have none."""

    @staticmethod
    def forward(ctx, x, alive):
        array = x.numpy().copy()
        alive.append(weakref.ref(array))
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def freed(make, transport, recompute):
    """Tensors that live on with a loss after its backward, and with an output that never got one."""
    rotating = mlp_of(make, transport=transport, recompute=recompute)
    alive = []

    def run():
        x, scale = inputs_of(0)
        return rotate_module(rotating.unit, mlp, (FromArray.apply(x, alive), scale)).sum()

    loss = rotating.step(run)
    after_backward = alive[-1]() is not None
    gc.disable()
    try:
        abandoned = run()
        while_needed = alive[-1]() is not None
        del abandoned
        without_backward = alive[-1]() is not None
    finally:
        gc.enable()
    return loss.requires_grad, after_backward, while_needed, without_backward


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("transport", ["shared_memory", "send_receive"])
def test_inputs_are_freed_with_the_backward_and_graphs_without_one(transport, recompute, rotating):
    for result in run_ranks(freed, rotating, transport, recompute, num_ranks=2):
        assert result == (True, False, True, False)


def gradients_of_slices_before(make, transport):
    """The most gradients of other slices that were there when a slice was computed."""
    rotating = mlp_of(make, transport=transport, recompute=True)
    made, beside = [], []

    class Noted(SliceGradient):
        def add(self, number, grad):
            made.append(weakref.ref(grad))
            super().add(number, grad)

    def run(weights, inputs):
        beside.append(sum(grad() is not None for grad in made))
        return mlp(weights, inputs)

    rotate.SliceGradient = Noted
    rotating.step(lambda: rotate_module(rotating.unit, run, inputs_of(0)).sum())
    return len(made) >= 9, max(beside)  # `add` is called once more where the buffer comes late


@pytest.mark.parametrize("transport", ["shared_memory", "send_receive"])
def test_gradients_of_a_slice_are_gone_when_the_next_one_is_computed(transport, rotating):
    """Gradients of experts, which autograd makes, are as large as the slice."""
    assert run_ranks(gradients_of_slices_before, rotating, transport, num_ranks=3) == [(True, 0)] * 3


def saved_weights(make, transport):
    """True, twice, if the graphs that a unit keeps of its slices hold memory of a slot, and of the rank's own slice."""
    rotating = mlp_of(make, transport=transport)
    storages = set()
    hooks = torch.autograd.graph.saved_tensors_hooks

    def noticing(pack, unpack):
        def noticed(tensor):
            kept = pack(tensor)
            if isinstance(kept, torch.Tensor):
                storages.add(kept.untyped_storage()._cdata)
            return kept

        return hooks(noticed, unpack)

    home = rotating.ring.home_weights(0).untyped_storage()._cdata
    dist.barrier()
    rotating.ring.start(fresh=[True])
    with hooks(lambda t: t, lambda t: t):  # hooks around a unit: its own stand before them for every slice
        torch.autograd.graph.saved_tensors_hooks = noticing
        try:
            rotate_module(rotating.unit, mlp, inputs_of(0))
        finally:
            torch.autograd.graph.saved_tensors_hooks = hooks
    slots = {slot.untyped_storage()._cdata for slot in rotating.ring.slots()}
    return bool(slots) and not storages & slots, home in storages


def test_kept_graphs_hold_no_slot(rotating):
    assert run_ranks(saved_weights, rotating, "send_receive", num_ranks=3) == [(True, True)] * 3


def cached(make):
    """Casts of visiting slices that autocast keeps alive through a forward pass."""
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(shape, generator=generator) for shape in ((HIDDEN, D), (HIDDEN, D), (D, HIDDEN))]
    rotating = make(whole, [(0, HIDDEN), (0, HIDDEN), (1, HIDDEN)], recompute=True)
    inputs = [x.detach().float().requires_grad_() for x in inputs_of(0)]
    casts = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and out.dtype == torch.bfloat16:
                casts.append(weakref.ref(out))
            return out

    dist.barrier()
    rotating.ring.start(fresh=[True])
    with torch.autocast("cpu", dtype=torch.bfloat16), Watch():
        rotate_module(rotating.unit, mlp, inputs)
        alive = sum(cast() is not None for cast in casts)
    return len(casts) > 0, alive


def test_autocast_keeps_no_casts_of_slices(rotating):
    assert run_ranks(cached, rotating, num_ranks=2) == [(True, 0)] * 2


def autocast_module(make, recompute):
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(shape, generator=generator) for shape in ((HIDDEN, D), (HIDDEN, D), (D, HIDDEN))]
    rotating = make(whole, [(0, HIDDEN), (0, HIDDEN), (1, HIDDEN)], recompute=recompute)
    dense = [w.clone().requires_grad_() for w in whole]
    theirs, mine = ([x.detach().float().requires_grad_() for x in inputs_of(0)] for _ in range(2))

    def loss(apply, inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = apply(inputs)
            assert y.dtype == torch.bfloat16
            return y.float().sum()

    expected = loss(lambda inputs: mlp(dense, inputs), theirs)
    expected.backward()
    for w in dense:
        w.grad *= dist.get_world_size()
    got = rotating.step(lambda: loss(lambda inputs: rotate_module(rotating.unit, mlp, inputs), mine))
    close = {"rtol": 5e-2, "atol": 0.25}  # bfloat16 has 8 bits, and slices round their sums on their own
    torch.testing.assert_close(got.detach(), expected.detach(), **close)
    torch.testing.assert_close([x.grad for x in mine], [x.grad for x in theirs], **close)
    rotating.check_gradients(dense, **close)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_module_under_autocast_is_close(recompute, rotating):
    run_ranks(autocast_module, rotating, recompute, num_ranks=2)


def twice(make, recompute):
    rotating = mlp_of(make, recompute=recompute)
    loss = rotate_module(rotating.unit, mlp, inputs_of(0)).sum()
    rotating.step(lambda: loss)
    with pytest.raises((RuntimeError, ConfigError), match=r"second (time|backward)"):
        loss.backward()
    x, scale = inputs_of(0)
    (first,) = torch.autograd.grad(rotate_module(rotating.unit, mlp, (x, scale)).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_second_backward_and_second_derivatives_are_errors(recompute, rotating):
    run_ranks(twice, rotating, recompute, num_ranks=1)
