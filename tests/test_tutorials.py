"""The tutorials of docs/tutorials, word by word: every block, one after another, in an empty directory."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from test_code_blocks import reads

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of a page's code blocks."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.slow  # below their commands are read; tests/train/test_after_training.py runs those of the first one
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_it_stands(page, tmp_path):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    (tmp_path / "empty").mkdir()
    (tmp_path / "home").mkdir()
    script = tmp_path / "tutorial.sh"
    script.write_text("set -euo pipefail\n" + "\n".join(text for _, text in blocks(page)))
    done = subprocess.run(
        ["bash", script], cwd=tmp_path / "empty", env=environment, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def test_the_program_understands_every_command_of_a_tutorial():
    lines = [line for page in TUTORIALS for _, text in blocks(page) for line in text.splitlines()]
    commands = [shlex.split(line.strip().removesuffix("&"), comments=True) for line in lines if "rotorch " in line]
    commands = [words for words in commands if words[:1] == ["rotorch"]]
    assert len(commands) > 20 and [said for words in commands if (said := reads(words))] == []


def test_every_block_of_a_tutorial_is_a_command():
    assert len(TUTORIALS) == 6
    assert {language for page in TUTORIALS for language, _ in blocks(page)} == {"bash"}
