"""Runs pytest on a private tree, in a fork of a process that has loaded what is large and nothing of rotorch.

[Note: a keeper per run]
    Each run has a process of its own that waits for it (the keeper): it is the reaper of all that the run forks, ends
    what is still there afterwards, whoever called setsid, and ends all of it when the process that started it dies.
    What tests write lies in one directory, shared memory in another, and both are removed.

[Note: how lines are noted]
    Ranks end by `os._exit`, so they could not report at their end: they mark lines in memory that is shared with the
    process that forked them. The marks are read and cleared after each test.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

_FILE_BYTES, _ADDRESS_BYTES, _LEFT_BYTES = 1 << 30, 64 << 30, 1 << 30
_POLL_S = 0.05
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of prctl
_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".cache", "__pycache__", ".*_cache", ".hypothesis", "runs", "*.html"
)


@dataclass(frozen=True)
class Request:
    """A run of pytest.

    Attributes:
        tests: files or ids of tests.
        limit_s: after so long all of it is killed.
        mutated: path of the changed file and its text; None: the source as it is.
        lines: note the lines of the source that each test reaches.
        goes_on: after a test that failed.
    """

    tests: tuple[str, ...]
    limit_s: float
    mutated: tuple[str, str] | None = None
    lines: bool = False
    goes_on: bool = False


@dataclass(frozen=True)
class Report:
    """Its result.

    Attributes:
        code: pytest's exit code; None: killed.
        passed: seconds by test.
        failed: tests that did not pass, in order; `collecting` if none could be run.
        running: the test that was running when all was killed.
        reached: of each test, lines by path; `` for those of fixtures.
        said: the end of what pytest printed.
        killed: why it was killed: late, or memory.
    """

    code: int | None
    passed: dict[str, float]
    failed: list[str]
    running: str
    reached: dict[str, dict[str, list[int]]]
    said: str
    killed: str = ""


class Run:
    """A run that is under way."""

    def __init__(self, request: Request, *, tree: Path, scratch: Path) -> None:
        self.request = request
        self.directory = Path(tempfile.mkdtemp(prefix="run-", dir=scratch))
        self._shared = Path(tempfile.mkdtemp(prefix="rotorch-mutants-", dir="/dev/shm"))
        self._parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self._keep(tree)
                code = 0
            finally:
                os._exit(code)

    def report(self) -> Report | None:
        """Its result, once it is over; then nothing is left of it."""
        if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            return None
        events = [json.loads(line) for line in _read(self.directory / "events.jsonl").splitlines()]
        ended = json.loads(_read(self.directory / "ended.json") or '{"code": null, "killed": "its keeper ended"}')
        passed = {e["test"]: e["seconds"] for e in events if e["event"] == "passed"}
        failed = [e["test"] for e in events if e["event"] == "failed"]
        if ended["code"] not in (0, 1, 5, None) and not failed:
            failed = ["collecting"]
        begun = [e["test"] for e in events if e["event"] == "begins"]
        running = begun[-1] if begun and begun[-1] not in passed else "collecting"
        noted = [e for e in events if e["event"] == "reached"]
        reached = {
            test: merged([e["lines"] for e in noted if e["test"] == test]) for test in {e["test"] for e in noted}
        }
        said = _read(self.directory / "said.txt")[-4000:]
        self._remove()
        return Report(ended["code"], passed, failed, running, reached, said, ended["killed"])

    def end(self) -> None:
        """Kills all of it."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGTERM)
            os.waitpid(self.pid, 0)
        self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self._shared, ignore_errors=True)

    def _keep(self, tree: Path) -> None:
        """Runs pytest in a child, and ends all that the child has forked."""
        os.setsid()
        libc = ctypes.CDLL(None)
        libc.prctl(_SET_CHILD_SUBREAPER, 1)
        libc.prctl(_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if os.getppid() != self._parent:
            return
        code, killed = None, ""
        try:
            own = self.directory / "tree"
            copy_tree(tree, own)
            if self.request.mutated:
                (own / self.request.mutated[0]).write_text(self.request.mutated[1])
            child = os.fork()
            if child == 0:
                _run_pytest(self.request, tree=own, directory=self.directory, shared=self._shared)
            waited, status = 0.0, None
            while status is None:
                pid, ended = os.waitpid(child, os.WNOHANG)
                if pid:
                    status = ended
                elif waited > self.request.limit_s:
                    killed = "late"
                    break
                elif psutil.virtual_memory().available < _LEFT_BYTES:
                    killed = "memory"
                    break
                else:
                    time.sleep(_POLL_S)  # counted in polls: a machine may sleep in between
                    waited += _POLL_S
            code = None if status is None else os.waitstatus_to_exitcode(status)
        finally:
            _end_all()
            (self.directory / "ended.json").write_text(json.dumps({"code": code, "killed": killed}))


def copy_tree(source: Path, target: Path) -> None:
    """Copies what tests need, and what they read."""
    shutil.copytree(source, target, ignore=_NOT_COPIED, symlinks=True)


def preload() -> None:
    """Loads what every run would load for itself, and computes nothing."""
    import importlib

    for name in (
        *("pytest", "_pytest.assertion.rewrite", "hypothesis", "hypothesis.strategies", "hypothesis.extra.numpy"),
        *("numpy", "torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.checkpoint"),
        *("torch.distributed.fsdp", "torch.nn.parallel", "torch.utils.checkpoint", "torch.testing", "torch.fx"),
        *("torch._subclasses", "torch.optim", "transformers", "transformers.modeling_utils", "safetensors.torch"),
        *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2", "tokenizers"),
        *("transformers.models.mixtral.modeling_mixtral", "transformers.models.qwen3.modeling_qwen3", "peft"),
        *("datasets", "pydantic", "typer", "typer.testing", "rich.progress", "rich.console", "psutil", "fsspec"),
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not any(name.partition(".")[0] == "rotorch" for name in sys.modules)


def _read(path: Path) -> str:
    return path.read_text("utf-8", errors="replace") if path.exists() else ""


def _end_all() -> None:
    """Kills every process below this one, also those that came here when their parents ended."""
    while below := psutil.Process().children(recursive=True):
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _run_pytest(request: Request, *, tree: Path, directory: Path, shared: Path) -> None:
    """Never returns."""
    code: int = 70
    try:
        temporary = directory / "tmp"
        temporary.mkdir()
        source = str(tree / "src")
        os.environ.update(
            OMP_NUM_THREADS="1",
            CUDA_VISIBLE_DEVICES="",
            PYTHONPATH=source,
            TMPDIR=str(temporary),
            HOME=str(temporary),
            ROTORCH_SHARED_MEMORY_DIR=str(shared),
            PYTHONDONTWRITEBYTECODE="1",
        )
        tempfile.tempdir = None
        sys.dont_write_bytecode = True
        os.chdir(tree)
        sys.path[:] = [source, *(p for p in sys.path if p not in ("", str(Path(__file__).parent)))]
        output = os.open(directory / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(output, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
        resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_BYTES, _ADDRESS_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        import pytest

        plugin = _Notes(directory / "events.jsonl", _Lines(tree) if request.lines else None)
        options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={tree}"]
        options += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]  # see preload
        options += [f"--basetemp={temporary / 'pytest'}", *([] if request.goes_on else ["-x"])]
        code = int(pytest.main([*options, *request.tests], plugins=[plugin]))
    except BaseException:
        (directory / "said.txt").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        os._exit(code)


class _Lines:
    """Lines of rotorch that this process and those that it forks reach."""

    def __init__(self, tree: Path) -> None:
        self._paths, self._begins, size = [], {}, 0
        for path in sorted((tree / "src").rglob("*.py")):
            count = len(path.read_bytes().splitlines()) + 2
            self._paths.append((path, size, count))
            self._begins[str(path)] = size
            size += count
        self._tree, self._marks = tree, mmap.mmap(-1, size)
        sys.settrace(self._call)
        threading.settrace(self._call)

    def take(self) -> dict[str, list[int]]:
        """The lines that were reached since the last call, by path."""
        marks = self._marks[:]
        self._marks[:] = bytes(len(marks))
        found = {}
        for path, begin, count in self._paths:
            part = marks[begin : begin + count]
            if any(part):
                found[str(path.relative_to(self._tree))] = [line for line in range(count) if part[line]]
        return found

    def _call(self, frame: Any, _event: str, _arg: Any) -> Any:
        begin = self._begins.get(frame.f_code.co_filename)
        if begin is None:
            return None
        marks = self._marks
        marks[begin + frame.f_lineno] = 1

        def line(frame: Any, event: str, _arg: Any) -> Any:
            if event == "line":
                marks[begin + frame.f_lineno] = 1
            return line

        return line


class _Notes:
    """A plugin of pytest that notes what becomes of each test as it happens."""

    def __init__(self, path: Path, lines: _Lines | None) -> None:
        self._path, self._lines, self._pid = path, lines, os.getpid()
        self._bad: set[str] = set()
        self._seconds: dict[str, float] = {}

    def pytest_collection_finish(self) -> None:
        if self._lines is not None:
            self._lines.take()  # what imports reach says nothing

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note(event="begins", test=nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._note(event="failed", test="collecting")

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        if self._lines is not None:
            reached = self._lines.take()
            self._note(event="reached", test=test if report.when == "call" else "", lines=reached)
        if report.failed and test not in self._bad:
            self._bad.add(test)
            self._note(event="failed", test=test)
        if report.skipped:
            self._bad.add(test)
        if report.when == "teardown" and test not in self._bad:
            self._note(event="passed", test=test, seconds=round(self._seconds[test], 3))

    def _note(self, **what: Any) -> None:
        if os.getpid() == self._pid:
            with self._path.open("a") as file:
                file.write(json.dumps(what) + "\n")


def merged(reached: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
    """Lines of several, by path."""
    found: dict[str, set[int]] = {}
    for lines in reached:
        for path, numbers in lines.items():
            found.setdefault(path, set()).update(numbers)
    return {path: sorted(numbers) for path, numbers in found.items()}
