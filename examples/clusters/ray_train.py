"""rotorch on a Ray cluster: Ray Train starts the ranks, and each of them runs `rotorch train`.

Run it on the head node:

    python examples/clusters/ray_train.py my_run.toml --parallel ddp=4,rtp=8

A rank takes a GPU, and there are as many ranks as the cluster has GPUs; `--ranks N` asks for N, with GPUs if there are
any. All other words are those of `rotorch train`. The exit code is rotorch's.
"""

import argparse
import json
import os
import sys
import tempfile
import uuid
from pathlib import Path

import ray
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from rotorch import cli

STARTED_AGAIN = (3, 70)
"""Exit codes of failures that another start may mend: a rank failed, an unforeseen error."""


def rank(config: dict) -> dict:
    """Work of every worker; Ray has joined it to the others and set RANK and WORLD_SIZE, as torchrun would."""
    os.environ["ROTORCH_JOB_ID"] = config["job"]  # the same after a failure: ranks resume what their own job began
    with tempfile.TemporaryDirectory() as directory:
        numbers = Path(directory) / "numbers.json"
        code = cli.run(["train", *config["arguments"], "--json", str(numbers)])
        if code in STARTED_AGAIN:
            raise RuntimeError(f"rotorch ended with exit code {code}: its last line says why")
        told = json.loads(numbers.read_text()) if numbers.exists() else {}
    ray.train.report(told)
    return {"exit_code": code, **told}


def main() -> int:
    """Starts the ranks, prints the numbers of the first one, and returns its exit code."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--ranks N] RUN.toml [rotorch train's options]", allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int)
    parser.add_argument("run_file", metavar="RUN.toml", type=Path)
    mine, arguments = parser.parse_known_args()
    arguments = [str(mine.run_file.absolute()), *arguments]  # workers have directories of their own
    ray.init()
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if (ranks := mine.ranks or gpus) < 1:
        parser.error("the cluster has no GPU: write how many ranks there are to be, e.g. --ranks 2")
    job = uuid.uuid4().hex
    result = TorchTrainer(
        rank,
        train_loop_config={"arguments": arguments, "job": job},
        # Ray's own choice for GPUs, NCCL alone, cannot sum the few numbers that ranks agree on in host memory.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpus else "gloo", timeout_s=600),
        scaling_config=ScalingConfig(num_workers=ranks, use_gpu=bool(gpus)),
        run_config=RunConfig(name=f"rotorch-{job}", failure_config=FailureConfig(max_failures=3)),
    ).fit()
    print(json.dumps(result.return_value))
    return result.return_value["exit_code"]


if __name__ == "__main__":
    sys.exit(main())
