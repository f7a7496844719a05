"""Ten seeds of chaos, most kinds of harm among them; `make chaos` does a hundred, on more layouts."""

import json
from dataclasses import replace
from types import SimpleNamespace

import chaos_faults
import chaos_runs
import pytest
from chaos_faults import Fault
from chaos_plan import Harm, describe, make_plan, moment
from chaos_runs import Attempt, run_plan

from rotorch.core.errors import ConfigError
from rotorch.train import loop

SEEDS = [4, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (81, 82, 0, 1, 2, 3, 6, 7, 8, 9))]
"""One of each kind of harm. Quick are those of which there is least elsewhere: tests/train/test_faults.py kills and
stops ranks, and a launcher; test_restart.py kills until there is one rank less; test_checkpoint_faults.py and
test_power_cut.py hurt what is saved.
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, warm):
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost(seed, place):
    plan = make_plan(seed)
    outcome = run_plan(plan, at=place, mounts=False)
    about = f"{plan.layout}: {describe(plan)} ({moment(plan)}): {outcome.ended}: {outcome.said}"
    assert outcome.wrong == [], about
    assert outcome.struck, about


def test_other_losses_are_noticed(tmp_path):
    plan = make_plan(0)
    attempt = Attempt(plan, tmp_path / "run.toml", fault=Fault(plan, run=tmp_path, scratch=tmp_path, own_disk=False))
    lines = [{"step": step, "loss": 2.0 - step / 10} for step in range(1, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "checkpoints" / ".step-00000003.tmp-1").mkdir(parents=True)
    attempt.check_losses(lines)
    assert attempt.wrong == ["its last checkpoint is None", "left behind: .step-00000003.tmp-1"]
    attempt.wrong.clear()
    attempt.check_losses([*lines[:2], {"step": 3, "loss": 1.7001}, {"step": 4, "loss": 1.6}])
    assert attempt.wrong[:2] == ["its steps are [1, 2, 3]", "step 3: loss is 1.7, should be 1.7001"]


def attempted(plan, directory, *, struck=True):
    """An attempt in whose run nothing happened yet but, if `struck`, what the plan says."""
    fault = SimpleNamespace(has_struck=struck, own_disk=False, run=directory)
    return Attempt(plan, directory / "run.toml", fault=fault)


def plan_of(harm, **changes):
    seed = next(seed for seed in range(100) if make_plan(seed).harm is harm)
    return replace(make_plan(seed), **{"delay_s": 0.0, "times": 1, "max_restarts": 3, **changes})


SWALLOWED = "it happened, and nothing was said or done about it"


@pytest.mark.parametrize("harm", Harm)
def test_what_happens_and_is_not_told_of_is_wrong(harm, tmp_path):
    late = harm in (Harm.KILL, Harm.KILL_IN_SAVE, Harm.STOP, Harm.MEMORY, Harm.ROT, Harm.LAUNCHER)
    for struck, delay_s, wrong in (
        (True, 0.0, [SWALLOWED]),
        (False, 0.0, []),
        (True, 0.01, [] if late else [SWALLOWED]),
    ):
        attempt = attempted(plan_of(harm, phase="CLIPPING", delay_s=delay_s), tmp_path, struck=struck)
        attempt.judge(0, told=[])
        assert (attempt.ended, attempt.wrong) == ("was not disturbed", wrong)


def test_ranks_may_do_without_shared_memory_and_say_nothing(tmp_path):
    attempt = attempted(plan_of(Harm.MEMORY, phase="BUILDING"), tmp_path)
    attempt.judge(0, told=[])
    assert (attempt.ended, attempt.wrong) == ("was not disturbed", [])


@pytest.mark.parametrize(
    ("restarts", "code", "told", "ended", "wrong"),
    [
        (3, 0, ["rotorch: rank 0 was killed by SIGKILL"], "continued", []),
        (0, 3, ["rotorch: rank 0 was killed by SIGKILL"], "stopped", []),
        (0, 0, ["rotorch: rank 0 was killed by SIGKILL"], "continued", ["it says that it failed and ends with 0"]),
        (3, 3, ["rotorch: rank 0 was killed by SIGKILL"], "stopped", ["it should have gone on by itself"]),
        (0, 3, ["rotorch: rank 1 was killed by SIGKILL"], "stopped", ["another message than it should be"]),
        (0, 1, [], "stopped", ["exit code 1", "it stopped and says nothing"]),
        (0, 3, ["Traceback (most", "rotorch: rank 0 was killed by SIGKILL"], "stopped", ["a traceback on the screen"]),
    ],
)
def test_how_a_run_may_end(restarts, code, told, ended, wrong, tmp_path):
    attempt = attempted(plan_of(Harm.KILL, victim=0, max_restarts=restarts), tmp_path)
    attempt.judge(code, told=told)
    assert (attempt.ended, attempt.wrong) == (ended, wrong)


@pytest.mark.parametrize("error", [ConfigError("a byte is another"), KeyError("step")])
def test_a_damaged_last_checkpoint_is_a_wrong_row(error, tmp_path, monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr(chaos_runs, "latest", lambda _: tmp_path)
    monkeypatch.setattr(chaos_runs, "check", fail)
    attempt = attempted(plan_of(Harm.KILL), tmp_path)
    attempt.check_losses([])
    what = "a byte is another" if isinstance(error, ConfigError) else "KeyError('step')"
    assert f"the last checkpoint is damaged: {what}" in attempt.wrong


@pytest.mark.parametrize("content", [b"\xff}\n", b'{"loss": 1}\n', None])
def test_metrics_that_cannot_be_read_are_a_wrong_row(content, tmp_path):
    (tmp_path / "metrics.jsonl").mkdir() if content is None else (tmp_path / "metrics.jsonl").write_bytes(content)
    attempt = attempted(plan_of(Harm.KILL), tmp_path)
    attempt.check_losses([{"step": 1, "loss": 2.0}])
    assert attempt.wrong[0].startswith("metrics.jsonl cannot be read: ")
    assert attempt.wrong[1:] == ["its last checkpoint is None"]


@pytest.mark.parametrize(
    ("code", "told", "ended", "wrong"),
    [
        (-9, [], "stopped", []),
        (3, [], "stopped", ["exit code 3"]),
        (-9, ["rotorch: rank 0 was killed"], "stopped", ["it says rotorch: rank 0 was killed"]),
        (0, [], "was not disturbed", [SWALLOWED]),
    ],
)
def test_how_a_run_may_end_whose_launcher_is_killed(code, told, ended, wrong, tmp_path):
    attempt = attempted(plan_of(Harm.LAUNCHER), tmp_path)
    attempt.judge(code, told=told)
    assert (attempt.ended, attempt.wrong) == (ended, wrong)


@pytest.mark.parametrize(("layout", "wrong"), [("rtp=1", []), ("rtp=2", ["it went on with as many ranks"])])
def test_a_run_that_should_take_fewer_ranks_does(layout, wrong, tmp_path):
    attempt = attempted(plan_of(Harm.FEWER, layout="rtp=2", victim=1), tmp_path)
    killed = "rotorch: rank 1 was killed by SIGKILL. Going on from the beginning with"
    attempt.judge(0, told=[f"{killed} rtp=2 (restart 1 of 3)", f"{killed} {layout} (restart 2 of 3)"])
    assert (attempt.ended, attempt.wrong) == ("continued", wrong)


def test_a_byte_changes_only_when_there_is_a_checkpoint_before(tmp_path, monkeypatch):
    found = iter([None, "first", "second"])  # the second is still being written when it is looked for
    monkeypatch.setattr(chaos_faults, "latest", lambda _: next(found))
    monkeypatch.setattr(chaos_faults, "one_before", lambda path: "first" if path == "second" else None)
    chaos_faults._await_one_before(tmp_path)
    assert next(found, "all were looked at") == "all were looked at"


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_data_is_noticed(place, monkeypatch):
    begun_at = []

    def elsewhere(state):
        begun_at.append(state.step)
        return 1 if begun_at[0] else 0

    monkeypatch.setattr(loop, "read_ahead", elsewhere)
    outcome = run_plan(replace(make_plan(5), seed=1005, times=1), at=place, mounts=False)
    assert outcome.ended == "continued"
    assert any("loss is" in wrong for wrong in outcome.wrong), outcome
