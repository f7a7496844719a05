"""Ranks that are killed, raise, hang or diverge; Ctrl-C; the launcher gone. Real processes throughout."""

import errno
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands import Command, diverge, rotorch, wait_until, write_run
from failures import seen

from rotorch.comm.shared_file import own_prefix
from rotorch.train.checkpoint.directories import latest
from rotorch.train.metrics import read_metrics

EXACT = "rtp=2[transport=send_receive]"
"""Over shared memory the last bits of a gradient depend on which rank comes first."""


@pytest.fixture
def run_toml(tmp_path, warm):
    return write_run(tmp_path)


@pytest.fixture
def started(tmp_path, run_toml, monkeypatch):
    """Starts a long run and returns it when it has done some steps; then sees that nothing was left behind."""
    commands = []
    shared_memory = tmp_path / "shared_memory"
    shared_memory.mkdir()
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(shared_memory))

    def start(*arguments, layout="rtp=2", steps=100_000, after_step=3):
        command = Command(tmp_path / "log", "train", run_toml, "--parallel", layout, f"train.steps={steps}", *arguments)
        commands.append(command)
        wait_until(lambda: len(read_metrics(tmp_path / "run")) >= after_step or ended(command), what="first steps")
        assert not ended(command), command.stderr
        return command

    yield start
    for command in commands:
        for pid in command.left():
            os.kill(pid, signal.SIGKILL)
    assert list(shared_memory.iterdir()) == []


def ended(command):
    return (
        command.code is not None or Path(f"/proc/{command.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    )


ANY_MOMENT = {r"in step \d+, [a-z ]+[a-z]": "in step 12, computing forward and backward"}


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        ("rtp=2", 0),
        pytest.param("rtp=2", 1, marks=pytest.mark.slow),
        pytest.param("ddp=2", 1, marks=pytest.mark.slow),  # below a rank of ddp=2 is missed, with the same report
    ],
)
def test_a_killed_rank_ends_the_job_with_its_name(started, layout, victim):
    command = started(layout=layout)
    os.kill(command.ranks()[victim], signal.SIGKILL)
    assert command.wait(deadline_s=30.0) == 3
    last = command.stderr.strip().splitlines()[-1]
    assert last.startswith(f"rotorch: rank {victim} was killed by SIGKILL"), command.stderr
    assert re.search(r"in step \d+, [a-z ]+", last)
    seen(
        "A rank is killed",
        last,
        instead={**ANY_MOMENT, r"^rotorch: rank \d": "rotorch: rank 1", r"\(rank \d": "(rank 0"},
    )
    report = Path(last.rpartition("Who was where: ")[2]).read_text()
    assert re.search(rf"rank {victim} \(process \d+, (ended|gone)\): in step \d+", report)
    if layout == "ddp=2":  # the other one notices, by its messages or in a sum, and ends too; or is about to
        noticed = r"rank 0 \(process \d+, ended\): in step \d+, .*\n(  .*\n)?  .*(Connection|rank 1 has ended)"
        assert re.search(noticed, report) or re.search(r"rank 0 \(process \d+, (running|sleeping)\): in step", report)
    else:  # it may have noticed, or still be computing
        state = re.search(rf"rank {1 - victim} \(process \d+, (running|sleeping|ended)\): in step \d+", report)[1]
        assert ("in forward_backward" in report) or state == "ended"  # its stack
    assert len(command.stderr.strip().splitlines()) == 1
    assert command.left() == []


@pytest.mark.slow  # test_restart.py has it of a run that goes on by itself, test_loop.py of one that is told to
def test_a_killed_run_resumes_with_the_same_losses(started, run_toml, tmp_path):
    settings = ["--parallel", EXACT, "train.steps=40", "train.checkpoint_every=4", "train.keep=3"]
    whole = rotorch(tmp_path / "log", "train", run_toml, *settings, f"train.out={tmp_path / 'whole'}")
    assert whole.code == 0, whole.stderr
    command = started("train.checkpoint_every=4", "train.keep=3", layout=EXACT, steps=40, after_step=9)
    os.kill(command.ranks()[1], signal.SIGKILL)
    assert command.wait() == 3
    assert 4 <= int(latest(tmp_path / "run").name.split("-")[1]) < 40
    resumed = rotorch(tmp_path / "log", "train", run_toml, *settings, "--resume")
    assert resumed.code == 0, resumed.stderr
    ours, theirs = (read_metrics(tmp_path / name) for name in ("run", "whole"))
    assert [(line["step"], line["loss"]) for line in ours] == [(line["step"], line["loss"]) for line in theirs]


@pytest.mark.parametrize("to_all", [False, True], ids=["launcher", "group"])
def test_ctrl_c_writes_a_checkpoint_and_leaves(started, tmp_path, to_all):
    command = started()
    os.killpg(command.pid, signal.SIGINT) if to_all else os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 130, command.stderr
    done = read_metrics(tmp_path / "run")[-1]["step"]
    assert latest(tmp_path / "run").name == f"step-{done:08d}"
    assert "--resume" in command.stdout and f"after step {done}" in command.stdout
    assert command.stderr == "" and command.left() == []
    if not to_all:
        seen("Ctrl-C", command.stdout.strip().splitlines()[-1], instead={r"/tmp/\S*/": ""})


@pytest.mark.parametrize(
    ("number", "code"),
    [
        # test_what_a_killed_launcher_left_in_shared_memory_goes_with_the_next ends a run by it.
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        (signal.SIGHUP, 129),
    ],
)
def test_other_signals_are_like_ctrl_c(started, tmp_path, number, code):
    """SIGHUP comes when a terminal is closed."""
    before = signal.signal(number, signal.SIG_DFL)  # under nohup a process inherits that it ignores SIGHUP
    try:
        command = started(layout="ddp=2")
    finally:
        signal.signal(number, before)
    os.killpg(command.pid, number)
    assert command.wait() == code, command.stderr
    assert latest(tmp_path / "run") is not None and command.stderr == ""


def test_sigquit_ends_at_once(started, tmp_path):
    """As Ctrl-C twice: there is no other way to leave a checkpoint out at the first signal."""
    command = started(layout="ddp=2")
    os.kill(command.pid, signal.SIGQUIT)
    assert command.wait() == 3, command.stderr
    assert "the launcher was ended by SIGQUIT" in command.stderr and latest(tmp_path / "run") is None
    assert command.left() == []


def test_a_run_that_is_asked_to_stop_after_its_last_step_is_done(tmp_path, run_toml, monkeypatch):
    from rotorch.train import run

    def summarise(*arguments, **options):
        os.kill(os.getppid(), signal.SIGTERM)
        return real(*arguments, **options)

    real = run.summarise
    monkeypatch.setattr(run, "summarise", summarise)
    assert rotorch(tmp_path / "log", "train", run_toml).code == 0


def test_without_a_terminal_by_nohup_a_run_goes_on(tmp_path, run_toml):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        command = Command(tmp_path / "log", "train", run_toml, "train.steps=100")
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_until(lambda: len(read_metrics(tmp_path / "run")) >= 2, what="two steps")
    os.kill(command.pid, signal.SIGHUP)
    assert command.wait() == 0, command.stderr


def test_a_second_ctrl_c_ends_at_once(started, tmp_path):
    command = started()
    for pid in command.ranks():
        os.kill(pid, signal.SIGSTOP)  # so that no rank can finish its step
    os.kill(command.pid, signal.SIGINT)
    time.sleep(0.3)
    os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 130
    assert command.stderr.strip() == "rotorch: interrupted" and command.left() == []
    seen("Ctrl-C twice", command.stderr)


def test_ranks_do_not_outlive_their_launcher(started, tmp_path):
    command = started()
    # Until it has seen that its ranks have built, what it leaves goes with the next start (see the next test).
    wait_until(lambda: not any((tmp_path / "shared_memory").iterdir()), what="the launcher's directory gone")
    os.kill(command.pid, signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    wait_until(lambda: not command.left(), what="ranks gone", deadline_s=10.0)


def test_what_a_killed_launcher_left_in_shared_memory_goes_with_the_next(started, tmp_path):
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    names = {"alive": own_prefix(), "dead": own_prefix().replace(str(os.getpid()), str(dead))}
    for name in names.values():
        (tmp_path / "shared_memory" / f"{name}x").mkdir()
        (tmp_path / "shared_memory" / f"{name}x" / "slices").write_bytes(b"x")
    command = started()
    # The command's own goes when it has seen that its ranks have built, maybe some steps later.
    left = [f"{names['alive']}x"]
    wait_until(
        lambda: [path.name for path in (tmp_path / "shared_memory").iterdir()] == left, what="the dead one's gone"
    )
    os.kill(command.pid, signal.SIGTERM)
    assert command.wait() == 143, command.stderr
    shutil.rmtree(tmp_path / "shared_memory" / f"{names['alive']}x")


def test_a_rank_that_hangs_is_missed(started, tmp_path):
    command = started("train.timeout_s=2", layout="ddp=2")
    victim = command.ranks()[1]
    os.kill(victim, signal.SIGSTOP)
    assert command.wait(deadline_s=60.0) == 3
    stopped = r"rank 1 \(stopped by a signal\) has not got on for \d+ s: it is in step \d+, [a-z ]+"
    assert re.match(rf"rotorch: {stopped}.*\(rank 0 is in step \d+, .*, for \d+ s\)\. Who was where", command.stderr)
    a_place = {
        r"it is in step \d+, [^(]* \(": "it is in step 12, updating the weights (",
        r"rank 0 is in step \d+, .*, for": "rank 0 is in step 13, computing forward and backward, summing the number "
        "of targets over all ranks, for",
    }
    seen("A rank does not get on", command.stderr, instead=a_place)
    report = (tmp_path / "run" / "failure.txt").read_text()
    assert re.search(r"rank 1 \(process \d+, stopped by a signal\): in step \d+, [a-z ]+, for \d+\.\d s", report)
    assert "most recent call first" in report  # where rank 0 waits
    assert command.left() == []


@pytest.fixture(params=["said", "mounted"])
def no_room(request, tmp_path, monkeypatch):
    """Shared memory of 16 KiB, as a container's may be: a file system, or the system's word for one that is full."""
    if request.param == "said":
        monkeypatch.setattr(os, "posix_fallocate", without_room)
        monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(tmp_path))
        yield
        return
    (place := tmp_path / "shm").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(place)]
    try:
        subprocess.run(mount, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system can be mounted here: {getattr(error, 'stderr', error)}")
    monkeypatch.setenv("ROTORCH_SHARED_MEMORY_DIR", str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def without_room(file, offset, size):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_run_without_room_in_shared_memory_sends_messages(run_toml, tmp_path, no_room):
    command = rotorch(tmp_path / "log", "train", run_toml, "--parallel", "rtp=2")
    assert command.code == 0 and len(read_metrics(tmp_path / "run")) == 6
    (line,) = [line for line in (command.stdout + command.stderr).splitlines() if "free of" in line]
    seen("Shared memory is full", line, instead=ROOM)


@pytest.mark.parametrize("no_room", ["said", pytest.param("mounted", marks=pytest.mark.slow)], indirect=True)
def test_a_run_that_must_have_shared_memory_is_refused_without_room(run_toml, tmp_path, no_room):
    command = rotorch(tmp_path / "log", "train", run_toml, "--parallel", "rtp=2[transport=shared_memory]")
    assert command.code == 2 and "Traceback" not in command.stderr
    seen("Shared memory is full, and was asked for", command.stderr, instead=ROOM)


ROOM = {r"into \S+ \(.*? free of .*?\)": "into /dev/shm (16.0 KiB free of 16.0 KiB)"}


@pytest.mark.slow  # test_divergence.py has the same words of a number that is not finite
def test_divergence_names_the_step(run_toml, tmp_path, monkeypatch):
    diverge(monkeypatch)
    command = rotorch(tmp_path / "log", "train", run_toml, "train.steps=20")
    assert command.code == 3
    assert re.search(
        r"rank 0 failed in step \d+.*first not finite is the (output|weight|gradient).*Lower optimizer\.lr",
        command.stderr,
    )
    assert len(command.stderr.strip().splitlines()) == 1


def test_an_exception_in_a_rank_leaves_its_traceback(run_toml, tmp_path, monkeypatch):
    from rotorch.train import loop

    real = loop.train_step

    def failing(model, *args, board, **kwargs):
        if board.own_rank == 1 and board.read(1).step == 3:
            raise ValueError("a mistake\nof ours")
        return real(model, *args, board=board, **kwargs)

    monkeypatch.setattr(loop, "train_step", failing)
    command = rotorch(tmp_path / "log", "train", run_toml, "--parallel", "ddp=2")
    assert command.code == 3
    assert "rotorch: rank 1 failed in step 3, reading data: ValueError: a mistake of ours" in command.stderr
    seen("A rank raises an exception", command.stderr, instead=ANY_MOMENT)
    assert len(command.stderr.strip().splitlines()) == 1
    assert "in failing" in (tmp_path / "run" / "traceback-rank1.txt").read_text()
