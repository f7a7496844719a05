"""One rank of 8, the others faked: what it holds and how long it computes (see gpu.py). Runs each case in a process.

[Note: bfloat16]
    Weights, gradients and AdamW's moments are all bfloat16 in every row, so that rows compare; a run that keeps float32
    masters holds more in all of them.

[Note: scaled up]
    Cases run with 2 and with 4 layers. What a layer adds is half of the difference; the whole model has 32. Memory and
    time of embedding, head and loss are in the measured part. Peaks grow by the layer as long as the peak is where it
    was: the two depths say so if they agree with a third, which one case by itself with `--layers 8` gives.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

NUM_RANKS = 8
LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
TINY = {**LLAMA_3_8B, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 6}
"""The same 32 times narrower: units have the sizes of one another."""
LAYOUTS = (
    f"rtp={NUM_RANKS}[transport=send_receive]",
    f"rtp={NUM_RANKS}[recompute=slice,transport=send_receive]",
    f"fsdp={NUM_RANKS}",
    f"fsdp={NUM_RANKS}[recompute=block]",
    f"ddp={NUM_RANKS}",
    f"ddp={NUM_RANKS}[recompute=block]",
)
DEPTHS = (2, 4)


def measure(*, device: str, tokens: int, steps: int) -> dict[str, Any]:
    """All rows, each with what was measured and what the whole model would take by it."""
    shapes = LLAMA_3_8B if device == "cuda" else TINY
    rows = []
    for layout in LAYOUTS:
        measured = []
        for layers in DEPTHS:
            command = [sys.executable, __file__, "--layout", layout, "--layers", str(layers), "--device", device]
            command += ["--tokens", str(min(tokens, shapes["max_position_embeddings"])), "--steps", str(steps)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                measured.append({"layers": layers, "error": (done.stderr.strip().splitlines() or ["failed"])[-1]})
            else:
                measured.append(json.loads(done.stdout.strip().splitlines()[-1]))
        rows.append({"parallel": layout, "measured": measured, **scaled(measured, layers=shapes["num_hidden_layers"])})
    return {
        "ranks": NUM_RANKS,
        "model": "Llama-3-8B" if device == "cuda" else "tiny",
        "tokens": tokens,
        "dtype": "bfloat16",
        "method": "one rank, the others faked: nothing sent, nothing waited for; scaled from "
        f"{DEPTHS[0]} and {DEPTHS[1]} layers to {shapes['num_hidden_layers']}",
        "rows": rows,
    }


def scaled(measured: list[dict[str, Any]], *, layers: int) -> dict[str, Any]:
    """Time and memory of `layers` layers, from those of two smaller numbers of layers (see [Note: scaled up])."""
    if any("error" in case for case in measured):
        return {}
    less, more = measured
    found = {}
    for name in ("peak_bytes", "step_s_median"):
        if less[name] is not None:
            each = (more[name] - less[name]) / (more["layers"] - less["layers"])
            found[f"{name}_scaled"] = less[name] + each * (layers - less["layers"])
    return found


def one_case(layout: str, *, shapes: dict[str, Any], device: str, tokens: int, steps: int) -> dict[str, Any]:
    """Memory and time of this process as rank 3 of 8."""
    import rotorch
    from rotorch.models.hf import causal_lm, config_from_dict
    from rotorch.testing.fake import as_rank

    config = config_from_dict({**shapes, "use_cache": False}, source="benchmarks/gpu_one_rank.py")
    with as_rank(3, num_ranks=NUM_RANKS), unsent_gradients():
        with rotorch.on_meta():
            module = causal_lm(config).to(torch.bfloat16).train()
        model = rotorch.parallelize(module, layout, device=device)
        on = next(iter(model.weights.values())).local.device
        fill_with_noise(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=True)
        ids = torch.randint(shapes["vocab_size"], (1, tokens), device=on)
        times = []
        for number in range(2 + steps):
            if number == 2 and on.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            start_s = now_s(on)
            model.forward_backward({"input_ids": ids, "labels": ids})
            optimizer.step()
            optimizer.zero_grad()
            times.append(now_s(on) - start_s)
        peak = torch.cuda.max_memory_allocated() if on.type == "cuda" else None
        model.close()
    return {
        "layers": shapes["num_hidden_layers"],
        "step_s_median": statistics.median(times[2:]),
        "step_s_all": times[2:],
        "peak_bytes": peak,
    }


def fill_with_noise(model: Any) -> None:
    """Gives weights and slots small numbers: from others nothing comes, and what is there by chance may be anything."""
    held = [weight.local for weight in model.weights.values()]
    for tensor in [*held, *model.sharded.slots()]:
        tensor.detach().normal_(std=0.02)
    model.values_changed()


@contextmanager
def unsent_gradients() -> Iterator[None]:
    """Lets torch's DDP do all but send: the fake group's answer is none that it can take."""
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
    from torch.nn.parallel import DistributedDataParallel

    class Unsent(DistributedDataParallel):
        __signature__ = inspect.signature(DistributedDataParallel)  # whose names of arguments are asked for

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_comm_hook(None, noop_hook)

    with mock.patch("rotorch.strategies.ddp.apply.DistributedDataParallel", Unsent):
        yield


def now_s(device: torch.device) -> float:
    """The time when all that the device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    """One case; prints it as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    shapes = {**(LLAMA_3_8B if options.device == "cuda" else TINY), "num_hidden_layers": options.layers}
    found = one_case(options.layout, shapes=shapes, device=options.device, tokens=options.tokens, steps=options.steps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
