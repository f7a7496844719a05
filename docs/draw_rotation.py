"""Draws `docs/rotation.svg`: one weight, four ranks, forward and backward.

Run it after a change: `python docs/draw_rotation.py`. The picture brings its own background, light or dark as the
reader's system asks for, so that it reads on any page.
"""

from collections.abc import Iterator
from pathlib import Path

NUM_RANKS = 4
COLOURS = ("#2f6fc1", "#c05f10", "#22855a", "#a0468a")
STYLE = """
  .card { fill: #ffffff; stroke: #d6dbe1 } .text { fill: #4b545e } .strong { fill: #1f262d } .line { stroke: #8a939d }
  .on { fill: #ffffff } .off { fill: none; stroke: #ffffff; stroke-opacity: .8 } .time { fill: #8a939d }
  @media (prefers-color-scheme: dark) {
    .card { fill: #14191f; stroke: #323a43 } .text { fill: #b3bcc6 } .strong { fill: #eef1f4 }
  }
"""

WIDTH, HEIGHT = 1150, 528
TOP, ROW, CELL_H, CELL_W, PITCH = 118, 72, 50, 62, 84
COLUMN = PITCH * (NUM_RANKS - 1) + CELL_W
WEIGHT_X, RANK_X, FORWARD_X, BACKWARD_X, STEP_X = 32, 126, 254, 614, 974


def slices_met(rank: int, *, backward: bool) -> list[int]:
    """The order in which a rank meets the slices: its own first in forward, last in backward."""
    steps = range(NUM_RANKS)
    return [(rank + 1 + j) % NUM_RANKS for j in steps] if backward else [(rank - i) % NUM_RANKS for i in steps]


def text(x: float, y: float, words: str, *, size: int = 15, style: str = "text", anchor: str = "start") -> str:
    """One line of text."""
    weight = ' font-weight="600"' if style in ("strong", "on") else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" class="{style}" text-anchor="{anchor}"{weight}>{words}</text>'


def box(x: float, y: float, width: float, height: float, *, index: int, radius: int = 7) -> str:
    """A rectangle in the colour of slice `index`."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" fill="{COLOURS[index]}"/>'


def name(x: float, y: float, index: int) -> str:
    """A slice's name, in white."""
    return text(x, y, f'W<tspan font-size="12" dy="4">{index}</tspan>', size=18, style="on", anchor="middle")


def dots(x: float, y: float, *, filled: int) -> Iterator[str]:
    """One dot per rank: filled for those that have added their part to a gradient."""
    for number in range(NUM_RANKS):
        style = "on" if number < filled else "off"
        yield f'<circle cx="{x + 11 * (number - 1.5):g}" cy="{y:g}" r="3.6" class="{style}"/>'


def hop(x: float, y: float, *, index: int, around: bool = False) -> str:
    """An arrow from the cell whose upper right corner is (x, y) to the next column, one row up."""
    across, up = PITCH - CELL_W, ROW - CELL_H
    dashes = ' stroke-dasharray="3.5 2.5"' if around else ""
    return (
        f'<line x1="{x - 2:g}" y1="{y - 1:g}" x2="{x + across - 1:g}" y2="{y - up + 3:g}" stroke="{COLOURS[index]}" '
        f'stroke-width="2.8"{dashes} marker-end="url(#tip{index})"/>'
    )


def row_y(rank: int) -> int:
    """Upper edge of a rank's row."""
    return TOP + ROW * rank


def headings() -> Iterator[str]:
    """What the columns are."""
    for x, label in ((WEIGHT_X, "At rest"), (FORWARD_X, "Forward"), (BACKWARD_X, "Backward"), (STEP_X, "Step")):
        yield text(x, 46, label, size=20, style="strong")
    for x in (FORWARD_X, BACKWARD_X):
        for step in range(NUM_RANKS):
            yield text(x + PITCH * step + CELL_W / 2, 74, str(step + 1), size=13, anchor="middle")
        yield f'<line x1="{x}" y1="82" x2="{x + COLUMN - 4}" y2="82" class="line" marker-end="url(#time)"/>'


def one_rank(rank: int) -> Iterator[str]:
    """A rank's row: the slice it keeps, the slices it meets, and its own slice again."""
    y = row_y(rank)
    middle = y + CELL_H / 2
    yield box(WEIGHT_X, y - (ROW - CELL_H) / 2, 74, ROW, index=rank, radius=0)
    yield name(WEIGHT_X + 37, middle + 5, rank)
    yield text(RANK_X, middle - 2, f"rank {rank}", size=16, style="strong")
    yield text(RANK_X, middle + 17, "its own data", size=13)
    for step, index in enumerate(slices_met(rank, backward=False)):
        x = FORWARD_X + PITCH * step
        yield box(x, y, CELL_W, CELL_H, index=index)
        yield name(x + CELL_W / 2, middle + 5, index)
    for step, index in enumerate(slices_met(rank, backward=True)):
        x = BACKWARD_X + PITCH * step
        yield box(x, y, CELL_W, CELL_H, index=index)
        yield name(x + CELL_W / 2, middle - 3, index)
        yield from dots(x + CELL_W / 2, middle + 15, filled=step + 1)
        if step == NUM_RANKS - 1:
            continue
        yield hop(x + CELL_W, y, index=index, around=rank == 0)
        if rank == 0:  # the last rank is its neighbour: the arrow comes in again below
            yield hop(x + CELL_W, row_y(NUM_RANKS), index=index, around=True)
    yield box(STEP_X, y, CELL_W, CELL_H, index=rank)
    yield name(STEP_X + CELL_W / 2, middle + 5, rank)
    yield text(STEP_X + CELL_W + 12, middle + 5, "optimizer", size=13)


CAPTIONS = {
    WEIGHT_X: ("One weight, cut in four.", "A rank keeps one slice,", "its gradient, and its", "optimizer state."),
    FORWARD_X: (
        "Data stays, weights go round. A rank",
        "begins with its own slice; each other",
        "one it takes from that slice's home,",
        "uses, and forgets. The results add up.",
    ),
    BACKWARD_X: (
        "The other way round, own slice last.",
        "A slice's gradient follows the arrows;",
        "each rank adds its part (a dot). With",
        "four dots it is complete, and home.",
    ),
    STEP_X: ("Each rank updates", "its own slice; nothing", "is left to reduce."),
}


def captions() -> Iterator[str]:
    """What happens, below the columns."""
    for x, words in CAPTIONS.items():
        for number, line in enumerate(words):
            yield text(x, row_y(NUM_RANKS) + 32 + 21 * number, line)


def draw() -> str:
    """The whole picture."""
    tip = (
        '<marker id="tip{0}" viewBox="0 0 8 8" refX="5.5" refY="4" markerWidth="4.2" markerHeight="4.2" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="{1}"/></marker>'
    )
    time = (
        '<marker id="time" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" class="time"/></marker>'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif" role="img">',
        "<title>Rotation of one weight over four ranks</title>",
        "<desc>One row per rank, one column per moment. In forward, rank r computes with slices r, r-1, r-2, r-3; in "
        "backward with r+1, r+2, r+3, r, while each slice's gradient hops from rank to rank until it is home.</desc>",
        f"<style>{STYLE}</style>",
        "<defs>" + "".join(tip.format(k, colour) for k, colour in enumerate(COLOURS)) + time + "</defs>",
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="14" class="card"/>',
        *headings(),
        *(part for rank in range(NUM_RANKS) for part in one_rank(rank)),
        *captions(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("rotation.svg").write_text(draw(), "utf-8")
