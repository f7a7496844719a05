"""The same over HTTP, from a local server that speaks S3; skipped where s3fs and moto are not installed."""

import importlib.util
import subprocess
import sys

import pytest
from commands import rotorch, write_run
from three_weights import make, read_back, step

from rotorch.testing.ranks import run_ranks
from rotorch.train.checkpoint.directories import candidates, checkpoints_of
from rotorch.train.checkpoint.saving import check, latest, load, save

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("s3fs", "moto", "flask")),
        reason="""no local object store: write pip install -e ".[s3-test]" (s3fs and moto) to run this""",
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(*server.get_host_and_port(), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def bucket():
    """The URL of an empty bucket; where it is, ranks know from the environment, as they would of a real one."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    host, port = server.stdout.readline().split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        import s3fs

        s3fs.S3FileSystem().mkdir("s3://bucket")
        yield "s3://bucket"
    server.stdin.close()
    server.wait(60)
    server.stdout.close()


def save_steps(url, num_steps):
    state = make()
    for _ in range(num_steps):
        step(state)
        save(url, state, keep=2)
    save(url, state, keep=2)  # the last one again


def go_on(url):
    state = make()
    load(latest(url), state)
    step(state)
    save(url, state, keep=1)


def test_ranks_save_and_others_go_on(bucket):
    url = f"{bucket}/by-hand"
    run_ranks(save_steps, url, 3, num_ranks=2)
    assert [path.name for path in candidates(checkpoints_of(url))] == ["step-00000002", "step-00000003"]
    assert check(latest(url)).num_ranks == 2
    run_ranks(go_on, url, num_ranks=3)
    assert run_ranks(read_back, url, num_ranks=1) == [(4, True)]
    assert [path.name for path in candidates(checkpoints_of(url))] == ["step-00000004"]
    assert {path.name for path in latest(url).iterdir()} == {"manifest.json", *check(latest(url)).files}


def test_a_run_saves_to_a_bucket(bucket, tmp_path, warm):
    settings = ["train", write_run(tmp_path), f"train.checkpoint_dir={bucket}/run", "train.async_save=true"]
    done = rotorch(tmp_path / "log", *settings, "--parallel", "rtp=2", "train.steps=2")
    assert done.code == 0, done.stderr
    done = rotorch(tmp_path / "log", *settings, "train.micro_batch=4", "train.steps=3", "--resume")
    assert done.code == 0, done.stderr
    assert rotorch(tmp_path / "log", "inspect", f"{bucket}/run", "--contents").code == 0
    done = rotorch(tmp_path / "log", "train", tmp_path / "run.toml", "train.checkpoint_dir=s3://no-such-bucket/run")
    assert done.code == 2 and "no-such-bucket" in done.stderr and "cannot be written" in done.stderr, done.stderr
