"""Ranks that are killed, and a run that goes on without being asked to. Real processes throughout."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import Command, diverge, rotorch, wait_until, write_run
from failures import seen

from rotorch.core.errors import ConfigError, RankFailure
from rotorch.run_config import load_run_config
from rotorch.strategies import parse_parallel
from rotorch.train.checks.preflight import RUN_FILE
from rotorch.train.launch import restart
from rotorch.train.launch.restart import ELASTIC_RUN, as_started, launch_again
from rotorch.train.metrics import read_metrics

EXACT = "rtp=2[transport=send_receive]"
"""Over shared memory the last bits of a gradient depend on which rank comes first."""
WHEN_KILLED = {
    r"(when memory runs out\)).*?\. Who": r"\1 in step 12, computing forward and backward (rank 0 was in step 12, "
    "computing forward and backward). Who"
}
"""For the page: where ranks were when one of them was killed."""
SETTINGS = ["train.steps=20", "train.checkpoint_every=4", "train.keep=3"]


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
    seen("A run goes on by itself", told, instead=WHEN_KILLED)
    assert losses(tmp_path / "run") == undisturbed
    assert command.left() == []


def test_a_run_that_does_not_get_on_takes_fewer_ranks(undisturbed, tmp_path):
    run_toml = write_run(tmp_path)
    settings = ["train.steps=20", "train.checkpoint_every=1000", "--max-restarts=3", "--elastic=1:2"]
    command = Command(tmp_path / "log", "train", run_toml, "--parallel", EXACT, *settings)
    kill(command, 0, run=tmp_path / "run", after_step=2)
    wait_until(lambda: "restart 1 of 3" in command.stderr, what="a restart")
    kill(command, 1, run=tmp_path / "run", after_step=0)
    assert command.wait() == 0, command.stderr
    first, second = command.stderr.strip().splitlines()
    assert "Going on from the beginning with rtp=2[transport=send_receive] (restart 1 of 3)" in first
    assert "Going on from the beginning with rtp=1[transport=send_receive] (restart 2 of 3)" in second
    seen("A run goes on with fewer ranks", second, instead=WHEN_KILLED)
    for (step, ours), (_, theirs) in zip(losses(tmp_path / "run"), undisturbed, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5), step


@pytest.mark.slow
def test_a_planned_run_that_does_not_get_on_is_planned_for_fewer_ranks(tmp_path, warm):
    settings = ["train.steps=30", "train.checkpoint_every=1000", "--max-restarts=3", "--elastic=1:2", "--nproc=2"]
    command = Command(tmp_path / "log", "train", write_run(tmp_path), "--parallel=auto", *settings)
    kill(command, 0, run=tmp_path / "run", after_step=2)
    wait_until(lambda: "restart 1 of 3" in command.stderr, what="a restart")
    kill(command, 1, run=tmp_path / "run", after_step=0)
    assert command.wait() == 0, command.stderr
    assert "Going on from the beginning with single (restart 2 of 3)" in command.stderr.strip().splitlines()[-1]
    planned = [line for line in command.stdout.splitlines() if " with a micro-batch of " in line]
    assert len(planned) == 2 and planned[1].startswith("auto: single with a micro-batch of")
    assert len(losses(tmp_path / "run")) == 30


def test_it_ends_when_it_was_restarted_often_enough(tmp_path, warm):
    (tmp_path / "run").mkdir()
    settings = ["--parallel", "rtp=2", "--max-restarts=1", "train.steps=100000", "train.checkpoint_every=2"]
    command = Command(tmp_path / "log", "train", write_run(tmp_path), *settings)
    kill(command, 0, run=tmp_path / "run", after_step=3)
    wait_until(lambda: "restart 1 of 1" in command.stderr, what="a restart")
    step = len(read_metrics(tmp_path / "run"))  # of the first attempt, also steps behind its last checkpoint
    kill(command, 1, run=tmp_path / "run", after_step=step + 1)
    assert command.wait() == 3
    last = command.stderr.strip().splitlines()[-1]
    assert last.startswith("rotorch: rank 1 was killed by SIGKILL") and "after 1 restarts" in last
    seen("A run was restarted often enough", last, instead=WHEN_KILLED)
    assert command.left() == []


def test_nothing_is_restarted_after_ctrl_c(tmp_path, warm):
    settings = ["--parallel", "ddp=2", "--max-restarts=5", "train.steps=100000", "train.checkpoint_every=1000"]
    command = Command(tmp_path / "log", "train", write_run(tmp_path), *settings)
    wait_until(lambda: len(read_metrics(tmp_path / "run")) >= 2, what="two steps")
    os.kill(command.ranks()[1], signal.SIGSTOP)  # so that it cannot save
    os.kill(command.pid, signal.SIGTERM)
    os.kill(command.ranks()[1], signal.SIGKILL)
    assert command.wait() == 3
    assert "(restart" not in command.stderr and command.left() == []


def test_what_would_come_again_is_not_started_again(tmp_path, warm, monkeypatch):
    diverge(monkeypatch)
    settings = ["--parallel=rtp=1", "--max-restarts=3", "train.checkpoint_every=2"]
    command = rotorch(tmp_path / "log", "train", write_run(tmp_path), *settings)
    assert command.code == 3
    (told,) = command.stderr.strip().splitlines()
    assert "Nothing was updated" in told and "(restart" not in told


def test_a_failure_before_the_first_step_leaves_the_directory_to_the_next_start(tmp_path, warm):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "failure.txt").write_text("a rank failed")
    (tmp_path / "run" / "traceback-rank1.txt").write_text("Traceback")
    command = rotorch(
        tmp_path / "log", "train", write_run(tmp_path), "--parallel=single", "train.steps=1", "optimizer.warmup_steps=1"
    )
    assert command.code == 0, command.stderr


def test_there_must_be_checkpoints_to_go_on_from(tmp_path):
    command = rotorch(tmp_path / "log", "train", write_run(tmp_path), "--parallel=single", "--max-restarts=1")
    assert command.code == 2 and "write train.checkpoint_every=" in command.stderr


DOWN = OSError(errno.EIO, "the store does not answer", "s3://bucket/run")


def unwritable():
    """As the check of a store says that it does not answer."""
    error = ConfigError("train.checkpoint_dir: s3://bucket/run: cannot be written")
    error.__cause__ = DOWN
    return error


class Again:
    """A run that is launched again, and what goes wrong at each launch, look for a checkpoint, and check."""

    def __init__(self, tmp_path, monkeypatch, *, launches, looks=(), checks=(), allowed=3):
        config = load_run_config(write_run(tmp_path), overrides=[f"train.max_restarts={allowed}"])
        strategies = parse_parallel(config.parallel.layout)
        out = tmp_path / "run"
        self.run = SimpleNamespace(
            config=config, strategies=strategies, num_ranks=1, out=out, saves_in=out, resume=None, command=""
        )
        self.launches, self.waits, self.told = iter(launches), [], []
        looks, checks = iter(looks), iter(checks)
        monkeypatch.setattr(restart, "latest", lambda place: self._next(looks))
        monkeypatch.setattr(restart, "check_run", lambda *args, **options: self._next(checks) or self.run)
        monkeypatch.setattr(restart, "holds_run", lambda out: True)

    def _next(self, outcomes):
        outcome = next(outcomes, None)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def __call__(self, **options):
        launch_again(
            self.run,
            launch=lambda run: self._next(self.launches),
            tell=self.told.append,
            wait=self.waits.append,
            **options,
        )


LOST = RankFailure("rank 1 failed in step 4")


@pytest.mark.parametrize("outage", [{"looks": [None, *[DOWN] * 3]}, {"checks": [unwritable() for _ in range(3)]}])
def test_a_store_that_is_back_within_a_minute_is_waited_for(tmp_path, monkeypatch, outage):
    again = Again(tmp_path, monkeypatch, launches=[LOST], **outage)
    again()
    assert again.waits == [1, 2, 4]
    first, last = again.told
    assert "s3://bucket/run: " in first and first.endswith("Waiting for that to pass, for 63 s at most, to go on")
    assert last.startswith(str(LOST)) and "restart 1 of 3" in last


@pytest.mark.parametrize(
    ("outage", "waits", "said"),
    [
        ({"looks": [None, *[DOWN] * 7]}, 63, "s3://bucket/run: the store does not answer"),
        ({"checks": [unwritable() for _ in range(7)]}, 63, "s3://bucket/run: cannot be written"),
        ({"checks": [ConfigError("train.out: is gone")]}, 0, "train.out: is gone"),
    ],
)
def test_what_does_not_come_back_ends_the_run_with_its_failure(tmp_path, monkeypatch, outage, waits, said):
    again = Again(tmp_path, monkeypatch, launches=[LOST], **outage)
    with pytest.raises(RankFailure, match=re.escape(f"{LOST}. It cannot be started again: ")) as caught:
        again()
    assert sum(again.waits) == waits and said in str(caught.value)


@pytest.mark.parametrize("error", [DOWN, ConfigError("checkpoint: s3://bucket/run: cannot be read")])
def test_what_was_right_at_the_start_is_a_failure_later(tmp_path, monkeypatch, error):
    again = Again(tmp_path, monkeypatch, launches=[LOST, error, error, None])
    again()
    assert len(again.told) == 3 and "restart 3 of 3" in again.told[-1]
    assert again.waits == [1, 2]  # there was no new checkpoint in between
    with pytest.raises(RankFailure, match=r"s3://bucket/run: .*after 1 restarts"):
        Again(tmp_path, monkeypatch, launches=[LOST, error], allowed=1)()
    with pytest.raises(type(error)):
        Again(tmp_path, monkeypatch, launches=[error])()


def test_a_planned_run_is_planned_again_for_the_ranks_that_are_left(tmp_path, monkeypatch):
    again = Again(tmp_path, monkeypatch, launches=[LOST, LOST, LOST, None])
    overrides = ["parallel.layout=ddp=4", "train.elastic='1:4'", "train.max_restarts=3"]
    config = load_run_config(write_run(tmp_path), overrides=overrides)
    again.run.config, again.run.num_ranks = config, 4
    asked = []

    def resize(config, *, num_ranks):
        asked.append((config, num_ranks))
        if num_ranks == 3:
            raise ConfigError("nothing fits on 3 ranks")
        return config

    again(resize=resize)
    assert asked[:2] == [(again.run.config, 3), (again.run.config, 2)]  # not for the first restart, on all ranks
    assert len(again.told) == 3


@pytest.mark.parametrize(
    ("elastic", "message"),
    [("2", "write the least and the most ranks"), ("3:2", "write the least"), ("3:4", "takes 2 ranks")],
)
def test_ranks_that_it_may_not_have_are_refused(tmp_path, elastic, message):
    command = rotorch(tmp_path / "log", "train", write_run(tmp_path), "--parallel=rtp=2", f"--elastic={elastic}")
    assert command.code == 2 and message in command.stderr


@pytest.fixture
def under_torchrun(tmp_path, monkeypatch):
    """A run that is there, begun by the job "ours"; returns what a rank of that job would do."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RUN_FILE).write_text('{"job": "ours"}')
    config = load_run_config(write_run(tmp_path), overrides=["parallel.layout=ddp=2,rtp=2", "train.elastic=2:4"])

    def started(world_size, *, job, restarts=0, resume=False):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        monkeypatch.setenv(ELASTIC_RUN, job)
        return as_started(config, resume=resume)

    return started


@pytest.mark.parametrize(
    ("job", "restarts", "goes_on"), [("ours", 0, True), ("ours", 1, True), ("another", 1, False), ("none", 1, False)]
)
def test_a_rank_goes_on_with_the_run_of_its_own_job(under_torchrun, job, restarts, goes_on):
    assert under_torchrun(4, job=job, restarts=restarts)[1] == goes_on
    assert under_torchrun(4, job=job, restarts=restarts, resume=True)[1]


def test_the_layout_is_chosen_for_the_ranks_that_there_are(under_torchrun):
    assert under_torchrun(4, job="ours")[0].parallel.layout == "ddp=2,rtp=2"
    config, _ = under_torchrun(2, job="ours")
    assert config.parallel.layout == "rtp=2"
    assert config.train.global_batch == 8  # as it was on four ranks
    with pytest.raises(ConfigError, match="there are 6 ranks"):
        under_torchrun(6, job="ours")
    with pytest.raises(ConfigError, match="is not micro_batch"):
        under_torchrun(3, job="ours")


@pytest.mark.slow
def test_torchrun_starts_it_again(tmp_path):
    settings = ["--parallel=rtp=2", "train.steps=60", "train.checkpoint_every=10"]
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
        "-m",
        "rotorch",
    ]
    command = [sys.executable, *torchrun, "train", write_run(tmp_path), *settings]
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(lambda: len(read_metrics(tmp_path / "run")) > 15, what="15 steps")
        ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(ranks[-1]), signal.SIGKILL)
        assert job.wait() == 0, (tmp_path / "log").read_text()
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(1, 61))
    assert "resume  step" in (tmp_path / "log").read_text()
