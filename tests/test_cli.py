"""The command line: a wrong input gives one line and exit code 2, before a rank starts or anything is written."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rotorch import cli
from rotorch.core.errors import ConfigError
from rotorch.train.launch.joining import JobRank

sys.path.insert(0, str(Path(__file__).parent / "train"))
from commands import rotorch, write_run

ROOT = Path(__file__).resolve().parents[1]
SRC = str(ROOT / "src")


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def directory(tmp_path, warm, monkeypatch):
    """A directory with a run that is all right; no rank may start in these tests."""
    from rotorch.train import run

    def no_rank(*args, **kwargs):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(run, "launch", no_rank)
    monkeypatch.setattr(run, "run_as_rank", no_rank)
    for name in ("TOKENIZERS_PARALLELISM", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    write_run(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, warm):
    """A run that was carried out."""
    directory = tmp_path_factory.mktemp("finished")
    done = rotorch(directory / "log", "train", write_run(directory), "train.checkpoint_every=3")
    assert done.code == 0, done.stderr
    shutil.rmtree(directory / "log")
    return directory


@pytest.fixture
def again(finished, directory):
    """A copy of the finished run."""
    shutil.copytree(finished, directory, dirs_exist_ok=True)
    return directory


def everything(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


def refused(capsys, directory, *arguments):
    """Runs a command that must be refused; returns its one line."""
    before = everything(directory)
    capsys.readouterr()
    assert cli.run([str(a) for a in arguments]) == 2
    assert everything(directory) == before
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and printed.err.startswith("rotorch: ")
    return printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.stpes=3"], "did you mean 'train.steps'?"),
        (["--parallel", "rtp=0"], "'rtp=0' needs a positive number of ranks"),
        (["--parallel", "rpt=2"], "unknown strategy 'rpt' (did you mean 'rtp'?)"),
        (["--parallel", "rtp=2,ddp=2"], "cannot be composed"),
        (["--parallel", "rtp=5", "--nproc", "2"], "needs 5 ranks, but there are 2"),
        (["--parallel", "ddp=2,rtp=2", "--nproc", "3"], "needs 2 x 2 = 4 ranks, but there are 3"),
        (["--nproc", "0"], "write a positive number of ranks"),
        (["--parallel", "rtp=3", "train.global_batch=8"], "batch ranks. Write train.global_batch=6"),
        (["--parallel", "rtp=300"], "ranks would hold nothing"),
        (["data.source=nowhere.txt"], "no such file or directory"),
        (["data.source=empty.txt"], "empty"),
        (["data.tokenizer=nowhere.json"], "no such file"),
        (["data.sequence_length=64"], "longer than the model's max_position_embeddings 32"),
        (["data.sequence_length=30", "data.source=short.txt"], "Write sequence_length = "),
        (["model.config.vocab_size=200"], "the tokens need 257 ids, the model has 200"),
        (["model.config.model_type=lama"], "knows no model_type 'lama'"),
        (["model.config=nowhere"], "Write the path of a Hugging Face config.json"),
        (["model.init=nowhere"], "no directory"),
        (["model.init=."], "holds no *.safetensors"),
        (["train.out=text.txt"], "is a file"),
        (["train.out=full"], "is not empty, and is no run of rotorch"),
        (["train.device=cuda"], "torch sees no CUDA device"),
        (["--resume"], "holds no run to go on with"),
        (["--json", "nowhere/summary.json"], "its directory is missing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_run_that_cannot_work_is_refused(capsys, directory, monkeypatch, arguments, words):
    if "cuda" in arguments[0]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(directory)
    (directory / "empty.txt").touch()
    (directory / "short.txt").write_text("too short for that")
    (directory / "full").mkdir()
    (directory / "full" / "thesis.tex").touch()
    assert words in refused(capsys, directory, "train", "run.toml", *arguments)


def test_a_process_whose_ranks_could_not_work_has_a_new_one_start_them(directory, monkeypatch):
    reasons = []
    monkeypatch.setattr("rotorch.train.run.call_fresh", lambda *_, why, **__: reasons.append(why) or True)
    command = ["train", str(directory / "run.toml")]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert cli.run(command) == 0
    finally:
        dist.destroy_process_group()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert cli.run(command) == 0
    assert reasons == [
        "it is rank 0 of 1 of a process group already",
        "it has used a GPU, or asked torch for one",
    ]


@pytest.mark.parametrize(
    ("command", "does"),
    [
        (["verify", "model", "--parallel", "rtp=2"], "rotorch.testing.verify.verify"),
        (["zoo", "LlamaConfig"], "rotorch.testing.zoo.run_zoo"),
    ],
    ids=["verify", "zoo"],
)
def test_what_computes_on_cpu_before_it_forks_sees_no_gpu(monkeypatch, command, does):
    seen = []

    def look(*_, **__):
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        raise ConfigError("seen enough")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(does, look)
    assert cli.run(command) == 2
    assert seen == [""]


def test_sizes_are_held_against_the_ranks_of_torchrun(capsys, directory, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(JobRank, "compare", lambda *_, **__: None)
    monkeypatch.setattr(JobRank, "tell", lambda *_: None)
    assert "there are 3" in refused(capsys, directory, "train", directory / "run.toml", "--parallel", "rtp=2")


def test_a_disk_without_room_is_noticed(capsys, directory, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10_000))
    line = refused(capsys, directory, "train", directory / "run.toml")
    assert "free" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "already holds a run. Write --resume"),
        (["--resume"], "nothing is left to do, by the sizes of its files. Write train.steps=... with more steps; or"),
        (["--resume"], "step-00000006 --contents, and if it is damaged, remove it"),
        (["--resume", "train.steps=9", "model.config.num_hidden_layers=2"], "num_hidden_layers is 1 there and 2 here"),
        (["--resume", "train.steps=9", "train.seed=4"], "Write train.seed=3"),
        (["--resume", "train.steps=9", "train.micro_batch=4"], "Write train.global_batch=2"),
        (["--resume", "train.steps=9", "data.sequence_length=8"], "Write data.sequence_length=16"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_another_run_is_not_touched(capsys, again, arguments, words):
    assert words in refused(capsys, again, "train", again / "run.toml", *arguments)


def test_another_text_is_no_resume(capsys, again):
    (again / "text.txt").write_text("Something else altogether. " * 100)
    assert cli.run(["train", str(again / "run.toml"), "--resume", "train.steps=9"]) == 2
    assert "is not the text that" in capsys.readouterr().err


def newest(directory):
    return sorted((directory / "run" / "checkpoints").glob("step-*"))[-1]


def test_a_truncated_checkpoint_is_refused_when_there_is_no_other(capsys, again, caplog):
    for path in (again / "run" / "checkpoints").glob("step-*/rank-*.safetensors"):
        path.write_bytes(path.read_bytes()[:-10])
    line = refused(capsys, again, "train", again / "run.toml", "--resume", "train.steps=9")
    assert "truncated" in line and str(newest(again)) in line and line.endswith("and the run begins anew\n")
    assert "truncated" not in caplog.text  # said once


def test_a_foreign_checkpoint_is_refused(capsys, again):
    for path in (again / "run" / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    foreign = again / "run" / "checkpoints" / "step-00000004"
    foreign.mkdir()
    (foreign / ".metadata").touch()
    line = refused(capsys, again, "train", again / "run.toml", "--resume", "train.steps=9")
    assert "of another program" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian", "run.toml"], "No such command 'trian'"),
        (["train"], "Missing argument"),
        (["train", "run.toml", "--nprocs", "2"], "--nprocs"),
        (["train", "nowhere.toml"], "no such file"),
        (["verify", "nowhere.json", "--parallel", "rtp=2"], "nowhere.json"),
        (["bench", "run.toml"], "--parallel"),
        (["export", "nowhere", "out"], "nowhere"),
        (["inspect", "nowhere"], "nowhere"),
        (["schedule", "zeropp"], "Missing option"),
        (["schedule", "zeropq", "--stages", "2", "--micro-batches", "4"], "did you mean 'zeropp'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_commands(capsys, directory, monkeypatch, arguments, words):
    monkeypatch.chdir(directory)
    assert words in refused(capsys, directory, *arguments)


def test_the_command_needs_no_torch_to_refuse_or_to_inspect(tmp_path, finished):
    code = (
        "import sys; from rotorch import cli; c = cli.run(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(c)"
    )
    environment = {**os.environ, "PYTHONPATH": SRC}
    run = write_run(tmp_path)
    inspecting = (["inspect", str(finished / "run"), "--contents"], 0)
    for arguments, expected in ((["--version"], 0), (["train", str(run), "--parallel", "rpt=2"], 2), inspecting):
        command = [sys.executable, "-W", "error", "-c", code, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == expected, done.stderr
        assert "Traceback" not in done.stderr and done.stderr.count("\n") == (expected != 0)


def test_help_lists_every_command(capsys):
    assert cli.run(["--help"]) == 0
    printed = capsys.readouterr().out
    for command in ("init", "train", "eval", "generate", "verify", "bench", "schedule", "export", "inspect", "doctor"):
        assert f"  {command} " in printed
        assert cli.run([command, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


def test_doctor_says_what_there_is(capsys, tmp_path):
    assert cli.run(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["torch"] == torch.__version__ and "cpu" in found["devices"]
    assert {"shared_memory", "send_receive"} <= found["transports"].keys()
    assert torch.__version__ in capsys.readouterr().out


def test_inspect_and_export_a_run(capsys, finished, tmp_path):
    assert cli.run(["inspect", str(finished / "run"), "--json", str(tmp_path / "inspect.json")]) == 0
    assert json.loads((tmp_path / "inspect.json").read_text())["step"] == 6
    assert (
        cli.run(["export", str(finished / "run"), str(tmp_path / "hf"), "--json", str(tmp_path / "export.json")]) == 0
    )
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "export.json").read_text())["step"] == 6
    assert "step" in capsys.readouterr().out


def test_the_demo_is_a_run_of_three_million_parameters_on_two_ranks(tmp_path, warm):
    from rotorch.run_config import load_run_config
    from rotorch.train.checks.preflight import check_run

    overrides = [f"train.out={tmp_path / 'demo'}", f"data.cache_dir={tmp_path / 'cache'}"]
    checked = check_run(load_run_config(ROOT / "configs" / "demo.toml", overrides=overrides), nproc=2)
    assert str(checked.strategies[0]) == "rtp=2"
    assert checked.spec.num_parameters >= 3_000_000
