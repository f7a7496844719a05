"""rtp over plain modules with a plan and a loss of their own: what such modules may do, against one process."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.testing.ranks import run_ranks

D, HIDDEN = 6, 10
PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """Loads here what every forked rank would load for itself."""
    for name in (
        "rotorch.parallelize",
        "rotorch.strategies.ddp.apply",
        "rotorch.strategies.rtp.apply",
        "torch._dynamo",
    ):
        importlib.import_module(name)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(D, HIDDEN)
        self.down = nn.Linear(HIDDEN, D)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Residual blocks and a norm that no plan names."""

    mlp = MLP

    def __init__(self, *, num_layers=2):
        super().__init__()
        self.layers = nn.ModuleList(self.mlp() for _ in range(num_layers))
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.norm(x)


def squared_error(module, batch, num_targets):
    return (module(batch["x"]) - batch["y"]).pow(2).sum() / num_targets


def rows(batch_rank=0, num_batch_ranks=1, *, seed=0):
    """This rank's share of 12 rows; `labels` only says that each row counts for one."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 12, D, generator=generator, dtype=torch.float64)
    share = slice(batch_rank * 12 // num_batch_ranks, (batch_rank + 1) * 12 // num_batch_ranks)
    return {"x": x[share].clone(), "y": y[share].clone(), "labels": torch.ones(share.stop - share.start, 2).long()}


def built(build):
    torch.manual_seed(0)
    return build().double()


def dense(build, *, loss=squared_error, batches=1):
    module, total = built(build), 0.0
    for seed in range(batches):
        value = loss(module, rows(seed=seed), 12 * batches)
        value.backward()
        total += value.item()
    return total, {name: p.grad for name, p in module.named_parameters()}


def parallel(build, parallel, plan, loss, batches, steps):
    model = rotorch.parallelize(built(build), parallel, device="cpu", plan=plan, loss=loss)
    micro_batches = [rows(model.batch_rank, model.num_batch_ranks, seed=seed) for seed in range(batches)]
    if steps is not None:
        return steps(model, micro_batches)
    value = model.forward_backward(micro_batches)
    has = {name: held.parameter.grad is not None for name, held in model.weights.items()}
    grads = {name: model.full_tensor(name, grad=True) if has[name] else None for name in model.weights}
    model.close()
    return float(value), grads


def check(build, *layouts, plan=PLAN, loss=squared_error, batches=1, steps=None):
    value, grads = dense(build, loss=loss, batches=batches)
    for layout in layouts or ("rtp=2", "rtp=3[transport=send_receive,recompute=slice]"):
        ranks = run_ranks(parallel, build, layout, plan, loss, batches, steps, num_ranks=size_of(layout))
        for got, got_grads in ranks:
            assert got == pytest.approx(value, rel=1e-12), layout
            assert got_grads.keys() == grads.keys()
            for name, expected in grads.items():
                if expected is None:  # zero where ranks would have to ask each other whether any has one
                    got_grad = got_grads[name]
                    assert got_grad is None or (name.endswith("down.bias") and not got_grad.any()), f"{layout}: {name}"
                else:
                    torch.testing.assert_close(
                        got_grads[name], expected, rtol=1e-10, atol=1e-12, msg=f"{layout} {name}"
                    )


def size_of(layout):
    return {"rtp=1": 1, "ddp=2,rtp=2": 4}.get(layout) or int(layout[4])


def test_a_plan_and_a_loss_of_ones_own():
    check(Net, "rtp=1", "rtp=2", "rtp=3[recompute=none,transport=send_receive]", "ddp=2,rtp=2", batches=2)


def test_a_plan_that_names_weights_means_their_biases_too():
    """Row-wise biases are added once, column-wise ones are cut."""
    check(Net, plan={"layers.*.up.weight": "colwise", "layers.*.down.weight": "rowwise"})


# ---------------------------------------------------------------- sharing


class TwoUses(Net):
    """One module at two places: two names for every weight."""

    def __init__(self):
        super().__init__()
        self.layers[1] = self.layers[0]


class OneName(Net):
    def forward(self, x):
        for layer in (self.layers[0], self.layers[1], self.layers[0]):
            x = x + layer(x)
        return self.norm(x)


@pytest.mark.parametrize("build", [TwoUses, OneName])
def test_a_unit_that_is_used_twice_gets_both_gradients(build):
    check(build, "rtp=2", "rtp=3[transport=send_receive,recompute=none]", batches=2)


class TakesWeights(MLP):
    """Makes products of its layers' weights by itself; one layer is called as well."""

    def forward(self, x):
        up = F.linear(x, self.up.weight, self.up.bias) + self.up(x)
        return F.linear(F.gelu(up), self.down.weight, self.down.bias)


class TakesWeightsNet(Net):
    mlp = TakesWeights


class RunsAgain(MLP):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class RunsAgainNet(Net):
    mlp = RunsAgain


@pytest.mark.parametrize("build", [TakesWeightsNet, RunsAgainNet])
def test_layers_are_those_of_their_slice(build):
    options = (3, ""), (3, ",recompute=slice"), (2, ",visits=1")
    check(build, *(f"rtp={n}[transport=send_receive{more}]" for n, more in options))


class SharedWeight(Net):
    def __init__(self):
        super().__init__()
        self.layers[1].up.weight = self.layers[0].up.weight


def test_a_cut_weight_of_two_different_modules_is_refused():
    (message,) = run_ranks(message_of, SharedWeight, "rtp=1", num_ranks=1)
    assert "'layers.1.up.weight' is the same weight as 'layers.0.up.weight'" in message


class NormedMLP(MLP):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        return super().forward(self.norm(x))


class SharedNorm(Net):
    """One norm inside two units and after them."""

    mlp = NormedMLP

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.norm = self.norm


def test_a_norm_that_units_share_gets_all_its_gradients():
    check(SharedNorm, "rtp=2", "rtp=2[recompute=slice]", batches=2)


# ---------------------------------------------------------------- forms of modules


class Block(nn.Module):
    """Weights with roles of its own beside a unit with roles: its forward cannot run once per slice."""

    def __init__(self):
        super().__init__()
        self.inner = MLP()
        self.up = nn.Linear(D, HIDDEN)
        self.down = nn.Linear(HIDDEN, D)

    def forward(self, x):
        x = x + self.inner(x)
        return x + self.down(F.relu(self.up(x)))


class Blocks(Net):
    mlp = Block


def test_a_unit_around_another_one_is_cut_weight_by_weight():
    check(Blocks, plan={**PLAN, "layers.*.inner.up": "colwise", "layers.*.inner.down": "rowwise"})


class ReturnsTuple(MLP):
    def forward(self, x, *, scale, shift=None):
        y = super().forward(x * scale) + 0.0
        return y, y.detach(), None


class Tuples(Net):
    """A learnt scale goes in by keyword and must get its gradient back through the unit."""

    mlp = ReturnsTuple

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((D,), 1.5))

    def forward(self, x):
        for layer in self.layers:
            y, *rest = layer(x, scale=self.scale, shift=x.detach())
            if len(rest) != 2:
                raise AssertionError("a tuple of another length came back")
            x = x + y
        return self.norm(x)


def test_tensors_given_by_keyword_get_their_gradients():
    check(Tuples, "rtp=2", "rtp=2[recompute=slice]")


class ReturnsDict(MLP):
    def forward(self, x):
        return {"y": super().forward(x)}


class Dicts(Net):
    mlp = ReturnsDict

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)["y"]
        return x


def message_of(build, layout, plan=PLAN):
    try:
        model = rotorch.parallelize(built(build), layout, device="cpu", plan=plan, loss=squared_error)
        model.forward_backward(rows(model.batch_rank, model.num_batch_ranks))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_unit_that_returns_a_dict_is_refused():
    (message,) = run_ranks(message_of, Dicts, "rtp=1[recompute=slice]", num_ranks=1)
    assert "'layers.0' returns a dict" in message and "no role" in message


class Residual(MLP):
    def forward(self, x):
        return x + super().forward(x)


class PostNorm(MLP):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, x):
        return self.norm(super().forward(x))


class Activated(MLP):
    def forward(self, x):
        return F.relu(super().forward(x))


class WithDropout(MLP):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5)


def net_of(layer):
    class NetOf(Net):
        mlp = layer

    return NetOf


@pytest.mark.parametrize("layer", [Residual, PostNorm, Activated])
def test_a_unit_whose_slices_do_not_add_up_is_refused(layer):
    for message in run_ranks(message_of, net_of(layer), "rtp=2[recompute=slice]", num_ranks=2):
        assert "'layers.0' cannot be cut as the plan says" in message
    check(net_of(layer), "rtp=2")  # side by side nothing is run on slices
    gathered = {"layers.*.up": "colwise_gather_output", "layers.*.down": "colwise_gather_output"}
    check(net_of(layer), "rtp=2", plan=gathered)


def test_dropout_behind_the_sum_is_not_taken_for_more_than_a_sum():
    assert run_ranks(message_of, net_of(WithDropout), "rtp=2", num_ranks=2) == ["", ""]


class ChangesInput(MLP):
    def forward(self, x):
        return super().forward(x.mul_(0.5))


class Changes(Net):
    mlp = ChangesInput

    def forward(self, x):
        return self.norm(self.layers[1](self.layers[0](x.clone()) + x))


def test_a_unit_that_changes_its_input_is_refused():
    for message in run_ranks(message_of, Changes, "rtp=2[recompute=slice]", num_ranks=2):
        assert "'layers.0' changes its input in place" in message


class AddsInPlace(Net):
    def forward(self, x):
        for layer in self.layers:
            y = layer(x)
            y += x
            x = y
        return self.norm(x)


def test_the_output_may_be_changed_in_place():
    check(AddsInPlace, "rtp=1", "rtp=2", "rtp=2[recompute=slice]")


class Overwrites(Net):
    """Changes a unit's input after the unit has seen it."""

    def forward(self, x):
        x = self.norm(x) + 0.0  # the norm's own output would be made again in backward
        y = self.layers[0](x)
        x.mul_(2.0)
        return self.layers[1](x + y)


def refusal(layout):
    model = rotorch.parallelize(built(Overwrites), layout, device="cpu", plan=PLAN, loss=squared_error)
    try:
        model.forward_backward(rows(model.batch_rank, model.num_batch_ranks))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("recompute", ["head", "all_but_attention", "slice"])
def test_an_input_that_was_overwritten_before_backward_is_an_error_as_in_plain_torch(recompute):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared_error(built(Overwrites), rows(), 1).backward()
    for message in run_ranks(refusal, f"rtp=2[recompute={recompute}]", num_ranks=2):
        assert "modified by an inplace operation" in message


class WritesOnNorms(Net):
    """The first unit's input has been changed behind the norm, the second one's has not."""

    def forward(self, x):
        x = self.norm(x)
        x.mul_(2.0)
        x = self.layers[0](x)
        return self.layers[1](self.norm(x) + x) + self.layers[1](self.norm(x))


class ShiftNorm(nn.Module):
    """One whose backward needs nothing of its input."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(D))

    def forward(self, x, *, times=1):
        return x + times * self.bias


class WritesUnderNorms(Net):
    """The norm's input has changed by the time that a unit gets its output."""

    def __init__(self):
        super().__init__()
        self.shift = ShiftNorm()

    def forward(self, x):
        x = self.norm(x) + 0.0
        shifted = self.shift(x)
        x.mul_(2.0)
        return self.layers[1](self.shift(self.layers[0](shifted) + x, times=2))


@pytest.mark.parametrize("net", [WritesOnNorms, WritesUnderNorms])
def test_what_somebody_has_written_on_is_not_made_again(net):
    check(net, "rtp=2", "rtp=2[recompute=slice]", "rtp=3[recompute=slice,transport=send_receive]")


# ---------------------------------------------------------------- steps


def freeze(prefix):
    def build():
        module = Net()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not name.startswith(prefix))
        return module

    return build


@pytest.mark.parametrize(
    "prefix", ["layers.0", *(pytest.param(each, marks=pytest.mark.slow) for each in ("layers.1", "layers")), "norm"]
)
def test_frozen_units_get_no_gradients_and_pass_them_on(prefix):
    check(freeze(prefix), "rtp=2", "ddp=2,rtp=2")


def test_a_unit_that_is_frozen_in_part_trains_the_rest_of_it_under_every_transport():
    check(freeze("layers.0.up"), "rtp=2", "rtp=2[recompute=slice]", "rtp=2[transport=send_receive]")


class Skips(Net):
    def forward(self, x):
        return self.norm(x + self.layers[1](x))


def test_a_unit_that_a_step_does_not_use_has_no_gradient():
    check(Skips, "rtp=2", "rtp=2[transport=send_receive]")


class Sometimes(Net):
    """Leaves its first unit out when it is told to."""

    all_layers = True

    def forward(self, x):
        for layer in self.layers if self.all_layers else self.layers[1:]:
            x = x + layer(x)
        return self.norm(x)


def used_then_not(model, micro_batches):
    value = float(model.forward_backward(micro_batches))
    grads = {name: model.full_tensor(name, grad=True) for name in model.weights}
    model.module.all_layers = False
    model.forward_backward(micro_batches, accumulate=True)
    for name in model.weights:
        same = torch.equal(model.full_tensor(name, grad=True), grads[name])
        assert same == name.startswith("layers.0"), name
    return value, grads


@pytest.mark.parametrize("layout", ["rtp=2", "rtp=3[transport=send_receive]", "ddp=2,rtp=2"])
def test_gradients_of_a_unit_stay_when_a_further_step_does_not_use_it(layout):
    check(Sometimes, layout, steps=used_then_not)


def with_teacher(module, batch, num_targets):
    with torch.no_grad():
        target = module(batch["x"]) + 0.1 * batch["y"]
    return (module(batch["x"]) - target).pow(2).sum() / num_targets


def test_a_teacher_may_run_without_gradients_inside_the_loss():
    check(Net, "rtp=2", "rtp=3[transport=send_receive,recompute=slice]", loss=with_teacher, batches=2)


def without_targets(model, _):
    """Ranks with no targets, then a batch with none anywhere."""
    empty = rows(model.batch_rank, model.num_batch_ranks)
    empty["labels"][:] = -100
    for key in ("x", "y"):
        empty[key] = empty[key][:0]
    first = rows(0, 1) if model.batch_rank == 0 else empty
    value = model.forward_backward(first)
    grads = {name: model.full_tensor(name, grad=True) for name in model.weights}
    for parameter in model.parameters():
        parameter.grad = None
    nothing = model.forward_backward(empty)
    assert float(nothing) == 0.0
    assert all(not model.full_tensor(name, grad=True).any() for name in model.weights)
    return float(value), grads


def test_ranks_without_targets_take_part():
    check(Net, "rtp=2", "rtp=3[transport=send_receive,recompute=slice]", steps=without_targets)
    gathered = {"layers.*.up": "colwise_gather_output", "layers.*.down": "colwise_gather_output"}
    check(Net, "rtp=2", plan=gathered, steps=without_targets)


def between_evaluations(model, micro_batches):
    """Evaluations before, between and after leave gradients alone; without zero_grad they add up."""
    held_out = micro_batches[0]
    before = model.evaluate(held_out)
    halves = []
    for micro_batch in micro_batches:
        halves.append(float(model.forward_backward(micro_batch, accumulate=True)) / len(micro_batches))
        assert model.evaluate(held_out).loss_sum == pytest.approx(before.loss_sum, rel=1e-12)
    count = len(micro_batches)
    return sum(halves), {name: model.full_tensor(name, grad=True) / count for name in model.weights}


@pytest.mark.parametrize("layout", ["rtp=2", "rtp=3[transport=send_receive]", "ddp=2,rtp=2"])
def test_gradients_add_up_across_evaluations(layout):
    check(Net, layout, batches=2, steps=between_evaluations)


class Fails(Exception):
    pass


def failing(where):
    """A loss that fails in forward or in backward when it is told to."""

    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise Fails

    def loss(module, batch, num_targets):
        if "fail" not in batch:
            return squared_error(module, batch, num_targets)

        def hook(_module, _args, output):
            if where == "forward":
                raise Fails
            return Bomb.apply(output)

        handle = module.layers[batch["fail"]].register_forward_hook(hook)
        try:
            return squared_error(module, batch, num_targets)
        finally:
            handle.remove()

    return loss


def fail_then_train(model, micro_batches):
    before = {name: held.local.clone() for name, held in model.weights.items()}
    for layer in (0, 1):
        with pytest.raises(Fails):
            model.forward_backward([*micro_batches, {**micro_batches[0], "fail": layer}])
        for name, held in model.weights.items():
            assert torch.equal(held.local, before[name])
            assert model.module.get_parameter(name) is held.parameter
        for parameter in model.parameters():
            parameter.grad = None
    value = model.forward_backward(micro_batches)
    return float(value), {name: model.full_tensor(name, grad=True) for name in model.weights}


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_after_an_abandoned_one_is_right(where):
    check(
        Net,
        "rtp=2",
        "rtp=3[transport=send_receive]",
        "rtp=3[transport=send_receive,recompute=slice]",
        loss=failing(where),
        batches=2,
        steps=fail_then_train,
    )
