"""Starts `rotorch` commands as processes of their own, without loading torch again for each: they are forked."""

import contextlib
import faulthandler
import inspect
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from rotorch import cli, run_config
from rotorch.process.forking import forking

# Deadlines are counted in polls, not by the clock: a machine may sleep in between.
DEADLINE_S, POLL_S = 120.0, 0.02

CONFIG = """
[model.config]
model_type = "llama"
vocab_size = 257
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 32
tie_word_embeddings = false
[data]
source = "text.txt"
cache_dir = "cache"
sequence_length = 16
held_out_fraction = 0.05
[train]
steps = 6
micro_batch = 2
seed = 3
eval_windows = 8
out = "run"
timeout_s = 300
tensorboard = false
[optimizer]
lr = 5e-3
warmup_steps = 2
[sample]
length = 0
"""


def write_run(directory: Path) -> Path:
    """A run that takes a second: a tiny Llama on a little text."""
    (directory / "text.txt").write_text("Slices go round; weights stay at home, and so does this ring. " * 60)
    (directory / "run.toml").write_text(CONFIG)
    return directory / "run.toml"


def write_news(directory: Path, *, num_records: int) -> None:
    """Writes `news.jsonl`, another text for such a run, in the field `body`."""
    records = [{"body": f"Report {number}: rain over the hills, 7 degrees."} for number in range(num_records)]
    (directory / "news.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def diverge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the runs of commands forked from now on a learning rate that no run file may have."""
    real = run_config.load_run_config

    def with_such_a_rate(*arguments, **options):
        config = real(*arguments, **options)
        optimizer = config.optimizer.model_copy(update={"lr": 1e30, "clip_norm": 0.0})
        return config.model_copy(update={"optimizer": optimizer})

    monkeypatch.setattr(run_config, "load_run_config", with_such_a_rate)


def _name_files_of_stack() -> None:
    """Spares this process a search of all modules, a hundred times, for files on its stack that are no module's.

    Torch's launcher asks `inspect` for the whole stack at each of its steps; below are files of pytest-xdist.
    """
    for frame, _ in traceback.walk_stack(None):
        inspect.modulesbyfile.setdefault(frame.f_code.co_filename, "")


class Command:
    """A forked `rotorch` command in a session of its own; what it prints goes to files.

    Args:
        directory: of these files.
        arguments: of the command.
        cwd: where it runs; by default where the test does.
        environment: variables that it has beside those of the test.
    """

    def __init__(
        self,
        directory: Path,
        *arguments: object,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._out, self._err = directory / "stdout.txt", directory / "stderr.txt"
        self.code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        with forking():
            self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number, path in ((1, self._out), (2, self._err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            _name_files_of_stack()
            logging.getLogger().handlers.clear()  # pytest's: with them no warning would be printed
            faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)  # for its ranks, too
            code = 70
            try:
                torch.set_num_threads(1)
                os.chdir(cwd or ".")
                os.environ.update(environment or {})
                tempfile.tempdir = None  # found again, by the new environment
                code = cli.run([str(argument) for argument in arguments])
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    @property
    def stdout(self) -> str:
        return self._out.read_text()

    @property
    def stderr(self) -> str:
        return self._err.read_text()

    def wait(self, *, deadline_s: float = DEADLINE_S) -> int:
        """Returns the exit code; kills everything and fails if it hangs."""
        for _ in range(round(deadline_s / POLL_S)):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                return self.code
            time.sleep(POLL_S)
        try:
            where = self._where()
        finally:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        raise AssertionError(f"still running after {deadline_s} s:\n{self.stdout}\n{self.stderr}\n{where}")

    def _where(self) -> str:
        """State of each of its processes; their Python stacks go to its stderr, one process after another."""
        found = []
        for pid in sorted(self.left()):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                waits = [path.read_text() or "-" for path in Path(f"/proc/{pid}/task").glob("*/wchan")]
                found.append(f"process {pid}: {' '.join(waits)}")
                with self._err.open("a") as err:
                    err.write(f"process {pid}\n")
                os.kill(pid, signal.SIGUSR2)
                time.sleep(0.2)
        return "\n".join(found)

    def ranks(self) -> list[int]:
        """Process ids of its ranks, in their order."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def left(self) -> list[int]:
        """Processes of its session that are still there, zombies not counted."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.pid and fields[0] != "Z":
                found.append(int(path.parent.name))
        return found


def rotorch(directory: Path, *arguments: object) -> Command:
    """Runs a command to its end."""
    command = Command(directory, *arguments)
    command.wait()
    return command


def wait_until(condition, *, what: str, deadline_s: float = DEADLINE_S) -> None:
    """Waits for something to become true."""
    for _ in range(round(deadline_s / POLL_S)):
        if condition():
            return
        time.sleep(POLL_S)
    raise AssertionError(f"not within {deadline_s} s: {what}")
