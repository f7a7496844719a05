"""Strategies of other packages: found by their entry points, held to what those of rotorch are held to."""

import importlib
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn

from rotorch import parallelize
from rotorch.core.errors import ConfigError
from rotorch.hold import holding, sharded_model
from rotorch.strategies import DDP, STRATEGIES, Single, installed
from rotorch.strategies.installed import GROUP, with_installed
from rotorch.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def named(monkeypatch, value, *, name="mine"):
    """Makes one entry point the only one there is."""
    monkeypatch.setattr(installed, "entry_points", lambda *, group: [EntryPoint(name, value, group)])


@pytest.fixture
def newcomer(tmp_path, monkeypatch):
    """A module that defines some strategies."""
    (tmp_path / "newcomer.py").write_text(
        "from rotorch.strategies import DDP, Single\n"
        "class Good(Single):\n    kind = 'good'\n    held_by = 'newcomer'\n"
        "class Nowhere(Single):\n    kind = 'nowhere'\n"
        "class Unwritable(Single):\n    kind = 'Un-Writable'\n    held_by = 'newcomer'\n"
        "class Again(DDP):\n    held_by = 'newcomer'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("newcomer", None)


def test_a_strategy_of_another_package_is_there(monkeypatch, newcomer):
    named(monkeypatch, "newcomer:Good")
    found = with_installed([Single, DDP])
    assert list(found) == ["single", "ddp", "good"] and found["good"].held_by == "newcomer"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("not_installed:Good", "cannot be loaded: No module named 'not_installed'. Fix it, or uninstall it"),
        ("newcomer:Missing", "cannot be loaded: "),
        ("newcomer:__name__", "is no subclass of rotorch.core.strategy.Strategy"),
        ("newcomer:Again", "'ddp' is there already"),
        ("newcomer:Unwritable", "whose kind is 'Un-Writable'. Write small letters, digits and underscores"),
        ("newcomer:Nowhere", "has no `held_by`"),
    ],
)
def test_what_is_no_strategy_is_refused_by_name(monkeypatch, newcomer, value, words):
    named(monkeypatch, value)
    with pytest.raises(ConfigError) as refused:
        with_installed([Single, DDP])
    assert f"names the strategy mine = {value!r}" in str(refused.value) and words in str(refused.value)


@pytest.fixture
def python(tmp_path):
    """Runs Python where the example is installed: an entry point is a line in a directory beside the package."""
    metadata = tmp_path / "rotorch_ddp_bf16-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rotorch-ddp-bf16\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\nddp_bf16 = ddp_bf16.plan:DDPBF16\n")
    places = [str(tmp_path), str(ROOT / "examples" / "strategy"), *filter(None, sys.path)]

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    return run


def test_the_example_names_its_strategy_as_the_test_does():
    project = (ROOT / "examples" / "strategy" / "pyproject.toml").read_text()
    assert f'[project.entry-points."{GROUP}"]\nddp_bf16 = "ddp_bf16.plan:DDPBF16"\n' in project


@pytest.mark.slow
def test_conformance_finds_the_example_by_itself_and_holds_it(python):
    options = ["-v", "-n0", "-p", "no:cacheprovider", "-m", "not slow"]
    cells = ("-k", "ddp_bf16 and (rounded or (qwen3 or gpt_neox) and (parity or bytes or losses))")
    done = python("-m", "pytest", *options, "tests/conformance", "examples/strategy", *cells)
    passed = [word for word in done.stdout.splitlines()[-1:] if " passed" in word and "failed" not in word]
    assert done.returncode == 0 and passed, done.stdout
    assert "test_ddp_bf16.py::test_rounded_sums_keep_all_else PASSED" in done.stdout
    assert "test_float64_parity.py::test_float64_parity[ddp_bf16=2-gpt_neox] PASSED" in done.stdout


@pytest.fixture
def example(monkeypatch):
    """The example's strategy, in the table."""
    monkeypatch.syspath_prepend(ROOT / "examples" / "strategy")
    strategy = importlib.import_module("ddp_bf16.plan").DDPBF16
    monkeypatch.setitem(STRATEGIES, "ddp_bf16", strategy)
    return strategy


def summed(module, batch, num_targets):
    return module(batch["x"]).sum()


def gradient(layout):
    model = parallelize(nn.Linear(1, 1, bias=False), layout, device="cpu", loss=summed)
    model.forward_backward([{"x": torch.full((1, 1), 1 + 2.0**-9), "labels": torch.zeros(1, 1, dtype=torch.int64)}])
    return float(next(iter(model.weights.values())).local_grad)


def test_the_example_compiles_blocks_though_it_has_no_option_to_recompute_them(example, monkeypatch):
    given = []
    monkeypatch.setattr("rotorch.hold.setup.compile_blocks", given.append)
    module = nn.Linear(1, 1, bias=False)
    parallelize(module, "ddp_bf16=1", device="cpu", loss=summed, compile=True).close()
    assert given == [module]


def test_parallelize_says_that_the_example_changes_the_model(example, caplog):
    for layout in ("ddp_bf16=1", "ddp_bf16=1[bfloat16=true]"):
        parallelize(nn.Linear(1, 1), layout, device="cpu", loss=summed).close()
    said = "ddp_bf16=1[bfloat16=true] trains another model than one process does: gradients are summed in bfloat16"
    assert caplog.messages == [said]


def test_rounded_sums_are_opt_in_and_said(example):
    """1 + 2^-9 is no number in bfloat16: two of them sum to 2 when they are rounded before they travel."""
    assert run_ranks(gradient, "ddp_bf16=2", num_ranks=2) == [2.00390625, 2.00390625]
    assert run_ranks(gradient, "ddp_bf16=2[bfloat16=true]", num_ranks=2) == [2.0, 2.0]
    exact, rounded = (example(size=2, bfloat16=rounds) for rounds in (False, True))
    assert exact.changes_the_model == "" and "bfloat16" in rounded.changes_the_model


def test_packages_find_what_they_subclass_under_its_earlier_name():
    names = {"Holding": "ShardedModel", "ShardsHolding": "SimpleShardedModel", "StageHolding": "ShardedStages"}
    for old, new in (names | {"OuterHolding": "OuterShardedModel"}).items():
        assert getattr(holding, old) is getattr(sharded_model, new)
