"""Logits that are not computed until someone needs them, and the loss over a vocabulary that goes round."""

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch.utils.checkpoint import checkpoint

from rotorch._torch_private import TorchDispatchMode, tree_flatten
from rotorch.core.errors import ConfigError
from rotorch.ops.deferred_logits import DeferredLogits, Head, real_for_hooks
from rotorch.ops.loss import RotatingHead
from rotorch.testing.ranks import run_ranks

EXACT = {"rtol": 1e-11, "atol": 1e-12}
BATCH, SEQUENCE, HIDDEN, VOCABULARY = 2, 5, 4, 11


def head_of(make, *, bias=False, dtype=torch.float64, **options):
    generator = torch.Generator().manual_seed(7)
    whole = [torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)]
    if bias:
        whole.append(torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype))
    return make(whole, [(0, VOCABULARY)] * len(whole), **options)


def inputs_of(rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(BATCH, SEQUENCE, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    targets[0, 0] = -100
    return hidden, targets


def compare(make, n, loss, options, tolerance=EXACT):
    """`loss(logits, targets)` on deferred logits of every rank against real logits on one process."""
    keep, transport, bias = options
    rotating = head_of(make, transport=transport, bias=bias)
    whole = [w.clone().requires_grad_() for w in rotating.whole]
    for rank in range(n):
        hidden, targets = inputs_of(rank)
        hidden.requires_grad_()
        value = loss(F.linear(hidden, *whole), targets)
        value.sum().backward()
        if rank == dist.get_rank():
            mine, expected, expected_grad = hidden.detach().clone().requires_grad_(), value.detach(), hidden.grad
    _, targets = inputs_of(dist.get_rank())
    got = []

    def run():
        got.append(loss(DeferredLogits(mine, RotatingHead(rotating.unit, keep)), targets))
        return got[0].sum()

    rotating.step(run)
    torch.testing.assert_close(got[0].detach(), expected, **tolerance)
    torch.testing.assert_close(mine.grad, expected_grad, **tolerance)
    rotating.check_gradients(whole, **tolerance)
    with torch.no_grad():
        again = loss(DeferredLogits(mine, RotatingHead(rotating.unit, keep)), targets)
    torch.testing.assert_close(again, expected, **tolerance)


def flat(logits, targets):
    return logits.view(-1, VOCABULARY), targets.view(-1)


LOSSES = {
    "mean": lambda z, t: F.cross_entropy(*flat(z, t)),
    "sum": lambda z, t: F.cross_entropy(*flat(z, t), reduction="sum") / 7,
    "none": lambda z, t: F.cross_entropy(*flat(z, t), reduction="none"),
    "ignores another index": lambda z, t: F.cross_entropy(*flat(z, t.clamp(min=3)), ignore_index=3),
    "by name": lambda z, t: F.cross_entropy(input=z.flatten(0, 1), target=t.flatten(), reduction="sum"),
    "module": lambda z, t: torch.nn.CrossEntropyLoss(reduction="sum")(*flat(z, t)),
    "shifted": lambda z, t: F.cross_entropy(
        z[..., :-1, :].contiguous().view(-1, z.size(-1)), t[..., 1:].reshape(-1), reduction="sum"
    ),
    "soft cap": lambda z, t: F.cross_entropy(*flat(torch.tanh(z / 3.0) * 3.0, t), reduction="sum"),
    "tanh alone": lambda z, t: F.cross_entropy(*flat(torch.tanh(z), t), reduction="sum"),
    "scale and shift": lambda z, t: F.cross_entropy(*flat(-(2.0 * z - 0.5), t), reduction="sum"),
    "one token": lambda z, t: F.cross_entropy(z[:, -1], t[:, -1], reduction="sum"),
    "few tokens": lambda z, t: F.cross_entropy(z[1, 1:3].reshape(2, -1), t[1, 1:3]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradients_are_exact(name, rotating):
    run_ranks(compare, rotating, 3, LOSSES[name], (False, "shared_memory", True), num_ranks=3)


@pytest.mark.parametrize("name", LOSSES)
def test_kept_logits_are_exact(name, rotating):
    run_ranks(compare, rotating, 3, LOSSES[name], (True, "shared_memory", True), num_ranks=3)


@pytest.mark.parametrize("name", ["mean", "scale and shift"])
def test_kept_logits_are_exact_over_messages(name, rotating):
    run_ranks(compare, rotating, 3, LOSSES[name], (True, "send_receive", False), num_ranks=3)


def sure(make):
    """Every target has a probability of nearly 1: gradients of 1e-5, which float32 has to find beside numbers of 20."""
    rotating = head_of(make, dtype=torch.float32)
    (exact,) = (w.double().requires_grad_() for w in rotating.whole)
    hidden = 8.0 * F.normalize(exact.detach()[:3])
    logits = F.linear(hidden, exact.detach())
    targets = logits.argmax(-1)
    hidden *= 12.0 / (logits.topk(2).values @ logits.new_tensor([1.0, -1.0])).unsqueeze(1)  # ahead of the next by 12
    mine, hidden = hidden.float().requires_grad_(), hidden.requires_grad_()
    F.cross_entropy(F.linear(hidden, exact), targets, reduction="sum").backward()
    assert 0 < hidden.grad.abs().max() < 1e-4

    def run():
        return F.cross_entropy(DeferredLogits(mine, RotatingHead(rotating.unit, True)), targets, reduction="sum")

    rotating.step(run)
    torch.testing.assert_close(mine.grad.double(), hidden.grad, rtol=1e-3, atol=1e-9)
    whole = exact.detach().float()
    whole.grad = exact.grad.float() * dist.get_world_size()
    rotating.check_gradients([whole], rtol=1e-3, atol=1e-8)


def test_kept_logits_give_small_gradients_exactly(rotating):
    run_ranks(sure, rotating, num_ranks=3)


def nearly_flat_in_float16(make):
    """So many rows, nearly as likely, that their sum is no number in float16."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(300_000, 1, generator=generator) + 0.2
    rotating = make([rows], [(0, len(rows))])
    whole = rows.clone().requires_grad_()
    hidden, targets = torch.tensor([[0.25], [-0.5]]), torch.tensor([3, 280_000])
    theirs, mine = (hidden.clone().requires_grad_() for _ in range(2))
    F.cross_entropy(F.linear(theirs, whole), targets).backward()
    whole.grad *= dist.get_world_size()

    def run():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(DeferredLogits(mine, RotatingHead(rotating.unit, True)), targets)
        return loss * SCALE  # as a scaler of gradients does, without which those of single rows are 0 in float16

    rotating.step(run)
    torch.testing.assert_close(mine.grad / SCALE, theirs.grad, rtol=0.02, atol=0.002)
    whole.grad *= SCALE
    rotating.check_gradients([whole], rtol=0.02, atol=0.002)


SCALE = 2.0**12


def test_many_kept_logits_fit_into_float16(rotating):
    run_ranks(nearly_flat_in_float16, rotating, num_ranks=2)


def impossible(make, keep, chain):
    """All rows of one slice, and some of another, have logits of minus infinity."""
    rotating = head_of(make, bias=True)
    for whole, home in zip(rotating.whole, rotating.home(rotating.ring.home_weights(0)), strict=True):
        if whole.dim() == 1:
            whole[:5] = -torch.inf
            home.copy_(rotating.part(whole, 1))
    dist.barrier()
    whole = [w.clone().requires_grad_() for w in rotating.whole]
    hidden, targets = inputs_of(0)
    targets = targets.clamp(min=5)
    theirs, mine = (hidden.clone().requires_grad_() for _ in range(2))

    def loss(logits):
        return F.cross_entropy(*flat(logits * 2.0 if chain else logits, targets), reduction="sum")

    expected = loss(F.linear(theirs, *whole))
    expected.backward()
    for weight in whole:
        weight.grad *= dist.get_world_size()
    got = rotating.step(lambda: loss(DeferredLogits(mine, RotatingHead(rotating.unit, keep))))
    assert expected.isfinite()
    torch.testing.assert_close(got.detach(), expected.detach(), **EXACT)
    torch.testing.assert_close(mine.grad, theirs.grad, **EXACT)
    rotating.check_gradients(whole, **EXACT)


@pytest.mark.parametrize("chain", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_logits_of_minus_infinity(keep, chain, rotating):
    run_ranks(impossible, rotating, keep, chain, num_ranks=3)


def hopeless(make, keep, sign):
    """Targets, and whole slices, whose probability is no number: the gradients of their logits are -1 and 0."""
    rotating = head_of(make)
    for weight in (*rotating.whole, *rotating.home(rotating.ring.home_weights(0))):
        weight.mul_(16.0)  # the reciprocal of a probability times such numbers must be a number as well
    dist.barrier()
    whole = [w.clone().requires_grad_() for w in rotating.whole]
    hidden = sign * 2000.0 * F.normalize(whole[0].detach()[:1]).repeat(3, 1)
    targets = F.linear(hidden, whole[0].detach())[0].argsort()[[0, 1, -1]]
    theirs, mine = (hidden.clone().requires_grad_() for _ in range(2))
    expected = F.cross_entropy(F.linear(theirs, *whole), targets, reduction="sum")
    expected.backward()
    for weight in whole:
        weight.grad *= dist.get_world_size()

    def run():
        return F.cross_entropy(DeferredLogits(mine, RotatingHead(rotating.unit, keep)), targets, reduction="sum")

    got = rotating.step(run)
    assert expected > 1000
    torch.testing.assert_close(got.detach(), expected.detach(), **EXACT)
    torch.testing.assert_close(mine.grad, theirs.grad, **EXACT)
    rotating.check_gradients(whole, **EXACT)


def all_hopeless(make):
    for keep in (False, True):
        for sign in (1, -1):
            hopeless(make, keep, sign)


def test_targets_without_a_chance(rotating):
    run_ranks(all_hopeless, rotating, num_ranks=3)


def all_in_bfloat16(make, keep):
    """A model of which everything is bfloat16, without autocast: torch computes its loss in float32 and rounds that."""
    rotating = head_of(make, dtype=torch.bfloat16)
    (whole,) = (w.clone().requires_grad_() for w in rotating.whole)
    hidden, targets = inputs_of(0, torch.bfloat16)
    hidden = hidden * 8.0  # losses of 10 and more, between which bfloat16 has steps of 0.06
    theirs, mine = (hidden.clone().requires_grad_() for _ in range(2))
    expected = LOSSES["none"](F.linear(theirs, whole), targets)
    expected.sum().backward()
    whole.grad *= dist.get_world_size()
    got = []

    def run():
        got.append(LOSSES["none"](DeferredLogits(mine, RotatingHead(rotating.unit, keep)), targets))
        return got[0].sum()

    rotating.step(run)
    assert got[0].dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got[0].detach(), expected.detach(), rtol=8e-3, atol=1e-5)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=2e-2, atol=2e-2)
    rotating.check_gradients([whole], rtol=2e-2, atol=0.5)


@pytest.mark.parametrize("keep", [False, True])
def test_a_loss_of_bfloat16_logits_is_rounded_once(keep, rotating):
    run_ranks(all_in_bfloat16, rotating, keep, num_ranks=2)


def checkpointed(make):
    rotating = head_of(make, transport="send_receive")
    whole = [w.clone().requires_grad_() for w in rotating.whole]
    hidden, targets = inputs_of(0)
    theirs, mine = (hidden.clone().requires_grad_() for _ in range(2))
    LOSSES["soft cap"](F.linear(theirs, *whole), targets).backward()
    whole[0].grad *= dist.get_world_size()

    def loss(hidden):
        return LOSSES["soft cap"](DeferredLogits(hidden, RotatingHead(rotating.unit, True)), targets)

    passes, visits = [], rotating.ring.visits
    rotating.ring.visits = lambda *args, **how: passes.append(how["backward"]) or visits(*args, **how)
    for _ in range(2):  # in the second step fetches run ahead
        mine.grad = None
        passes.clear()
        rotating.step(lambda: checkpoint(loss, mine, use_reentrant=False))
        assert passes == [False, False, True]  # forward, once more for backward, and backward
        torch.testing.assert_close(mine.grad, theirs.grad, **EXACT)
        rotating.check_gradients(whole, **EXACT)


def test_kept_logits_inside_of_activation_checkpointing(rotating):
    run_ranks(checkpointed, rotating, num_ranks=3)


def frozen_around(make):
    """A head that is not trained, and one over hidden states that are not."""
    hidden, targets = inputs_of(0)
    for trained in (False, True):
        rotating = head_of(make, trained=trained)
        (whole,) = (w.clone().requires_grad_(trained) for w in rotating.whole)
        theirs, mine = (hidden.clone().requires_grad_(not trained) for _ in range(2))
        loss = LOSSES["mean"]
        loss(F.linear(theirs, whole), targets).backward()

        def run(mine=mine, unit=rotating.unit):
            return LOSSES["mean"](DeferredLogits(mine, RotatingHead(unit, True)), targets)

        rotating.step(run)
        if trained:
            whole.grad *= dist.get_world_size()
            rotating.check_gradients([whole], **EXACT)
        else:
            torch.testing.assert_close(mine.grad, theirs.grad, **EXACT)
            assert rotating.ring.home_gradients(0).isnan().all()  # untouched


def test_kept_logits_where_not_everything_is_trained(rotating):
    run_ranks(frozen_around, rotating, num_ranks=2)


def backward_again(make):
    rotating = head_of(make)
    hidden, targets = inputs_of(0)
    hidden.requires_grad_()

    def run():
        loss = LOSSES["mean"](DeferredLogits(hidden, RotatingHead(rotating.unit, True)), targets)
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(ConfigError, match="'unit': a second backward through a graph that the first has freed"):
        rotating.step(run)


def test_a_second_backward_through_kept_logits_is_refused(rotating):
    run_ranks(backward_again, rotating, num_ranks=1)


@pytest.mark.parametrize("keep", [False, True])
def test_a_ring_of_one(keep, rotating):
    run_ranks(compare, rotating, 1, LOSSES["soft cap"], (keep, "shared_memory", True), num_ranks=1)


def overwritten(z, t):
    """Some models forbid tokens by writing into their logits."""
    z = z * 1.0
    z[..., 0] = -1e9
    z /= 2.0
    z.mul_(3.0)
    return F.cross_entropy(*flat(z, t.clamp(min=1)), reduction="sum")


REAL = {
    "label smoothing": lambda z, t: F.cross_entropy(*flat(z, t), label_smoothing=0.1),
    "class weights": lambda z, t: F.cross_entropy(*flat(z, t), weight=torch.arange(1.0, VOCABULARY + 1).double()),
    "soft targets": lambda z, t: F.cross_entropy(z[0], z[1].detach().softmax(-1)),
    "classes in the middle": lambda z, t: F.cross_entropy(z.transpose(1, 2), t),
    "other functions": lambda z, t: (z.softmax(-1) * torch.log_softmax(z, -1)).sum(),
    "columns": lambda z, t: z[..., 2].sum() + z[0, 0, 3] + z[0, 0, 0, ...] + z[:, :, 1:3].sum(),
    "of two": lambda z, t: (z - z.detach().mean(-1, keepdim=True)).square().sum(),
    "no last dim": lambda z, t: z.reshape(-1).sin().sum() + z.view(BATCH, -1).cos().sum(),
    "written to": overwritten,
}


@pytest.mark.parametrize("name", REAL)
def test_anything_else_makes_logits_real(name, rotating):
    run_ranks(compare, rotating, 2, REAL[name], (False, "shared_memory", False), num_ranks=2)


class WholeHead(Head):
    """All logits from a whole weight."""

    vocab_size = VOCABULARY

    def __init__(self, weight):
        self.weight = weight

    def logits(self, hidden):
        return F.linear(hidden, self.weight)

    def loss(self, hidden_BD, target_B, *, chain, ignore_index):
        raise NotImplementedError


class DefersLogits(torch.nn.Linear):
    """A head as strategies leave it."""

    def forward(self, hidden):
        return DeferredLogits(hidden, WholeHead(self.weight))


def test_hooks_of_a_head_see_real_logits_and_their_gradients():
    hooked, other = (DefersLogits(HIDDEN, VOCABULARY, bias=False) for _ in range(2))
    outputs, gradients = [], []
    hooked.register_forward_hook(lambda _, __, output: outputs.append(output))
    hooked.register_full_backward_hook(lambda _, __, grads: gradients.append(grads[0]))
    hidden = torch.randn(3, HIDDEN, requires_grad=True)
    with real_for_hooks([hooked, other]):
        hooked(hidden).square().sum().backward()
        assert isinstance(other(hidden), DeferredLogits)
    expected = F.linear(hidden, hooked.weight)
    assert type(outputs[0]) is torch.Tensor
    torch.testing.assert_close(outputs[0], expected)
    torch.testing.assert_close(gradients[0], 2 * expected)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returned, apart from the proxies."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.numel = max(self.numel, tensor.numel())
        return out


def largest(make, keep):
    """Numbers of elements per row of the vocabulary, in a step with many tokens."""
    rotating = head_of(make)
    hidden = torch.randn(64, HIDDEN, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (64,))
    found = []

    def run():
        logits = DeferredLogits(hidden, RotatingHead(rotating.unit, keep))
        assert (logits.shape, logits.dtype, logits.dim(), logits.size(-1)) == (
            (64, VOCABULARY),
            torch.float64,
            2,
            VOCABULARY,
        )
        logits = (logits / 2.0).tanh().float()
        return F.cross_entropy(input=logits, target=targets)

    with Largest() as mode:
        rotating.step(run)
        found.append(mode.numel)
        mode.numel = 0
        with torch.no_grad():
            run()
        found.append(mode.numel)
    return found


@pytest.mark.parametrize("keep", [False, True])
def test_full_logits_never_exist(keep, rotating):
    with Largest():
        torch.zeros(1)  # loads what a dispatch mode loads, once for all ranks
    for found in run_ranks(largest, rotating, keep, num_ranks=4):
        assert max(found) <= 64 * max(HIDDEN, 3)  # 11 rows over 4 ranks: at most 3 in a slice


class Made(TorchDispatchMode):
    """Keeps every tensor that operations make, so that each has memory of its own."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.tensors += [tensor for tensor in tree_flatten(out)[0] if isinstance(tensor, torch.Tensor)]
        return out

    def count(self, dtype, numel):
        """Number of pieces of memory with so many elements."""
        return len({t.data_ptr() for t in self.tensors if t.dtype == dtype and t.numel() == numel})


def made_in_float32(make, keep, operation):
    rotating = head_of(make, dtype=torch.bfloat16)
    hidden = torch.randn(64, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, VOCABULARY, (64,))
    with Made() as made:
        rotating.step(
            lambda: F.cross_entropy(
                operation(DeferredLogits(hidden, RotatingHead(rotating.unit, keep)).float()), targets
            )
        )
    return made.count(torch.float32, 64 * VOCABULARY)


@pytest.mark.parametrize(
    ("keep", "of_a_cast", "of_tanh"),
    [
        (True, 1, 4),  # the cast's result; that of tanh, a copy of it, and a gradient
        (False, 2, 6),  # the cast's result twice; that of tanh twice, a copy of the second, and a gradient
    ],
)
def test_logits_of_another_precision_exist_once_at_a_time(keep, of_a_cast, of_tanh, rotating):
    """Sums write over them, in forward and where they are computed again, unless a gradient needs them."""
    for operation, number in ((lambda z: z, of_a_cast), (torch.tanh, of_tanh)):
        assert run_ranks(made_in_float32, rotating, keep, operation, num_ranks=1) == [number]


def out_of_bounds(make):
    rotating = head_of(make)
    hidden, targets = inputs_of(0)
    for bad in (VOCABULARY, -1):
        targets[1, 1] = bad
        with pytest.raises(IndexError, match=f"target {bad} is outside of a vocabulary of {VOCABULARY}"):
            F.cross_entropy(*flat(DeferredLogits(hidden, RotatingHead(rotating.unit, False)), targets))


def test_a_target_outside_of_the_vocabulary_is_an_error(rotating):
    run_ranks(out_of_bounds, rotating, num_ranks=1)


def no_targets(make, keep):
    rotating = head_of(make)
    hidden, targets = inputs_of(dist.get_rank())
    hidden.requires_grad_()
    targets[:] = -100

    def run():
        return F.cross_entropy(
            *flat(DeferredLogits(hidden, RotatingHead(rotating.unit, keep)), targets), reduction="sum"
        )

    assert rotating.step(run) == 0
    assert not hidden.grad.any() and not rotating.ring.home_gradients(0).any()
    assert F.cross_entropy(*flat(DeferredLogits(hidden, RotatingHead(rotating.unit, keep)), targets)).isnan()


@pytest.mark.parametrize("keep", [False, True])
def test_no_targets_at_all(keep, rotating):
    run_ranks(no_targets, rotating, keep, num_ranks=2)


def under_autocast(make, operation, dtype, keep):
    rotating = head_of(make, dtype=dtype)
    whole = [w.clone().requires_grad_() for w in rotating.whole]
    hidden, targets = inputs_of(0, dtype)
    mine, hidden = hidden.clone().requires_grad_(), hidden.requires_grad_()

    def loss(logits):
        return F.cross_entropy(*flat(operation(logits), targets), reduction="sum")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = loss(F.linear(hidden, *whole))
    expected.backward()
    whole[0].grad *= dist.get_world_size()

    def run():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(DeferredLogits(mine, RotatingHead(rotating.unit, keep)))

    got = rotating.step(run)
    assert got.dtype == expected.dtype == torch.float32
    # The same bfloat16 logits; only sums are taken in another order.
    torch.testing.assert_close(got.detach(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.grad, hidden.grad, rtol=2e-2, atol=2e-2)
    rotating.check_gradients(whole, rtol=2e-2, atol=5e-2)


UNDER_AUTOCAST = {
    "as they are": lambda z: z,
    "cast": torch.Tensor.float,
    "tanh of a cast": lambda z: torch.tanh(z.float()),  # behind which the loss's own cast does nothing
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("as they are", torch.float32), ("cast", torch.float32), ("tanh of a cast", torch.bfloat16)],
)
def test_under_autocast_the_loss_is_computed_in_float32(name, dtype, keep, rotating):
    run_ranks(under_autocast, rotating, UNDER_AUTOCAST[name], dtype, keep, num_ranks=2)


def casts(make):
    logits = DeferredLogits(inputs_of(0)[0], RotatingHead(head_of(make).unit, False))
    assert logits.dtype == torch.float64
    for same in (logits.double(), logits.to(torch.float64), logits.to("cpu"), logits.type(torch.float64)):
        assert same is logits
    for other in (logits.float(), logits.to(torch.float32), logits * 1.0):
        assert other is not logits and len(other.chain) == 1


def test_a_cast_to_the_same_dtype_is_no_operation_to_replay(rotating):
    run_ranks(casts, rotating, num_ranks=1)
