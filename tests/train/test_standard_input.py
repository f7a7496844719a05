"""`rotorch train -`: the run file from standard input."""

import io
import sys
from types import SimpleNamespace

import pytest
from commands import write_run

from rotorch import cli
from rotorch.cli.options import standard_input
from rotorch.core.errors import ConfigError
from rotorch.run_config import load_run_config
from rotorch.train.metrics import read_metrics


def given(monkeypatch, content):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_run_file_in_standard_input_is_that_of_the_working_directory(tmp_path, monkeypatch):
    content = write_run(tmp_path).read_bytes()
    monkeypatch.chdir(tmp_path)
    given(monkeypatch, content)
    config = load_run_config("stdin", content=standard_input(job=None))
    assert config.data.source == str(tmp_path / "text.txt") and config.train.out == str(tmp_path / "run")
    without = load_run_config("stdin", content=content.replace(b'out = "run"', b""))
    assert without.train.out == str(tmp_path / "runs" / "stdin")


def test_it_is_trained(tmp_path, monkeypatch, warm):
    monkeypatch.chdir(tmp_path)
    given(monkeypatch, write_run(tmp_path).read_bytes())
    assert cli.run(["train", "-", "train.steps=2"]) == 0
    assert len(read_metrics(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b"[train", "stdin: not valid TOML"),
        (b"[train]\nsteps=1", "stdin: model"),
    ],
)
def test_what_is_no_run_is_refused_in_a_line(content, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given(monkeypatch, content)
    assert cli.run(["train", "-"]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_ranks_of_a_job_cannot_share_it(monkeypatch):
    given(monkeypatch, b"[train]")
    with pytest.raises(ConfigError, match="cannot share standard input"):
        standard_input(job=SimpleNamespace(num_ranks=2))
