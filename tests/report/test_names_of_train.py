"""Names in a run's directory: those that `rotorch report` looks for are those that `rotorch train` writes."""

from dataclasses import fields, replace
from pathlib import Path

from rotorch.report import read
from rotorch.train.checkpoint.directories import checkpoints_of, step_name
from rotorch.train.checkpoint.manifest import MANIFEST, Manifest
from rotorch.train.checks.preflight import RUN_FILE
from rotorch.train.events import EVENTS, MOST_RANKS
from rotorch.train.launch.failure_report import REPORT
from rotorch.train.metrics import METRICS, HeldOut, Rewards, StepRecord


def test_files_have_the_names_that_train_gives_them():
    assert (read.METRICS, read.RUN_FILE, read.FAILURE, read.EVENTS) == (METRICS, RUN_FILE, REPORT, EVENTS)
    assert (checkpoints_of("run"), read.MANIFEST) == (Path("run") / read.CHECKPOINTS, MANIFEST)
    assert read._STEP_NAME.fullmatch(step_name(7))
    assert read.MOST_RANKS == MOST_RANKS
    assert {"versions", "parallel", "num_ranks", "tensors", "files"} <= set(Manifest.model_fields)


def test_every_figure_of_a_step_is_drawn():
    record = StepRecord(1, 2.0, 3, 4.0, 5.0, 6.0, 7, 8.0, held_out=HeldOut(1.0, 2.0, 3), skipped=True)
    assert {f.name for f in fields(StepRecord)} - {"held_out", "evals", "memory", "rewards"} <= set(record.to_json())
    assert set(record.to_json()) - {"step", "tokens", "skipped"} == set(read.SERIES)
    rewards = Rewards(0.5, 0.75)
    of_pairs = replace(record, held_out=HeldOut(None, 2.0, 0, rewards), rewards=rewards)
    assert set(of_pairs.to_json()) - set(record.to_json()) == set(read.OF_PAIRS)
