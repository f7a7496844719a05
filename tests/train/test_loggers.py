"""Loggers and callbacks of a run: imported only if named, refused in one line if missing, told of every step."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from rotorch.core.errors import ConfigError, FinalFailure
from rotorch.run_config import TrainSection
from rotorch.train.loggers import RunInfo, check_listeners, make_listeners
from rotorch.train.metrics import StepRecord

RECORD = StepRecord(
    step=3, loss=2.0, tokens=10, tokens_per_s=5.0, grad_norm=1.0, lr=0.1, peak_bytes=7, step_s=0.1, held_out=None
)


class Seen:
    """A callback that knows two of the calls."""

    def __init__(self, run):
        self.path = run.directory / "seen"
        self.path.write_text(f"{run.config['train']['steps']} {run.after_step}\n")

    def on_step(self, record):
        with self.path.open("a") as file:
            file.write(f"{record.step} {record.loss}\n")

    def close(self):
        with self.path.open("a") as file:
            file.write("closed\n")


class Broken(Seen):
    def on_step(self, record):
        raise KeyError("loss of\nmind")


class Nothing:
    def __init__(self, run):
        self.run = run


def section(**settings):
    return TrainSection(steps=5, **settings)


def info(tmp_path, *, after_step=0):
    return RunInfo(tmp_path, {"train": {"steps": 5}}, after_step=after_step)


def test_callbacks_are_told_what_they_ask_for(tmp_path):
    train = section(callbacks=(f"{__name__}.Seen",))
    check_listeners(train)
    (listener,) = make_listeners(train, info(tmp_path, after_step=2))
    listener.on_step(RECORD)
    listener.on_note("saved")
    listener.on_rolled_back(1)
    listener.close()
    assert (tmp_path / "seen").read_text() == "5 2\n3 2.0\nclosed\n"


def test_an_error_of_a_callback_is_one_line(tmp_path):
    (listener,) = make_listeners(section(callbacks=(f"{__name__}.Broken",)), info(tmp_path))
    with pytest.raises(FinalFailure, match=r"train\.callbacks: .*Broken: on_step: KeyError") as raised:
        listener.on_step(RECORD)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"callbacks": ("no_such_package.Seen",)}, "cannot be imported: ModuleNotFoundError"),
        ({"callbacks": ("Seen",)}, "is no import path"),
        ({"callbacks": (f"{__name__}.RECORD",)}, "is a StepRecord. Write a class or a function"),
        ({"callbacks": (f"{__name__}.Nothing",)}, "has none of on_step"),
        ({"loggers": ("wandb",)}, "wandb is not installed. Install it"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_starts(monkeypatch, settings, said):
    monkeypatch.setattr("rotorch.train.loggers.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        check_listeners(section(**settings))
    assert said in str(refused.value) and "\n" not in str(refused.value)


class Service(ModuleType):
    """Stands in for wandb and mlflow: writes down what it is called with."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self if name == "init" else SimpleNamespace(info=SimpleNamespace(run_id="r1"))

        return call


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_services_get_the_numbers_of_each_step_and_a_run_goes_on_in_the_same_one(monkeypatch, tmp_path, name):
    service = Service(name)
    monkeypatch.setitem(sys.modules, name, service)
    for after_step in (0, 3):
        (listener,) = make_listeners(section(loggers=(name,)), info(tmp_path, after_step=after_step))
        listener.on_step(RECORD)
        listener.close()
    calls = [call for call, _, _ in service.calls]
    if name == "wandb":
        assert calls == ["init", "define_metric", "log", "finish"] * 2
        first, second = (kwargs for call, _, kwargs in service.calls if call == "init")
        assert first["id"] == second["id"] and (first["resume"], second["resume"]) == (None, "allow")
        assert service.calls[2][1][0]["loss"] == 2.0
    else:
        assert calls == ["start_run", "log_params", "log_metrics", "end_run", "start_run", "log_metrics", "end_run"]
        assert service.calls[1][1][0] == {"train.steps": "5"}
        assert service.calls[4][2] == {"run_id": "r1"} and service.calls[2][2] == {"step": 3}
