"""The tables of `docs/checkpoints.md`: written by the tests that measure them, with ROTORCH_WRITE_CHECKPOINTS=1."""

import os
import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
WRITES = "ROTORCH_WRITE_CHECKPOINTS"


def write(name, text):
    """Puts `text` into a section of the page, if that was asked for (`make checkpoints`)."""
    if os.environ.get(WRITES):
        filled = _pattern(name).sub(lambda found: f"{found[1]}\n{text.strip()}\n{found[3]}", PAGE.read_text())
        PAGE.write_text(filled)


def section(name):
    """Text of a section of the page."""
    found = _pattern(name).search(PAGE.read_text())
    assert found is not None, f"{PAGE.name} has no section {name!r}"
    return found[2].strip()


def _pattern(name):
    return re.compile(rf"(<!-- {name}: .*? -->)\n(.*?)(<!-- end -->)", re.DOTALL)


def matrix_table(layouts, cells):
    """One row per layout that wrote, one column per layout that went on; the columns by the numbers of their rows."""
    worst = max(cell.error for cell in cells.values())
    lines = [
        f"All {len(cells)} pairs go on exactly: weights and both moments of AdamW are to the bit what was saved, and "
        f"the losses after it differ from an undisturbed run's by at most {worst:.1e} of them (float64).",
        "",
        "| written under | " + " | ".join(f"{n}" for n, _ in enumerate(layouts, start=1)) + " |",
        "|---" * (len(layouts) + 1) + "|",
    ]
    for number, source in enumerate(layouts, start=1):
        row = [_shown(cells[source, layout].error) for layout in layouts]
        lines.append(f"| {number} `{source}` | " + " | ".join(row) + " |")
    return "\n".join(lines)


def fifty_steps(errors):
    """One row per layout that went on."""
    lines = ["| goes on under | largest difference of a loss, of 50 steps |", "|---|---|"]
    return "\n".join(lines + [f"| `{layout}` | {error:.1e} |" for layout, error in errors.items()])


def _shown(error):
    return f"{error:.0e}" if error else "0"
