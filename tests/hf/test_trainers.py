"""Unmodified trainers of transformers and TRL under layouts: the numbers of one process, and its checkpoints."""

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

import scripts
from scripts import difference, run_all

from rotorch.models.describe import describe
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks

MESSAGES = "rtp=2[transport=send_receive]"
LAYOUTS = ("rtp=2", MESSAGES, "fsdp=2", "ddp=2", "megatron=2")
SCRIPTS = {
    "trainer": (scripts.plain_trainer, {}),
    "sft": (scripts.sft, {}),
    "sft with adapters": (scripts.sft, {"lora": True}),
    "sft that computes layers again": (scripts.sft, {"gradient_checkpointing": True}),
    "dpo": (scripts.dpo, {}),
    "dpo with adapters": (scripts.dpo, {"lora": True}),
    "reward": (scripts.reward, {}),
}
QUICK = {(layout, name) for layout in ("rtp=2", MESSAGES) for name in SCRIPTS} | {
    (layout, name) for layout in LAYOUTS for name in ("trainer", "sft with adapters")
}


def work_of(layout, directory, names):
    return [(name, SCRIPTS[name][0], layout, directory / name, SCRIPTS[name][1]) for name in names]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Every script on one process, without a layout."""
    load_step_code(["rtp", "fsdp", "ddp", "megatron"])
    describe(scripts.model())  # its trial on a tiny model is remembered by all ranks
    describe(scripts.model(scripts.LlamaForSequenceClassification, num_labels=1))
    return run_ranks(run_all, work_of(None, tmp_path_factory.mktemp("alone"), SCRIPTS), num_ranks=1)[0]


def hold_to(alone, found):
    said = [f"{name}: {what}" for name, run in found.items() for what in difference(run, alone[name])]
    assert not said, "\n".join(said)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainers_do_as_on_one_process(alone, tmp_path, layout):
    names = [name for name in SCRIPTS if (layout, name) in QUICK]
    for found in run_ranks(run_all, work_of(layout, tmp_path, names), num_ranks=2):
        hold_to(alone, found)
