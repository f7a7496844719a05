"""The examples and the picture in the documentation: they run, and say what they should."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from rotorch.strategies.rtp import plan

ROOT = Path(__file__).resolve().parents[1]
DRAWING = ROOT / "docs" / "draw_rotation.py"


@pytest.mark.slow
def test_rtp_in_30_lines_runs_on_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # NCCL wants one device per rank
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(tmp_path),
    }
    run = subprocess.run(
        [*command, str(ROOT / "examples" / "01_rtp_in_30_lines.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", run.stdout)]
    assert losses[0] > losses[-1] and losses[-1] < 2.0
    held = re.findall(r"rank (\d) holds ([0-9,]+) of ([0-9,]+) bytes", run.stdout)
    assert {rank for rank, _, _ in held} == {"0", "1"}
    for _, part, whole in held:
        assert 0.5 <= int(part.replace(",", "")) / int(whole.replace(",", "")) < 0.51


def test_the_picture_is_what_its_script_draws() -> None:
    drawing = runpy.run_path(str(DRAWING))
    assert DRAWING.with_name("rotation.svg").read_text("utf-8") == drawing["draw"]()


def test_the_picture_shows_the_order_that_the_strategy_documents() -> None:
    drawing = runpy.run_path(str(DRAWING))
    rows = re.findall(r"rank (\d) \|([ 0-9]+)\|([ 0-9]+)\|", plan.__doc__ or "")
    assert len(rows) == drawing["NUM_RANKS"]
    for rank, forward, backward in rows:
        assert [int(k) for k in forward.split()] == drawing["slices_met"](int(rank), backward=False)
        assert [int(k) for k in backward.split()] == drawing["slices_met"](int(rank), backward=True)
