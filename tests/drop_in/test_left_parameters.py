"""Parameters that a model had before `parallelize` answer for themselves; what holds them by right goes on."""

import copy
import io

import pytest
import torch
from torch import nn

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks

LAYOUTS = ("rtp=2", "fsdp=2", "megatron=2", "ddp=2")


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)).double()


def backward(model):
    model(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()


def refusal(call):
    try:
        call()
    except ConfigError as error:
        return str(error)
    except RuntimeError as error:  # torch's own of clip_grad_value_, for an empty list
        return f"torch: {error}"
    return None


def saved_and_loaded(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def stale(layout):
    """Refusals of what asks old parameters for gradients; None where there is none."""
    told = {}
    for name, clip in {
        "norm": lambda p: nn.utils.clip_grad_norm_(p, 0.1),
        "value": lambda p: nn.utils.clip_grad_value_(p, 0.1),
        "zero": lambda p: torch.optim.SGD(p, lr=0.1).zero_grad(),
    }.items():
        model = build()
        parameters = list(model.parameters())
        model = rotorch.parallelize(model, layout, device="cpu")
        backward(model)
        told[name] = refusal(lambda clip=clip, parameters=parameters: clip(parameters))
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)) > 0
    return told


def rightful(layout):
    """True by use of old parameters that goes on."""
    plain = build()
    backward(plain)
    old = dict(plain.named_parameters())
    gradient = old["0.weight"].grad.clone()
    plain[2].weight.grad = None
    frozen, tied = plain[2].weight.requires_grad_(False), nn.Linear(4, 6).double()
    tied.weight = plain[0].weight
    values = {name: p.detach().clone() for name, p in old.items()}
    model = rotorch.parallelize(plain, layout, device="cpu")
    old["0.bias"].grad = None
    deep, kept = copy.deepcopy(old["0.weight"]), copy.deepcopy(model)
    again = saved_and_loaded([old["0.weight"]], weights_only=False)[0]
    found = {
        "values": all(torch.equal(old[name], values[name]) for name in old),
        "earlier gradients": torch.equal(old["0.weight"].grad, gradient),
        "frozen": frozen.grad is None,
        "deepcopy": type(deep) is nn.Parameter and deep.grad is None and torch.equal(deep, values["0.weight"]),
        "pickle": type(again) is nn.Parameter and again.grad is None,
        "computed with": type(old["0.weight"] * 2) is torch.Tensor and (old["0.weight"] * 2).requires_grad,
        "instance": isinstance(old["0.weight"], nn.Parameter),
        "copy of the model": len(list(kept.parameters())) == 4,
    }
    old["0.weight"].grad = None
    tied(torch.ones(1, 4, dtype=torch.float64)).sum().backward()  # another module's, which has it as ever
    found["another module's"] = float(nn.utils.clip_grad_norm_(tied.parameters(), 1.0)) > 0
    del old["0.weight"].grad
    with torch.no_grad():
        old["0.weight"].copy_(values["0.weight"])
        old["0.weight"].lerp_(values["0.weight"], 0.5)  # an average's
    found["written"] = torch.equal(old["0.weight"], values["0.weight"])
    return found


def everything():
    return {layout: (stale(layout), rightful(layout)) for layout in LAYOUTS}


@pytest.fixture(scope="module")
def ranks():
    load_step_code(["ddp", "fsdp", "rtp", "megatron"])
    return run_ranks(everything, num_ranks=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clipping_of_parameters_from_before_is_refused(ranks, layout):
    for told in ranks:
        for said in told[layout][0].values():
            assert "Take model.parameters() again, after parallelize" in str(said) and "\n" not in said


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_holds_them_by_right_goes_on(ranks, layout):
    for told in ranks:
        assert [use for use, goes_on in told[layout][1].items() if not goes_on] == []
