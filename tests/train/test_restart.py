"""Ranks that are killed, and a run that goes on without being asked to. Real processes throughout."""

import os
import signal

import pytest
from commands import Command, rotorch, wait_until, write_run

from rotorch.train.directories import latest
from rotorch.train.metrics import read_metrics

EXACT = "rtp=2[transport=send_receive]"
"""Over shared memory the last bits of a gradient depend on which rank comes first."""
SETTINGS = ["train.steps=30", "train.checkpoint_every=4", "train.keep=3"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, warm):
    directory = tmp_path_factory.mktemp("undisturbed")
    command = rotorch(directory / "log", "train", write_run(directory), "--parallel", EXACT, *SETTINGS)
    assert command.code == 0, command.stderr
    return losses(directory / "run")


def losses(run):
    return [(line["step"], line["loss"]) for line in read_metrics(run)]


def kill(command, rank, *, run, after_step):
    """Kills a rank of those that run now, once they have come as far."""
    wait_until(lambda: len(read_metrics(run)) >= after_step and len(command.ranks()) > rank, what=f"step {after_step}")
    os.kill(command.ranks()[rank], signal.SIGKILL)


def test_a_run_goes_on_from_its_last_checkpoint(undisturbed, tmp_path):
    run_toml = write_run(tmp_path)
    command = Command(tmp_path / "log", "train", run_toml, "--parallel", EXACT, *SETTINGS, "--max-restarts=2")
    kill(command, 1, run=tmp_path / "run", after_step=6)
    assert command.wait() == 0, command.stderr
    (told,) = command.stderr.strip().splitlines()
    assert told.startswith("rotorch: rank 1 was killed by SIGKILL") and "(restart 1 of 2)" in told
    assert "Going on from step " in told
    assert losses(tmp_path / "run") == undisturbed
    assert command.left() == []


def test_a_run_that_does_not_get_on_takes_fewer_ranks(undisturbed, tmp_path):
    run_toml = write_run(tmp_path)
    settings = ["train.steps=30", "--max-restarts=3", "--elastic=1:2"]
    command = Command(tmp_path / "log", "train", run_toml, "--parallel", EXACT, *settings)
    kill(command, 0, run=tmp_path / "run", after_step=2)
    wait_until(lambda: "restart 1 of 3" in command.stderr, what="a restart")
    kill(command, 1, run=tmp_path / "run", after_step=0)
    assert command.wait() == 0, command.stderr
    first, second = command.stderr.strip().splitlines()
    assert "Going on from the beginning with rtp=2[transport=send_receive] (restart 1 of 3)" in first
    assert "Going on from the beginning with rtp=1[transport=send_receive] (restart 2 of 3)" in second
    for (step, ours), (_, theirs) in zip(losses(tmp_path / "run"), undisturbed, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5), step


def test_it_ends_when_it_was_restarted_often_enough(tmp_path, warm):
    (tmp_path / "run").mkdir()
    settings = ["--parallel", "rtp=2", "--max-restarts=1", "train.steps=100000", "train.checkpoint_every=2"]
    command = Command(tmp_path / "log", "train", write_run(tmp_path), *settings)
    kill(command, 0, run=tmp_path / "run", after_step=3)
    wait_until(lambda: "restart 1 of 1" in command.stderr, what="a restart")
    step = int(latest(tmp_path / "run").name.split("-")[1])
    kill(command, 1, run=tmp_path / "run", after_step=step + 1)
    assert command.wait() == 3
    last = command.stderr.strip().splitlines()[-1]
    assert last.startswith("rotorch: rank 1 was killed by SIGKILL") and "after 1 restarts" in last
    assert command.left() == []


def test_nothing_is_restarted_after_ctrl_c(tmp_path, warm):
    settings = ["--parallel", "ddp=2", "--max-restarts=5", "train.steps=100000", "train.timeout_s=60"]
    command = Command(tmp_path / "log", "train", write_run(tmp_path), *settings)
    wait_until(lambda: len(read_metrics(tmp_path / "run")) >= 2, what="two steps")
    os.kill(command.ranks()[1], signal.SIGSTOP)  # so that it cannot save
    os.kill(command.pid, signal.SIGTERM)
    os.kill(command.ranks()[1], signal.SIGKILL)
    assert command.wait() == 3
    assert "restart" not in command.stderr and command.left() == []


@pytest.mark.parametrize(
    ("elastic", "message"),
    [("2", "write the least and the most ranks"), ("3:2", "write the least"), ("3:4", "takes 2 ranks")],
)
def test_ranks_that_it_may_not_have_are_refused(tmp_path, elastic, message):
    command = rotorch(tmp_path / "log", "train", write_run(tmp_path), "--parallel=rtp=2", f"--elastic={elastic}")
    assert command.code == 2 and message in command.stderr
