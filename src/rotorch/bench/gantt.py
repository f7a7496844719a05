"""Gantt chart of ranks as a page, shared by measured traces and simulated schedules. No torch, nothing from elsewhere.

[Note: bars of a row are paths]
    A page is one file of at most a megabyte, so a row has one SVG path per kind of bar, stretched to whatever room
    there is, and numbers of what each bar is. Labels and the text under the mouse are the script's: it writes a label
    only where its bar has room for it, of the part in view, so a number is legible or not there. The page opens so wide
    that all labels fit, as far as `_WIDEST` allows, and scrolls; a slider makes it narrower or wider.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rotorch.report.chart import ticks

_SIZE = 100_000  # of the view box: less than a pixel of the widest chart
_WIDEST = 12_000
_PIXELS_OF_DIGIT, _PIXELS_OF_EDGE = 7, 4


@dataclass(frozen=True)
class Bar:
    """One span of time.

    Attributes:
        row: the name of its line of the chart.
        start: in the chart's unit of time.
        length: likewise.
        says: text shown under the mouse.
        text: text written in the bar.
    """

    row: str
    start: float
    length: float
    says: str
    text: str = ""


@dataclass(frozen=True)
class Kind:
    """Bars that have one entry of the legend, and its colour."""

    name: str
    colour: str
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Level:
    """Amount that a rank holds, from moment to moment: drawn in a row of its own, so no rank hides another.

    Attributes:
        row: name of its row.
        moments: time, and the amount from then on; ascending.
    """

    row: str
    moments: Sequence[tuple[float, float]]

    @property
    def highest(self) -> float:
        """The largest amount."""
        return max((amount for _, amount in self.moments), default=0.0)


def gantt_page(
    headlines: Sequence[str],
    kinds: Sequence[Kind],
    *,
    rows: Sequence[str],
    unit: str,
    levels: Sequence[tuple[str, Sequence[Level]]] = (),
) -> str:
    """Draws a page of its own.

    Args:
        headlines: its title, and lines below it.
        kinds: in the order of drawing: later ones lie on earlier ones.
        rows: names of the chart's rows, from top to bottom.
        unit: of time.
        levels: titles of further charts over the same time, with a row per rank; rows of one chart share their scale.
    """
    title, *lines = headlines
    end = max((bar.start + bar.length for kind in kinds for bar in kind.bars), default=0.0) or 1.0
    says: dict[str, int] = {}
    drawn = [
        (row, "".join(_path(number, kind, row, end=end, says=says) for number, kind in enumerate(kinds)))
        for row in rows
    ]
    keys = "".join(f'<span><i style="background:{k.colour}"></i>{escape(k.name)}</span>' for k in kinds if k.bars)
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in lines),
        f'<div class="keys">{keys}</div>',
        '<p class="bar"><label>width <input type="range" min="0" max="100" value="0" id="zoom"></label></p>',
        f'<p id="tip">Point at a bar: it tells what it is, and when, in {escape(unit)}.</p>',
        f'<div class="chart" style="--row:clamp(1.5rem,{60 / max(1, len(rows)):.3g}vh,10rem)"><div class="names">',
        *(f"<b>{escape(row)}</b>" for row in rows),
        *_level_names(levels),
        f'<b class="axis">{escape(unit)}</b></div><div class="scroll"><div class="wide">',
        *(f'<div class="row">{_svg(paths)}</div>' for _, paths in drawn),
        *_level_rows(levels, end=end),
        _axis(end),
        "</div></div></div>",
    ]
    about = {
        "end": end,
        "unit": unit,
        "size": _SIZE,
        "kinds": [kind.name for kind in kinds],
        "says": list(says),
        "width": _width_for_labels(kinds, end=end),
        "digit": _PIXELS_OF_DIGIT,
        "edge": _PIXELS_OF_EDGE,
    }
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}"
        f'<script type="application/json" id="about">{json.dumps(about).replace("<", chr(92) + "u003c")}</script>'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _width_for_labels(kinds: Sequence[Kind], *, end: float) -> int:
    """Pixels of a chart in which every bar has room for its label."""
    needs = (
        (_PIXELS_OF_EDGE + _PIXELS_OF_DIGIT * len(bar.text)) * end / bar.length
        for kind in kinds
        for bar in kind.bars
        if bar.text and bar.length > 0
    )
    return min(_WIDEST, int(max(needs, default=0)) + 1)


def _path(number: int, kind: Kind, row: str, *, end: float, says: dict[str, int]) -> str:
    bars = sorted((bar for bar in kind.bars if bar.row == row), key=lambda bar: bar.start)
    if not bars:
        return ""
    found = []
    for bar in bars:
        since = round(_SIZE * bar.start / end)
        length = max(1, round(_SIZE * (bar.start + bar.length) / end) - since)
        found.append(f"M{since} 0h{length}v1h-{length}z")
    told = " ".join(str(says.setdefault(bar.says, len(says))) for bar in bars)
    texts = f' data-text="{escape(" ".join(bar.text for bar in bars))}"' if any(bar.text for bar in bars) else ""
    return f'<path fill="{kind.colour}" data-kind="{number}" data-says="{told}"{texts} d="{"".join(found)}"/>'


def _svg(inside: str) -> str:
    return f'<svg viewBox="0 0 {_SIZE} 1" preserveAspectRatio="none">{inside}</svg>'


def _level_names(levels: Sequence[tuple[str, Sequence[Level]]]) -> list[str]:
    return [
        part
        for title, of in levels
        for part in (
            f'<b class="title">{escape(title)}</b>',
            *(f'<b class="level">{escape(level.row)}<small>highest {level.highest:g}</small></b>' for level in of),
        )
    ]


def _level_rows(levels: Sequence[tuple[str, Sequence[Level]]], *, end: float) -> list[str]:
    """A filled step curve per rank; rows of one chart have the same scale."""
    parts = []
    for _, of in levels:
        highest = max((level.highest for level in of), default=0.0) or 1.0
        parts.append('<div class="title"></div>')
        for level in of:
            steps = "".join(
                f"H{min(_SIZE, round(_SIZE * time / end))}V{1 - amount / highest:.4g}" for time, amount in level.moments
            )
            parts.append(f'<div class="level">{_svg(f"""<path fill="#7a9cc0" d="M0 1{steps}H{_SIZE}V1z"/>""")}</div>')
    return parts


def _axis(end: float) -> str:
    marks = (f'<span style="left:{time / end:.3%}">{time:g}</span>' for time in ticks(0.0, end) if time < 0.97 * end)
    return f'<div class="axis">{"".join(marks)}</div>'


_STYLE = """
*{box-sizing:border-box}body{font:14px/1.45 system-ui,sans-serif;margin:0;padding:1rem;color:#1c2330;background:#fff;
overflow-wrap:anywhere}
h1{font-size:1.15rem;margin:0 0 .3rem}p{margin:.15rem 0}.keys{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;
margin:.6rem 0}.keys i{display:inline-block;width:.9rem;height:.9rem;margin-right:.35rem;vertical-align:-.1rem;
border-radius:.15rem}
#tip{min-height:1.5rem;color:#5a6372}.bar label{display:inline-flex;align-items:center;gap:.5rem}
.chart{display:grid;grid-template-columns:minmax(3.4rem,max-content) minmax(0,1fr);gap:.5rem}
.names{max-width:34vw}
.names b{display:block;font-weight:400;text-align:right;height:calc(var(--row) + .2rem);line-height:var(--row);
overflow-wrap:normal;white-space:nowrap}
.names .level{height:2.6rem;line-height:1.2rem}.names small{display:block;color:#5a6372}
.names .title{height:2.4rem;line-height:2.6rem;text-align:left;font-weight:600;overflow:visible;width:0;
position:relative;z-index:1}
.scroll{overflow-x:auto}.wide{min-width:100%;position:relative}
.row,.level{position:relative}.row{height:var(--row);margin-bottom:.2rem;background:#f3f5f8}
.wide .level{height:2.4rem;margin-bottom:.2rem;background:#f3f5f8}.wide .title{height:2.4rem}
svg{width:100%;height:100%;display:block}
.row span{position:absolute;top:0;line-height:var(--row);font-size:11px;text-align:center;pointer-events:none;
white-space:nowrap}
.axis{position:relative;height:1.4rem;color:#5a6372}.axis span{position:absolute;font-size:12px;white-space:nowrap;
border-left:1px solid #b9c1cc;padding-left:.2rem}.names .axis{line-height:1.4rem;height:1.4rem}
@media(max-width:700px){.names b{white-space:normal;font-size:11px;line-height:.8rem}.names .title{white-space:nowrap}}
"""

_SCRIPT = """
const about = JSON.parse(document.getElementById('about').textContent), zoom = document.getElementById('zoom');
const scroll = document.querySelector('.scroll'), wide = document.querySelector('.wide');
const tip = document.getElementById('tip');
const rows = [...document.querySelectorAll('.row')].map(row => ({row,
  bars: [...row.querySelectorAll('path')].flatMap(p => {
  const says = p.dataset.says.split(' '), text = p.dataset.text === undefined ? [] : p.dataset.text.split(' ');
  return [...p.getAttribute('d').matchAll(/M(\\d+) 0h(\\d+)/g)].map((found, n) =>
    ({at: +found[1], size: +found[2], kind: +p.dataset.kind, says: +says[n], text: text[n] || ''}))})}));
function draw() {
  const width = wide.clientWidth, left = scroll.scrollLeft, right = left + scroll.clientWidth;
  for (const {row, bars} of rows) {
    row.querySelectorAll('span').forEach(span => span.remove());
    for (const bar of bars) {
      const x = bar.at / about.size * width, size = bar.size / about.size * width;
      if (!bar.text || x + size < left || x > right || size < about.edge / 2 + about.digit * bar.text.length) continue;
      const span = document.createElement('span');
      span.textContent = bar.text; span.style.left = x + 'px'; span.style.width = size + 'px'; row.append(span);
    }
  }
}
function resize() {
  const least = scroll.clientWidth, most = Math.max(24 * least, about.width);
  wide.style.width = Math.round(least * (most / least) ** (zoom.value / 100)) + 'px'; draw();
}
function fit() {
  const least = scroll.clientWidth, most = Math.max(24 * least, about.width);
  zoom.step = 'any';
  zoom.value = about.width > least ? 100 * Math.log(about.width / least) / Math.log(most / least) : 0; resize();
}
zoom.addEventListener('input', resize); scroll.addEventListener('scroll', draw);
window.addEventListener('resize', resize);
scroll.addEventListener('mousemove', event => {
  const found = rows.find(({row}) => row.contains(event.target));
  if (!found) return;
  const box = found.row.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * about.size;
  const bar = found.bars.findLast(bar => bar.at <= at && at < bar.at + bar.size);
  const time = n => +(n / about.size * about.end).toFixed(3);
  if (bar) tip.textContent = about.kinds[bar.kind] + ': ' + about.says[bar.says] + ', from ' + time(bar.at) + ' for '
    + time(bar.size) + ' ' + about.unit;
});
fit();
"""
