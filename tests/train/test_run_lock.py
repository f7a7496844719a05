"""Two runs in one directory: the second is refused, by name of the first, and writes nothing."""

import json
import os
import platform
import re
import shutil
import signal
import socket

import pytest
from commands import Command, rotorch, wait_until, write_run
from failures import seen

from rotorch.train.events import EVENTS
from rotorch.train.launch import run_lock
from rotorch.train.launch.run_lock import LOCK, DirectoryInUse, check_not_in_use, contents, lock_directories
from rotorch.train.metrics import METRICS, MetricsFile, StepRecord, read_metrics

ELSEWHERE = {
    rf"on {re.escape(platform.node())}": "on node-7",
    r"since 2\S* \S+?(?=[:,.)] |$)": "since 2026-02-03 04:05:06",
    r"/tmp/\S*?/run\b": "runs/my_run",
}
"""What differs from time to time in what is said."""

ENDLESS = ["train.steps=1000000", "optimizer.schedule=constant", "train.checkpoint_every=1"]


def files(directory):
    """Files of a directory, and the times at which they were written."""
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def live(tmp_path, warm):
    """A run that goes on until it is ended, and has saved something."""
    command = Command(tmp_path / "live", "train", write_run(tmp_path), *ENDLESS)
    wait_until(lambda: len(read_metrics(tmp_path / "run")) > 2, what="three steps")
    os.kill(command.ranks()[0], signal.SIGSTOP)  # so that what it writes stays as it is
    yield command
    if command.code is None:
        os.killpg(command.pid, signal.SIGKILL)
        command.wait()


def test_a_second_run_beside_a_live_one_is_refused_and_writes_nothing(live, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path / "run")
    for others in ([], ["--resume"], ["train.checkpoint_dir=run", "train.out=other"]):
        second = rotorch(tmp_path / "second", "train", tmp_path / "run.toml", *ENDLESS, *others)
        assert second.code == 2, second.stderr
        key = "train.checkpoint_dir" if len(others) > 1 else "train.out"
        assert f"{key}: " in second.stderr and "is used by another run" in second.stderr, second.stderr
        assert f"process {live.pid} on {platform.node()}, since 2" in second.stderr
        assert len(second.stderr.strip().splitlines()) == 1
        assert files(tmp_path / "run") == before and not (tmp_path / "other").exists()
        if not others:
            seen("A second run in the same directory", second.stderr, instead=ELSEWHERE)


def test_a_run_that_was_killed_blocks_nobody(live, tmp_path):
    os.kill(live.ranks()[0], signal.SIGCONT)
    os.kill(live.pid, signal.SIGKILL)
    live.wait()
    done = len(read_metrics(tmp_path / "run"))
    after = rotorch(tmp_path / "log", "train", tmp_path / "run.toml", *ENDLESS, f"train.steps={done + 3}", "--resume")
    assert after.code == 0, after.stderr
    assert not (tmp_path / "run" / LOCK).exists()


def test_of_two_that_start_together_one_goes_on(tmp_path, warm):
    run = write_run(tmp_path)
    both = [Command(tmp_path / name, "train", run, "train.checkpoint_every=2") for name in ("first", "second")]
    codes = sorted(command.wait() for command in both)
    assert codes == [0, 2], [command.stderr for command in both]
    assert len(read_metrics(tmp_path / "run")) == 6
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2  # train.keep


# ---------------------------------------------------------------- the lock alone


def hold(directory, **others):
    directories = {"train.out": directory, **others}
    return lock_directories(directories, seen_with=contents(directories))


def test_two_names_of_one_directory_are_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with hold(tmp_path / "run", **{"train.checkpoint_dir": tmp_path / "link"}):
        with pytest.raises(
            DirectoryInUse, match=rf"train\.x: .*link is used by another run \(process {os.getpid()} on"
        ):
            check_not_in_use({"train.x": tmp_path / "link"})
        with pytest.raises(DirectoryInUse), hold(tmp_path / "run"):
            pass
    with hold(tmp_path / "run"):
        pass


def test_it_leaves_nothing_behind(tmp_path):
    with hold(tmp_path / "runs" / "mine"):
        assert (tmp_path / "runs" / "mine" / LOCK).exists()
    assert not list(tmp_path.iterdir())


def test_what_is_there_stays(tmp_path):
    (tmp_path / METRICS).write_text("")
    with hold(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [METRICS]


def test_a_run_that_came_and_went_during_the_check_is_noticed(tmp_path):
    before = contents({"train.out": tmp_path})
    (tmp_path / METRICS).write_text("")
    with (
        pytest.raises(DirectoryInUse, match=rf"another run has just written or removed .*{METRICS}\. Give the same"),
        lock_directories({"train.out": tmp_path}, seen_with=before),
    ):
        pass


def test_a_directory_that_was_replaced_meanwhile_keeps_the_other_lock(tmp_path):
    out = tmp_path / "run"
    with hold(out):
        (out / LOCK).unlink()
        with hold(out):
            assert (out / LOCK).exists()
        with hold(out):
            pass


def test_whose_text_makes_no_sense_is_refused_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "_LOOKS", 1)
    for text in ("", "[]", "{", json.dumps({"pid": 3}), "[" * 50_000):
        with hold(tmp_path):
            (tmp_path / LOCK).write_text(text)
            with pytest.raises(DirectoryInUse, match="whose process is not known"):
                check_not_in_use({"train.out": tmp_path})


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, caplog):
    def none(*_):
        raise OSError(run_lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", none)
    with hold(tmp_path):
        pass
    assert "has no locks (No locks available): see to it that no other run writes there" in caplog.text


def test_a_holder_on_another_host_is_never_taken_for_ended():
    mine = run_lock.Holder.this()
    assert not mine.has_ended and mine.host == socket.gethostname()
    other = run_lock.Holder(1, "elsewhere", "then", mine.process.replace(str(os.getpid()), "999999999"))
    assert not other.has_ended


# ---------------------------------------------------------------- nothing is overwritten


@pytest.mark.slow
def test_a_run_without_checkpoints_begins_anew_and_keeps_its_earlier_metrics(tmp_path, warm):
    run, out = write_run(tmp_path), tmp_path / "run"
    (out / "checkpoints").mkdir(parents=True)
    content = b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.4}\n'
    (out / METRICS).write_bytes(content)
    for number in (1, 2):
        done = rotorch(tmp_path / f"log-{number}", "train", run, "--resume")
        assert done.code == 0, done.stderr
        (told,) = done.stderr.strip().splitlines()
        assert "has no checkpoint to go on from, so the run begins anew" in told and f"metrics-{number}.jsonl" in told
        shutil.rmtree(out / "checkpoints")
    seen("A run without a checkpoint is resumed", told, instead=ELSEWHERE)
    assert (out / "metrics-1.jsonl").read_bytes() == content
    assert [r["step"] for r in read_metrics(out)] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_has_done_nothing_yet_begins(tmp_path, warm):
    """Killed before its first step: whoever starts it again and again with --resume need not look."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    done = rotorch(tmp_path / "log", "train", write_run(tmp_path), "--resume")
    assert done.code == 0, done.stderr


# ---------------------------------------------------------------- removed while running


def test_a_directory_that_is_removed_while_a_run_writes_there_is_made_again(tmp_path, warm, monkeypatch):
    out, on_step = tmp_path / "run", MetricsFile.on_step

    def removed(self, record):
        if record.step == 4:
            shutil.rmtree(out)
        on_step(self, record)

    monkeypatch.setattr(MetricsFile, "on_step", removed)
    done = rotorch(tmp_path / "log", "train", write_run(tmp_path), "train.checkpoint_every=2")
    assert done.code == 0, done.stderr
    assert [record["step"] for record in read_metrics(out)] == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in out.iterdir()} == {METRICS, EVENTS, "checkpoints", "run.json"}
    events = [json.loads(line)["event"] for line in (out / EVENTS).read_text().splitlines()]
    assert (events[0], events[-1]) == ("started", "ended")
    assert len(list((out / "checkpoints").iterdir())) == 2
    seen("The run's directory is removed", done.stderr, instead=ELSEWHERE)


def test_a_directory_that_became_another_run_s_is_left_alone(tmp_path, warm, monkeypatch):
    out, on_step, started = tmp_path / "run", MetricsFile.on_step, []

    def replaced(self, record):
        if record.step == 4:
            shutil.rmtree(out)
            started.append(lock_directories({"train.out": out}, seen_with=frozenset()))
            started[0].__enter__()  # as of a run that starts there
            monkeypatch.setattr(os, "getppid", lambda: 1)  # and in another process
            (out / LOCK).write_text("{}")
        on_step(self, record)

    monkeypatch.setattr(MetricsFile, "on_step", replaced)
    done = rotorch(tmp_path / "log", "train", write_run(tmp_path))
    assert done.code == 3, done.stderr
    assert "somebody has removed this run's directory while it ran" in done.stderr
    assert "run is used by another run" in done.stderr
    assert not (out / METRICS).exists()
    seen("The run's directory was taken by another run", done.stderr, instead=ELSEWHERE)


def record(step):
    return StepRecord(step=step, loss=1.0, tokens=1, tokens_per_s=1.0, grad_norm=1.0, lr=1.0, peak_bytes=1, step_s=1.0)


def test_metrics_that_were_removed_are_written_again_with_a_word_and_locked(tmp_path, caplog):
    out = tmp_path / "run"
    with hold(out):
        file = MetricsFile(out, after_step=0, beside={"run.json": "{}"})
        file.on_step(record(1))
        shutil.rmtree(out)
        for step in (2, 3):
            file.on_step(record(step))
        assert [line["step"] for line in read_metrics(out)] == [1, 2, 3]
        assert (out / "run.json").read_text() == "{}"
        with pytest.raises(DirectoryInUse), hold(out):
            pass
        file.close()
        with hold(out):
            pass
    assert caplog.text.count("somebody has removed it while the run was writing there; it is written again, but") == 1
    assert (out / METRICS).exists() and not (out / LOCK).exists()


def test_metrics_that_an_editor_replaced_go_on_in_the_new_file(tmp_path, caplog):
    with hold(tmp_path):
        file = MetricsFile(tmp_path, after_step=0)
        file.on_step(record(1))
        (tmp_path / "edited").write_text('{"step": 0}\n')
        os.replace(tmp_path / "edited", tmp_path / METRICS)
        file.on_step(record(2))
        file.on_rolled_back(1)
        file.on_step(record(2))
        file.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 2]
    assert "somebody has replaced it while the run was writing there; it goes on in the new file" in caplog.text
