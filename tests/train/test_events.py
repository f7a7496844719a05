"""`events.jsonl`: what a run notes beside its metrics, and a report of real runs."""

import json
import logging
import re

from commands import diverge, rotorch, write_run

from rotorch import cli
from rotorch.report.read import read_run
from rotorch.train.events import EVENTS, EventsFile


def noted(out):
    return [json.loads(line) for line in (out / EVENTS).read_text().splitlines()]


def test_a_run_that_is_resumed_notes_both_starts_and_its_memory(tmp_path):
    run, out = write_run(tmp_path), tmp_path / "run"
    more = ("--parallel", "rtp=2", "train.checkpoint_every=2", "train.eval_every=3")
    assert rotorch(tmp_path / "log", "train", run, *more, "train.steps=4", "optimizer.schedule=constant").code == 0
    done = rotorch(tmp_path / "log", "train", run, *more, "--resume", "optimizer.schedule=constant")
    assert done.code == 0, done.stderr
    first, ended, again, last = (e for e in noted(out) if e["event"] != "memory")
    assert [e["event"] for e in (first, ended, again, last)] == ["started", "ended", "started", "ended"]
    assert (first["step"], again["step"], last["step"]) == (0, 4, 6) and first["text"] == "2 ranks, rtp=2"
    assert first["predicted"] == last["memory"], "the formulas of a layout are exact"
    assert len(last["peaks"]) == 2 and "torch" in first["versions"]
    found = read_run(out, name="run")
    assert [(e.kind, e.step) for e in found.events] == [("started", 0), ("resumed", 4)]
    assert found.memory_steps == [1, 2, 3, 4, 5, 6] and len(found.rank_memory["measured"]) == 2
    for predicted, measured in zip(found.rank_memory["predicted"], found.rank_memory["measured"], strict=True):
        assert measured.pop("peak") > 0 and predicted == measured
    assert list(found.steps) == [1, 2, 3, 4, 5, 6]
    assert len(found.values("held_out_loss")) == 3  # the first run's end, too
    assert [c.step for c in found.checkpoints] == [4, 6] and not found.remarks
    assert cli.run(["report", str(out)]) == 0
    assert re.search(
        r"predicted: [\d.]+ KiB per rank.*measured: [\d.]+ KiB per rank", (out / "report.html").read_text()
    )


def test_skipped_steps_are_noted_with_their_reason(tmp_path, monkeypatch):
    run, out = write_run(tmp_path), tmp_path / "run"
    diverge(monkeypatch)
    done = rotorch(tmp_path / "log", "train", run, "train.on_nonfinite=skip")
    assert done.code == 0, done.stderr
    (note, *_) = [event for event in noted(out) if event["event"] == "note"]
    assert re.match(r"step \d is skipped: ", note["text"])
    assert "skipped" in {event.kind for event in read_run(out, name="run").events}


def events_file(directory):
    return EventsFile(directory, after_step=3, text="1 rank, single", versions={}, predicted=[{}])


def test_a_roll_back_is_noted_with_both_steps(tmp_path):
    events = events_file(tmp_path)
    events.on_rolled_back(1)
    events.on_note("step 4: loss nan")
    events.close()
    assert [(e["event"], e["step"], e["text"]) for e in noted(tmp_path)] == [
        ("started", 3, "1 rank, single"),
        ("rolled_back", 1, "from step 3"),
        ("note", 1, "step 4: loss nan"),
    ]


def test_a_file_that_cannot_be_written_is_told_once_and_ends_nothing(tmp_path, caplog):
    (tmp_path / EVENTS).mkdir()
    with caplog.at_level(logging.WARNING):
        events = events_file(tmp_path)
        events.on_note("on it goes")
        events.close()
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / EVENTS}: Is a directory; the run goes on without it"
    ]


def test_a_full_disk_is_told_once_and_ends_nothing(tmp_path, caplog):
    (tmp_path / EVENTS).symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING):
        events = events_file(tmp_path)
        events.on_note("on it goes")
        events.close()
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / EVENTS}: No space left on device; the run goes on without it"
    ]
