"""Saves behind a run: of the state as it was, whole or not at all, and never unnoticed when they fail."""

import errno
import os
import signal
import sys
import threading

import pytest
from commands import rotorch, write_run
from failures import seen
from three_weights import make, read_back, step, steps_of

from rotorch.core.errors import RankFailure
from rotorch.testing.ranks import run_ranks
from rotorch.train.checkpoint import storage
from rotorch.train.checkpoint.async_save import Saver
from rotorch.train.checkpoint.saving import check, latest
from rotorch.train.metrics import read_metrics


def held_back(release):
    """Writes nothing before `release` is set."""
    write = storage.write_safetensors

    def waiting(*args):
        assert release.wait(60)
        mine, main = (os.getpriority(os.PRIO_PROCESS, thread) for thread in (threading.get_native_id(), os.getpid()))
        assert mine > main or mine == 19 or sys.platform != "linux"  # training comes first
        return write(*args)

    storage.write_safetensors = waiting


def save_and_go_on(run_dir):
    """Saves step 2 behind the run, which does two more steps before anything of it is written, and saves again."""
    state, release = make(), threading.Event()
    held_back(release)
    for _ in range(2):
        step(state)
    with Saver(run_dir, keep=3, behind=True, mesh=state.model.mesh) as saver:
        path = saver.save(state)
        for _ in range(2):
            step(state)
            saver.check()
        seen = steps_of(run_dir)
        release.set()
        saver.wait()
        first = read_back(run_dir)
        saver.save(state)
    return path.name, seen, first, read_back(run_dir)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_run_goes_on_while_its_state_as_it_was_is_written(tmp_path, num_ranks):
    for told in run_ranks(save_and_go_on, tmp_path, num_ranks=num_ranks):
        assert told == ("step-00000002", [], (2, True), (4, True))
    assert check(latest(tmp_path)).step == 4


def save_on_a_full_disk(run_dir):
    state, told, write = make(), [], storage.write_safetensors

    def full(*args):
        if state.rank == 1 and "step-00000002" in str(args[0]):
            raise OSError(errno.ENOSPC, "No space left on device", str(args[0]))
        return write(*args)

    storage.write_safetensors = full
    saver = Saver(run_dir, keep=3, behind=True, mesh=state.model.mesh)
    for _ in range(2):
        step(state)
        saver.save(state)
    saver._thread.join()
    try:
        saver.check()
    except RankFailure as error:
        told.append(str(error))
    saver.check()  # once is enough
    step(state)
    saver.save(state)  # and the next one is written
    saver.wait()
    return told


def test_a_failure_is_told_at_the_next_step(tmp_path):
    (told,), *others = run_ranks(save_on_a_full_disk, tmp_path, num_ranks=2)
    assert others == [[told]]
    assert "rank 1: " in told and "No space left on device; earlier checkpoints are untouched" in told
    assert steps_of(tmp_path) == [1, 3]
    seen(
        "The disk fills up during a save behind the run",
        f"rotorch: rank 1 failed in step 3, summing the gradient norm over ranks: {told}",
    )


def save_behind_until_killed(run_dir, delay_s):
    state = make()
    with Saver(run_dir, keep=2, behind=True, mesh=state.model.mesh) as saver:
        while state.step < 10_000:
            step(state)
            saver.save(state)
            if state.step == 2 and state.rank == 1:  # a first one is there, however slow the machine is
                threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


def test_a_rank_killed_while_it_saves_behind_the_run(tmp_path):
    with pytest.raises(RankFailure):
        run_ranks(save_behind_until_killed, tmp_path, 0.4, num_ranks=2)
    (saved, same), _ = run_ranks(read_back, tmp_path, num_ranks=2)
    assert same and saved == steps_of(tmp_path)[-1]


@pytest.mark.slow  # above it is as the state was; test_stores.py has a run that saves so, and goes on
def test_a_run_that_saves_behind_itself(tmp_path, warm):
    run_toml = write_run(tmp_path)
    runs = {"behind": ["train.async_save=true"], "at_once": []}
    for name, settings in runs.items():
        arguments = [
            "train.checkpoint_every=1",
            "train.keep=9",
            "train.steps=3",
            f"train.out={tmp_path / name}",
            *settings,
        ]
        done = rotorch(tmp_path / "log", "train", run_toml, "--parallel", "rtp=2[transport=send_receive]", *arguments)
        assert (done.code, done.stderr) == (0, "")
    assert [line["loss"] for line in read_metrics(tmp_path / "behind")] == [
        line["loss"] for line in read_metrics(tmp_path / "at_once")
    ]
    for number in range(1, 4):
        files = [check(tmp_path / name / "checkpoints" / f"step-{number:08d}").files for name in runs]
        assert files[0] == files[1]  # the same digests
