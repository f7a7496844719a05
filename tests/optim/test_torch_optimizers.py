"""Every class of torch.optim over weights of which each rank has a part: as on one process, or refused in one line."""

import inspect
from functools import cache

import pytest
import torch
from muon_runs import build, config_of, rows

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.parallelize import load_step_code
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.compare import value_errors
from rotorch.testing.ranks import run_ranks

LAYOUTS = ("ddp=2", "fsdp=2", "rtp=2", "megatron=2")
QUICK = LAYOUTS[:3]
CLASSES = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
}
REFUSED = {
    "LBFGS": "it adds up all weights as one vector. Write another optimizer",
    "Adafactor": "Write rotorch.optim.Adafactor",
    "Muon": "Write rotorch.optim.Muon",
}
NEVER = {"SparseAdam": "does not support dense gradients"}  # on one process neither
if torch.__version__ < "2.15":
    CLASSES.pop("Rprop")  # torch's own, of 2.13, writes by masks, which its DTensor refuses


def of_kind(kind, model, *, share=0, num_shares=1):
    """Makes two steps."""
    model.zero_grad()
    parameters = [p for p in model.parameters() if p.requires_grad and (p.dim() == 2 or kind is not torch.optim.Muon)]
    optimizer = kind(parameters, **({} if kind is torch.optim.LBFGS else {"lr": 0.05}))
    batch = rows(61, step=0, share=share, num_shares=num_shares)

    def closure():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        return loss

    with exact_arithmetic():
        for _ in range(2):
            if kind is torch.optim.LBFGS:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()


def on_one_process(config):
    found = {}
    for name, kind in CLASSES.items():
        if name not in NEVER:
            model = build(config)
            of_kind(kind, model)
            found[name] = {key: p.detach() for key, p in model.named_parameters()}
    return found


def everything(config, expected, layouts):
    """By layout and class: the largest error, or what is said."""
    found, state = {}, build(config).state_dict()
    for layout in layouts:
        model = rotorch.parallelize(build(config), layout, device="cpu")
        for name, kind in CLASSES.items():
            model.load_state_dict(state)
            try:
                of_kind(kind, model, share=model.batch_rank, num_shares=model.num_batch_ranks)
                found[layout, name] = max(value_errors(model.weights, expected[name]).values())
            except (ConfigError, RuntimeError) as error:
                found[layout, name] = str(error)
        model.close()
    return found


@pytest.fixture(scope="module")
def found(tiny):
    config = config_of(tiny("llama"))
    load_step_code(["ddp", "fsdp", "rtp", "megatron"])
    expected = on_one_process(config)
    return cache(lambda *layouts: run_ranks(everything, config, expected, layouts, num_ranks=2))


@pytest.mark.parametrize(
    "layout",
    # Parts of megatron are those of rtp.
    [*QUICK, *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS if layout not in QUICK)],
)
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_torch_is_right_or_refused(found, layout, name):
    for of_rank in found(*(QUICK if layout in QUICK else (layout,))):
        result = of_rank[layout, name]
        if name in NEVER:
            assert NEVER[name] in result
        elif name in REFUSED and layout != "ddp=2":
            assert isinstance(result, str) and REFUSED[name] in result and "\n" not in result
        else:
            assert isinstance(result, float) and result < 1e-10, result
