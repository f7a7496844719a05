"""Trains the Llama of the first example in pipeline stages: the same losses under every layout and schedule.

    python examples/09_pipelines.py
    torchrun --nproc-per-node 4 examples/09_pipelines.py "pp=4[schedule=zb_h1]"
    torchrun --nproc-per-node 4 examples/09_pipelines.py "zeropp=2x2[chunks=2]"
    torchrun --nproc-per-node 4 examples/09_pipelines.py "zeropp=2x2[inner=rtp]"

A step's micro-batches pass from stage to stage. `forward_backward` gets all of them and does what the schedule says:
`rotorch schedule zeropp --stages 2 --chunks 2 --micro-batches 4` draws it.
"""

import contextlib
import io
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rotorch

layout = sys.argv[1] if len(sys.argv) > 1 else "single"
num_steps = int(sys.argv[2]) if len(sys.argv) > 2 else 40

with contextlib.redirect_stdout(io.StringIO()) as zen:
    import this  # noqa: F401
windows = torch.tensor(list(zen.getvalue().encode()))[:768].view(12, 64)  # bytes are tokens

with rotorch.on_meta():
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=5,
            num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True,
        )
    )  # fmt: skip
model = rotorch.parallelize(llama, layout, device="cpu")  # pipelines run on CPU ranks
model.materialize(seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # weights of other stages are there, and empty

mine = windows[model.batch_rank :: model.num_batch_ranks]  # ranks of one pipeline share a batch
micro_batches = [{"input_ids": rows, "labels": rows} for rows in mine.split(2)]
rank, losses = torch.distributed.get_rank(), []
for step in range(1, num_steps + 1):
    optimizer.zero_grad()
    losses.append(float(model.forward_backward(micro_batches)))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # over all stages
    optimizer.step()
    if rank == 0 and step % 10 == 0:
        print(f"step {step}: loss {losses[-1]:.4f}", flush=True)

held = {name.split(".")[2] for name, w in model.weights.items() if ".layers." in name and w.local.numel()}
num_bytes = sum(weight.local.nbytes for weight in model.weights.values())
print(
    f"rank {rank} holds parts of layers {', '.join(sorted(held))}: {num_bytes:,} of {model.spec.num_bytes:,} bytes",
    flush=True,
)
model.close()
torch.distributed.destroy_process_group()
