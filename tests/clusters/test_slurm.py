"""The file for Slurm: its decisions after each exit code, and jobs of 2 ranks on a Slurm of one node."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import rotorch, write_run
from slurm_node import Slurm, why_not

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "examples" / "clusters" / "slurm.sbatch"
ONE_NODE = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=1"]


# ---------------------------------------------------------------- the script alone, with commands that only note


@pytest.fixture
def script(tmp_path):
    """Runs the file with an `srun` that ends with given exit codes; returns its own one, and the commands it gave."""

    def run(*codes: int, state: str = "RUNNING"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
        (tmp_path / "given").write_text("")
        for name, does in {
            "srun": f"code=$(head -n 1 {tmp_path}/codes); sed -i 1d {tmp_path}/codes; exit $code",
            "scontrol": '[ "$1" = show ] && echo first-node',
            "squeue": f'[ "{state}" = RUNNING ] && echo 77',
        }.items():
            (tmp_path / "bin" / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/given\n{does}\n')
            (tmp_path / "bin" / name).chmod(0o755)
        environment = {
            "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "first-node",
        }
        done = subprocess.run(["bash", FILE, "my_run.toml"], env=environment, capture_output=True, text=True)
        given = [line.split()[:2] for line in (tmp_path / "given").read_text().splitlines()]
        return done.returncode, [" ".join(words) for words in given if words[0] in ("srun", "scontrol")][1:]

    return run


START, REQUEUE = "srun --kill-on-bad-exit=0", "scontrol requeue"


@pytest.mark.parametrize("code", [0, 1, 2])
def test_what_another_start_would_not_mend_ends_the_job(script, code):
    assert script(code) == (code, [START])


def test_a_failure_starts_the_ranks_again_at_most_three_times(script):
    assert script(3, 137, 0) == (0, [START] * 3)
    assert script(3, 2) == (2, [START] * 2)
    assert script(3, 3, 70, 137) == (137, [START] * 4)


def test_a_job_that_was_asked_to_stop_goes_on_in_its_next_turn(script):
    assert script(75) == (75, [START, REQUEUE])
    assert script(75, state="COMPLETING") == (75, [START])  # it was cancelled, or Slurm itself has requeued it


# ---------------------------------------------------------------- really run


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    environment = {
        "PATH": str(Path(sys.executable).parent),
        "PYTHONPATH": str(ROOT / "src"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    with Slurm(tmp_path_factory.mktemp("slurm"), environment=environment) as slurm:
        yield slurm


def steps(directory: Path) -> list[dict]:
    file = directory / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def ranks_of(directory: Path) -> list[int]:
    """Process ids of the ranks that work in a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_rank = b"\0RANK=" in b"\0" + (path / "environ").read_bytes()
            if is_rank and b"rotorch" in (path / "cmdline").read_bytes() and (path / "cwd").readlink() == directory:
                found.append(int(path.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_a_misspelt_key_ends_the_job_at_once(slurm, tmp_path):
    write_run(tmp_path)
    log = tmp_path / "log"
    job = slurm.submit(*ONE_NODE, str(FILE), "run.toml", "--parallel=rtp=2", "train.stepz=9", cwd=tmp_path, log=log)
    assert slurm.wait(job, log=log) == "FAILED 2:0"
    assert log.read_text().count("did you mean 'train.steps'?") == 2  # of each rank once


@pytest.mark.slow
def test_two_ranks_are_preempted_and_resume(slurm, tmp_path):
    """SIGTERM, a rank that is killed, a requeue by Slurm: the losses are those of a run that nothing happened to."""
    settings = ["--parallel=rtp=2", "train.steps=300", "train.checkpoint_every=10"]
    for name in ("disturbed", "alone"):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name)
    here, log = tmp_path / "disturbed", tmp_path / "log"
    job = slurm.submit(*ONE_NODE, str(FILE), "run.toml", *settings, cwd=here, log=log)

    def trains_on(*, beyond: int):
        slurm.until(lambda: len(steps(here)) > beyond, what=f"step {beyond + 1}", log=log)
        return len(steps(here))

    done = trains_on(beyond=10)
    slurm.call("scancel", "--signal=TERM", job)  # as at the end of its time, or when its place is taken
    slurm.until(lambda: "stopped     after step" in log.read_text(), what="a checkpoint", log=log)

    done = trains_on(beyond=done + 10)
    os.kill(ranks_of(here)[1], signal.SIGKILL)
    slurm.until(lambda: "3 restarts left" in log.read_text(), what="a new start", log=log)

    done = trains_on(beyond=done + 10)
    slurm.call("scontrol", "requeue", job)
    slurm.until(lambda: log.read_text().count("stopped     after step") == 2, what="a checkpoint", log=log)

    assert slurm.wait(job, log=log) == "COMPLETED 0:0"
    reference = rotorch(tmp_path / "reference", "train", tmp_path / "alone" / "run.toml", *settings)
    assert reference.code == 0, reference.stderr
    losses = [
        [(record["step"], record["loss"]) for record in steps(tmp_path / name)] for name in ("disturbed", "alone")
    ]
    assert [step for step, _ in losses[0]] == list(range(1, 301))
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_a_cancelled_job_does_not_come_back(slurm, tmp_path):
    write_run(tmp_path)
    log = tmp_path / "log"
    settings = ["--parallel=rtp=2", "train.steps=1000000"]
    job = slurm.submit(*ONE_NODE, str(FILE), "run.toml", *settings, cwd=tmp_path, log=log)
    slurm.until(lambda: len(steps(tmp_path)) > 3, what="step 4", log=log)
    slurm.call("scancel", job)
    slurm.until(lambda: not slurm.call("squeue", "--noheader", "--jobs", job), what="it has left", log=log)
    assert slurm.state(job).startswith("CANCELLED")
    assert "stopped     after step" in log.read_text()  # with a checkpoint
