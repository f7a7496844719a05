"""`rotorch schedule`: figures, the picture in the terminal, and the page."""

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rotorch import cli
from rotorch.cli.schedule import NAMES, named_schedule, page, picture, simulated

ZEROPP = ["schedule", "zeropp", "--stages", "4", "--chunks", "2", "--unit", "7", "--micro-batches", "28"]


def test_figures_are_printed_and_written(capsys, tmp_path):
    assert cli.run([*ZEROPP, "--json", str(tmp_path / "figures.json"), "--html", str(tmp_path / "page.html")]) == 0
    printed = capsys.readouterr().out
    assert "zeropp: 4 ranks of 2 chunks, 28 micro-batches in 4 units of 7" in printed
    assert "bubble: 3 of 171 slots (1.8 %)" in printed
    found = json.loads((tmp_path / "figures.json").read_text())
    assert (found["bubble_slots"], found["makespan_slots"], found["unit"]) == (3, 171, 7)
    assert found["bubble_ratio"] == pytest.approx(3 / 171)
    assert [rank["busy_slots"] for rank in found["ranks"]] == [168] * 4
    assert [rank["gradient_sums"] for rank in found["ranks"]] == [8] * 4
    assert max(rank["peak_micro_batches"] for rank in found["ranks"]) == 7 == found["most_in_flight"]
    page = (tmp_path / "page.html").read_text("utf-8")
    assert page.count("<html") == 1 and len(page) < 200_000 and "src=" not in page
    bars = [found for texts in re.findall(r'data-text="([\d ]+)"', page) for found in texts.split()]
    assert sorted(map(int, bars)) == sorted(list(range(28)) * 4 * 2 * 3)  # ranks, chunks, and F, I, W


def small(**how):
    plain = named_schedule("zeropp", stages=2, chunks=1, micro_batches=3, unit=3)
    return simulated(plain, **{"gather": 0.0, "message": 0.0, **how})


def test_the_picture_without_colour_is_letters():
    assert [str(line) for line in picture(small(), width=80, colour=False)] == [
        "rank 0 FFFIWIWIW.",
        "rank 1 .FIFIFIWWW",
    ]


def test_the_picture_in_colour_is_micro_batches():
    lines = list(picture(small(), width=80, colour=True))
    assert [line.plain for line in lines] == ["rank 0 012001122 ", "rank 1  001122012"]
    console = Console(file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(lines[0])
    assert "\x1b[30;48;2;74;144;196m" in console.file.getvalue()


def test_many_slots_share_columns():
    found = simulated(named_schedule("1f1b", stages=4, chunks=1, micro_batches=100, unit=None), gather=0.0, message=0.0)
    assert {len(line) for line in picture(found, width=50, colour=False)} == {50}


def test_the_page_draws_every_computation_and_what_ranks_hold():
    html = page(small(gather=0.5, message=0.25))
    for name in ("forward", "input gradient", "weight gradient", "gather of weights", "output under way"):
        assert f"</i>{name}</span>" in html
    assert html.count('<b class="level">rank 1<small>') == 2
    assert "rank 1 gathers and sums" in html and "rank 0 messages" in html
    assert "gathers and sums" not in page(small())  # what takes no time has no lane


def test_gathers_and_messages_cost_time():
    assert small(gather=1.0).makespan_s > small().makespan_s
    assert small(message=1.0).bubble_ratio > small().bubble_ratio


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_has_a_picture(name, capsys):
    chunks = "2" if name == "zbv" else "1"
    assert cli.run(["schedule", name, "--stages", "2", "--chunks", chunks, "--micro-batches", "4"]) == 0
    assert f"{name}: 2 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"--unit": "29"}, "a unit of 29 micro-batches, but a step has 28"),
        ({"--stages": "0"}, "ranks = 0. Write 1 or more"),
        ({"--gather": "-1"}, "--gather -1"),
        ({"--message": "nan"}, "--message nan"),
        ({"--html": "nowhere/page.html"}, "its directory is missing"),
    ],
    ids=str,
)
def test_wrong_input_is_one_line_and_exit_code_2(changes, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run([*ZEROPP, *(word for change in changes.items() for word in change)]) == 2
    told = capsys.readouterr()
    assert re.search(says, told.err) and told.err.count("\n") == 1
    assert told.out == "" and not list(tmp_path.iterdir())


def test_it_needs_no_torch():
    code = "import sys; from rotorch import cli; assert cli.run(sys.argv[1:]) == 0; assert 'torch' not in sys.modules"
    source = str(Path(cli.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code, *ZEROPP], env={"PYTHONPATH": source}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
