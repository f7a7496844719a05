"""Ranks whose torchrun is killed while they start. Real processes, which nothing ends but the kernel."""

import os
import signal
import sys
import time

import pytest
from commands import wait_until, write_run

from rotorch import cli, run_config
from rotorch.process.forking import forking
from rotorch.run_config import load_run_config
from rotorch.train import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="to die with one's parent is Linux's")


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("started_by", ["command", "script"])
def test_a_rank_that_is_still_starting_does_not_outlive_torchrun(started_by, tmp_path, monkeypatch):
    """It is in what it does first: a command reads its file, before torch is loaded; a script has its checks."""
    config = load_run_config(write_run(tmp_path))

    def starting(*args, **options):
        (tmp_path / "rank").write_text(str(os.getpid()))
        os.rename(tmp_path / "rank", tmp_path / "starting")
        time.sleep(600)

    for name, value in {"TORCHELASTIC_RUN_ID": "ours", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")  # nobody gets as far as that
    if started_by == "command":
        monkeypatch.setattr(run_config, "load_run_config", starting)
    monkeypatch.setattr(run, "as_started", starting)
    with forking():
        torchrun = os.fork()
    if torchrun == 0:
        if os.fork() == 0:
            cli.run(["train", str(tmp_path / "run.toml")]) if started_by == "command" else run.start(config)
            os._exit(1)
        time.sleep(600)
        os._exit(1)
    wait_until((tmp_path / "starting").exists, what="a rank that starts")
    rank = int((tmp_path / "starting").read_text())
    assert is_alive(rank)
    os.kill(torchrun, signal.SIGKILL)
    os.waitpid(torchrun, 0)
    try:
        wait_until(lambda: not is_alive(rank), what="the end of the rank", deadline_s=10)
    finally:
        if is_alive(rank):
            os.kill(rank, signal.SIGKILL)
