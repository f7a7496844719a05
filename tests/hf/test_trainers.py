"""Unmodified trainers of transformers and TRL under layouts: the numbers of one process, and its checkpoints."""

import re
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")

import scripts
import torch
from safetensors.torch import load_file
from scripts import difference, resumed, run_all

from rotorch.core.errors import ConfigError
from rotorch.hold.put_off import PutOffSums
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
    "dpo of a model that is parallel": (scripts.dpo, {"given": True}),
    "reward": (scripts.reward, {}),
    "grpo": (scripts.grpo, {}),
    "stream": (scripts.of_a_stream, {}),
    "texts from texts": (scripts.texts_from_texts, {}),
    "classes": (scripts.classes, {}),
}
AFTERWARDS = dict(zip(LAYOUTS, ("fsdp=2", "megatron=2", MESSAGES, "rtp=2", "ddp=2"), strict=True))
"""Under which layout a run that was begun under another one is resumed."""
RESUMED = ("trainer", "sft with adapters")
FILES = "config.json generation_config.json model.safetensors optimizer rng_state_0.pth rng_state_1.pth scheduler.pt"
FILES = [*FILES.split(), "trainer_state.json", "training_args.bin"]
OTHERS = ("stream", "dpo of a model that is parallel", "sft")  # of the last one others here are more
QUICK = {(MESSAGES, name) for name in SCRIPTS if name not in OTHERS} | {
    (layout, name) for layout in LAYOUTS for name in ("trainer", "sft with adapters")
}
QUICK |= {("rtp=2", "stream"), ("fsdp=2", "dpo")}


def work_of(layout, directory, names):
    return [(name, SCRIPTS[name][0], layout, directory / name, SCRIPTS[name][1]) for name in names]


def work_resumed(layout, directory):
    """The same from their checkpoints in the middle."""
    return [
        (f"{name} resumed", SCRIPTS[name][0], layout, directory / name, SCRIPTS[name][1] | {"resume": True})
        for name in RESUMED
    ]


@pytest.fixture(scope="module")
def alone_in(tmp_path_factory):
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def alone(alone_in):
    """Every script on one process, without a layout."""
    load_step_code(["rtp", "fsdp", "ddp", "megatron"])
    describe(scripts.model())  # its trial on a tiny model is remembered by all ranks
    describe(scripts.model(scripts.LlamaForSequenceClassification, num_labels=1))
    describe(scripts.encoded())
    return run_ranks(run_all, work_of(None, alone_in, SCRIPTS), num_ranks=1)[0]


def hold_to(alone, found):
    said = []
    for name, run in found.items():
        expected = alone[name.removesuffix(" resumed")]
        if name not in alone:
            run, expected = resumed(run), resumed(expected)
        said += [f"{name}: {what}" for what in difference(run, expected)]
    assert not said, "\n".join(said)


@pytest.mark.parametrize(
    "layout", ["rtp=2", MESSAGES, *(pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS[2:])]
)
def test_trainers_do_as_on_one_process(alone, alone_in, tmp_path, layout):
    names = [name for name in SCRIPTS if (layout, name) in QUICK]
    work = work_of(layout, tmp_path, names) + work_resumed(AFTERWARDS[layout], tmp_path)
    for found in run_ranks(run_all, work, num_ranks=2):
        hold_to(alone, found)
    checkpoint = tmp_path / "trainer" / "checkpoint-8"
    assert sorted(path.name for path in checkpoint.iterdir()) == FILES
    values = load_file(checkpoint / "model.safetensors")
    for name, value in load_file(alone_in / "trainer" / "checkpoint-8" / "model.safetensors").items():
        assert torch.allclose(values[name], value, rtol=0, atol=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_rest_of_them_too(alone, tmp_path, layout):
    names = [name for name in SCRIPTS if (layout, name) not in {*QUICK, ("megatron=2", "grpo")}]
    for found in run_ranks(run_all, work_of(layout, tmp_path, names), num_ranks=2):
        hold_to(alone, found)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp=2,megatron=2", "ddp=2,rtp=2"])
def test_four_ranks_too(alone, tmp_path, layout):
    for found in run_ranks(run_all, work_of(layout, tmp_path, RESUMED), num_ranks=4):
        hold_to(alone, found)


def put_off(directory):
    """Of each backward of a trainer, whether it has left its sums over replicas to a later one."""
    seen, end = [], PutOffSums.end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PutOffSums, "end", lambda self, weights: (seen.append(self.asked), end(self, weights)))
        scripts.plain_trainer("ddp=2", directory)
    return seen


@pytest.mark.slow
def test_all_but_the_last_micro_batch_of_a_step_leave_their_sums_to_it(tmp_path):
    for seen in run_ranks(put_off, tmp_path, num_ranks=2):
        assert seen[:4] == [True, True, True, False] and seen.count(False) == 8  # the last one of an epoch has fewer


def test_a_run_of_two_ranks_goes_on_on_one_and_back(alone, tmp_path):
    run_ranks(run_all, work_of("rtp=2", tmp_path, RESUMED), num_ranks=2)
    hold_to(alone, run_ranks(run_all, work_resumed("single", tmp_path), num_ranks=1)[0])
    for found in run_ranks(run_all, work_resumed("fsdp=2", tmp_path), num_ranks=2):
        hold_to(alone, found)


def test_texts_that_ranks_share_are_refused(alone, tmp_path):
    for found in run_ranks(refused_texts, tmp_path, num_ranks=2):
        assert "GRPOConfig's trainer makes texts" in found and "\n" not in found


def refused_texts(directory):
    with pytest.raises(ConfigError) as caught:
        run_all([("grpo", scripts.grpo, "megatron=2", directory, {})])
    return str(caught.value)


def test_the_optimizers_state_in_one_piece_is_refused(alone, alone_in):
    (found,) = run_ranks(refused, alone_in / "trainer", num_ranks=1)
    assert "optimizer.pt is the optimizer's state in one piece" in found


def refused(directory):
    with pytest.raises(ConfigError) as caught:
        run_all([("trainer", scripts.plain_trainer, "single", directory, {"resume": True})])
    return str(caught.value)


def test_the_programs_on_the_page_run(alone, tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "drop_in.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page.partition("<!-- tests/hf runs these blocks -->")[2], re.DOTALL)
    scripts.model().save_pretrained(tmp_path / "base")
    scripts.tokenizer().save_pretrained(tmp_path / "base")
    for left in run_ranks(
        scripts.run_page,
        [b.replace("path/to/llama", str(tmp_path / "base")) for b in blocks[:4]],
        tmp_path,
        num_ranks=2,
    ):
        late = [f"adapters-{rank}/adapter_model.safetensors" for rank in (0, 1)]
        assert left == [*late, "adapters/adapter_model.safetensors", "base/model.safetensors", "out/model.safetensors"]
