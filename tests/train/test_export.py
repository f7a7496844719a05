"""Export: transformers loads what was trained, with the same logits; whole or not at all."""

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from disk import Disk
from safetensors import safe_open
from safetensors.torch import load_file
from stores import url_of
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rotorch
from rotorch.core.errors import ConfigError, RankFailure
from rotorch.testing.ranks import run_ranks
from rotorch.train.checkpoint import export
from rotorch.train.checkpoint.export import export_checkpoint
from rotorch.train.checkpoint.saving import save
from rotorch.train.state import TrainState

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "tiny"
INPUT_IDS = torch.arange(1, 33).view(2, 16)
FAMILIES = ["llama", "qwen3", "gemma2", "gpt_neox", "olmo2", "mixtral"]


def train_and_save(run_dir, family, parallel, tokenizer_file, run):
    with rotorch.on_meta():
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIGS / f"{family}.json"))
    model = rotorch.parallelize(module, parallel).materialize(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.forward_backward({"input_ids": INPUT_IDS, "labels": INPUT_IDS})
    optimizer.step()
    state = TrainState(model=model, optimizer=optimizer, step=1, tokenizer_file=tokenizer_file, run=run)
    save(run_dir, state, keep=1)
    return model.next_token_logits(INPUT_IDS).tolist()


def trained(run_dir, family, *, parallel="single", num_ranks=1, tokenizer_file=None, run=None):
    """Trains one step and saves; returns the logits of the next token."""
    given = run_dir, family, parallel, tokenizer_file, run or {}
    return torch.tensor(run_ranks(train_and_save, *given, num_ranks=num_ranks)[0])


def loaded_logits(directory):
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info  # nothing missing, unexpected, mismatched
    with torch.no_grad():
        return model(input_ids=INPUT_IDS).logits[:, -1].float(), model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_logits(family, tmp_path):
    logits = trained(tmp_path / "run", family)
    done = export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert set(done["files"]) == {"config.json", "model.safetensors"}
    again, model = loaded_logits(tmp_path / "out")
    assert torch.equal(again, logits)
    assert model.config.use_cache
    assert done["step"] == 1
    assert json.loads(json.dumps(done)) == done


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of a model with tied weights on two ranks."""
    path = tmp_path_factory.mktemp("run")
    path.joinpath("logits").write_text(json.dumps(trained(path, "qwen3", parallel="fsdp=2", num_ranks=2).tolist()))
    return path


def test_from_two_ranks_into_several_files(run_dir, tmp_path):
    done = export_checkpoint(run_dir / "checkpoints" / "step-00000001", tmp_path / "out", max_shard_bytes=300_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = {name for name in done["files"] if name.endswith(".safetensors")}
    assert len(shards) > 3
    assert set(index["weight_map"].values()) == shards
    for name in shards:
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            keys = set(file.keys())
            assert keys == {key for key, shard in index["weight_map"].items() if shard == name}
            assert len(keys) == 1 or (tmp_path / "out" / name).stat().st_size < 300_000 + 10_000
    assert "lm_head.weight" not in index["weight_map"]  # tied: once
    expected = torch.tensor(json.loads((run_dir / "logits").read_text()))
    torch.testing.assert_close(loaded_logits(tmp_path / "out")[0], expected, rtol=0, atol=1e-5)


def test_in_another_dtype(run_dir, tmp_path):
    export_checkpoint(run_dir, tmp_path / "out", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match="dtype 'int4': write one of float64, float32"):
        export_checkpoint(run_dir, tmp_path / "other", dtype="int4")


def test_the_tokenizer_comes_along(tokenizer_json, tmp_path):
    trained(tmp_path / "run", "llama", tokenizer_file=tokenizer_json)
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer_json.read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("Once upon a time").input_ids) == "Once upon a time"


def test_the_tokenizer_comes_along_from_a_step_saved_again_in_a_store(tokenizer_json, tmp_path):
    """There it lies under another name, beside which the one of the first save was whole until the end."""
    run = url_of(tmp_path / "run")
    for content in ("{}", tokenizer_json.read_text()):
        (tmp_path / "given.json").write_text(content)
        trained(run, "llama", tokenizer_file=tmp_path / "given.json")
    assert not (tmp_path / "run" / "checkpoints" / "step-00000001" / "tokenizer.json").exists()
    export_checkpoint(run, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer_json.read_bytes()
    assert (tmp_path / "out" / "tokenizer_config.json").exists()


def test_what_is_written_is_on_the_disk_before_it_has_its_name(run_dir, tmp_path, monkeypatch):
    disk, out = Disk(monkeypatch), tmp_path / "new" / "out"
    for _ in range(2):
        export_checkpoint(run_dir, out, force=True)
        disk.check(out)
    disk.check_made_directories()


def test_what_is_there_is_replaced_only_by_force(run_dir, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    export_checkpoint(run_dir, out)  # an empty directory is fine
    (out / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"not empty\. Write another directory, or --force"):
        export_checkpoint(run_dir, out)
    assert (out / "notes.txt").exists()
    export_checkpoint(run_dir, out, force=True)
    assert not (out / "notes.txt").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="a file is in the way"):
        export_checkpoint(run_dir, tmp_path / "file")


def test_a_failing_disk_leaves_nothing(run_dir, tmp_path, monkeypatch):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(RankFailure, match="File too large; nothing was left"):
            export_checkpoint(run_dir, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(RankFailure, match="MiB needed, 1000 B free; nothing was left"):
        export_checkpoint(run_dir, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_refused(run_dir, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run_dir / "checkpoints" / "step-00000001", copy)
    with (copy / "rank-00001.safetensors").open("r+b") as file:
        file.seek(5000)
        file.write(b"\xff\x00\xff")
    with pytest.raises(ConfigError, match=r"rank-00001\.safetensors: damaged"):
        export_checkpoint(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def removed_before_it_is_read(monkeypatch, checkpoint):
    """As by a live run's next saves, after the export has checked all bytes."""
    checked = export.check

    def check(path):
        manifest = checked(path)
        shutil.rmtree(checkpoint)
        return manifest

    monkeypatch.setattr(export, "check", check)


def test_a_checkpoint_that_its_run_removes_meanwhile(run_dir, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(run_dir / "checkpoints" / "step-00000001", copy)
    removed_before_it_is_read(monkeypatch, copy)
    words = rf"{copy}: was removed while it was read; nothing was left\. Export the run's newest one .*train\.keep"
    with pytest.raises(RankFailure, match=words):
        export_checkpoint(copy, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_damaged_after_it_was_checked(run_dir, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(run_dir / "checkpoints" / "step-00000001", copy)
    checked = export.check

    def check(path):
        manifest = checked(path)
        for file in copy.glob("rank-*.safetensors"):
            os.truncate(file, 5000)
        return manifest

    monkeypatch.setattr(export, "check", check)
    with pytest.raises((ConfigError, RankFailure), match="rank-0000"):
        export_checkpoint(copy, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_directory_that_cannot_be_made_is_wrong_input(run_dir):
    with pytest.raises(ConfigError, match=r"/proc/x: No such file or directory\. Write another directory"):
        export_checkpoint(run_dir, Path("/proc/x"))


def save_plain(run_dir):
    model = rotorch.parallelize(nn.Linear(4, 4), "single", plan={})
    save(run_dir, TrainState(model=model), keep=1)


def test_a_plain_module_has_no_such_form(tmp_path):
    run_ranks(save_plain, tmp_path, num_ranks=1)
    with pytest.raises(ConfigError, match="holds a Linear without a Hugging Face config"):
        export_checkpoint(tmp_path, tmp_path / "out")


def test_no_checkpoint(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="a run without a whole checkpoint"):
        export_checkpoint(tmp_path, tmp_path / "out")
    with pytest.raises(ConfigError, match="no such directory"):
        export_checkpoint(tmp_path / "nothing", tmp_path / "out")


def load_and_save(run_dir, published, parallel):
    with rotorch.on_meta():
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(published))
    model = rotorch.parallelize(module, parallel).materialize(seed=0).load(str(published))
    save(run_dir, TrainState(model=model), keep=1)


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 30_000])
def test_experts_come_out_one_by_one_as_they_were_published(tmp_path, warm, max_shard_bytes):
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIGS / "mixtral.json"))
    original.save_pretrained(tmp_path / "published")
    run_ranks(load_and_save, tmp_path / "run", tmp_path / "published", "rtp=2", num_ranks=2)
    done = export_checkpoint(tmp_path / "run", tmp_path / "out", max_shard_bytes=max_shard_bytes)
    theirs = load_file(tmp_path / "published" / "model.safetensors")
    ours = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        ours |= load_file(file)
    assert ours.keys() == theirs.keys() and done["num_tensors"] == len(theirs)
    assert any(".experts.1." in name for name in ours)
    assert all(ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in theirs)
    _, model = loaded_logits(tmp_path / "out")
    again = model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in original.state_dict().items())


@pytest.mark.parametrize("text", ["plain", "naïve café ☕ \n\t\r", "\x00\x7f\x80\xad\xff", "  two  spaces "])
def test_the_tokenizer_of_bytes_is_that_of_the_run(text, tmp_path):
    from transformers import AutoTokenizer

    from rotorch.train.checkpoint.byte_tokenizer import byte_tokenizer, tokenizer_config
    from rotorch.train.data.tokens import ByteTokens

    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(longest=32)))
    opened, ours = AutoTokenizer.from_pretrained(tmp_path), ByteTokens()
    assert opened(text).input_ids == ours.encode(text) and opened.decode(ours.encode(text)) == text
    assert opened.eos_token_id == ours.end_id and len(opened) == ours.vocab_size and opened.model_max_length == 32


def test_a_run_on_bytes_brings_their_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    trained(tmp_path / "run", "llama", run={"data": {"tokenizer": "bytes"}})
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([82, 84, 80]) == "RTP"
