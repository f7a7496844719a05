"""Teaches a small T5 to spell words of the Zen of Python backwards. Head and loss are those of transformers.

python examples/06_t5.py [STEPS]
torchrun --nproc-per-node 2 examples/06_t5.py [STEPS]
"""

import contextlib
import io
import os
import sys

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import T5Config, T5ForConditionalGeneration

import rotorch

with contextlib.redirect_stdout(io.StringIO()) as zen:
    import this  # noqa: F401
words = sorted({word.encode() for word in zen.getvalue().split()})[:72]  # bytes are tokens, 0 is padding
asked = pad_sequence([torch.tensor(list(word)) for word in words], batch_first=True)
answers = pad_sequence([torch.tensor(list(word[::-1])) for word in words], batch_first=True, padding_value=-100)

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60
with rotorch.on_meta():
    t5 = T5ForConditionalGeneration(
        T5Config(
            vocab_size=256, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )  # fmt: skip
model = rotorch.parallelize(t5, f"rtp={os.environ.get('WORLD_SIZE', '1')}")
model.materialize(seed=0)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

mine = slice(model.batch_rank, None, model.num_batch_ranks)
batch = {"input_ids": asked[mine], "attention_mask": (asked[mine] > 0).long(), "labels": answers[mine].contiguous()}
losses = []
for step in range(1, steps + 1):
    optimizer.zero_grad()
    losses.append(float(model.forward_backward(batch)))
    optimizer.step()
    if model.batch_rank == 0 and (step % 10 == 0 or step == steps):
        print(f"step {step}: loss {losses[-1]:.4f}", flush=True)

if model.batch_rank == 0:
    print(model.spec.summary())
model.close()
torch.distributed.destroy_process_group()
