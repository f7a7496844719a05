"""Preference pairs of `rotorch train` beside TRL's DPOTrainer: the same losses, rewards and weights."""

import json
import warnings
from functools import partial

import pytest
import scripts
import torch
from commands import rotorch
from datasets import Dataset
from safetensors.torch import load_file
from trl import DPOConfig, DPOTrainer

from rotorch.testing.ranks import run_ranks
from rotorch.train.metrics import read_metrics

STEPS, PAIRS, BETA = 4, 4, 0.3
RUN = f"""
[model]
init = "base"
[data]
kind = "preferences"
source = "pairs.jsonl"
tokenizer = "model"
cache_dir = "cache"
sequence_length = 24
held_out_fraction = 0.0
[dpo]
beta = {BETA}
[train]
steps = {STEPS}
micro_batch = {PAIRS}
out = "run"
tensorboard = false
[optimizer]
lr = 1e-3
betas = [0.9, 0.95]
weight_decay = 0.0
schedule = "constant"
[sample]
length = 0
"""


class Listening(DPOTrainer):
    """TRL's trainer, whose losses are kept as they are: its log rounds them."""

    heard: list[float]

    def compute_loss(self, *args, **kwargs):
        found = super().compute_loss(*args, **kwargs)
        self.heard.append(float((found[0] if isinstance(found, tuple) else found).detach()))
        return found


def by_trl(directory, records):
    warnings.simplefilter("ignore")  # TRL's own, of arguments and of the device
    kind = partial(
        DPOConfig, beta=BETA, gradient_checkpointing=False, lr_scheduler_type="constant", adam_beta2=0.95,
        max_grad_norm=1.0, weight_decay=0.0,
    )  # fmt: skip
    args = scripts.arguments(kind, directory / "trl", None, rows=PAIRS, max_steps=STEPS, learning_rate=1e-3)
    trainer = Listening(
        model=scripts.model(),
        ref_model=scripts.model(),
        args=args,
        train_dataset=Dataset.from_list(records),
        processing_class=scripts.tokenizer(),
    )
    trainer.heard = []
    trainer.train()
    logged = [(line["rewards/margins"], line["rewards/accuracies"]) for line in trainer.state.log_history[:STEPS]]
    weights = {name: value.detach().numpy().copy() for name, value in trainer.model.named_parameters()}
    return trainer.heard, logged, weights


@pytest.mark.parametrize("layout", [pytest.param("single", marks=pytest.mark.slow), "fsdp=2"])
def test_pairs_are_learnt_as_by_trl(tmp_path, layout):
    given = scripts.preferences(PAIRS)
    records = [dict(zip(given, (p, f" {c}", f" {r}"), strict=True)) for p, c, r in zip(*given.values(), strict=True)]
    ((losses, rewards, weights),) = run_ranks(by_trl, tmp_path, records, num_ranks=1)
    scripts.model().save_pretrained(tmp_path / "base")
    scripts.tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "run.toml").write_text(RUN)
    rows = PAIRS if layout == "single" else PAIRS // 2
    done = rotorch(tmp_path / "log", "train", tmp_path / "run.toml", "--parallel", layout, f"train.micro_batch={rows}")
    assert done.code == 0, done.stderr
    ours = read_metrics(tmp_path / "run")
    assert len(losses) == STEPS and losses[-1] < losses[0] - 0.01
    assert [line["loss"] for line in ours] == pytest.approx(losses, abs=1e-5)
    assert [line["reward_margin"] for line in ours] == pytest.approx([margin for margin, _ in rewards], abs=1e-5)
    assert [line["reward_accuracy"] for line in ours[1:]] == [accuracy for _, accuracy in rewards[1:]]
    exported = rotorch(tmp_path / "log", "export", tmp_path / "run", tmp_path / "out")
    assert exported.code == 0, exported.stderr
    for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.allclose(value, torch.from_numpy(weights[name]), rtol=0, atol=1e-4), name
