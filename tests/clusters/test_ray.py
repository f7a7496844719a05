"""The file for Ray Train, really run: 2 workers on CPU train, and report what one process reports."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import rotorch, write_run

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "examples" / "clusters" / "ray_train.py"

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="there is no ray: pip install 'rotorch[ray]'")


def on_ray(directory: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Runs the file on a Ray of its own, which ends with it."""
    (directory / "home").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "HOME": str(directory / "home"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",  # a busy machine loads torch for minutes
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.run(
        [sys.executable, FILE, *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=900
    )


def test_two_workers_train_and_report(tmp_path):
    (tmp_path / "alone").mkdir()
    write_run(tmp_path)
    done = on_ray(tmp_path, "--ranks", "2", "run.toml", "--parallel", "rtp=2")
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"exit_code"'))
    assert told["exit_code"] == 0
    assert done.stderr.count("Reporting training result") + done.stdout.count("Reporting training result") >= 1
    reference = rotorch(
        tmp_path / "log", "train", write_run(tmp_path / "alone"), "--parallel=rtp=2", "--json", tmp_path / "numbers"
    )
    assert reference.code == 0, reference.stderr
    alone = json.loads((tmp_path / "numbers").read_text())
    lines = [
        [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
        for run in (tmp_path, tmp_path / "alone")
    ]
    assert [record["loss"] for record in lines[0]] == [record["loss"] for record in lines[1]]
    assert told["held_out_bits_per_byte"] == alone["held_out_bits_per_byte"]


@pytest.mark.slow
def test_wrong_input_ends_it_without_another_start(tmp_path):
    write_run(tmp_path)
    done = on_ray(tmp_path, "--ranks", "2", "run.toml", "--parallel", "rtp=2", "train.stepz=9")
    assert done.returncode == 2
    assert "did you mean 'train.steps'?" in done.stdout + done.stderr
