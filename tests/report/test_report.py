"""`rotorch report`: what is on the page, and what is refused."""

import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from report_runs import VERSIONS, eventful, record, traced, write_run

from rotorch import cli
from rotorch.report.chart import Curve, Unit, chart, log_ticks, thinned, ticks
from rotorch.report.page import MOST_BYTES, page
from rotorch.report.read import SERIES, read_run, read_runs
from rotorch.report.trace import trace_of


def written(*directories: Path, out: Path) -> str:
    assert cli.run(["report", *map(str, directories), "--out", str(out)]) == 0
    return out.read_text("utf-8")


def charts(text: str) -> dict[str, dict]:
    """The values that the page's script tells, by the title of their chart."""
    found = re.findall(r'<figcaption><b>(.*?)</b>.*?<script type="application/json">(.*?)</script>', text, re.DOTALL)
    return {unescape(title): json.loads(data) for title, data in found}


def in_words(text: str) -> str:
    """The text of a page, without tags, styles and scripts."""
    text = re.sub(r"<(style|script)\b.*?</\1>", " ", text, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", text)).split())


def test_every_series_is_drawn_with_its_values(tmp_path):
    run = eventful(tmp_path / "run")
    drawn = charts(written(run, out=tmp_path / "page.html"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    titles = {
        "loss": "Loss in training, and on held-out text (dots)",
        "held_out_loss": "Loss in training, and on held-out text (dots)",
        "held_out_bits_per_byte": "Held-out text",
        "grad_norm": "Norm of the gradients",
        "lr": "Learning rate",
        "tokens_per_s": "Speed",
        "step_s": "Time of a step",
        "peak_bytes": "Peak memory of a rank",
    }
    assert set(titles) == set(SERIES) and set(titles.values()) == set(drawn)
    for name, title in titles.items():
        curve = next(c for c in drawn[title]["curves"] if (c["label"] == "run held-out") == (name == "held_out_loss"))
        there = {line["step"]: line[name] for line in lines if line.get(name) is not None}
        assert curve["x"] == list(there)
        assert curve["y"] == pytest.approx(list(there.values()), rel=1e-5)


def test_texts_that_are_measured_by_name_have_charts_of_their_own(tmp_path):
    fields = {"eval_law-2_bits_per_byte": 2.5, "eval_law-2_loss": 1.7, "held_out_bits_per_byte": 2.0}
    first = write_run(tmp_path / "a", [record(step, **fields if step % 10 == 0 else {}) for step in range(1, 31)])
    second = write_run(tmp_path / "b", [record(step) for step in range(1, 31)])
    drawn = charts(written(first, second, out=tmp_path / "page.html"))
    assert [title for title in drawn if "law-2" in title] == ["Text law-2"]
    (curve,) = drawn["Text law-2"]["curves"]
    assert (curve["label"], curve["x"], curve["y"]) == ("a", [10, 20, 30], [2.5, 2.5, 2.5])


def test_a_run_on_pairs_has_its_rewards_in_place_of_bits_per_byte(tmp_path):
    fields = {"reward_margin": 0.2, "reward_accuracy": 0.75}
    held_out = {f"held_out_{name}": value / 2 for name, value in fields.items()}
    records = [record(step, **fields, **(held_out if step == 20 else {})) for step in range(1, 21)]
    page = written(write_run(tmp_path / "a", records), out=tmp_path / "page.html")
    drawn = charts(page)
    assert "Held-out text" not in drawn and "37.5% of pairs right" in in_words(page)
    curves = drawn["Reward margin of pairs, and held out (dots)"]["curves"]
    assert [(curve["label"], curve["x"], curve["y"][-1]) for curve in curves] == [
        ("a", list(range(1, 21)), 0.2),
        ("a held-out", [20], 0.1),
    ]


def test_a_curve_lies_where_its_values_are():
    drawn = chart(
        "x", [Curve("a", 0, [0, 5, 10], [0.0, 30.0, 15.0])], unit=Unit("number", ""), first=0, last=10, if_empty=""
    )
    path = re.search(r'<g class="lin">.*?class="curve r0 c0" d="M(.*?)"', drawn)
    points = [tuple(map(float, pair.split())) for pair in path[1].split("L")]
    highest = 30 * 1.03
    assert points == [
        (0, 1000),
        (500, pytest.approx(1000 * (1 - 30 / highest), abs=0.06)),
        (1000, pytest.approx(1000 * (1 - 15 / highest), abs=0.06)),
    ]


def test_a_step_without_a_value_ends_the_line():
    values = [1.0, 2.0, None, 3.0, 4.0]
    drawn = chart("x", [Curve("a", 0, range(5), values)], unit=Unit("number", ""), first=0, last=4, if_empty="")
    path = re.search(r'<g class="lin">.*?class="curve r0 c0" d="(.*?)"', drawn)[1]
    assert path.count("M") == 2 and path.count("L") == 2


def test_the_page_says_what_happened(tmp_path):
    said = in_words(written(eventful(tmp_path / "run"), out=tmp_path / "page.html"))
    for words in (
        "step 120: step skipped: the weights were left as they were",
        "step 217: failure, 2026-11-23 12:00:00: rank 1 was killed by SIGKILL in step 217, in backward",
        "step 200: checkpoint, 2.11 KiB, by 2 ranks under rtp=2",
        "layout rtp=2",
        "steps 300 of 300",
        "target tokens 153,600",
        "optimizer.lr 0.005",
        "torch 2.15.0",
        "rank 0: waiting for a slice 10.0%, waiting for a gradient 10.0%, optimizer 20.0%, compute 60.0%",
        "rank 1: waiting for a slice 20.0%",
        "one step of 10 ms, layout rtp=2",
        "resumes with rotorch train run.toml --resume",
        "peak of a rank 289 MiB",
    ):
        assert words in said, words


def test_what_is_not_there_is_said(tmp_path):
    run = write_run(tmp_path / "run", [record(1, peak_bytes=0, loss=None)])
    said = in_words(written(run, out=tmp_path / "page.html"))
    for words in (
        "no held-out text measured in this run",
        "no finite loss in this run",
        "the system did not tell the memory of this run",
        "no memory by category recorded",
        "no trace in the run's directory",
        "no checkpoint is in the run's directory",
        "unknown: the run's directory has no checkpoint that says them",
        "step 1: not finite",
    ):
        assert words in said, words


def test_events_that_a_run_has_noted(tmp_path):
    events = [
        {"event": "started", "step": 0, "versions": VERSIONS, "predicted": {"weights": 1 << 20, "gradients": 1 << 19}},
        {"event": "skipped", "step": 2, "text": "loss nan"},
        {"event": "rolled_back", "step": 2, "text": "from step 4"},
        {"event": "started", "step": 2, "versions": VERSIONS, "at": "2026-11-23 12:00:00"},
        {"event": "ended", "step": 5, "memory": {"weights": 1 << 21, "gradients": 0}, "peaks": [1 << 22, 1 << 23]},
    ]
    events[-1]["planned"] = {"planned_bytes": [3 << 20, 5 << 20], "measured_bytes": [4 << 20, 6 << 20]}
    records = [record(step) for step in range(1, 6)]
    records[1] |= {"skipped": True}
    run = write_run(tmp_path / "run", records, events=events)
    with (run / "events.jsonl").open("a") as stream:
        stream.write('{"event": ')
    said = in_words(written(run, out=tmp_path / "page.html"))
    for words in (
        "step 2: step skipped: loss nan",
        "step 2: rolled back: from step 4",
        "step 2: resumed, 2026-11-23 12:00:00",
        "measured: 2.00 MiB per rank (weights 2.00 MiB, gradients 0 B)",
        "peak by rank 4.00 MiB, 8.00 MiB",
        "planned peak 5.00 MiB of tensors",
        "events.jsonl, line 6: damaged; it is left out",
        "torch 2.15.0",
    ):
        assert words in said, words
    assert "the weights were left as they were" not in said


def test_predicted_memory_stands_beside_measured(tmp_path):
    events = [
        {"event": "started", "step": 0, "predicted": {"weights": 1 << 20}},
        {"event": "ended", "step": 1, "memory": {"weights": 3 << 19}},
    ]
    said = in_words(written(write_run(tmp_path / "run", [record(1)], events=events), out=tmp_path / "page.html"))
    assert "predicted: 1.00 MiB per rank" in said and "measured: 1.50 MiB per rank" in said


def test_memory_of_every_rank_over_the_steps(tmp_path):
    mib = 1 << 20
    predicted = [{"weights": mib, "gradients": mib}, {"weights": 2 * mib, "gradients": mib}]
    events = [
        {"event": "started", "step": 0, "predicted": predicted[0], "predicted_by_rank": predicted},
        {"event": "memory", "step": 1, "weights": [mib, 2 * mib], "gradients": [mib, mib], "peak": [9 * mib, 8 * mib]},
        {"event": "memory", "step": 3, "weights": [mib, 3 * mib], "gradients": [mib, mib], "peak": [9 * mib, 8 * mib]},
        {"event": "started", "step": 2, "predicted": predicted[0], "predicted_by_rank": predicted},
        {"event": "memory", "step": 3, "weights": [mib, 4 * mib], "gradients": [mib, mib], "peak": [9 * mib, 8 * mib]},
        {"event": "memory", "step": 4, "weights": "damaged", "gradients": [None, "x"]},
    ]
    text = written(
        write_run(tmp_path / "run", [record(n) for n in range(1, 6)], events=events[:-1]), out=tmp_path / "p"
    )
    curves = charts(text)["Memory: weights"]["curves"]
    assert [c["label"] for c in curves] == ["run", "run predicted"]
    assert curves[0]["x"] == [1, 3] and curves[0]["y"] == pytest.approx([2 * mib, 4 * mib], rel=1e-5)
    assert curves[1]["y"] == pytest.approx([2 * mib, 2 * mib], rel=1e-5)
    said = in_words(text)
    assert "rank 0: predicted 2.00 MiB, measured 2.00 MiB, peak 9.00 MiB" in said
    assert "rank 1: predicted 3.00 MiB, measured 5.00 MiB, peak 8.00 MiB" in said
    damaged = write_run(tmp_path / "damaged", [record(n) for n in range(1, 6)], events=events)
    assert read_run(damaged, name="damaged").memory_columns["weights"] == [2 * mib, 4 * mib, None]


def test_several_runs_lie_over_each_other_with_a_legend(tmp_path):
    for parent, rate in (("a", 1e-3), ("b", 2e-3)):
        config = {"train": {"steps": 9}, "optimizer": {"lr": rate}}
        about = {"config": config, "parallel": f"ddp={rate * 1000:g}"}
        write_run(tmp_path / parent / "run", [record(step, loss=rate) for step in range(1, 4)], about=about)
    text = written(tmp_path / "a" / "run", tmp_path / "b" / "run", out=tmp_path / "page.html")
    assert [c["label"] for c in charts(text)["Loss in training"]["curves"]] == ["a/run", "b/run"]
    assert [c["y"] for c in charts(text)["Loss in training"]["curves"]] == [[1e-3] * 3, [2e-3] * 3]
    assert text.count('type="checkbox" id="r') == 2
    said = in_words(text)
    assert "a/run ddp=1 b/run ddp=2" in said
    assert "1 key in which the runs differ: optimizer.lr a/run: 0.001 b/run: 0.002" in said


def test_names_are_escaped(tmp_path):
    name = '<b>&"</b><script>'
    about = {"parallel": name, "command": name, "config": {"train": {"note": name}}}
    records = [record(1), record(2)]
    events = [{"event": "note", "step": 1, "text": name}]
    run = write_run(tmp_path / "<i>'&\"", records, about=about, events=events, failure=f"now\n{name}", checkpoints=[1])
    text = written(run, out=tmp_path / "page.html")
    assert name not in text and "<i>'" not in text
    assert text.count("<script") == len(charts(text)) + 1
    assert in_words(text).count(name) >= 5


def test_a_long_run_fits_and_keeps_its_spikes(tmp_path):
    records = [record(step) for step in range(1, 100_001)]
    records[54_320] |= {"loss": 77.5}
    records[12_345] |= {"loss": None}
    run = write_run(tmp_path / "run", records)
    text = written(run, out=tmp_path / "page.html")
    assert len(text.encode()) < MOST_BYTES
    loss = charts(text)["Loss in training"]["curves"][0]
    assert dict(zip(loss["x"], loss["y"], strict=True))[54_321] == 77.5
    assert (loss["x"][0], loss["x"][-1]) == (1, 100_000) and len(loss["x"]) <= 3 * 600 + 2
    assert re.search(r'<g class="lin">.*?class="curve r0 c0" d="(.*?)"', text)[1].count("M") == 2


def test_many_runs_fit(tmp_path):
    records = [record(step) for step in range(1, 2_501)]  # more than a curve keeps
    paths = [write_run(tmp_path / f"run{number}", records) for number in range(16)]
    text = page(read_runs(paths))
    assert len(text.encode()) < MOST_BYTES and len(charts(text)["Loss in training"]["curves"]) == 16


def test_thinning_keeps_the_extremes_of_every_column():
    points = [(step, float(step * 7919 % 1000)) for step in range(10_000)]
    kept = thinned(points, first=0, last=9_999, columns=100)
    assert len(kept) <= 202 and kept == sorted(kept) and set(kept) <= set(points)
    for column in range(100):
        of_column = [value for step, value in points[1:-1] if step * 100 // 9_999 == column]
        still = [value for step, value in kept if step * 100 // 9_999 == column]
        assert {min(of_column), max(of_column)} <= set(still)


def test_ticks_are_round():
    assert ticks(0.0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(0.0, 300 * 2**20, base=1024.0) == [0, 100 * 2**20, 200 * 2**20, 300 * 2**20]
    assert ticks(7.0, 7.0) == [7.0]
    assert log_ticks(1e-5, 1e-2) == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2])
    assert log_ticks(2.0, 6.0) == pytest.approx([2, 5]) or len(log_ticks(2.0, 6.0)) >= 3


def test_states_of_a_rank_follow_one_another_without_gaps():
    trace = trace_of(list(traced()), name="?")
    assert trace.name == "rtp=2" and trace.length_ms == pytest.approx(10)
    for rank, states in enumerate(trace.ranks):
        assert [start for _, start, _ in states] == [0, *(end for _, _, end in states[:-1])]
        assert sum(trace.shares(rank).values()) == pytest.approx(1)
    assert [name for name, *_ in trace.ranks[0]] == [
        "compute",
        "waiting for a slice",
        "compute",
        "waiting for a gradient",
        "optimizer",
    ]


def test_a_last_line_that_was_cut_off_is_left_out_with_a_word(tmp_path, capsys):
    run = write_run(tmp_path / "run", [record(1), record(2)])
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3, "lo')
    text = written(run, out=tmp_path / "page.html")
    assert charts(text)["Loss in training"]["curves"][0]["x"] == [1, 2]
    assert "run: metrics.jsonl: the last line was cut off as it was written" in in_words(text)
    assert "the last line was cut off" in capsys.readouterr().err


def test_what_is_damaged_beside_the_metrics_is_a_remark(tmp_path):
    run = write_run(tmp_path / "run", [record(1), record(2)], checkpoints=[2], trace=[{"ph": "X"}])
    (run / "run.json").write_text("{")
    (run / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    said = in_words(written(run, out=tmp_path / "page.html"))
    for words in (
        "run.json: cannot be read",
        "step-00000002/manifest.json: missing",
        "trace/rtp-2.trace.json: cannot be read as a trace",
        "unknown: there is no run.json that can be read",
    ):
        assert words in said, words


DAMAGED = ['{"step": 2, "loss": }', "[]", '{"step": "2"}', '{"step": -1}', '{"step": 2, "loss": "low"}', "\x00"]


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_is_named(tmp_path, capsys, line):
    run = write_run(tmp_path / "run", [record(1)])
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write(line + "\n" + json.dumps(record(3)) + "\n")
    refused(capsys, [run], f"report: {run}/metrics.jsonl, line 2: damaged (no step of a run). Repair the line")
    assert not (run / "report.html").exists()


def refused(capsys, directories, words, *, more=()):
    assert cli.run(["report", *map(str, directories), *map(str, more)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rotorch: {words}") and said.count("\n") == 1, said


def test_directories_that_are_no_runs_are_refused(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_text("{}")
    refused(capsys, [tmp_path / "no"], f"report: {tmp_path}/no: no such directory.")
    refused(capsys, [tmp_path / "file"], f"report: {tmp_path}/file: a file.")
    refused(capsys, [tmp_path / "empty"], f"report: {tmp_path}/empty: not a run's directory (no metrics.jsonl).")
    refused(capsys, [tmp_path / "begun"], f"report: {tmp_path}/begun: the run has done no step (metrics.jsonl is")
    (tmp_path / "begun" / "failure.txt").write_text("now\nall is lost\n")
    refused(capsys, [tmp_path / "begun"], f"report: {tmp_path}/begun: the run has done no step ({tmp_path}/begun/fail")


def test_a_run_that_is_named_twice_is_refused(tmp_path, capsys):
    run = write_run(tmp_path / "run", [record(1)])
    refused(capsys, [run, tmp_path / "run" / ".." / "run"], f"report: {tmp_path}/run/../run: named twice.")


def test_too_many_runs_are_refused(tmp_path, capsys):
    refused(capsys, [tmp_path] * 17, "report: 17 runs, and at most 16 can be told apart.")


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, capsys):
    nowhere = tmp_path / "no" / "page.html"
    refused(capsys, [tmp_path / "no run"], f"--out {nowhere}: its directory is missing", more=["--out", nowhere])
    refused(capsys, [tmp_path / "no run"], f"--out {tmp_path}: its directory is", more=["--out", tmp_path])


def test_a_report_replaces_only_a_report(tmp_path, capsys):
    run, out = write_run(tmp_path / "run", [record(1)]), tmp_path / "page.html"
    out.write_text("<!doctype html>mine")
    refused(capsys, [run], f"--out {out}: there already, and no report.", more=["--out", out])
    assert out.read_text() == "<!doctype html>mine"
    out.unlink()
    first = written(run, out=out)
    assert written(run, out=out) == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_the_page_of_one_run_lies_in_its_directory(tmp_path, capsys, monkeypatch):
    runs = [write_run(tmp_path / name, [record(1)]) for name in "ab"]
    monkeypatch.chdir(tmp_path)
    assert cli.run(["report", str(runs[0]), "--json", "numbers.json"]) == 0
    assert (runs[0] / "report.html").is_file()
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert numbers["runs"][0]["step"] == 1 and numbers["num_bytes"] == (runs[0] / "report.html").stat().st_size
    assert cli.run(["report", *map(str, runs)]) == 0
    assert (tmp_path / "report.html").is_file()
    assert capsys.readouterr().out.splitlines()[-1] == "written: report.html"


def test_checkpoints_elsewhere_are_found_or_said_to_be_elsewhere(tmp_path):
    write_run(tmp_path / "saves", [record(1)], checkpoints=[1])
    config = {"train": {"checkpoint_dir": str(tmp_path / "saves")}}
    there = read_run(write_run(tmp_path / "run", [record(1)], about={"config": config}), name="run")
    assert [c.step for c in there.checkpoints] == [1] and there.versions == VERSIONS
    config = {"train": {"checkpoint_dir": "s3://bucket/run"}}
    store = read_run(write_run(tmp_path / "other", [record(1)], about={"config": config}), name="other")
    assert list(store.remarks) == ["checkpoints: in the store s3://bucket/run, which a report does not read"]


def test_nothing_comes_from_elsewhere(tmp_path):
    text = written(eventful(tmp_path / "run"), out=tmp_path / "page.html")
    assert not re.search(r"https?:|src=|@import|url\(|<link", text)


def test_the_command_loads_no_torch(tmp_path):
    run = write_run(tmp_path / "run", [record(1)])
    code = (
        "import sys; from rotorch import cli; code = cli.run(sys.argv[1:]);"
        "print(code, sorted({'torch', 'numpy', 'transformers', 'plotly'} & set(sys.modules)))"
    )
    source = Path(cli.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(run)],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 []"


HOSTILE_VALUES = ["1e400", "-1e308", "1e308", "1" * 400, "true", "null", "NaN", "-Infinity", "5e-324", "0", "-1"]


def test_any_number_is_drawn(tmp_path):
    for number, value in enumerate(HOSTILE_VALUES):
        run = write_run(tmp_path / str(number), [record(1), record(2)])
        with (run / "metrics.jsonl").open("a") as stream:
            fields = ", ".join(f'"{name}": {value}' for name in (*SERIES, "tokens"))
            stream.write(f'{{"step": 3, {fields}}}\n')
        written(run, out=tmp_path / "page.html")


HOSTILE_EVENTS = [
    '{"event": "ended", "step": 1, "peaks": 3, "memory": []}',
    '{"event": "ended", "step": 1, "peaks": ["a", null], "memory": {"weights": "x"}}',
    '{"event": "started", "step": 1, "versions": ["torch"], "predicted": 7}',
    '{"event": ["note"], "step": 1}',
    '{"event": "note", "step": ' + "1" * 400 + "}",
    '{"event": "note", "step": -5}',
    '{"event": "note", "step": NaN}',
    '{"event": "note", "step": 1, "text": "\\ud800"}',
    "[]",
    "[" * 100_000,
]
HOSTILE_TRACES = [
    "[]",
    "{}",
    '{"traceEvents": 3}',
    '{"traceEvents": [{"ph": "X", "ts": NaN, "dur": 1, "pid": 0, "cat": "forward"}]}',
    '{"traceEvents": [{"ph": "X", "ts": 0, "dur": 1e400, "pid": 0, "cat": "forward"}]}',
    '{"traceEvents": [{"ph": "X", "ts": 0, "dur": 0, "pid": 0, "cat": "forward"}]}',
    '{"traceEvents": [{"ph": "X", "ts": 0, "dur": 1, "pid": 0, "cat": "unknown"}]}',
    '{"traceEvents": [{"name": "process_name", "pid": 0, "args": 1}]}',
]
HOSTILE_FILES = [
    *(("events.jsonl", text) for text in HOSTILE_EVENTS),
    *(("limit/a.trace.json", text) for text in HOSTILE_TRACES),
    ("run.json", '{"config": [], "parallel": 3, "command": {}}'),
    ("run.json", '{"config": {"train": [], "model": {"a": {"b": [null, "\\ud800"]}}}, "parallel": "\\udfff"}'),
    ("run.json", '{"config": {"train": {"checkpoint_dir": "\\u0000", "steps": "many"}}}'),
    ("run.json", "{" * 100_000),
    ("failure.txt", "\x00\n\x00"),
    ("failure.txt", "now\nin step " + "9" * 40),
    ("checkpoints/step-00000002/manifest.json", '{"versions": 3, "num_ranks": "two", "parallel": []}'),
    ("checkpoints/step-00000002/manifest.json", "[]"),
    ("checkpoints/step-00000002/manifest.json", '{"versions": {"torch": {}}}'),
]


def test_whatever_lies_beside_the_metrics_is_drawn_or_left_out(tmp_path):
    for number, (name, text) in enumerate(HOSTILE_FILES):
        run = write_run(tmp_path / str(number), [record(1), record(2)], checkpoints=[1])
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
        assert "Loss in training" in written(run, out=tmp_path / "page.html"), name


def test_a_checkpoint_that_goes_away_while_it_is_looked_at_is_no_error(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", [record(1)], checkpoints=[1, 2])
    real = os.scandir

    def gone(path, *more):
        if Path(path).name == "step-00000001":
            raise FileNotFoundError(path)
        return real(path, *more)

    monkeypatch.setattr(os, "scandir", gone)
    assert [checkpoint.step for checkpoint in read_run(run, name="run").checkpoints] == [2]
