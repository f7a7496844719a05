"""An unmodified `Accelerator` under layouts: the numbers of one process, and its checkpoints under other layouts."""

import subprocess
import sys

import pytest

pytest.importorskip("accelerate")

import accelerate_loops
import torch
from accelerate import Accelerator
from adapter_loops import AFTERWARDS, BEGUN, Run, difference, model, rows, run_all, weights_of
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import rotorch
import rotorch.accelerate
from rotorch.core.errors import ConfigError
from rotorch.models.describe import describe
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks


def work_of(layout, directory, *, resume=False):
    return [("resumed" if resume else "loop", accelerate_loops.loop, layout, directory, {"resume": resume})]


@pytest.fixture(scope="module")
def alone_in(tmp_path_factory):
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def alone(alone_in):
    """The loop on one process, without a layout, and resumed there."""
    load_step_code(["rtp", "fsdp", "ddp", "megatron"])
    describe(model())  # its trial on a tiny model is remembered by all ranks
    work = work_of(None, alone_in) + work_of(None, alone_in, resume=True)
    (found,) = run_ranks(run_all, work, num_ranks=1)
    return found


def hold_to(alone, found):
    said = [f"{name}: {what}" for name, run in found.items() for what in difference(run, alone[name])]
    assert not said, "\n".join(said)


@pytest.mark.parametrize("layout", BEGUN)
def test_a_loop_does_as_on_one_process(alone, alone_in, tmp_path, layout):
    work = work_of(layout, tmp_path) + work_of(AFTERWARDS[layout], tmp_path, resume=True)
    for found in run_ranks(run_all, work, num_ranks=2):
        hold_to(alone, found)
    values, expected = (load_file(directory / "model" / "model.safetensors") for directory in (tmp_path, alone_in))
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(values[name], value, rtol=0, atol=1e-5), name


def test_a_loop_of_two_ranks_goes_on_on_one_and_back(alone, tmp_path):
    run_ranks(run_all, work_of("single", tmp_path), num_ranks=1)
    for found in run_ranks(run_all, work_of("rtp=2", tmp_path, resume=True), num_ranks=2):
        hold_to(alone, found)


def test_loaders_and_schedules_count_shares_of_a_batch():
    first = [int(row["input_ids"][0]) for row in accelerate_loops.rows(8, seed=1)]
    for layout, own in (("rtp=2", [first[0:2] + first[4:6], first[2:4] + first[6:8]]), ("megatron=2", [first, first])):
        found = run_ranks(accelerate_loops.shares, layout, num_ranks=2)
        assert found == [(4, own[0], 8), (4, own[1], 8)]


# ---------------------------------------------------------------- optimizers that have state

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad}
"""By name. Adagrad has state from the start on."""


def steps_before_and_after(layout):
    """By optimizer, the weights after a step of one's own over the plain model and two more under an accelerator."""
    found = {}
    for name, kind in OPTIMIZERS.items():
        accelerator, net = Accelerator(cpu=True), model()
        optimizer = kind(net.parameters(), lr=0.05)
        batches = [torch.stack([row["input_ids"] for row in rows(4, seed=seed)]) for seed in range(3)]
        net(input_ids=batches[0], labels=batches[0]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if layout is None:
            net, prepared = accelerator.prepare(net, optimizer)
        else:
            net, prepared = rotorch.accelerate.prepare(accelerator, net, optimizer, layout=layout)
        parallel = getattr(net, "parallel", None)
        share, num_shares = (0, 1) if parallel is None else (parallel.batch_rank, parallel.num_batch_ranks)
        for batch in batches[1:]:
            ids = batch[share::num_shares]
            accelerator.backward(net(input_ids=ids, labels=ids).loss)
            prepared.step()
            prepared.zero_grad()
        kept = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        size = sum(getattr(value, "to_local", lambda value=value: value)().numel() for value in kept)
        found[name] = Run([("elements of state", size)], weights_of(accelerator.unwrap_model(net)))
    return found


@pytest.mark.parametrize("layout", ["rtp=2", "ddp=2", pytest.param("megatron=2", marks=pytest.mark.slow)])
def test_an_optimizer_goes_on_from_its_steps_over_the_plain_model(begun, layout):
    for found in run_ranks(steps_before_and_after, layout, num_ranks=2):
        for name, run in found.items():
            [(_, size)], [(_, whole)] = run.seen, begun[name].seen
            assert size == whole if layout == "ddp=2" else size < 0.6 * whole, name
            assert not difference(Run(weights=run.weights), Run(weights=begun[name].weights)), name


@pytest.fixture(scope="module")
def begun():
    (found,) = run_ranks(steps_before_and_after, None, num_ranks=1)
    return found


# ---------------------------------------------------------------- refusals, before anything is changed


def refused(case):
    """On one rank: what `prepare` says of a case; the model is still plain then."""
    accelerator, net = Accelerator(cpu=True), model()
    optimizer, layout = torch.optim.AdamW(net.parameters()), "rtp=1"
    match case:
        case "a pipeline":
            layout = "pp=2"
        case "another number of ranks":
            layout = "rtp=2"
        case "no layout":
            layout = None
        case "another model's":
            optimizer = torch.optim.AdamW(model().parameters())
        case "an optimizer of one's own that has made steps":
            optimizer = type("Mine", (torch.optim.AdamW,), {"__module__": "mine"})(net.parameters())
            net(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
            optimizer.step()
        case "float16":
            net.half()
        case "a compiled model":
            net = torch.compile(net)
        case "compile":
            accelerator.state.dynamo_plugin.backend = "EAGER"
        case "no model":
            net = DataLoader([1])
    with pytest.raises(ConfigError) as caught:
        rotorch.accelerate.prepare(accelerator, net, optimizer, layout=layout)
    assert not hasattr(net, "parallel")
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("a pipeline", "of which each rank of a pipeline has a part (pp)"),
        ("another number of ranks", "counts 1 processes, and 'rtp=2' has 2 ranks"),
        ("no layout", "write layout='single'"),
        ("another model's", "AdamW has parameters that are not the model's"),
        ("an optimizer of one's own that has made steps", "Mine has state of whole weights, and is no class of torch"),
        ("float16", "Load them as bfloat16"),
        ("compile", "would trace through what goes between ranks"),
        ("a compiled model", "torch.compile would trace"),
        ("no model", "0 models given"),
    ],
)
def test_what_cannot_be_right_is_refused(case, words):
    (said,) = run_ranks(refused, case, num_ranks=1)
    assert words in said and "\n" not in said


def test_a_state_without_a_layout_is_refused(alone, alone_in):
    (said,) = run_ranks(refused_state, alone_in, num_ranks=1)
    assert "has no 'parallel': it was written without a layout" in said


def refused_state(directory):
    with pytest.raises(ConfigError) as caught:
        accelerate_loops.loop("rtp=1", directory, resume=True)
    return str(caught.value)


def test_a_second_model_goes_to_prepare_too():
    (said,) = run_ranks(refused_second_model, num_ranks=1)
    assert "LlamaForCausalLM is whole on every rank" in said


def refused_second_model():
    accelerator = Accelerator(cpu=True)
    rotorch.accelerate.prepare(accelerator, model(), layout="rtp=1")
    with pytest.raises(ConfigError) as caught:
        accelerator.prepare(model())
    return str(caught.value)


@pytest.mark.parametrize("name", ["accelerate", "lightning"])
def test_a_missing_package_is_one_line_and_rotorch_needs_none(name):
    code = f"""
import sys
import rotorch
assert not {{"accelerate", "lightning"}} & set(sys.modules)
sys.modules[{name!r}] = None
try:
    rotorch.{name}
except rotorch.ConfigError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said == f"rotorch.{name} needs the package {name}. Write pip install 'rotorch[{name}]'\n"
