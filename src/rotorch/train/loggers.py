"""Loggers and callbacks of `rotorch train` beside its own files: wandb, mlflow, and what users name by import path.

Only what is named is imported. All of them run on the first rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rotorch.core.errors import ConfigError, FinalFailure
from rotorch.run_config import TrainSection
from rotorch.train.metrics import Listener, StepRecord

_CALLS = ("on_step", "on_note", "on_rolled_back", "close")
_MOST_PARAMETERS_CHARS = 500


@dataclass(frozen=True)
class RunInfo:
    """The run that a logger or callback is made for.

    Attributes:
        directory: the run's.
        config: the run's configuration, as plain JSON.
        after_step: the step that the run goes on from; 0 at its beginning.
    """

    directory: Path
    config: Mapping[str, Any]
    after_step: int = 0


class Wandb:
    """Logs to wandb; a run that goes on does so in the same one. Its own environment variables say to which project."""

    def __init__(self, run: RunInfo) -> None:
        import wandb

        name, is_new = _name_of_run(run, file="wandb-run.txt", made=lambda: uuid.uuid4().hex[:12])
        resume = None if is_new else "allow"
        self._run = wandb.init(
            dir=str(run.directory), name=run.directory.name, id=name, resume=resume, config=dict(run.config)
        )
        self._run.define_metric("*", step_metric="step")  # steps come again after a roll-back

    def on_step(self, record: StepRecord) -> None:
        """Logs what `metrics.jsonl` has."""
        self._run.log({name: value for name, value in record.to_json().items() if value is not None})

    def close(self) -> None:
        """Waits until all of it has left."""
        self._run.finish()


class Mlflow:
    """Logs to mlflow; a run that goes on does so in the same one. Where to is said by its environment variables."""

    def __init__(self, run: RunInfo) -> None:
        import mlflow

        self._mlflow = mlflow

        def begin() -> str:
            return str(mlflow.start_run(run_name=run.directory.name).info.run_id)

        name, is_new = _name_of_run(run, file="mlflow-run.txt", made=begin)
        if is_new:
            mlflow.log_params({key: str(value)[:_MOST_PARAMETERS_CHARS] for key, value in _flat(run.config)})
        else:
            mlflow.start_run(run_id=name)

    def on_step(self, record: StepRecord) -> None:
        """Logs the numbers that `metrics.jsonl` has."""
        fields = record.to_json()
        step = fields.pop("step")
        numbers = {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}
        self._mlflow.log_metrics(numbers, step=step)

    def close(self) -> None:
        """Ends the run there."""
        self._mlflow.end_run()


_LOGGERS: dict[str, Callable[[RunInfo], Any]] = {"wandb": Wandb, "mlflow": Mlflow}


class LoggerListener:
    """A listener that has only some of its calls, and whose errors are the run's, in one line."""

    def __init__(self, key: str, make: Callable[[RunInfo], Any], run: RunInfo) -> None:
        self._key = key
        self._to = self._call("making it", make, run)

    def on_step(self, record: StepRecord) -> None:
        """Called after every step."""
        self._pass_on("on_step", record)

    def on_rolled_back(self, step: int) -> None:
        """Called when the run has gone back to the end of `step`."""
        self._pass_on("on_rolled_back", step)

    def on_note(self, text: str) -> None:
        """Called with a line for the user."""
        self._pass_on("on_note", text)

    def close(self) -> None:
        """Called once, also after an exception."""
        self._pass_on("close")

    def _pass_on(self, name: str, *given: Any) -> None:
        call = getattr(self._to, name, None)
        if call is not None:
            self._call(name, call, *given)

    def _call(self, what: str, call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        except Exception as error:
            said = str(error).splitlines()[0] if str(error) else ""
            raise FinalFailure(f"{self._key}: {what}: {type(error).__name__}: {said}") from error


def check_listeners(train: TrainSection) -> None:
    """Loggers that are named are installed, and callbacks can be imported.

    Raises:
        ConfigError: one is not.
    """
    for name in train.loggers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"train.loggers: {name} is not installed. Install it (pip install {name}), or leave it out"
            )
    for path in train.callbacks:
        _imported(path)


def make_listeners(train: TrainSection, run: RunInfo) -> list[Listener]:
    """The loggers and callbacks of a run, on its first rank."""
    named = [(f"train.loggers: {name}", _LOGGERS[name]) for name in train.loggers]
    named += [(f"train.callbacks: {path}", _imported(path)) for path in train.callbacks]
    return [LoggerListener(key, make, run) for key, make in named]


def _imported(path: str) -> Callable[[RunInfo], Any]:
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError(f"train.callbacks: {path!r} is no import path. Write one such as 'my_package.MyCallback'")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        said = str(error).splitlines()[0] if str(error) else ""
        raise ConfigError(
            f"train.callbacks: {path!r} cannot be imported: {type(error).__name__}: {said}. Install it, or put its "
            "directory on PYTHONPATH"
        ) from None
    if not callable(found):
        raise ConfigError(f"train.callbacks: {path!r} is a {type(found).__name__}. Write a class or a function")
    if isinstance(found, type) and not any(hasattr(found, call) for call in _CALLS):
        raise ConfigError(f"train.callbacks: {path!r} has none of {', '.join(_CALLS)}. Write at least one of them")
    return found  # type: ignore[no-any-return]


def _name_of_run(run: RunInfo, *, file: str, made: Callable[[], str]) -> tuple[str, bool]:
    """The name of a run in somebody's service, and whether it is new: kept in the run's directory."""
    path = run.directory / file
    if run.after_step and path.exists():
        return path.read_text("utf-8").strip(), False
    name = made()
    path.write_text(name + "\n", "utf-8")
    return name, True


def _flat(config: Mapping[str, Any], *, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        found += _flat(value, prefix=f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return found
