"""Teaches MiniLM, an encoder that was published without a classifier, to tell from which age a passage of a speech is.

python examples/07_minilm.py [STEPS]
torchrun --nproc-per-node 2 examples/07_minilm.py [STEPS]

The State of the Union addresses of 1790 to 2020, in passages of three sentences: before the Civil War, up to the end of
the Second World War, or since. Every eighth speech is held out. After 40 steps 76 % of 384 passages of those speeches
are told right, where 48 % are from the commonest age. Losses are the same on one rank and on two.
"""

import json
import os
import re
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

sys.path.append(str(Path(__file__).parent / "finetune_smollm2"))
from fetch import Unavailable, minilm, speeches

import rotorch

AGES, BEGINNINGS = ("before 1861", "1861 to 1945", "since 1946"), (1861, 1946)
LENGTH, BATCH, HELD_OUT = 48, 32, 384  # tokens of a passage; passages of a step, and of the test

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
try:
    directory, folder = minilm(), speeches()
except Unavailable as error:
    print(f"skipped: an input cannot be had here: {error}")
    sys.exit()


def passages(files: list[Path]) -> tuple[list[str], list[int]]:
    """Texts of three sentences each, and the ages that they are from, in an order that mixes both."""
    texts, ages = [], []
    for file in files:
        year = json.loads(file.with_suffix(".json").read_text("utf-8"))["year"]
        sentences = re.split(r"(?<=[.!?])\s+", file.read_text("utf-8").strip())
        found = [" ".join(sentences[at : at + 3]) for at in range(0, len(sentences), 3)]
        texts += found
        ages += [sum(year >= beginning for beginning in BEGINNINGS)] * len(found)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    return [texts[k] for k in order], [ages[k] for k in order]


tokenizer = AutoTokenizer.from_pretrained(directory)


def batch_of(texts: list[str], ages: list[int]) -> dict[str, torch.Tensor]:
    """This rank's share of some passages, as the model takes them."""
    share = slice(model.batch_rank, None, model.num_batch_ranks)
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    return {name: rows[share].contiguous() for name, rows in {**tokens, "labels": torch.tensor(ages)}.items()}


files = sorted(folder.glob("*.txt"))
texts, ages = passages([file for number, file in enumerate(files) if number % 8])
held_out_texts, held_out_ages = passages(files[::8])

config = AutoConfig.from_pretrained(directory, num_labels=len(AGES), dtype=torch.float32)
config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0  # so that losses can be compared
with rotorch.on_meta():
    classifier = AutoModelForSequenceClassification.from_config(config)
model = rotorch.parallelize(classifier, f"rtp={os.environ.get('WORLD_SIZE', '1')}", device="cpu")
model.materialize(seed=0, only=["classifier.*"])  # new; everything else is read, by each rank what it holds
model.load(str(directory), may_lack=["classifier.*"], may_have=["embeddings.position_ids"])  # the model counts itself
model.module.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)

losses = []
for step in range(1, steps + 1):
    optimizer.zero_grad()
    rows = [(step - 1) * BATCH + k for k in range(BATCH)]
    batch = batch_of([texts[k % len(texts)] for k in rows], [ages[k % len(texts)] for k in rows])
    losses.append(float(model.forward_backward(batch)))
    optimizer.step()
    if model.batch_rank == 0 and (step % 5 == 0 or step == steps):
        print(f"step {step}: loss {losses[-1]:.4f}", flush=True)

right = torch.zeros(1)
for first in range(0, min(HELD_OUT, len(held_out_texts)), BATCH):
    batch = batch_of(held_out_texts[first : first + BATCH], held_out_ages[first : first + BATCH])
    labels = batch.pop("labels")
    right += (model.predict(batch).logits.argmax(-1) == labels).sum()
torch.distributed.all_reduce(right)
accuracy = float(right) / min(HELD_OUT, len(held_out_texts))
if model.batch_rank == 0:
    print(f"of {min(HELD_OUT, len(held_out_texts))} passages that were held out {100 * accuracy:.1f} % are told right")
model.close()
torch.distributed.destroy_process_group()
