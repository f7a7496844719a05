"""Optimizers of `rotorch train` by name: on parts of weights as on one process, through checkpoints, or refused."""

from functools import cache

import pytest
import torch
from muon_runs import build, config_of, rows

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.decay import is_decayed
from rotorch.parallelize import load_step_code
from rotorch.run_config import OptimizerGroup, OptimizerSection, load_run_config
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.compare import value_errors
from rotorch.testing.ranks import run_ranks
from rotorch.train.checkpoint.saving import load, save
from rotorch.train.choose_optimizer import check_optimizer
from rotorch.train.optim import make_optimizer, set_learning_rate
from rotorch.train.state import TrainState

BAR, NUM_STEPS = 1e-10, 4
GROUPS = (OptimizerGroup(match="*embed*", lr=0.03, weight_decay=0.0),)
SETTINGS = {
    "adamw": OptimizerSection(lr=0.01, groups=GROUPS),
    "sgd": OptimizerSection(name="sgd", lr=0.01, weight_decay=0.01, arguments={"momentum": 0.9, "nesterov": True}),
    "adafactor": OptimizerSection(name="adafactor", lr=0.01, groups=GROUPS),
    "lion": OptimizerSection(name="lion", lr=0.001, betas=(0.9, 0.99), weight_decay=0.3),
    "muon": OptimizerSection(name="muon", lr=0.01, groups=(OptimizerGroup(match="*v_proj*", use_muon=False),)),
    "by path": OptimizerSection(name="torch.optim.NAdam", lr=0.01, arguments={"momentum_decay": 0.01}),
    "of another library": OptimizerSection(name="foreign_optimizer.Scaled", lr=0.01, weight_decay=0.0),
}
LAYOUTS = {2: ("rtp=2", "fsdp=2"), 3: ("rtp=3",)}
# Uneven cuts are torch's own arithmetic of other elements: tests/optim/test_cut_in_name.py, test_whole_states.py.
CELLS = [
    pytest.param(num_ranks, layout, name, marks=() if num_ranks == 2 else pytest.mark.slow)
    for num_ranks, layouts in LAYOUTS.items()
    for layout in layouts
    for name in SETTINGS
]


def on_one_process(config, name):
    """By torch's own classes, where it has one."""
    settings, module = SETTINGS[name], build(config)
    groups = []
    for key, parameter in module.named_parameters():
        if parameter.requires_grad:
            decay = settings.weight_decay if is_decayed(module, key, shape=parameter.shape) else 0.0
            in_group = "embed" in key and settings.groups == GROUPS
            group = {"lr": 0.03, "weight_decay": 0.0} if in_group else {"lr": settings.lr, "weight_decay": decay}
            hidden = parameter.dim() == 2 and "embed" not in key and "lm_head" not in key and "v_proj" not in key
            groups.append({"params": [parameter], **group, **({"use_muon": hidden} if name == "muon" else {})})
    if name == "muon":
        for group in groups:
            group.update({"adjust_lr_fn": "match_rms_adamw"} if group["use_muon"] else {"betas": (0.9, 0.95)})
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(groups, betas=(0.9, 0.95)),
        "sgd": lambda: torch.optim.SGD(groups, momentum=0.9, nesterov=True),
        "adafactor": lambda: torch.optim.Adafactor(groups),
        "lion": lambda: rotorch.optim.Lion(groups, betas=(0.9, 0.99)),
        "muon": lambda: rotorch.optim.Muon(groups),  # held to torch's elsewhere
        "by path": lambda: torch.optim.NAdam(groups, betas=(0.9, 0.95), momentum_decay=0.01),
        "of another library": lambda: choose_scaled()([g["params"][0] for g in groups], lr=0.01),
    }[name]()
    with exact_arithmetic():
        for step in range(NUM_STEPS):
            module(**rows(config.vocab_size, step=step, share=0, num_shares=1)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return {key: parameter.detach().clone() for key, parameter in module.named_parameters()}


def choose_scaled():
    from foreign_optimizer import Scaled

    return Scaled


def train(state, *, steps):
    settings, model = SETTINGS[state.run["name"]], state.model
    with exact_arithmetic():
        while state.step < steps:
            share = {"share": model.batch_rank, "num_shares": model.num_batch_ranks}
            model.forward_backward([rows(61, step=state.step, **share)])
            set_learning_rate(state.optimizer, lr=settings.lr)
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.step += 1


def under(config, layout, name):
    model = rotorch.parallelize(build(config), layout, device="cpu")
    return TrainState(
        model=model.parallel, optimizer=make_optimizer(model, settings=SETTINGS[name]), run={"name": name}
    )


def everything(config, layouts, expected, folder):
    found = {}
    for number, layout in enumerate(layouts):
        for name in SETTINGS:
            begun = under(config, layout, name)
            train(begun, steps=2)
            path = save(folder / name / layout, begun, keep=1)
            going_on = under(config, layouts[number - 1], name)
            load(path, going_on)
            going_on.run = begun.run
            for which, state in (("straight on", begun), ("resumed", going_on)):
                train(state, steps=NUM_STEPS)
                errors = value_errors(state.model.weights, expected[name])
                found[layout, name, which] = max(errors.items(), key=lambda pair: pair[1])
                state.model.close()
    return found


@pytest.fixture(scope="module")
def found(tiny, tmp_path_factory):
    load_step_code(["fsdp", "rtp"])
    config = config_of(tiny("llama"))
    expected = {name: on_one_process(config, name) for name in SETTINGS}

    @cache
    def on(num_ranks):
        folder = tmp_path_factory.mktemp("saved")
        return run_ranks(everything, config, LAYOUTS[num_ranks], expected, folder, num_ranks=num_ranks)

    return on


@pytest.mark.parametrize("which", ["straight on", "resumed"])
@pytest.mark.parametrize(("num_ranks", "layout", "name"), CELLS)
def test_steps_equal_those_of_one_process(found, num_ranks, layout, name, which):
    for of_rank in found(num_ranks):
        weight, error = of_rank[layout, name, which]
        assert error <= BAR, weight


REFUSED = [
    ({"name": "adan"}, "optimizer.name = 'adan' is unknown"),
    ({"name": "torch.optim.Muon"}, 'Write name = "muon"'),
    ({"name": "torch.optim.LBFGS"}, "computes the loss several times"),
    ({"name": "no_such_package.Sgd"}, "cannot be imported: ModuleNotFoundError"),
    ({"name": "torch.nn.Linear"}, "is no subclass of torch.optim.Optimizer"),
    ({"name": "sgd", "arguments": {"momentun": 0.9}}, "takes no 'momentun' (did you mean 'momentum'?)"),
    ({"name": "sgd", "arguments": {"lr": 0.9}}, "is a key of [optimizer]"),
    ({"name": "sgd", "betas": [0.8, 0.9]}, "optimizer.betas = (0.8, 0.9): sgd takes none"),
    ({"name": "muon", "arguments": {"ns_steps": 200}}, "write fewer than 100"),
    ({"name": "torch.optim.Rprop"}, "takes none. Write weight_decay = 0"),
    ({"groups": [{"match": "*.embedtokens.*"}]}, "fits no trained weight"),
    ({"groups": [{"match": "*", "use_muon": True}]}, "use_muon is for name = 'muon'"),
    ({"name": "muon", "groups": [{"match": "*norm*", "use_muon": True}]}, "is no matrix"),
]


@pytest.mark.parametrize(("settings", "said"), REFUSED)
def test_what_cannot_be_is_refused_before_anything_starts(tiny, settings, said):
    from rotorch.models.describe import describe

    spec = describe(build(config_of(tiny("llama"))))
    with pytest.raises(ConfigError) as refused:
        check_optimizer(OptimizerSection.model_validate(settings), spec)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_groups_are_read_from_toml_and_unknown_keys_refused(tmp_path):
    path = tmp_path / "run.toml"
    text = (
        '[model]\nconfig = "c"\n[train]\nsteps = 2\n[optimizer]\nname = "muon"\n[optimizer.arguments]\nmomentum = 0.9\n'
    )
    path.write_text(text + '[[optimizer.groups]]\nmatch = "*norm*"\nlr = 0.1\n')
    read = load_run_config(path).optimizer
    assert (read.name, read.arguments, read.groups[0].lr) == ("muon", {"momentum": 0.9}, 0.1)
    path.write_text(text + '[[optimizer.groups]]\nmatch = "*norm*"\nlrr = 0.1\n')
    with pytest.raises(ConfigError, match=r"unknown key 'optimizer\.groups\.0\.lrr'"):
        load_run_config(path)
