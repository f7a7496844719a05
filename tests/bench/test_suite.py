import io
import json
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from bench_cases import write_run
from rich.console import Console

import rotorch.bench.peers as peers_module
import rotorch.bench.suite as suite_module
from rotorch.bench.command import read_layouts
from rotorch.bench.peers import PEERS
from rotorch.bench.plot import points_of, to_html, to_svg
from rotorch.bench.suite import load_suite, read_result, select
from rotorch.bench.suite_command import _prepare, list_cases, suite_command, write_tables
from rotorch.bench.summary import to_markdown
from rotorch.core.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
STANDARD = ROOT / "configs" / "bench" / "suite.toml"
BARS = STANDARD.with_name("bars.toml")
MINI = """
rounds = 1
steps = 1
parallel = ["single", "ddp={n}"]
bars = ["ddp={n} >= 0.000001 * limit"]
[[case]]
run = "tiny.toml"
nproc = [2]
batch = [{ sequence_length = 16, micro_batch = 2 }, { sequence_length = 8, micro_batch = 1 }]
"""


def write_suite(directory, text=MINI):
    write_run(directory)
    (directory / "mini.toml").write_text(text)
    return directory / "mini.toml"


def run(suite, out, **options):
    """Exit code and what was printed."""
    printed = io.StringIO()
    code = suite_command(suite, out=out, console=Console(file=printed, width=200), **options)
    return code, printed.getvalue()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A suite that was run twice: its directory, and exit code and printed text of both runs."""
    directory = tmp_path_factory.mktemp("suite")
    suite, out = write_suite(directory), directory / "out"
    return out, run(suite, out), run(suite, out)


def test_every_case_leaves_a_record(measured):
    out, (code, printed), _ = measured
    assert code == 0, printed
    for case, tokens in (("tiny-2ranks-32tokens", 64), ("tiny-2ranks-8tokens", 16)):
        record = json.loads((out / f"{case}.json").read_text())
        assert record["suite"]["case"] == case and record["tokens_per_step"] == tokens
        assert [row["parallel"] for row in record["rows"]] == ["single", "ddp=2"]
        assert record["bars"][0]["ok"] is True
        assert f"{case}: 3 rows, 1 rounds of 1 steps" in printed


def test_what_is_measured_already_is_skipped_with_a_line(measured):
    out, _, (code, printed) = measured
    assert code == 0
    assert printed.count("measured already") == 2 and "rounds of" not in printed
    assert (out / "mini.md").is_file()


def test_a_suite_that_was_broken_off_goes_on_where_it_was(measured, tmp_path, monkeypatch):
    out = measured[0]
    asked = []
    monkeypatch.setattr(
        "rotorch.bench.suite_command._measure", lambda case, checked, console: asked.append(case.name) or stop()
    )
    (tmp_path / "out").mkdir()
    first = "tiny-2ranks-32tokens.json"
    (tmp_path / "out" / first).write_text((out / first).read_text())
    with pytest.raises(KeyboardInterrupt):
        run(write_suite(tmp_path), tmp_path / "out")
    assert asked == ["tiny-2ranks-8tokens"]


def stop():
    raise KeyboardInterrupt


def test_the_table_has_a_line_for_every_row(measured):
    text = (measured[0] / "mini.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 2 * 3
    assert {line.count("|") for line in table} == {11}
    assert text.count("holds: `ddp=2 >= 0.000001 * limit`") == 0 and text.count("holds: `ddp=2 >= 1e-06 * limit`") == 2


def test_the_table_says_what_must_be_known_before_cases_are_compared(measured):
    text = (measured[0] / "mini.md").read_text()
    assert "All cases are of commit " in text and "Processes of all rows are set alike" in text
    old, new = record_of(), record_of()
    for record, commit in ((old, "a" * 40), (new, "b" * 40)):
        record |= {"commit": commit, "rows": [{"parallel": "fsdp2", "nproc": 2, "step_s_median": 1.0}]}
    new["rows"][0]["process_settings"] = {}
    said = to_markdown({"old": old, "new": new})
    assert "The cases are of 2 commits" in said and "That is so of old." in said
    assert "commit aaaaaaaaaa, 2 cores (?), load after 0.0" in said
    assert "load before 0.0" in to_markdown({"new": {**new, "date": "2026-01-01T00:00:00+00:00"}})


def test_tables_are_written_without_measuring(tmp_path):
    suite, out = write_suite(tmp_path), tmp_path / "results"
    with pytest.raises(ConfigError, match="no directory"):
        write_tables(suite, out=out)
    out.mkdir()
    write_tables(suite, out=out)
    assert "Not measured:" in (out / f"{suite.stem}.md").read_text()


def test_the_picture_is_well_formed_and_tells_every_point(measured):
    out = measured[0]
    titles = [e.text for e in ElementTree.fromstring((out / "mini.svg").read_text()).iter() if e.tag.endswith("title")]
    assert len(titles) == 2 * 3 and sum(title.startswith("ddp=2: ") for title in titles) == 2
    assert "tiny-2ranks-8tokens" in (out / "mini.html").read_text()


def record_of(*rows):
    limit = {"parallel": "limit", "nproc": 2, "tokens_per_s": 100.0, "peak_bytes_per_rank": 2**20}
    machine = {"cores": 2, "cpu": "?", "load_average": [0.0]}
    return {"limit": limit, "rows": list(rows), "bars": [], "machine": machine, "tokens_per_step": 8, "commit": None}


def test_figures_of_a_bad_row_are_shown_nowhere():
    wrong = {"parallel": "fsdp2", "tokens_per_s": 999.0, "peak_bytes_per_rank": 2**20, "invalid": "holds 2.00 times"}
    record = record_of({"parallel": "tp", "error": "tp: rank 0 raised:\nValueError: no"}, wrong)
    assert [point.row for point in points_of(record)] == ["limit"]
    text = to_markdown({"case": record}, missing=["another"])
    assert "999" not in text and "| `fsdp2` | invalid |" in text and "| `tp` | failed |" in text
    assert "tp: error: ValueError: no" in text and "fsdp2: invalid: holds 2.00 times" in text
    assert "Not measured: another." in text
    assert "999" not in to_svg({"case": record})


def test_nothing_measured_is_drawn_as_nothing():
    assert ElementTree.fromstring(to_svg({})) is not None
    assert "Nothing is measured" in to_html({})


# ---- which cases there are, and when a result is old --------------------------------------------------------------


def test_the_standard_suite_can_be_run():
    cases = load_suite(STANDARD)
    shapes = {(case.run.stem, case.nproc, case.name.rpartition("-")[2]) for case in cases}
    models = {"llama-h384", "llama-h512", "gpt-h384"}
    assert shapes >= {(m, 2, "512tokens") for m in models} | {(m, 2, "64tokens") for m in models if "h384" in m}
    assert shapes >= {("llama-h384", 4, "512tokens"), ("llama-h384", 4, "64tokens"), ("llama-h512", 4, "512tokens")}
    for case in [*cases, *load_suite(BARS)]:
        checked = _prepare(case)
        layouts, task = checked["layouts"], checked["task"]
        assert task.num_ranks == case.nproc and task.micro_batch * task.sequence_length == int(
            case.name.rpartition("-")[2].removesuffix("tokens")
        )
        assert any(name.startswith(f"rtp={case.nproc}") for name in layouts)
        read_layouts(case.rows.parallel, peers=case.rows.peers, nproc=case.nproc)


@pytest.mark.parametrize("suite", [STANDARD, BARS], ids=["suite", "bars"])
def test_the_committed_tables_are_those_of_their_records(suite):
    out = ROOT / "benchmarks" / "results" / ("bars" if suite == BARS else "")
    records = {case.name: read_result(out / f"{case.name}.json") for case in load_suite(suite)}
    assert all(record is not None for record in records.values())
    assert (out / f"{suite.stem}.md").read_text() == to_markdown(records, missing=[])


def test_the_cases_of_the_standard_suite_are_of_one_commit():
    results = [read_result(ROOT / "benchmarks" / "results" / f"{case.name}.json") for case in load_suite(STANDARD)]
    assert len({record["commit"] for record in results}) == 1


def test_what_must_hold_has_bars_of_speed_and_of_memory():
    cases = load_suite(BARS)
    assert all(case.rows.bars for case in cases)
    assert not any(case.rows.bars for case in load_suite(STANDARD))  # where many rows disturb each other
    assert [case.name for case in cases if case.rows.process_memory] == ["llama-h512-4ranks-128tokens"]
    kinds = {bar.split()[0] if bar.startswith(("peak", "process")) else "speed" for c in cases for bar in c.rows.bars}
    assert kinds == {"speed", "peak", "process"}


def test_the_records_have_the_bars_of_the_file():
    """A bar that was moved since holds nothing until it is measured again."""
    for case in load_suite(BARS):
        found = read_result(ROOT / "benchmarks" / "results" / "bars" / f"{case.name}.json")["bars"]
        assert [bar["bar"] for bar in found] == [str(bar) for bar in _prepare(case)["bars"]], case.name


def test_peers_that_are_missing_are_left_out_with_their_bars(tmp_path, monkeypatch):
    real = peers_module.importlib.util.find_spec
    monkeypatch.setattr(
        peers_module.importlib.util, "find_spec", lambda name: None if name == "deepspeed" else real(name)
    )
    text = MINI.replace(
        "[[case]]",
        'peers = ["fsdp2", "deepspeed-zero3"]\n'
        '[[case]]\nbars = ["ddp={n} >= 1 * deepspeed-zero3", "fsdp2 >= 1 * limit"]',
    )
    case = load_suite(write_suite(tmp_path, text))[0]
    assert case.rows.peers == ("fsdp2",) and case.rows.bars == ("fsdp2 >= 1 * limit",)
    assert case.missing == ("deepspeed-zero3: deepspeed is not installed. Write: pip install 'rotorch[peers]'",)


def test_a_result_is_old_when_what_it_depends_on_has_changed(tmp_path, monkeypatch):
    suite = write_suite(tmp_path)
    key = load_suite(suite)[0].key()
    assert load_suite(suite)[0].key() == key != load_suite(suite)[1].key()
    assert load_suite(suite, rounds=2)[0].key() != key
    (tmp_path / "tiny.toml").write_text((tmp_path / "tiny.toml").read_text() + "# another\n")
    assert load_suite(suite)[0].key() != key
    key = load_suite(suite)[0].key()
    monkeypatch.setattr(suite_module, "_digest_of_source", lambda: "changed")
    assert load_suite(suite)[0].key() != key


def test_cases_are_chosen_by_pattern(tmp_path):
    cases = load_suite(write_suite(tmp_path))
    assert [case.name for case in select(cases, patterns=["*-8tokens"])] == ["tiny-2ranks-8tokens"]
    assert select(cases, patterns=[]) == cases
    with pytest.raises(ConfigError, match=r"no case 'tiny-2ranks-9tokens'.*did you mean 'tiny-2ranks-8tokens'"):
        select(cases, patterns=["tiny-2ranks-9tokens"])


def test_the_list_says_what_is_measured(tmp_path):
    suite, out, printed = write_suite(tmp_path), tmp_path / "out", io.StringIO()
    out.mkdir()
    key = load_suite(suite)[0].key()
    (out / "tiny-2ranks-32tokens.json").write_text(json.dumps({"suite": {"case": "?", "key": key}}))
    (out / "tiny-2ranks-8tokens.json").write_text(json.dumps({"suite": {"case": "?", "key": "old"}}))
    list_cases(suite, out=out, console=Console(file=printed, width=120))
    assert printed.getvalue().splitlines()[0].endswith(" measured")
    assert printed.getvalue().splitlines()[1].endswith(" measured by another source")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rows": []}'])
def test_files_that_no_suite_wrote_are_no_results(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    assert read_result(tmp_path / "x.json") is None


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("rounds = 1", "roundz = 1", "roundz: extra inputs are not permitted.*did you mean 'rounds'"),
        ("rounds = 1", "rounds = 0", "rounds: input should be greater than 0"),
        ("nproc = [2]", "nproc = []", "case.0.nproc"),
        ('"tiny.toml"', '"tinny.toml"', "no run 'tinny.toml'.*did you mean 'tiny.toml'"),
        ("micro_batch = 1 }", "micro_batch = 4 }", "two cases are 'tiny-2ranks-32tokens'"),
        ("rounds = 1", "rounds = ", "not valid TOML"),
        ('"ddp={n}"]', '"ddp={n}"]\npeers = ["fsdp3"]', "unknown peer 'fsdp3'"),
        ('"ddp={n}"]', '"ddp=3"]', "needs 3 ranks, but there are 2"),
        ("* limit", "* tp", "no row 'tp'"),
        ("sequence_length = 8", "sequence_length = 64", "longer than the 32 positions"),
        (
            "8, micro_batch = 1 }]",
            '9, micro_batch = 1 }]\npeers = ["tp"]',
            "2 ranks do not divide data.sequence_length = 9",
        ),
    ],
)
def test_bad_suites_start_nothing(tmp_path, monkeypatch, old, new, says):
    monkeypatch.setattr("rotorch.bench.command.RowRanks", None)
    suite = write_suite(tmp_path, MINI.replace(old, new))
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        run(suite, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_suite_says_so(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_suite(tmp_path / "no.toml")


def test_the_standard_suite_names_every_peer():
    """But pipelines, which want several micro-batches (benchmarks/pipelines.py), 2-D, which wants four, and experts."""
    named = tomllib.loads(STANDARD.read_text())["peers"]
    assert named == [name for name in PEERS if not name.startswith("pipeline-") and name not in ("fsdp2-tp", "hf-ep")]
