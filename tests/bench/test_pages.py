"""Tables of README.md and docs/ against the records of their measurements, and what records say of themselves."""

import json
import re
import sys
from pathlib import Path

import pytest

from rotorch.bench.record import describe_origin

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pages

    yield pages
    del sys.modules["pages"]


def test_tables_are_those_of_their_records(pages, capsys):
    assert pages.main(["--check"]) == 0, capsys.readouterr().out


def test_a_page_that_says_something_else_is_named_and_written_anew(pages, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "PAGES", {"one": (Path("page.md"), lambda read: ["figure 2"])})
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- made by benchmarks/pages.py: one -->\nfigure 1\n<!-- end of one -->\nb\n")
    assert pages.main(["--check"]) == 1 and "page.md: one" in capsys.readouterr().out and "figure 1" in page.read_text()
    assert pages.main([]) == 0 and pages.main(["--check"]) == 0
    assert page.read_text().splitlines()[0::4] == ["a", "b"] and "figure 2" in page.read_text()
    page.write_text("a\n")
    with pytest.raises(SystemExit, match="no block 'one'"):
        pages.main([])


def test_words_beside_the_tables_are_true_of_the_records(pages):
    """Claims of pages in words that nobody generates; whoever measures anew rewrites those that became wrong."""
    models = {row["layout"]: row for row in pages.read_record("grid-models-8ranks.json")["rows"]}
    grid = models["megatron=8"]["first_is_faster_by"]  # docs/grids.md: it wins in forward, not in backward
    assert grid["forward_s"] > 1 + pages.ALIKE and grid["backward_s"] < 1 + pages.ALIKE
    products = {row["name"]: row for row in pages.read_record("grids-8ranks.json")["rows"]}
    for peer in ("megatron-core tensor parallel 8", "torch tensor parallel 8"):  # docs/grids.md, on equal terms
        ours, theirs = products["rotorch 2x2x2, messages"], products[peer]
        assert pages.faster_by(ours, theirs, "forward_s") > 1 - pages.ALIKE
        assert pages.faster_by(ours, theirs, "backward_s") < 1
    record = pages.read_record("pipelines-4ranks.json")
    rows = {row["parallel"]: row for row in record["rows"]}
    speeds = {name: row["tokens_per_s"] for name, row in rows.items()}
    peaks = {name: row["peak_bytes_per_rank"] for name, row in rows.items()}
    assert peaks["zeropp=2x2"] > 1.1 * peaks["pipeline-fsdp2"]  # docs/pipelines.md: missed in memory
    assert speeds["zeropp=2x2"] < (1 + pages.ALIKE) * speeds["pipeline-fsdp2-keep"]  # nearly as fast
    assert speeds["pp=2,megatron=2"] < (1 + pages.ALIKE) * speeds["zeropp=2x2"]  # no faster
    assert speeds["pp=2,fsdp=2"] == max(speeds.values())  # fastest
    assert peaks["pp=2,rtp=2"] == min(peaks.values())  # holds least
    assert abs(speeds["pp=2,rtp=2"] / speeds["pipeline-fsdp2-keep"] - 1) < pages.ALIKE  # as fast


def test_the_first_lines_of_the_readme_quote_its_table(pages):
    record = pages.read_record("bars/llama-h384-2ranks-512tokens.json")
    rows = {name: pages.row_of(record, name) for name in ("rtp=2", "torch-ddp", "fsdp2")}
    lead = (ROOT / "README.md").read_text().split("![")[0]
    held, speed = "resident_bytes_per_rank", "ratio_to_limit"
    quoted = [pages.mebibytes(rows[name][held]) for name in ("rtp=2", "torch-ddp")]
    quoted += [pages.two_digits(rows[name][speed]) for name in ("rtp=2", "fsdp2")]
    assert [figure for figure in quoted if figure not in lead] == []
    assert abs(rows["rtp=2"][speed] / rows["torch-ddp"][speed] - 1) < pages.ALIKE  # "at the same speed"


def test_the_cost_of_a_call_in_the_page_is_that_of_the_record(pages):
    record = pages.read_record("bars/llama-h384-2ranks-64tokens.json")
    (reached,) = (bar["reached"] for bar in record["bars"] if bar["bar"].startswith("rtp-own-loop "))
    assert 1 <= round(100 * (1 - reached)) <= 3
    assert "1 to 3 % at 64 tokens a rank" in (ROOT / "docs" / "drop_in.md").read_text("utf-8")


def test_ratios_of_equal_transports_stand_in_the_page(pages):
    rows = {row["name"]: row for row in pages.read_record("grids-8ranks.json")["rows"]}
    ours, theirs = rows["rotorch 2x2x2, messages"], rows["megatron-core tensor parallel 8"]
    said = [pages.two_digits(pages.faster_by(ours, theirs, phase)) for phase in ("forward_s", "backward_s")]
    assert f"| {said[0]} | {said[1]} |\n" in (ROOT / "docs" / "grids.md").read_text().split("Megatron-Core's")[1]


def test_rates_of_streams_stand_in_the_page(pages):
    rows = pages.read_record("streams.json")["rows"]
    page = (ROOT / "docs" / "how_to.md").read_text().replace("\n", " ")
    said = re.search(
        r"([\d.]+) million tokens a second with a vocabulary of 8,000 .*?, ([\d.]+) million of bytes", page
    )
    found = [rows[name]["tokens_per_processor_s"] / 1e6 for name in ("vocabulary of 8000", "bytes")]
    assert said.groups() == tuple(f"{rate:.2g}" for rate in found)
    assert all(row["most_resident_bytes"] < 1.05 * row["first_resident_bytes"] for row in rows.values())  # flat


def test_ratios_in_a_word(pages):
    assert [pages.verdict(ratio) for ratio in (0.9, 0.97, 1.04, 1.2)] == ["slower", "as fast", "as fast", "faster"]


def test_every_record_says_where_it_comes_from():
    for file in sorted(RESULTS.rglob("*.json")):
        record = json.loads(file.read_text())
        origin = record.get("origin", record)
        assert origin["commit"] and origin["date"] and origin["versions"]["torch"], file.name
        assert not origin["commit"].endswith("+"), file.name  # of a source that nobody has
        assert origin["machine"]["cpu"] and origin["machine"]["load_average"], file.name
        assert not re.search(r"""(^|[\s=,"'\[])(file://)?/""", origin["command"]), file.name  # a path of one machine
        for row in record["rows"] if "task" in record else ():
            assert "error" not in row and "invalid" not in row, (file.name, row["parallel"])
            alike = row["process_settings"]["keeps_freed_memory"]
            assert alike == (not row["parallel"].endswith("-as-is")), (file.name, row["parallel"])


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/opt/bin/rotorch", "suite", "bench/suite.toml"], "rotorch suite bench/suite.toml"),
        (["/src/rotorch/__main__.py", "suite", "--out=/srv/one"], "rotorch suite --out=one"),
        (["benchmarks/links.py", "--json", "/srv/two.json", "train.steps=3"], "links.py --json two.json train.steps=3"),
        (["rotorch", "bench", "--peer=a b", "rtp=2[visits=4]"], "rotorch bench '--peer=a b' 'rtp=2[visits=4]'"),
        (
            ["rotorch", "data.source=file:///srv/a.txt", "s3://b/c/d", "~/e/f"],
            "rotorch data.source=a.txt s3://b/c/d '~/e/f'",
        ),
        (["rotorch", 'x=["/srv/a/c.txt"]', "y=[/srv/d,/srv/e]", "/srv/f,g"], "rotorch 'x=[\"c.txt\"]' 'y=[d,e]' f,g"),
    ],
)
def test_a_command_has_no_paths_of_one_machine(monkeypatch, arguments, command):
    monkeypatch.setattr(sys, "argv", arguments)
    assert describe_origin()["command"] == command
