"""The page of a report in a real browser: nothing is cut, on a screen and on a phone. Writes the pictures of docs/."""

import os
import signal
from pathlib import Path

import pytest
from report_runs import eventful, record, write_run

from rotorch.report.page import page
from rotorch.report.read import read_runs

DOCS = Path(__file__).parents[2] / "docs"
WRITES = "ROTORCH_WRITE_REPORT"
WIDE, NARROW = 1400, 400

CUT = """(() => {
const found = [], width = document.documentElement.clientWidth;
if (document.documentElement.scrollWidth > width) found.push('the page is wider than its window');
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node; node = walker.nextNode();) {
  const holder = node.parentElement, range = document.createRange();
  if (!node.textContent.trim() || ['SCRIPT', 'STYLE'].includes(holder.tagName)) continue;
  range.selectNodeContents(node);
  for (const box of range.getClientRects()) {
    const said = node.textContent.trim().slice(0, 40);
    if (!box.width) continue;
    if (box.left < -0.5 || box.right > width + 0.5) found.push('outside of the window: ' + said);
    for (let outer = holder; outer !== document.body; outer = outer.parentElement) {
      const clips = getComputedStyle(outer).overflowX !== 'visible', edge = outer.getBoundingClientRect();
      if (clips && (box.left < edge.left - 1 || box.right > edge.right + 1 || box.top < edge.top - 1
        || box.bottom > edge.bottom + 1)) found.push('cut by its ' + outer.tagName + ': ' + said);
      if (outer.matches('.card,.chart') && (box.left < edge.left || box.right > edge.right))
        found.push('outside of its card: ' + said);
    }
  }
}
for (const outer of document.querySelectorAll('body,p,dd,dt,li,pre,figure,.card,.legend label,.tip,summary'))
  if (outer.scrollWidth > outer.clientWidth + 1 && outer.clientWidth) found.push('wider than itself: '
    + outer.tagName + ' ' + outer.textContent.slice(0, 40));
for (const text of document.querySelectorAll('svg text')) {
  const box = text.getBoundingClientRect(), edge = text.ownerSVGElement.getBoundingClientRect();
  if (box.left < edge.left || box.right > edge.right || box.top < edge.top || box.bottom > edge.bottom)
    found.push('outside of its picture: ' + text.textContent);
}
for (const axis of document.querySelectorAll('.xs,.ys')) {
  const boxes = [...axis.children].map(l => l.getBoundingClientRect()).filter(b => b.width);
  boxes.forEach((a, n) => boxes.slice(n + 1).forEach(b => {
    if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
      found.push('labels on each other: ' + axis.textContent)}));
}
return found.slice(0, 20)})()"""
"""Texts that a reader cannot see whole, and labels that lie on each other."""


def written(file: Path, *runs: Path) -> Path:
    file.write_text(page(read_runs(runs)), "utf-8")
    return file


def long_and_odd(directory: Path) -> Path:
    """A run whose names and numbers are as long as they get."""
    name = "a_run_whose_name_has_no_space_at_all_and_which_is_longer_than_any_screen_of_a_phone_is_wide"
    about = {"parallel": "ddp=2,zeropp=2x4[inner=rtp,unit=7]", "config": {"train": {"out": "/x" * 200}}}
    records = [
        record(step, peak_bytes=1023 * 2**20, tokens_per_s=1.234e9, lr=1.2345e-7 * step, grad_norm=12345.6 / step)
        for step in range(999_000, 1_000_001, 7)
    ]
    return write_run(directory / name, records, about=about, failure="now\n" + "failed" * 300)


@pytest.mark.parametrize("width", [WIDE, 800, NARROW])
@pytest.mark.parametrize("what", ["eventful", "long", "several", "short"])
def test_nothing_is_cut(browser, tmp_path, what, width):
    runs = {
        "eventful": lambda: [eventful(tmp_path / "demo")],
        "long": lambda: [long_and_odd(tmp_path)],
        "several": lambda: [eventful(tmp_path / f"demo{n}") for n in range(9)] + [long_and_odd(tmp_path)],
        "short": lambda: [write_run(tmp_path / "one", [record(1)])],
    }[what]()
    browser.open(written(tmp_path / "page.html", *runs), width=width)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.run(CUT) == []
    browser.run("document.querySelectorAll('.islog').forEach(box => box.click())")
    assert browser.run(CUT) == []


def test_cut_text_is_found(browser, tmp_path):
    file = tmp_path / "page.html"
    file.write_text(
        "<body><p style='width:9em;overflow:hidden;white-space:nowrap'>a text that is longer than its paragraph</p>"
        "<svg width=50 height=20><text x=30 y=15>too far to the right</text></svg><div style='width:3000px'>.</div>"
        "<div class=xs><span>on</span><span style='margin-left:-1em'>each other</span></div>"
    )
    browser.open(file, width=NARROW)
    found = "\n".join(browser.run(CUT))
    for words in (
        "the page is wider",
        "cut by its P",
        "wider than itself: P",
        "outside of its picture",
        "labels on each",
    ):
        assert words in found, words


def test_a_value_is_told_where_the_mouse_is(browser, tmp_path):
    browser.open(written(tmp_path / "page.html", eventful(tmp_path / "demo")), width=WIDE)
    x, y, step, value = browser.run("""(() => {
        const figure = document.querySelector('figure.chart'), area = figure.querySelector('.area');
        figure.scrollIntoView(); const box = area.getBoundingClientRect();
        const curve = JSON.parse(figure.querySelector('script').textContent).curves[0], n = curve.x.indexOf(200);
        return [box.left + box.width * 199 / 299, box.top + 20, curve.x[n], curve.y[n]]})()""")
    assert (step, value) == (200, 42.0)
    browser.move_to(x, y)
    told = browser.run("document.querySelector('.tip').textContent")
    assert told.startswith("near step 200demo 42") and "demo held-out" in told
    assert browser.run(CUT) == []


def test_a_run_can_be_hidden_and_the_scale_be_logarithmic(browser, tmp_path):
    runs = [eventful(tmp_path / name) for name in ("first", "second")]
    browser.open(written(tmp_path / "page.html", *runs), width=WIDE)
    seen = "[...document.querySelectorAll('figure.chart .{}')].filter(e => e.getClientRects().length).length"
    both, logarithmic = browser.run(seen.format("r1")), browser.run(seen.format("log"))
    browser.run("document.getElementById('r1').click()")
    assert both > 0 and browser.run(seen.format("r1")) == 0 < browser.run(seen.format("r0"))
    browser.run("document.querySelector('.islog').click()")
    assert logarithmic == 0 < browser.run(seen.format("log"))


def num_lines(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


PLACE_OF = """[...document.querySelectorAll('h2')].find(h => h.textContent === '%s').getBoundingClientRect().top - 8"""


@pytest.mark.skipif(WRITES not in os.environ, reason=f"writes pictures into docs/; make report, or {WRITES}=1")
def test_the_pictures_of_the_documentation(browser, tmp_path, monkeypatch):
    """Two runs of a minute: one loses a rank and goes on from its checkpoint, the other stays whole."""
    from commands import Command, rotorch, wait_until, write_run  # here: it loads torch

    (tmp_path / "configs").mkdir()
    run = write_run(tmp_path / "configs")
    wanted = ["data.source=stdlib", "train.steps=300", "train.eval_every=50", "train.checkpoint_every=100"]
    wanted += ["train.micro_batch=8", "train.keep=3", "data.held_out_fraction=0.01", "optimizer.lr=1e-2"]
    wanted += [f"data.cache_dir={tmp_path / 'cache'}"]
    runs = []
    for name, layout, more in (("rtp", "rtp=2", ["train.max_restarts=1"]), ("ddp", "ddp=2", ["optimizer.lr=3e-3"])):
        runs.append(out := tmp_path / name)
        command = Command(
            tmp_path / f"log-{name}", "train", run, *wanted, f"train.out={out}", *more, "--parallel", layout
        )
        if "train.max_restarts=1" in more:
            wait_until(lambda: num_lines(tmp_path / "rtp" / "metrics.jsonl") >= 160, what="160 steps")
            os.kill(command.ranks()[1], signal.SIGKILL)
        assert command.wait() == 0, command.stderr
        traced = rotorch(
            tmp_path / f"trace-{name}", "bench", run, *wanted, "--parallel", layout, "--rounds", "1", "--steps", "3",
            "--no-process-memory", "--trace", out / "trace",
        )  # fmt: skip
        assert traced.code == 0, traced.stderr
    browser.open(tmp_path / "rtp" / "trace" / "rtp-2.html", width=WIDE)
    height = browser.run("Math.ceil(document.body.getBoundingClientRect().height)")
    browser.picture(DOCS / "trace-wide.png", width=WIDE, height=height)
    assert (DOCS / "trace-wide.png").stat().st_size < 150_000
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path / "page.html", *(out.relative_to(tmp_path) for out in runs))
    for name, width, height, dark in (
        ("report-wide.png", WIDE, 1250, False),
        ("report-narrow.png", NARROW, 1400, True),
    ):
        browser.open(file, width=width, dark=dark)
        assert browser.run(CUT) == []
        browser.picture(DOCS / name, width=width, height=height)
        assert (DOCS / name).stat().st_size < 200_000
    browser.open(file, width=WIDE)
    top, end = (browser.run(PLACE_OF % title) for title in ("Memory by category", "Who computed, and who waited"))
    browser.picture(DOCS / "report-memory.png", width=WIDE, height=int(end - top), top=top)
    assert (DOCS / "report-memory.png").stat().st_size < 150_000
