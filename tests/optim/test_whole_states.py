"""An optimizer's state of one process, loaded into loops under a layout: they go on as that process does."""

import copy

import pytest
import torch
from muon_runs import build, config_of

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.parallelize import load_step_code
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.compare import value_errors
from rotorch.testing.ranks import run_ranks

LAYOUTS = [("llama", "ddp=2"), ("llama", "fsdp=2"), ("gpt_neox", "rtp=2"), ("gpt_neox", "megatron=2")]
UNEVEN = [("llama", "rtp=3"), ("gpt_neox", "rtp=3[transport=send_receive]")]
KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "adam one by one": lambda p: torch.optim.Adam(p, lr=0.05, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def step(model, optimizer, number, *, share=0, num_shares=1):
    optimizer.zero_grad()
    with exact_arithmetic():
        ids = torch.randint(61, (6, 6), generator=torch.Generator().manual_seed(number))[share::num_shares]
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def on_one_process(configs):
    """By model and kind: weights and state after one step, and weights after two more."""
    found = {}
    for name, config in configs.items():
        for kind, make in KINDS.items():
            model = build(config)
            optimizer = make(model.parameters())
            step(model, optimizer, 0)
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            step(model, optimizer, 1)
            step(model, optimizer, 2)
            found[name, kind] = *saved, {key: p.detach() for key, p in model.named_parameters()}
    return found


def going_on(configs, expected, cells):
    found = {}
    for name, layout in cells:
        model = rotorch.parallelize(build(configs[name]), layout, device="cpu")
        for kind, make in KINDS.items():
            weights, state, after = expected[name, kind]
            model.load_state_dict(weights)
            optimizer = make(model.parameters())
            optimizer.load_state_dict(copy.deepcopy(state))  # counters of steps stay those that were given
            for number in (1, 2):
                step(model, optimizer, number, share=model.batch_rank, num_shares=model.num_batch_ranks)
            found[name, layout, kind] = max(value_errors(model.weights, after).values())
            for parameter, kept in optimizer.state.items():
                values = [value for key, value in kept.items() if key != "step"]
                assert {v.to_local().shape for v in values} == {parameter.to_local().shape}  # its part, and no more
        model.close()
    return found


@pytest.fixture(scope="module")
def found(tiny):
    configs = {name: config_of(tiny(name)) for name in ("llama", "gpt_neox")}
    load_step_code(["ddp", "fsdp", "rtp", "megatron"])
    expected = on_one_process(configs)
    by_rank = [run_ranks(going_on, configs, expected, cells, num_ranks=n) for n, cells in ((2, LAYOUTS), (3, UNEVEN))]
    return [of_rank for ranks in by_rank for of_rank in ranks]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS + UNEVEN)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_goes_on_from_the_state_of_one_process(found, name, layout, kind):
    errors = [of_rank[name, layout, kind] for of_rank in found if (name, layout, kind) in of_rank]
    assert len(errors) == (3 if (name, layout) in UNEVEN else 2)
    assert max(errors) < 1e-10


def on_one_rank_only(config, expected):
    """Refusals where the first rank alone loads a state, at once or after steps of all."""
    said = []
    for num_steps in (0, 1):
        model = rotorch.parallelize(build(config), "rtp=2", device="cpu")
        optimizer = KINDS["sgd"](model.parameters())
        for number in range(num_steps):
            step(model, optimizer, number, share=model.batch_rank, num_shares=2)
        if model.batch_rank == 0:
            optimizer.load_state_dict(copy.deepcopy(expected["llama", "sgd"][1]))
        try:
            for number in (1, 2):
                step(model, optimizer, number, share=model.batch_rank, num_shares=2)
        except ConfigError as error:
            said.append(str(error))
    return said


def test_a_state_that_one_rank_alone_has_loaded_is_refused_on_all_ranks(tiny):
    config = config_of(tiny("llama"))
    load_step_code(["rtp"])
    for said in run_ranks(on_one_rank_only, config, on_one_process({"llama": config}), num_ranks=2):
        assert len(said) == 2
        assert all("rank 0 steps an optimizer into which it has loaded the state of one process" in s for s in said)
        assert all("rank 1 calls the model" in s for s in said)
