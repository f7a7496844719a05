"""`docs/idioms.md`: what each idiom is under each layout, exact or refused, as test_idioms.py found it."""

import re
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "idioms.md"
WRITES = "ROTORCH_WRITE_IDIOMS"
EXACT = "exact"

INTRODUCTION = """# Idioms of training loops, and layouts

Written by `make idioms`; do not edit.

Each row is a loop as people write it (`tests/drop_in/idioms*.py`), around a tiny llama in float64. *Exact*: gradients
before each update, losses, what hooks see, and all weights in the end equal those of one process to 1e-10, where
gradients are means over ranks with different batches. A number: refused in one line on all ranks; the line is below.
Pipelines (`pp`, `zeropp`) take `model.forward_backward(micro_batches, loss=...)` instead of such calls.
"""

Outcomes = Mapping[str, Mapping[str, str]]
"""By idiom and layout: nothing if exact, else the line that refuses it."""


def render(outcomes: Outcomes) -> str:
    """The page."""
    layouts = list(next(iter(outcomes.values())))
    lines = list(dict.fromkeys(line for cells in outcomes.values() for line in cells.values() if line))
    rows = [
        ["idiom", *(f"`{layout}`" for layout in layouts)],
        ["---"] * (len(layouts) + 1),
        *(
            [name.replace("_", " "), *(_cell(cells[layout], lines) for layout in layouts)]
            for name, cells in outcomes.items()
        ),
    ]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    notes = "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
    return f"{INTRODUCTION}\n{table}\n\n{notes}\n"


def _cell(line: str, lines: list[str]) -> str:
    return f"({lines.index(line) + 1})" if line else EXACT


def parse(text: str) -> dict[str, dict[str, str]]:
    """Text of a page."""
    lines = dict(re.findall(r"^(\d+)\. (.+)$", text, flags=re.MULTILINE))
    head, _, *rows = [row.strip("| ").split(" | ") for row in re.findall(r"^\|.*\|$", text, flags=re.MULTILINE)]
    layouts = [cell.strip("`") for cell in head[1:]]
    found = {}
    for name, *cells in rows:
        outcomes = ["" if cell == EXACT else lines[cell.strip("()")] for cell in cells]
        found[name.replace(" ", "_")] = dict(zip(layouts, outcomes, strict=True))
    return found
