"""rotorch on a Ray cluster: Ray Train starts the ranks, and each of them runs `rotorch train`.

Run it on the head node: `python examples/clusters/ray_train.py my_run.toml --parallel ddp=4,rtp=8`.
"""

import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from rotorch import cli

NUM_RANKS, GPUS = 32, True


def rank(config: dict) -> None:
    """Work of every worker; Ray has joined it to the others and set RANK and WORLD_SIZE, as torchrun would."""
    if code := cli.run(["train", *config["arguments"]]):
        raise RuntimeError(f"rotorch ended with exit code {code}: its last line says why")


if __name__ == "__main__":
    TorchTrainer(
        rank,
        train_loop_config={"arguments": sys.argv[1:]},
        # Ray's own choice for GPUs, NCCL alone, cannot sum the few numbers that ranks agree on in host memory.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if GPUS else "gloo", timeout_s=600),
        scaling_config=ScalingConfig(num_workers=NUM_RANKS, use_gpu=GPUS),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=0)),  # start it again with --resume
    ).fit()
