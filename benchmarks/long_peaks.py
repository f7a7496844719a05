"""Peak bytes of a rank with one long sequence, counted exactly on CPU: shared sequences beside tensor parallelism.

    python benchmarks/long_peaks.py [--json FILE] [--tokens 131072] [--layers 32] [--only TEXT]

The setting of TSP's paper (arXiv 2604.26294), as far as it is known: a 7B with one sequence of 131,072 tokens on 8
ranks, for which it reports 38.8 GB, and 85 to 140 for tensor parallelism that cuts the sequence between its products.
One rank is real and the others are faked, and nothing is computed, as in gpu_peaks.py: float32 weights and gradients,
passes in bfloat16. AdamW's state, which is as large in every row, is added.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from gpu_peaks import in_a_process, measured, write_record  # noqa: E402
from gpu_rank import NUM_RANKS, TINY  # noqa: E402

import rotorch  # noqa: E402
from rotorch.models.hf import causal_lm, config_from_dict  # noqa: E402

LLAMA_2_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
TENSOR_PARALLEL = f"megatron={NUM_RANKS}[sequence_parallel=true]"
ROWS = (
    f"tsp={NUM_RANKS}[recompute=slice,transport=symmetric_memory]",
    f"tsp={NUM_RANKS}[recompute=slice,exchange=heads,transport=symmetric_memory]",
    f"fsdp={NUM_RANKS}[context={NUM_RANKS},recompute=block]",
    TENSOR_PARALLEL,
)
"""Keys gathered, heads exchanged, keys gathered beside gathered blocks; and what the paper compares with."""


def state_bytes(shapes: dict[str, Any], *, layers: int) -> int:
    """Bytes of AdamW's two moments of a rank's share of the weights."""
    with rotorch.on_meta():
        module = causal_lm(config_from_dict({**shapes, "num_hidden_layers": layers}, source=__file__))
    return 8 * sum(parameter.numel() for parameter in module.parameters()) // NUM_RANKS


def main(arguments: list[str] | None = None) -> int:
    """Prints a table; writes a record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write a record here, too")
    parser.add_argument("--tokens", type=int, default=131072, help="of the sequence (default: 131072)")
    parser.add_argument("--layers", type=int, default=32, help="of the model (default: 32)")
    parser.add_argument("--only", default="", help="rows that contain this")
    parser.add_argument("--tiny", action="store_true", help="a model 32 times narrower, to try this program")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.tokens < 2 * NUM_RANKS or options.layers < 1:
        parser.error(f"--tokens are {2 * NUM_RANKS} or more, --layers 1 or more")
    shapes = TINY if options.tiny else LLAMA_2_7B
    torch.set_num_threads(1)
    if options.row:
        warnings.simplefilter("ignore")
        found = measured(options.row, shapes=shapes, layers=options.layers, tokens=options.tokens)
        found.pop("recompute")  # it is in the layout
        print(json.dumps({**found, "peak_bytes": found["peak_bytes"] + state_bytes(shapes, layers=options.layers)}))
        return 0
    rows: list[dict[str, Any]] = []
    print(f"{'peak of a rank':62} {'GB':>7}")
    for parallel in (row for row in ROWS if options.only in row):
        rows.append(in_a_process(__file__, parallel, tiny=options.tiny, layers=options.layers, tokens=options.tokens))
        print(f"{parallel:62} {rows[-1]['peak_bytes'] / 1e9:7.2f}", flush=True)
    if options.json:
        write_record(options.json, rows, shapes=shapes, layers=options.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
