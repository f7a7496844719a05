"""`docs/bad_inputs.md`: every input of `bad_inputs.py` with the line that refuses it, as the tests see it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import bad_inputs
import failures

PAGE = Path(__file__).resolve().parents[2] / "docs" / "bad_inputs.md"

INTRODUCTION = """# Bad inputs

Inputs that cannot work, and the one line that refuses each, with exit code 2, before a rank starts and before anything
is written. Written by `make failures`; a test per line holds the words against what happens, that no traceback is
printed, and that no file is left behind. Paths are shortened. `docs/failures.md` has what goes wrong in a run.
"""


def seen(case: bad_inputs.Case, message: str, *, directory: Path) -> None:
    """Holds the line that refuses a case against the page, or writes it there (`make failures`)."""
    message = message.strip().removeprefix("rotorch: ").replace(f"{directory}/", "").replace(str(directory), ".")
    page = parse(PAGE.read_text() if PAGE.exists() else "")
    if os.environ.get(failures.WRITES):
        PAGE.write_text(render({**page, (case.section, case.shown): message}))
    else:
        there = page.get((case.section, case.shown), "")
        has_changed = f"{PAGE.name}: {case.shown!r} has changed: run make failures"
        assert failures.words(message) == failures.words(there), has_changed


def parse(text: str) -> dict[tuple[str, str], str]:
    """The messages of a page by section and case."""
    found, section = {}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif (row := re.fullmatch(r"\| `` (.*) `` \| `` (.*) `` \|", line)) is not None:
            shown, message = (part.replace("\\|", "|") for part in row.groups())
            found[section, shown] = message
    return found


def render(messages: Mapping[tuple[str, str], str]) -> str:
    """The page."""
    parts, sections = [INTRODUCTION], dict.fromkeys(case.section for case in bad_inputs.CASES)
    for section in sections:
        rows = [
            f"| `` {_cell(case.shown)} `` | `` {_cell(messages[section, case.shown])} `` |"
            for case in bad_inputs.CASES
            if case.section == section and (section, case.shown) in messages
        ]
        parts.append("\n".join([f"## {section}\n", "| input | message |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
