"""Linear layers of a slice: those of one input are one function, and what comes out is as if each ran by itself."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from rotorch.core.errors import ConfigError
from rotorch.ops import slice_linear
from rotorch.ops.rotate import rotate_module
from rotorch.ops.running_sum import OutputSum
from rotorch.ops.slice_linear import Layer, SliceLinears
from rotorch.testing.ranks import run_ranks

NUM_TOKENS, D, INSIDE = 5, 4, 6
Q, K, V, OUT, BIAS = range(5)
LAYERS = {Q: Layer(Q, BIAS), K: Layer(K, None), V: Layer(V, None), OUT: Layer(OUT, None)}


def attention(of):
    """`of(layer, x)` gives a layer's output; one input for three of them."""
    return lambda x, _: of(OUT, torch.sigmoid(of(Q, x)) * of(K, x).sin() * of(V, x))


def in_another_order(of):
    def run(x, _):
        v = of(V, x)
        return of(OUT, of(K, x).sin() * v * of(Q, x))

    return run


def across(of):
    """Keys and values of another input than queries, as in cross-attention."""
    return lambda x, memory: of(OUT, of(Q, x) * of(K, memory).sin() * of(V, memory))


def one_left_out(of):
    return lambda x, _: of(OUT, of(Q, x) * of(V, x))


def without_a_graph(of):
    """A layer whose output is taken without gradients, before it is asked for with them."""

    def run(x, _):
        q = of(Q, x)
        with torch.no_grad():
            shown = of(K, x)
        return of(OUT, q * of(K, x).sin() * shown * of(V, x))

    return run


def computed_again(of):
    """Some of the layers within a user's own activation checkpointing, the others behind it."""

    def first(x):
        return of(Q, x) * of(K, x).sin()

    return lambda x, _: of(OUT, checkpoint(first, x, use_reentrant=False) * of(V, x))


def compiled_in_part(of):
    """A graph must not have the weights of the slice that was there when it was made."""
    return lambda x, _: of(OUT, torch.compile(lambda x: of(Q, x) * of(K, x).sin(), backend="eager")(x) * of(V, x))


def compiled_behind(of):
    return lambda x, _: torch.compile(lambda q, k, v: of(OUT, q * k.sin() * v), backend="eager")(
        of(Q, x), of(K, x), of(V, x)
    )


def twice(of):
    return lambda x, _: of(OUT, of(Q, x) * of(Q, x).sin() * of(K, x) * of(V, x))


MODULES = {
    "attention": attention,
    "in another order": in_another_order,
    "across": across,
    "one left out": one_left_out,
    "without a graph": without_a_graph,
    "computed again": computed_again,
    "compiled in part": compiled_in_part,
    "compiled behind": compiled_behind,
    "twice": twice,
}
ONE_INPUT = {"attention", "in another order", "without a graph", "compiled in part", "compiled behind"}


def attention_of(make, **options):
    generator = torch.Generator().manual_seed(3)
    shapes = [(INSIDE, D)] * 3 + [(D, INSIDE), (INSIDE,)]
    whole = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return make(whole, [(0, INSIDE)] * 3 + [(1, INSIDE), (0, INSIDE)], **options)


def held_to_one_process(make, name, recompute, transport):
    """Trains two steps beside one process, which adds up what all ranks do; returns the sizes of functions."""
    rotating = attention_of(make, transport=transport, recompute=recompute)
    whole = rotating.whole
    linears = SliceLinears(rotating.unit, [[LAYERS[Q], LAYERS[K], LAYERS[V]]])
    rotating.unit.put = linears.put
    dense_whole = [w.clone().requires_grad_() for w in whole]

    def dense(number, x):
        return F.linear(x, dense_whole[number], dense_whole[BIAS] if number == Q else None)

    def on_slice(weights, inputs):
        with linears.running(weights):
            return MODULES[name](lambda number, x: linears(LAYERS[number], x))(*inputs)

    sizes = []
    for step in range(2):
        for rank in range(dist.get_world_size()):
            expected_inputs = inputs_of(rank, step)
            y = MODULES[name](dense)(*expected_inputs)
            (y.cos() * (rank + 1)).sum().backward()
            if rank == dist.get_rank():
                expected, expected_grads = y.detach(), [x.grad for x in expected_inputs]
        inputs, outputs = inputs_of(dist.get_rank(), step), []

        def loss(inputs=inputs, outputs=outputs):
            y = rotate_module(rotating.unit, on_slice, inputs)
            outputs.append(y.detach())
            return (y.cos() * (dist.get_rank() + 1)).sum()

        with mock.patch.object(slice_linear._SliceLinears, "apply", counting(sizes)):
            rotating.step(loss, fresh=step == 0)
        torch.testing.assert_close(outputs[0], expected, rtol=1e-11, atol=1e-12)
        for x, gradient in zip(inputs, expected_grads, strict=True):
            torch.testing.assert_close(x.grad, gradient, rtol=1e-11, atol=1e-12)
    for each in dense_whole:  # of a layer that is not used
        each.grad = torch.zeros_like(each) if each.grad is None else each.grad
    rotating.check_gradients(dense_whole, rtol=1e-11, atol=1e-12)
    return sizes, what_is_kept(linears)


def what_is_kept(linears):
    kept = ("_early", "_input", "_made_under", "_hooks")
    return [name for name in kept if getattr(linears, name)]


def counting(sizes):
    apply = slice_linear._SliceLinears.apply

    def counted(unit, layers, *given):
        sizes.append(len(layers))
        return apply(unit, layers, *given)

    return counted


def inputs_of(rank, step):
    generator = torch.Generator().manual_seed(50 + 7 * step + rank)
    x, memory = torch.randn(2, NUM_TOKENS, D, generator=generator, dtype=torch.float64)
    return [x.requires_grad_(), memory.requires_grad_()]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile looks at it
@pytest.mark.parametrize("transport", ["shared_memory", "send_receive"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_layers_of_a_slice_are_those_of_one_process(name, recompute, transport, rotating):
    num_ranks = 2
    for sizes, kept in run_ranks(held_to_one_process, rotating, name, recompute, transport, num_ranks=num_ranks):
        if name in ONE_INPUT:
            assert sizes == [3, 1] * num_ranks * 2  # the three are one function in every visit of both steps
        else:
            assert sizes.count(3) <= 1  # what has been made in vain is made once
        assert not kept  # no input or output outlives the run, nor hooks that have some


def bits(make, together):
    generator = torch.Generator().manual_seed(4)
    whole = [torch.randn(shape, generator=generator) for shape in [(24, 16), (24, 16), (24, 16), (16, 24), (24,)]]
    rotating = make(whole, [(0, 24)] * 3 + [(1, 24), (0, 24)])
    linears = SliceLinears(rotating.unit, [[LAYERS[Q], LAYERS[K], LAYERS[V]]] if together else [])
    x = torch.randn(7, 16, generator=generator).requires_grad_()

    def on_slice(weights, inputs):
        with linears.running(weights):
            return attention(lambda number, x: linears(LAYERS[number], x))(*inputs, None)

    rotating.step(lambda: rotate_module(rotating.unit, on_slice, [x]).sin().sum())
    return [x.grad, *(gradient.clone() for gradient in rotating.home(rotating.ring.home_gradients(0)))]


def test_one_function_gives_the_bits_of_several(rotating):
    """So a run that has been resumed, whose first visits may go otherwise, goes on as it would have."""
    apart, together = (run_ranks(bits, rotating, each, num_ranks=2) for each in (False, True))
    for before, after in zip(apart, together, strict=True):
        assert all(map(torch.equal, before, after))


def adds_to_the_sum(make, by_itself):
    """For each product without a bias: it was added to the sum of the slices' outputs, not made on its own."""
    rotating, added, product = attention_of(make), [], OutputSum.product
    linears = SliceLinears(rotating.unit, [])

    def noted(self, *given):
        found = product(self, *given)
        added.append(found is not None)
        return found

    def on_slice(weights, inputs):
        with linears.running(weights):
            return attention(lambda number, x: linears(LAYERS[number], x, by_itself=by_itself))(*inputs)

    with mock.patch.object(OutputSum, "product", noted):
        rotating.step(lambda: rotate_module(rotating.unit, on_slice, inputs_of(0, 0)).sum())
    return added


@pytest.mark.parametrize("by_itself", [False, True])
def test_the_product_that_a_slice_returns_adds_to_the_sum(by_itself, rotating):
    """From the second slice on, unless the layer's outputs are no sum."""
    for added in run_ranks(adds_to_the_sum, rotating, by_itself, num_ranks=2):
        assert added == [False, False, False, False, False, not by_itself]  # K, V and OUT, twice


def raises_halfway(make):
    rotating = attention_of(make)
    linears = SliceLinears(rotating.unit, [[LAYERS[Q], LAYERS[K], LAYERS[V]]])

    def on_slice(weights, inputs):
        with linears.running(weights):
            linears(LAYERS[Q], inputs[0])
            raise ArithmeticError

    rotating.ring.start(fresh=[True])
    with pytest.raises(ArithmeticError):
        rotate_module(rotating.unit, on_slice, inputs_of(0, 0))
    return what_is_kept(linears)


def test_a_module_that_raises_leaves_nothing(rotating):
    assert run_ranks(raises_halfway, rotating, num_ranks=1) == [[]]


def frozen_in_a_checkpoint(make):
    """A frozen unit over an input without gradients, within activation checkpointing: hooks there have the input."""
    rotating = attention_of(make, trained=False)
    linears = SliceLinears(rotating.unit, [[LAYERS[Q], LAYERS[K], LAYERS[V]]])

    def on_slice(weights, inputs):
        with linears.running(weights):
            return attention(lambda number, x: linears(LAYERS[number], x))(*inputs, None)

    rotating.ring.start(fresh=[True])
    checkpoint(lambda x: rotate_module(rotating.unit, on_slice, [x]), inputs_of(0, 0)[0].detach(), use_reentrant=False)
    return what_is_kept(linears)


def test_hooks_of_a_checkpoint_around_a_unit_are_not_kept(rotating):
    assert run_ranks(frozen_in_a_checkpoint, rotating, num_ranks=1) == [[]]


def gradients_in_forward(make):
    rotating = attention_of(make)
    linears = SliceLinears(rotating.unit)

    def on_slice(weights, inputs):
        with linears.running(weights):
            q = linears(LAYERS[Q], inputs[0])
            return torch.autograd.grad(q.sum(), inputs[0])[0]

    rotating.ring.start(fresh=[True])
    with pytest.raises(ConfigError, match=r"'unit': gradients of a part of its forward are asked for outside"):
        rotate_module(rotating.unit, on_slice, inputs_of(0, 0))
    return True


def test_gradients_within_the_forward_of_a_unit_are_refused(rotating):
    assert run_ranks(gradients_in_forward, rotating, num_ranks=1) == [True]
