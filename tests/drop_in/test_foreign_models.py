"""Models that nobody here wrote, in a plain loop on two ranks: as on one process, or refused before the first step."""

import traceback
from functools import cache

import more_foreign_models  # noqa: F401  # enters its models
import pytest
import torch
from foreign_models import FOREIGN

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.parallelize import load_step_code
from rotorch.strategies import batch_ranks, parse_parallel
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.compare import gradient_errors, relative_error, value_errors
from rotorch.testing.ranks import run_ranks

LAYOUTS = ("fsdp=2", "rtp=2", "rtp=2[transport=send_receive]", "megatron=2")
NUM_RANKS, NUM_STEPS, BAR = 2, 2, 1e-10
REFUSED = {
    ("clip", "fsdp=2"): "fsdp: 'logit_scale' is a scalar",
    ("a_block_whose_part_is_used_outside", "fsdp=2"): "the model calls 'blocks.0.condition' outside of the block",
    ("diffusers_dit", "fsdp=2"): "outside of the block that it belongs to",
}
MODELS, MORE = ([name for name, model in FOREIGN.items() if model.slow == slow] for slow in (False, True))
IN_TURN = (("fsdp=2", "rtp=2[transport=send_receive]"), ("rtp=2", "megatron=2"))
QUICK = {
    (name, layout)
    for number, name in enumerate(name for name in MODELS if name != "diffusers_unet_with_text")  # as diffusers_unet
    for layout in LAYOUTS
    if layout in IN_TURN[number % 2] or (name, layout) in REFUSED
}
"""Two layouts of each model, in turn, and all refusals. The others repeat on it what these prove."""

CELLS = [
    pytest.param(name, layout, marks=() if (name, layout) in QUICK else pytest.mark.slow)
    for name in MODELS
    for layout in LAYOUTS
]


def shares_of(layout):
    return batch_ranks(parse_parallel(layout))


def built(name):
    """The model in float64; nothing in it is 0, so that a value has something to be measured against."""
    torch.manual_seed(0)
    module = widen(FOREIGN[name].build()).train()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, dtype=torch.float64)
    return module


def loss_of(name, module, *, step, share):
    model = FOREIGN[name]
    args, kwargs = model.batch(torch.Generator().manual_seed(10 * step + share))
    return model.loss(module(*args, **kwargs))


def optimizer_of(module):
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def on_one_process(name, *, num_shares):
    """Losses by step and share, gradients of each step, values in the end; gradients are means over shares."""
    module = built(name)
    optimizer, losses, gradients = optimizer_of(module), [], []
    with exact_arithmetic():
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            buffers, shares = [buffer.clone() for buffer in module.buffers()], []
            for share in range(num_shares):
                for buffer, before in zip(module.buffers(), buffers, strict=True):
                    buffer.data.copy_(before)  # a forward writes them; each rank begins with the same ones
                shares.append(loss_of(name, module, step=step, share=share))
            (sum(shares) / num_shares).backward()
            losses.append([loss.detach() for loss in shares])
            gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()})
            optimizer.step()
    return losses, gradients, {n: p.detach() for n, p in module.named_parameters()}


def problems_of(name, layout, expected):
    """Differences on this rank, in lines; a refusal is one line that begins so."""
    losses, gradients, values = expected
    found, step = [], 0
    try:
        model = rotorch.parallelize(built(name), layout, device="cpu")
        optimizer = optimizer_of(model)
        with exact_arithmetic():
            for step in range(NUM_STEPS):
                optimizer.zero_grad()
                loss = loss_of(name, model, step=step, share=model.batch_rank)
                loss.backward()
                if not relative_error(loss.detach(), losses[step][model.batch_rank]) <= BAR:
                    found.append(f"step {step}: loss {float(loss)}, not {float(losses[step][model.batch_rank])}")
                for weight, error in gradient_errors(model.weights, gradients[step]).items():
                    if not error <= BAR:
                        found.append(f"step {step}: gradient of {weight} is off by {error:.1e}")
                optimizer.step()
        errors = value_errors(model.weights, values)
        found += [f"{weight} is off by {error:.1e} in the end" for weight, error in errors.items() if not error <= BAR]
        model.close()
    except ConfigError as error:
        found.append(f"step {step}: refused: {error}" if step else f"refused: {error}")
    except Exception:
        found.append(traceback.format_exc())
    return found


def everything(cells, expected):
    return {(name, layout): problems_of(name, layout, expected[name, shares_of(layout)]) for name, layout in cells}


@cache
def on_ranks(group):
    """Problems by name and layout, of each rank, for models of a group whose packages are there."""
    load_step_code(["fsdp", "rtp", "megatron"])
    pairs = [(name, layout) for name in FOREIGN for layout in LAYOUTS if group_of(name, layout) == group]
    cells = [(name, layout) for name, layout in pairs if FOREIGN[name].is_installed]
    alone = {(name, shares_of(layout)) for name, layout in cells}
    expected = {(name, shares): on_one_process(name, num_shares=shares) for name, shares in alone}
    return run_ranks(everything, cells, expected, num_ranks=NUM_RANKS)


def group_of(name, layout):
    """The cells measured together with one: quick, slow, or of more models."""
    return "more" if name in MORE else "quick" if (name, layout) in QUICK else "slow"


def check(name, layout):
    if not FOREIGN[name].is_installed:
        pytest.skip(f"needs {FOREIGN[name].package}")
    for rank, problems in enumerate(on_ranks(group_of(name, layout))):
        found = problems[name, layout]
        if (name, layout) in REFUSED:
            assert len(found) == 1 and found[0].startswith("refused: ") and REFUSED[name, layout] in found[0]
            assert "\n" not in found[0]
        else:
            assert not found, f"rank {rank}: " + "\n".join(found[:3])


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_a_model_that_others_wrote_learns_as_on_one_process(name, layout):
    check(name, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MORE)
def test_more_models_that_others_wrote_learn_as_on_one_process(name, layout):
    check(name, layout)
