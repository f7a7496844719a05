"""The pages of `schedule --html` and `bench --trace` in a real browser. Writes a picture into docs/."""

import os
from pathlib import Path

import pytest

from rotorch import cli
from rotorch.bench.gantt import Bar, Kind, Level, gantt_page

DOCS = Path(__file__).parents[2] / "docs"
WRITES = "ROTORCH_WRITE_REPORT"
WIDE, NARROW = 1400, 400

CUT = """(() => {
const found = [], width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth > width) found.push('the page is wider than its window');
for (const node of document.querySelectorAll('h1,p,.keys span,.names b,.names small')) {
  const range = document.createRange(); range.selectNodeContents(node);
  for (const box of range.getClientRects())
    if (box.left < -0.5 || box.right > width + 0.5) found.push('outside of the window: ' + node.textContent);
}
const names = [...document.querySelectorAll('.names b')].filter(b => !b.matches('.title'));
names.forEach(b => { if (b.scrollHeight > b.clientHeight + 1 || b.scrollWidth > b.clientWidth + 1)
  found.push('name is cut: ' + b.textContent); });
for (const span of document.querySelectorAll('.row span'))
  if (span.scrollWidth > span.clientWidth + 1) found.push('number is wider than its bar: ' + span.textContent);
return found.slice(0, 20)})()"""
"""Texts that a reader cannot see whole."""

SHOWN = """[...document.querySelectorAll('.row span')].map(s =>
  [...document.querySelectorAll('.row')].indexOf(s.parentElement) + ' ' + s.style.left + ' ' + s.textContent)"""
"""Numbers in bars, with their places."""

FILLED = """(() => {
const chart = document.querySelector('.wide').getBoundingClientRect(), page = document.documentElement;
const shown = document.querySelector('.scroll').getBoundingClientRect();
return shown.width * chart.height / (page.clientWidth * page.scrollHeight)})()"""
"""Share of the page that is chart."""


def schedule(file: Path, *, micro_batches: int) -> Path:
    shape = ["zeropp", "--stages", "4", "--chunks", "2", "--micro-batches", str(micro_batches)]
    assert cli.run(["schedule", *shape, "--gather", "0.5", "--html", str(file)]) == 0
    return file


def trace(file: Path, *, num_ranks: int = 8) -> Path:
    """As many rows and kinds as a trace has, without labels, and a title as long as they get."""
    lanes = ("does", "slice under way", "gradient under way")
    rows = [f"rank {rank} {lane}" for rank in range(num_ranks) for lane in lanes]
    kinds = [
        Kind(
            f"waiting for a gradient of kind {n}",
            "#4a90c4",
            [Bar(r, n + 0.1 * m, 0.9, "span") for m, r in enumerate(rows)],
        )
        for n in range(10)
    ]
    layout = "ddp=2,rtp=4[transport=send_receive,recompute=slice,visits=2]"
    shares = [
        f"rank {rank}: compute 70.0 %, waiting for a slice 5.0 %, collectives 25.0 %" for rank in range(num_ranks)
    ]
    file.write_text(gantt_page([f"{layout}: one step of 12.3 ms", *shares], kinds, rows=rows, unit="ms"))
    return file


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("what", ["schedule", "trace"])
def test_nothing_is_cut_and_little_is_empty(browser, tmp_path, what, width):
    file = schedule(tmp_path / "page.html", micro_batches=28) if what == "schedule" else trace(tmp_path / "page.html")
    assert file.stat().st_size < 200_000
    browser.open(file, width=width)
    assert browser.run(CUT) == []
    if width == WIDE:
        assert browser.run(FILLED) > 0.5
    if what == "trace":
        assert browser.run("document.querySelectorAll('.keys span').length") == 10


def test_a_page_of_one_rank_is_not_mostly_empty(browser, tmp_path):
    browser.open(trace(tmp_path / "page.html", num_ranks=1), width=WIDE)
    assert browser.run(CUT) == [] and browser.run(FILLED) > 0.4


def test_every_number_is_legible_where_the_chart_is_scrolled_to(browser, tmp_path):
    """Each of 28 micro-batches, in each of 4 ranks and 2 chunks: forward and both gradients."""
    browser.open(schedule(tmp_path / "page.html", micro_batches=28), width=WIDE)
    seen = set()
    for part in range(9):
        browser.run(f"(() => {{scroll.scrollLeft = {part} / 8 * scroll.scrollWidth; draw()}})()")
        assert browser.run(CUT) == []
        seen |= set(browser.run(SHOWN))
    assert len(seen) == 28 * 4 * 2 * 3
    browser.run("(() => {zoom.value = 0; resize()})()")  # as narrow as the window: numbers without room are left out
    assert browser.run(CUT) == [] and not browser.run(SHOWN)


def test_curves_of_ranks_do_not_hide_each_other(browser, tmp_path):
    browser.open(schedule(tmp_path / "page.html", micro_batches=12), width=WIDE)
    tops = browser.run("[...document.querySelectorAll('.wide .level')].map(e => e.getBoundingClientRect().top)")
    assert len(tops) == len(set(tops)) == 4 * 2


def test_bars_of_a_moment_are_told(browser, tmp_path):
    kinds = [
        Kind("forward", "#4a90c4", [Bar("rank 0", 0.0, 2.0, "layer 3 </script>", "7"), Bar("rank 0", 2.0, 2.0, "b")])
    ]
    levels = [("held", [Level("rank 0", [(0.0, 1.0), (2.0, 3.0)])])]
    (tmp_path / "page.html").write_text(gantt_page(["title"], kinds, rows=["rank 0"], unit="ms", levels=levels))
    browser.open(tmp_path / "page.html", width=WIDE)
    x, y = browser.run("(() => {const b = document.querySelector('.row').getBoundingClientRect(); "
                       "return [b.left + b.width / 4, b.top + 5]})()")  # fmt: skip
    browser.move_to(x, y)
    assert browser.run("tip.textContent") == "forward: layer 3 </script>, from 0 for 2 ms"


@pytest.mark.skipif(WRITES not in os.environ, reason=f"writes a picture into docs/; make report, or {WRITES}=1")
def test_the_picture_of_the_schedule(browser, tmp_path):
    browser.open(schedule(tmp_path / "page.html", micro_batches=12), width=WIDE)
    assert browser.run(CUT) == []
    height = browser.run("Math.ceil(document.body.getBoundingClientRect().height)")
    browser.picture(DOCS / "schedule-wide.png", width=WIDE, height=height)
    assert (DOCS / "schedule-wide.png").stat().st_size < 150_000
