"""Output that closes while a command runs, and errors that nobody foresaw. The real entry point, forked."""

import io
import os
import re
import signal
import sys
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from rotorch import cli
from rotorch.cli.output import leave_traceback
from rotorch.core.phase_line import tell_phase
from rotorch.process.forking import forking

sys.path.insert(0, str(Path(__file__).parent / "train"))
from commands import rotorch, wait_until, write_run
from failures import seen

from rotorch.train.checkpoint.directories import latest
from rotorch.train.metrics import read_metrics


def started(*arguments, out=None, err=None):
    """A forked `rotorch` whose output goes to these descriptors; None closes it."""
    with forking():
        pid = os.fork()
    if pid == 0:
        os.setsid()
        for number, to in ((1, out), (2, err)):
            os.close(number) if to is None else os.dup2(to, number)
        sys.stdout = None if out is None else os.fdopen(1, "w", closefd=False)
        sys.stderr = None if err is None else os.fdopen(2, "w", closefd=False)
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as error:
            sys.stdout.flush()  # as the end of an interpreter does
            sys.stderr.flush()
            os._exit(error.code or 0)
        finally:
            os._exit(99)
    return pid


def code_of(pid):
    ended = []
    try:
        wait_until(lambda: ended.append(os.waitpid(pid, os.WNOHANG)) or ended[-1][0], what="its end")
    except AssertionError:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return os.waitstatus_to_exitcode(ended[-1][1])


def unread():
    """The end of a pipe that nobody reads from."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


# The next test has a pipe that nobody reads any more.
@pytest.mark.parametrize("how", [pytest.param("nobody reads", marks=pytest.mark.slow), "closed"])
def test_a_run_goes_on_when_its_output_closes(tmp_path, warm, how):
    end = unread() if how == "nobody reads" else None
    assert code_of(started("train", write_run(tmp_path), "--parallel=ddp=2", out=end, err=end)) == 0
    assert len(read_metrics(tmp_path / "run")) == 6 and latest(tmp_path / "run") is not None


def test_a_run_of_which_one_line_is_read_goes_on(tmp_path, warm):
    reader, writer = os.pipe()
    pid = started("train", write_run(tmp_path), "--parallel=ddp=2", out=writer, err=writer)
    os.close(writer)
    with os.fdopen(reader) as head:
        line = head.readline()
    assert code_of(pid) == 0
    assert len(read_metrics(tmp_path / "run")) == 6 and latest(tmp_path / "run") is not None
    seen("Nobody reads the output any more", line)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
@pytest.mark.parametrize("how", ["nobody reads", "closed"])
def test_a_command_that_prints_ends_quietly(tmp_path, arguments, how):
    with (tmp_path / "err").open("w") as err:
        end = unread() if how == "nobody reads" else None
        assert code_of(started(*arguments, out=end, err=err.fileno())) == 0
    assert (tmp_path / "err").read_text() == ""


def test_a_wrong_input_keeps_its_exit_code_when_nobody_reads():
    assert code_of(started("train", "nowhere.toml", out=unread(), err=unread())) == 2


def test_what_is_printed_into_a_file_arrives(tmp_path):
    with (tmp_path / "out").open("w") as out:
        assert code_of(started("--version", out=out.fileno(), err=out.fileno())) == 0
    assert re.fullmatch(r"rotorch \d\S*\n", (tmp_path / "out").read_text())


# ---------------------------------------------------------------- errors that nobody foresaw


def broken(*_, **__):
    raise ZeroDivisionError("of all\nthings")


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["export", "s3://x", "y"], "rotorch.train.checkpoint.export.export_checkpoint"),
        (["inspect", "x"], "rotorch.train.checkpoint.contents.inspect_checkpoint"),
        (["train", "{run}"], "rotorch.train.run.check_run"),
    ],
)
def test_an_error_that_nobody_foresaw_is_one_line_and_a_file(capsys, tmp_path, monkeypatch, arguments, where, warm):
    monkeypatch.setattr(where, broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = write_run(tmp_path)
    assert cli.run([argument.format(run=run) for argument in arguments]) == 70
    (line,) = capsys.readouterr().err.splitlines()
    found = re.fullmatch(r"rotorch: unforeseen ZeroDivisionError: of all things\. The traceback is in (.*)", line)
    assert "in broken" in Path(found[1]).read_text()


def test_what_torch_collects_of_ranks_that_failed_is_one_line_and_a_file(capsys, tmp_path, monkeypatch, warm):
    """It is no `Exception`."""

    def fail(*_, **__):
        raise CheckpointException("saving failed", {0: (OSError("of all things"), StackSummary())})

    monkeypatch.setattr("rotorch.train.checkpoint.export.export_checkpoint", fail)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cli.run(["export", "s3://x", "y"]) == 70
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rotorch: unforeseen CheckpointException: ") and "The traceback is in" in line


def test_the_traceback_goes_to_the_run_if_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    (tmp_path / "run.json").write_text("{}")
    words = leave_traceback(ValueError("x"), run_directory=tmp_path)
    assert words == f". The traceback is in {tmp_path / 'traceback-rank1.txt'}"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    assert leave_traceback(ValueError("x"), run_directory=tmp_path / "other") == ""


def test_a_rank_that_fails_before_its_first_step_leaves_its_traceback_in_the_run(tmp_path, monkeypatch, warm):
    monkeypatch.setattr("rotorch.train.run.build", broken)
    command = rotorch(tmp_path / "log", "train", write_run(tmp_path))
    assert command.code == 3 and "ZeroDivisionError: of all things" in command.stderr
    assert "in broken" in (tmp_path / "run" / "traceback-rank0.txt").read_text()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_phase_takes_the_place_of_the_one_before_and_is_erased(monkeypatch):
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        monkeypatch.setattr(sys, "stderr", stream)
        for text in ("loading torch", "building", ""):
            tell_phase(text)
    assert terminal.getvalue() == "\r\x1b[2Kloading torch ...\r\x1b[2Kbuilding ...\r\x1b[2K"
    assert file.getvalue() == ""


def test_the_command_shows_a_line_before_it_is_loaded(monkeypatch):
    """The line is there when the package of commands begins to load, and gone when the command begins."""
    from rotorch import __main__

    told = []
    monkeypatch.setattr(__main__, "tell_phase", lambda text="": told.append(text))
    monkeypatch.setitem(sys.modules, "rotorch.cli", None)  # which fails to load
    with pytest.raises(ImportError):
        __main__.main()
    assert told == ["starting"]
    monkeypatch.setitem(sys.modules, "rotorch.cli", SimpleNamespace(main=lambda: told.append("command")))
    __main__.main()
    assert told[1:] == ["starting", "", "command"]
