"""Calls a function in a new interpreter, from a process that ranks cannot be forked from.

[Note: fresh processes]
    Ranks are forked from a process that has computed nothing with a GPU (see `process/forking.py`): that saves seconds,
    and the ranks' function need not be sent to them. A notebook, or a script in the middle of its work, may be no such
    process. Then the function that starts the ranks is sent to a new interpreter, and they are forked there. It prints
    where this process prints, gets its signals from this one, and dies with it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from rotorch.core.errors import ConfigError, RankFailure, RotorchError
from rotorch.process.parent_death import die_with

_MARK = "ROTORCH_FRESH_PROCESS"
_INSTEAD = "start the run by the command `rotorch train` or by torchrun"


def start_fresh(
    entry: str, *, environment: Mapping[str, str], own_group: bool = False
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Starts an interpreter that imports as this one does; returns it and this end of a connection to it.

    Args:
        entry: the function that it calls with the descriptor of its end, as "module:name".
        environment: variables besides those of this process.
        own_group: a Ctrl-C at the terminal goes to this process alone.
    """
    ours, theirs = multiprocessing.Pipe()
    module, _, name = entry.partition(":")
    code = f"from {module} import {name}; {name}({theirs.fileno()})"
    path = os.pathsep.join(p for p in sys.path if p)
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        pass_fds=[theirs.fileno()],
        process_group=0 if own_group else None,
    )
    theirs.close()
    return process, ours


def call_fresh(function: Callable[..., Any], *args: Any, why: str, hide_gpus: bool = False, **kwargs: Any) -> Any:
    """Calls `function(*args, **kwargs)` in a new interpreter; returns its result, or raises its error.

    Args:
        function: of a module that can be imported there; its arguments and its result can be pickled.
        args: its arguments by position.
        why: the reason why it is not called here, for the message if it cannot be called there either.
        hide_gpus: the new interpreter sees no GPU.
        kwargs: its arguments by name.

    Raises:
        ConfigError: the function cannot be sent. RankFailure: the new process died.
    """
    if os.environ.get(_MARK) == str(os.getpid()):
        raise ConfigError(f"ranks cannot be forked from this process: {why}, though it is a new one")
    try:
        work = pickle.dumps((function, args, kwargs))
    except Exception as error:  # whatever the objects' own ways to be pickled raise
        raise _cannot_be_sent(error, why=why) from None
    environment = {"CUDA_VISIBLE_DEVICES": ""} if hide_gpus else {}
    sys.stdout.flush()
    process, connection = start_fresh("rotorch.process.new_interpreter:main", environment=environment, own_group=True)
    with connection, _signals_go_to(process):
        try:
            connection.send((os.getpid(), why))
            connection.send_bytes(work)
            ok, value = connection.recv()
        except (EOFError, OSError):
            ok, value = False, RankFailure(f"the process that starts the ranks ended with exit code {process.wait()}")
        except BaseException:
            process.kill()
            raise
        finally:
            process.wait()
    if ok:
        return value
    raise value


def main(descriptor: int) -> None:
    """Entry of the new interpreter."""
    with Connection(descriptor) as connection:
        parent_pid, why = connection.recv()
        die_with(parent_pid)
        os.environ[_MARK] = str(os.getpid())
        try:
            answer = True, _loaded(connection.recv_bytes(), why=why)()
        except BaseException as error:
            answer = False, _sendable(error)
        sys.stdout.flush()
        connection.send(answer)


def _loaded(work: bytes, *, why: str) -> Callable[[], Any]:
    try:
        function, args, kwargs = pickle.loads(work)
    except Exception as error:
        raise _cannot_be_sent(error, why=why) from None
    return lambda: function(*args, **kwargs)


def _cannot_be_sent(error: Exception, *, why: str) -> ConfigError:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return ConfigError(
        f"ranks cannot be forked from this process: {why}, and their function cannot be sent to a new one "
        f"({said}). Define it in a module of its own, start ranks before that, or {_INSTEAD}"
    )


def _sendable(error: BaseException) -> BaseException:
    """Returns the error in a form that can be pickled; one that is not for the user has its traceback in a note."""
    if isinstance(error, RotorchError | KeyboardInterrupt):
        return error
    text = traceback.format_exc()
    error.add_note(f"in the process that starts the ranks:\n{text}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RankFailure(text)
    return error


@contextlib.contextmanager
def _signals_go_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Passes signals that ask this process to end on to the other one, which knows how to save and leave."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    passed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: process.send_signal(n)) for number in passed_on}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
