"""Peak bytes of a rank in a step's passes, counted exactly on CPU: rtp beside FSDP2 with chunked cross entropy.

    python benchmarks/gpu_peaks.py [--json FILE] [--tokens 2048 8192] [--layers 32] [--only TEXT]

One rank of 8 over torch's fake process group, in the shapes of Llama-3-8B, all of its layers and its vocabulary.
Weights and gradients are float32, passes compute in bfloat16: `train.precision = "bfloat16"`, and FSDP2's own policy.
Every tensor that is made exists, but nothing is computed in large ones (`rotorch.testing.operations`), so the machine
needs little memory; bytes are those of storages that are alive (`rotorch.traced.live_storages`). Memory that a kernel
or an allocator takes for itself is in no row, nor is the optimizer's state, which is as large in every row. Each row is
measured in a process of its own.

    fsdp2          a group for each block, the rest in the root's, which stays gathered
    fsdp2 groups   embedding and head in groups of their own, as torchtitan has them: the head is gathered per chunk

Both peers compute the loss in eight chunks of tokens, whose logits are made again in backward. `recompute` is `none`,
or `block`: torch's checkpoint around every block, and rtp's own, slice by slice.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from gpu_rank import (  # noqa: E402
    LLAMA_3_8B,
    NULL,
    NUM_CHUNKS,
    NUM_RANKS,
    TINY,
    ChunkedLoss,
    Contender,
    in_group_of,
    under_fsdp2,
)

import rotorch  # noqa: E402
from rotorch.bench.record import describe_origin  # noqa: E402
from rotorch.models.blocks import repeated_blocks  # noqa: E402
from rotorch.models.hf import causal_lm, config_from_dict  # noqa: E402
from rotorch.testing.operations import WithoutArithmetic  # noqa: E402
from rotorch.traced.live_storages import ACTIVATIONS, LiveStorages  # noqa: E402

MODE = "bfloat16"
ROWS = (
    ("fsdp2", "none"),
    ("fsdp2 groups", "none"),
    (f"rtp={NUM_RANKS}[transport=send_receive,visits={NUM_RANKS}]", "none"),
    (NULL.replace("]", f",visits={NUM_RANKS}]"), "none"),
    ("fsdp2", "block"),
    ("fsdp2 groups", "block"),
    (f"rtp={NUM_RANKS}[transport=send_receive,recompute=slice]", "block"),
    (NULL.replace("]", ",recompute=slice]"), "block"),
)
"""Layouts as they are between GPUs by default, and the peer; each with what is computed again."""


def peer(shapes: dict[str, Any], *, layers: int, tokens: int, groups: bool, recompute: bool) -> Callable[[], None]:
    """Returns a step of FSDP2's, over the fake group that is there."""
    config = config_from_dict({**shapes, "num_hidden_layers": layers, "use_cache": False}, source=__file__)
    with rotorch.on_meta():
        module = ChunkedLoss(causal_lm(config).train())
    for block in repeated_blocks(module) if recompute else ():
        block.forward = _checkpointed(block.forward)
    apart = [module.model.embed_tokens, module.loss.head] if groups else []
    under_fsdp2(module, getattr(torch, MODE), torch.float32, apart=apart)
    ids = torch.zeros(1, tokens, dtype=torch.int64)

    def step() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        module(ids).backward()

    return step


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def measured(
    parallel: str, recompute: str = "none", *, shapes: dict[str, Any], layers: int, tokens: int
) -> dict[str, Any]:
    """Peak of one row, and what it is made of at that moment."""
    with in_group_of(parallel):
        if parallel.startswith("fsdp2"):
            step = peer(
                shapes, layers=layers, tokens=tokens, groups="groups" in parallel, recompute=recompute != "none"
            )
            kept: Any = None
        else:
            kept = Contender(parallel, MODE, shapes=shapes, layers=layers, tokens=tokens)
            step = kept.forward_backward
        with WithoutArithmetic():
            step()  # buffers are made, and the order of passes is known
            with LiveStorages() as live:
                step()
            peak, parts = live.peak()
        del step, kept
    return {
        "parallel": parallel,
        "recompute": recompute,
        "tokens": tokens,
        "peak_bytes": peak,
        "activations_bytes": parts[ACTIVATIONS],
    }


def in_a_process(program: str, *row: str, tiny: bool, layers: int, tokens: int) -> dict[str, Any]:
    """A row that a program prints as its last line, measured where nothing was computed before."""
    command = [sys.executable, program, "--row", *row, "--layers", str(layers), "--tokens", str(tokens)]
    done = subprocess.run([*command, *["--tiny"] * tiny], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(row)}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def write_record(file: Path, rows: list[dict[str, Any]], *, shapes: dict[str, Any], layers: int) -> None:
    """Writes rows with the model that they are of, and where and how they were measured."""
    record = {"model": {**shapes, "num_hidden_layers": layers}, "ranks": NUM_RANKS, "precision": MODE}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**record, **describe_origin(), "rows": rows}, indent=1) + "\n", "utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; writes a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write a record here, too")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="of a rank (default: 2048 8192)")
    parser.add_argument("--layers", type=int, default=32, help="of the model (default: 32)")
    parser.add_argument("--only", default="", help="rows that contain this")
    parser.add_argument("--tiny", action="store_true", help="a model 32 times narrower, to try this program")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if min(options.tokens) < 2 * NUM_CHUNKS or options.layers < 1:
        parser.error(f"--tokens are {2 * NUM_CHUNKS} or more, --layers 1 or more")
    shapes = TINY if options.tiny else LLAMA_3_8B
    torch.set_num_threads(1)
    if options.row:
        warnings.simplefilter("ignore")
        (tokens,) = options.tokens
        print(json.dumps(measured(*options.row, shapes=shapes, layers=options.layers, tokens=tokens)))
        return 0
    rows: list[dict[str, Any]] = []
    print(f"{'peak of a rank, without the optimizer':62} {'tokens':>6} {'GB':>7}")
    for tokens in options.tokens:
        for parallel, recompute in ROWS:
            if options.only not in f"{parallel} {recompute}":
                continue
            row = in_a_process(__file__, parallel, recompute, tiny=options.tiny, layers=options.layers, tokens=tokens)
            rows.append(row)
            print(f"{parallel + '  ' + recompute:62} {tokens:6} {row['peak_bytes'] / 1e9:7.3f}", flush=True)
    for row in rows:  # once both peers are known
        beside = [r for r in rows if (r["recompute"], r["tokens"]) == (row["recompute"], row["tokens"])]
        peers = [r["peak_bytes"] for r in beside if r["parallel"].startswith("fsdp2")]
        row["of_fsdp2"] = row["peak_bytes"] / min(peers) if peers else None
    if options.json:
        write_record(options.json, rows, shapes=shapes, layers=options.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
