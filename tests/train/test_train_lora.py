"""`rotorch train` with [lora]: adapters are trained beside a published model, resumed, measured, exported, merged."""

import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import rotorch
from rotorch import cli
from rotorch.core.errors import ConfigError
from rotorch.models.lora import add_lora
from rotorch.run_config import load_run_config
from rotorch.train.checkpoint import saving as checkpoint
from rotorch.train.checkpoint.directories import latest
from rotorch.train.checkpoint.export import export_checkpoint
from rotorch.train.checkpoint.manifest import MODEL, read_manifest
from rotorch.train.checks.preflight import check_run
from rotorch.train.state import TrainState

sys.path.insert(0, str(Path(__file__).parent))
from commands import CONFIG, write_run
from commands import rotorch as command

peft = pytest.importorskip("peft")

LORA = '\n[lora]\nrank = 2\ntargets = ["q_proj", "o_proj", "down_proj"]\n'
IDS = torch.arange(32).view(2, 16)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A model of one layer, of 4 heads in 2 groups, some of whose zeros are negative."""
    directory = tmp_path_factory.mktemp("published")
    torch.manual_seed(1)
    config = tomllib.loads(CONFIG)["model"]["config"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, :4] = -0.0
    model.save_pretrained(directory)
    return directory


def write_lora_run(directory, published, lora=LORA):
    """A run of adapters beside `published`, into `directory`/run."""
    directory.mkdir(exist_ok=True)
    path = write_run(directory)
    text = path.read_text()
    text = text[text.index("[data]") :].replace("lr = 5e-3", 'lr = 0.1\nschedule = "constant"')
    path.write_text(f'[model]\ninit = "{published}"\n' + text + lora)
    return path


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, published, warm):
    """One process: six steps with four samples in each."""
    directory = tmp_path_factory.mktemp("alone")
    run = write_lora_run(directory, published)
    done = command(directory / "log", "train", run, "train.global_batch=4", f"--json={directory / 'end.json'}")
    assert done.code == 0, done.stderr
    return directory


def test_only_adapters_are_trained_and_measured(alone, published):
    trained = losses(alone / "run")
    assert len(trained) == 6 and trained[-1] < trained[0]
    end = json.loads((alone / "end.json").read_text())
    assert 0 < end["held_out_bits_per_byte"] < 20
    assert end["num_trained_parameters"] == 2 * (16 + 16) * 2 + 2 * (32 + 16) < end["num_parameters"]
    manifest = read_manifest(alone / "run" / "checkpoints" / "step-00000006")
    moments = {name for name in manifest.tensors if name.startswith("optimizer/exp_avg/")}
    assert len(moments) == 6 and all(".lora_" in name for name in moments)
    weights = load_file(published / "model.safetensors")
    export_checkpoint(alone / "run", alone / "merged", merge=True)
    merged = load_file(alone / "merged" / "model.safetensors")
    assert merged.keys() == weights.keys()
    changed = {name for name, value in weights.items() if not torch.equal(value.view(torch.int32), bits(merged[name]))}
    assert changed == {f"model.layers.0.{name}.weight" for name in TARGETS}


TARGETS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")


def bits(tensor):
    return tensor.view(torch.int32)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_peft_loads_what_is_exported_and_computes_what_the_merged_model_does(alone, published, capsys):
    assert cli.run(["export", str(alone / "run"), str(alone / "adapter")]) == 0
    assert cli.run(["export", str(alone / "run"), str(alone / "whole"), "--merge"]) == 0
    assert {file.name for file in (alone / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    base = AutoModelForCausalLM.from_pretrained(published)
    model = peft.PeftModel.from_pretrained(base, alone / "adapter")
    found = peft.AutoPeftModelForCausalLM.from_pretrained(alone / "adapter")  # it knows its base model
    merged = AutoModelForCausalLM.from_pretrained(alone / "whole")
    with torch.no_grad():
        logits = model(input_ids=IDS).logits
        assert torch.equal(found(input_ids=IDS).logits, logits)
        assert torch.allclose(merged(input_ids=IDS).logits, logits, atol=1e-6)
        assert not torch.allclose(
            AutoModelForCausalLM.from_pretrained(published)(input_ids=IDS).logits, logits, atol=1e-4
        )
    theirs = model.merge_and_unload().state_dict()
    assert all(torch.allclose(theirs[name], value, atol=1e-7) for name, value in merged.state_dict().items())


@pytest.mark.parametrize(
    ("parallel", "micro"),
    [
        pytest.param("rtp=2", 2, marks=pytest.mark.slow),  # the test below goes on under it
        pytest.param("rtp=4", 1, marks=pytest.mark.slow),
        ("fsdp=2", 2),
        pytest.param("ddp=2,rtp=2", 1, marks=pytest.mark.slow),
    ],
)
def test_any_layout_has_the_losses_of_one_process(alone, published, tmp_path, warm, parallel, micro):
    run = write_lora_run(tmp_path, published)
    options = ("--parallel", parallel, f"train.micro_batch={micro}", "train.global_batch=4")
    done = command(tmp_path / "log", "train", run, *options)
    assert done.code == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(alone / "run"), rel=1e-5)


def test_it_goes_on_where_it_stopped_on_other_ranks_too(alone, published, tmp_path, warm):
    run = write_lora_run(tmp_path, published)
    told = ("train", run, "train.global_batch=4")
    assert command(tmp_path / "log", *told, "train.steps=3").code == 0
    done = command(tmp_path / "log", *told, "--parallel", "rtp=2", "--resume")
    assert done.code == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(alone / "run"), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("lora.rank=4", "lora.rank = 2, and here it is 4. Write lora.rank as it was"),
        ("lora.alpha=2", "lora.alpha = 4, and here it is 2.0. Write lora.alpha as it was"),
        ("lora.targets=['q_proj']", "lora.targets = ['q_proj', 'o_proj', 'down_proj'], and here it is ['q_proj']"),
    ],
)
def test_other_adapters_are_not_resumed(alone, capsys, change, words):
    code = cli.run(["train", str(alone / "run.toml"), "train.global_batch=4", "train.steps=9", change, "--resume"])
    assert code == 2 and words in capsys.readouterr().err


def test_the_same_adapters_may_be_written_otherwise(alone):
    """Twice the rank is what alpha is by default, and targets have no order."""
    options = ["lora.alpha=4", "lora.targets=['down_proj', 'self_attn.q_proj', 'o_proj']", "lora.dropout=0.5"]
    config = load_run_config(alone / "run.toml", overrides=["train.global_batch=4", "train.steps=9", *options])
    assert check_run(config, resume=True).resume is not None


def test_a_checkpoint_is_not_loaded_beside_adapters_of_another_scale(alone, published):
    model = add_lora(AutoModelForCausalLM.from_pretrained(published), rank=2, alpha=3.0, targets=TARGETS)
    state = TrainState(model=rotorch.parallelize(model, "single"))
    with pytest.raises(ConfigError, match=r"scaled by 2 \(alpha / rank\), this model's by 1\.5\. Write alpha=4"):
        checkpoint.load(latest(alone / "run"), state)


def test_a_run_without_adapters_is_not_resumed_with_them(alone, published, capsys, tmp_path):
    bare = tmp_path / "bare.toml"
    bare.write_text((alone / "run.toml").read_text().replace(LORA, "").replace('"text.txt"', f'"{alone}/text.txt"'))
    arguments = ["train", str(bare), "train.global_batch=4", "train.steps=9", f"train.out={alone / 'run'}", "--resume"]
    assert cli.run(arguments) == 2
    assert "was written by a run with adapters. Write its [lora]" in capsys.readouterr().err


def test_what_adds_nothing_leaves_every_bit_as_it_was(published, tmp_path, warm):
    """Also the sign of a zero."""
    run = write_lora_run(tmp_path, published, lora="\n[lora]\nrank = 2\n")  # beside all linear layers but the head
    done = command(
        tmp_path / "log",
        "train",
        run,
        "--parallel",
        "rtp=2",
        "train.steps=1",
        "optimizer.warmup_steps=1",
        "optimizer.lr=1e-60",
    )
    assert done.code == 0, done.stderr
    manifest = read_manifest(tmp_path / "run" / "checkpoints" / "step-00000001")
    assert sum(".lora_A." in name for name in manifest.names(MODEL)) == 7
    export_checkpoint(tmp_path / "run", tmp_path / "out", merge=True)
    before, after = load_file(published / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(bits(value), bits(after[name])), name


def test_dropout_is_for_training(alone, published, tmp_path, warm):
    """The first step is that of a run without it, since new adapters add nothing; what is exported drops nothing."""
    run = write_lora_run(tmp_path, published, lora=LORA + "dropout = 0.5\n")
    assert command(tmp_path / "log", "train", run, "train.global_batch=4").code == 0
    dropped, kept = losses(tmp_path / "run"), losses(alone / "run")
    assert dropped[0] == kept[0]
    assert all(abs(a - b) > 1e-5 for a, b in zip(dropped[2:], kept[2:], strict=True))
    export_checkpoint(tmp_path / "run", tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_dropout"] == 0.5


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("lora.rank=0", "lora.rank = 0: input should be greater than 0"),
        ("lora.rank=-3", "lora.rank = -3: input should be greater than 0"),
        ("lora.targets=['q_prj']", "target 'q_prj' names no layer of LlamaForCausalLM (did you mean 'q_proj'?)"),
        ("lora.targets=['mlp']", "names 'model.layers.0.mlp', a LlamaMLP; adapters go beside linear layers"),
        ("lora.targets=['embed_tokens']", "names 'model.embed_tokens', a Embedding"),
        ("lora.targets=['lm_head']", "is the head"),
        ("lora.targets=[]", "lora.targets"),
        ("lora.alhpa=2", "unknown key 'lora.alhpa' (did you mean 'lora.alpha'?)"),
        ("model.init=random", "Write model.init=... with its directory, or leave [lora] out"),
    ],
)
def test_what_is_wrong_is_said_before_a_rank_starts(published, tmp_path, capsys, monkeypatch, override, words):
    from rotorch.train import run as train_run

    monkeypatch.setattr(train_run, "launch", lambda *a, **k: pytest.fail("a rank was started"))
    run = write_lora_run(tmp_path, published)
    threads = torch.get_num_threads()
    try:
        code = cli.run(["train", str(run), f"model.config={published}", override])
    finally:
        torch.set_num_threads(threads)
    line = capsys.readouterr().err
    assert code == 2 and line.count("\n") == 1 and words in line, line
    assert not (tmp_path / "run").exists()


def test_without_peft(published, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    assert cli.run(["train", str(write_lora_run(tmp_path, published))]) == 2
    assert capsys.readouterr().err == "rotorch: lora: needs the package peft. Write pip install 'rotorch[lora]'\n"


def test_a_model_without_adapters_has_none_to_merge(tmp_path, warm, capsys):
    run = write_run(tmp_path)
    assert command(tmp_path / "log", "train", run, "train.steps=1", "optimizer.warmup_steps=1").code == 0
    assert cli.run(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--merge"]) == 2
    assert "has no adapters to merge. Leave --merge out" in capsys.readouterr().err


def test_a_bench_does_not_pass_over_adapters(published, tmp_path, capsys):
    run = write_lora_run(tmp_path, published)
    assert cli.run(["bench", str(run), "--parallel", "rtp=2"]) == 2
    assert capsys.readouterr().err == "rotorch: bench: adapters are not measured. Leave [lora] out\n"
