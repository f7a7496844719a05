"""Unmodified Fabric and Lightning's Trainer under layouts: the numbers of one process, and checkpoints for others."""

import pytest

pytest.importorskip("lightning")

import lightning_loops
import torch
from adapter_loops import AFTERWARDS, LAYOUTS, Run, difference, model, run_all, weights_of
from lightning import Fabric, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging

import rotorch.lightning
from rotorch.core.errors import ConfigError
from rotorch.models.describe import describe
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks

LOOPS = {"fabric": lightning_loops.fabric_loop, "trainer": lightning_loops.trainer_loop}


def work_of(layout, directory, *, resume=False, loops=tuple(LOOPS)):
    after = " resumed" if resume else ""
    return [(name + after, LOOPS[name], layout, directory / name, {"resume": resume}) for name in loops]


@pytest.fixture(scope="module")
def alone_in(tmp_path_factory):
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def alone(alone_in):
    """The loops on one process, without a layout, and resumed there."""
    load_step_code(["rtp", "fsdp", "ddp", "megatron"])
    describe(model())  # its trial on a tiny model is remembered by all ranks
    (found,) = run_ranks(run_all, work_of(None, alone_in) + work_of(None, alone_in, resume=True), num_ranks=1)
    return found


def hold_to(alone, found):
    said = [f"{name}: {what}" for name, run in found.items() for what in difference(run, alone[name])]
    assert not said, "\n".join(said)


QUICK = "rtp=2"
"""The hooks are the same under all; tests/adapters/test_accelerate.py has the other layouts of `BEGUN`."""


@pytest.mark.parametrize(
    "layout", [each if each == QUICK else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS]
)
def test_loops_do_as_on_one_process(alone, tmp_path, layout):
    work = work_of(layout, tmp_path) + work_of(AFTERWARDS[layout], tmp_path, resume=True)
    for found in run_ranks(run_all, work, num_ranks=2):
        hold_to(alone, found)


@pytest.mark.slow
def test_loops_of_one_rank_go_on_on_two(alone, tmp_path):
    run_ranks(run_all, work_of("single", tmp_path, loops=["fabric"]), num_ranks=1)
    for found in run_ranks(run_all, work_of("rtp=2", tmp_path, resume=True, loops=["fabric"]), num_ranks=2):
        hold_to(alone, found)


def steps_before_and_after():
    """Weights after a step over the plain model and one under Fabric, and after the same two on one process."""
    net, alone = model(), model()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (net, alone)]
    batches = [torch.stack([row["input_ids"] for row in lightning_loops.rows(4, seed=seed)]) for seed in range(2)]
    for each, optimizer in zip((net, alone), optimizers, strict=True):
        each(input_ids=batches[0], labels=batches[0]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    fabric = Fabric(accelerator="cpu", devices=2, strategy=rotorch.lightning.FabricStrategy("rtp=2"))
    fabric.launch()
    net, prepared = fabric.setup(net, optimizers[0])
    ids = batches[1][net.parallel.batch_rank :: 2]
    fabric.backward(net(input_ids=ids, labels=ids).loss)
    prepared.step()
    alone(input_ids=batches[1], labels=batches[1]).loss.backward()
    optimizers[1].step()
    return Run(weights=weights_of(net.module)), Run(weights=weights_of(alone))


def test_an_optimizer_goes_on_from_its_steps_over_the_plain_model():
    load_step_code(["rtp"])
    for found, expected in run_ranks(steps_before_and_after, num_ranks=2):
        assert not difference(found, expected)


# ---------------------------------------------------------------- refusals


class OwnWeight(LightningModule):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch, number):
        return self.scale.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


def refused(case, directory):
    """On one rank: what is said of a case."""
    with pytest.raises(ConfigError) as caught:
        match case:
            case "pipeline":
                rotorch.lightning.Strategy("pp=1")
            case "pipeline in fabric":
                rotorch.lightning.FabricStrategy("pp=1")
            case "number of ranks":
                rotorch.lightning.Strategy("rtp=2")
            case "precision":
                Trainer(accelerator="cpu", devices=1, precision="16-true", strategy=rotorch.lightning.Strategy("rtp=1"))
            case "precision in fabric":
                Fabric(
                    accelerator="cpu",
                    devices=1,
                    precision="16-true",
                    strategy=rotorch.lightning.FabricStrategy("rtp=1"),
                )
            case "compile":
                training = lightning_loops.Training(0)
                training.net = torch.compile(training.net)
                lone_trainer(directory).fit(training, [lightning_loops.rows(2, seed=1)[0]])
            case "own weight":
                lone_trainer(directory).fit(OwnWeight(), [0])
            case "averages by a callback":
                trainer = lone_trainer(directory)
                trainer.callbacks.append(EMAWeightAveraging())
                trainer.fit(lightning_loops.Training(0), [lightning_loops.rows(2, seed=1)[0]])
            case "a checkpoint without a layout":
                lightning_loops.trainer_loop("rtp=1", directory / "trainer", resume=True)
            case "another model's optimizer":
                fabric = Fabric(accelerator="cpu", devices=1, strategy=rotorch.lightning.FabricStrategy("rtp=1"))
                fabric.launch()
                fabric.setup(model(), torch.optim.SGD(model().parameters()))
    return str(caught.value)


def lone_trainer(directory):
    strategy = rotorch.lightning.Strategy("rtp=1")
    return Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, default_root_dir=directory)


CASES = {
    "pipeline": "of which each rank of a pipeline has a part (pp)",
    "pipeline in fabric": "of which each rank of a pipeline has a part (pp)",
    "number of ranks": "needs 2 ranks, but there are 1",
    "precision": "precision='16-true' is not tried under a layout",
    "precision in fabric": "precision='16-true' is not tried under a layout",
    "compile": "torch.compile would trace",
    "own weight": "scale is a weight of OwnWeight itself",
    "averages by a callback": "EMAWeightAveraging copies the module before it is spread over ranks",
    "a checkpoint without a layout": "was written without a layout, its optimizer's state in one piece",
    "another model's optimizer": "SGD has parameters that are not the model's",
}


def all_refused(directory):
    return {case: refused(case, directory) for case in CASES}


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_right_is_refused(alone, alone_in):
    (said,) = run_ranks(all_refused, alone_in, num_ranks=1)
    for case, words in CASES.items():
        assert words in said[case] and "\n" not in said[case], (case, said[case])
