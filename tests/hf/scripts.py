"""Scripts as people write them for transformers' Trainer and TRL's, run without a layout or under one."""

import contextlib
import os
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from datasets import Dataset, IterableDataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import rotorch
from rotorch.hf import TrainerMixin
from rotorch.strategies import batch_ranks, parse_parallel

WORDS = [f"w{number}" for number in range(58)]


@dataclass
class Run:
    """Record of a script.

    Attributes:
        log: the trainer's log, without what depends on the clock.
        weights: in the end, by name; those that were trained.
    """

    log: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)


def config(**changes: Any) -> LlamaConfig:
    """Grouped queries, tied embeddings, a vocabulary that two ranks cannot cut evenly."""
    sizes = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=0)
    return LlamaConfig(**sizes | changes)


def model(kind: type = LlamaForCausalLM, *, seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    return kind(config(**changes))


def tokenizer() -> PreTrainedTokenizerFast:
    known = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def text(generator: np.random.Generator, *, least: int = 3, most: int = 9) -> str:
    return " ".join(generator.choice(WORDS, size=generator.integers(least, most)))


def arguments(kind: type, directory: Path, layout: str | None, *, rows: int = 8, **changes: Any) -> Any:
    """Arguments with `rows` in each micro-batch of all ranks, and everything logged."""
    shares = 1 if layout is None else batch_ranks(parse_parallel(layout))
    given = dict(per_device_train_batch_size=rows // shares, per_device_eval_batch_size=rows // shares)
    given |= dict(output_dir=str(directory), max_steps=3, learning_rate=1e-2, logging_steps=1, save_strategy="no")
    given |= dict(use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False, bf16=False, seed=3)
    return kind(**given | changes)


def trainer_class(kind: type, layout: str | None) -> Any:
    return kind if layout is None else type(kind.__name__, (TrainerMixin, kind), {"layout": layout})


def finish(trainer: Any, layout: str | None) -> Run:
    # In the loss of a last batch that is not full, Trainer counts the rows twice that fill it up on some process.
    late = ("runtime", "per_second", "time", "flos", "odd_loss")
    log = [
        {k: v for k, v in entry.items() if not any(word in k for word in late)} for entry in trainer.state.log_history
    ]
    names = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    state = trainer.model.state_dict() if layout is None else trainer.model.full_state_dict(all_ranks=True)
    run = Run(log, {name: state[name].numpy().copy() for name in names})
    if layout is not None:
        trainer.model.parallel.close()
    return run


# ---------------------------------------------------------------- scripts: (layout, directory, ...) -> Run


def rows_of_ids(num_rows: int, *, seed: int) -> Dataset:
    generator = np.random.default_rng(seed)
    ids = generator.integers(3, 61, size=(num_rows, 10))
    labels = np.where(generator.random(ids.shape) < 0.4, -100, ids)
    return Dataset.from_dict({"input_ids": ids, "labels": labels})


def metrics_of(found: Any) -> dict[str, float]:
    predicted, labels = found.predictions[:, :-1].argmax(-1), found.label_ids[:, 1:]
    right = (predicted == labels)[labels != -100]
    return {"accuracy": right.mean(), "size": float(np.abs(found.predictions).mean()), "rows": len(labels)}


def plain_trainer(layout: str | None, directory: Path, *, resume: bool = False, steps: int = 8) -> Run:
    """8 steps with accumulation, clipping and evaluation; at the end the better one of two checkpoints is loaded."""
    changes = dict(max_steps=steps, gradient_accumulation_steps=4, max_grad_norm=0.5, weight_decay=0.1)
    changes |= dict(eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4)
    changes |= dict(load_best_model_at_end=True, metric_for_best_model="even_loss")
    trainer = trainer_class(Trainer, layout)(
        model=model(seed=5 if resume else 0),  # a checkpoint's values must take their place
        args=arguments(TrainingArguments, directory, layout, **changes),
        train_dataset=rows_of_ids(48, seed=1),
        eval_dataset={"even": rows_of_ids(16, seed=2), "odd": rows_of_ids(11, seed=3)},
        compute_metrics=metrics_of,
    )
    trainer.train(resume_from_checkpoint=str(directory / "checkpoint-4") if resume else None)
    return finish(trainer, layout)


def sft(layout: str | None, directory: Path, *, lora: bool = False, resume: bool = False, **changes: Any) -> Run:
    """Packed rows without padding between them, and a checkpoint after two of three steps."""
    generator = np.random.default_rng(3)
    args = arguments(
        SFTConfig, directory, layout, rows=4, packing=True, max_length=16, gradient_accumulation_steps=2,
        **dict(gradient_checkpointing=False, save_strategy="steps", save_steps=2) | changes,
    )  # fmt: skip
    trainer = trainer_class(SFTTrainer, layout)(
        model=model(),
        args=args,
        train_dataset=Dataset.from_dict({"text": [text(generator) for _ in range(64)]}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"]) if lora else None,
    )
    trainer.train(resume_from_checkpoint=str(directory / "checkpoint-2") if resume else None)
    return finish(trainer, layout)


def preferences(num_rows: int) -> dict[str, list[str]]:
    generator = np.random.default_rng(4)
    return {k: [text(generator) for _ in range(num_rows)] for k in ("prompt", "chosen", "rejected")}


def of_a_stream(layout: str | None, directory: Path) -> Run:
    """Rows of which nobody knows how many there are."""
    rows = rows_of_ids(24, seed=1).with_format("torch")
    trainer = trainer_class(Trainer, layout)(
        model=model(),
        args=arguments(TrainingArguments, directory, layout),
        train_dataset=IterableDataset.from_generator(lambda: iter(rows)),
        compute_loss_func=lambda outputs, labels, num_items_in_batch: (
            cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            / num_items_in_batch
        ),
    )
    trainer.train()
    return finish(trainer, layout)


def encoded() -> Any:
    """A T5 of one layer on each side."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=1, num_decoder_layers=1)
    return T5ForConditionalGeneration(T5Config(**sizes, pad_token_id=0, decoder_start_token_id=0, dropout_rate=0.0))


def texts_from_texts(layout: str | None, directory: Path) -> Run:
    """Evaluation generates texts, whose tokens are compared with the labels."""
    generator = np.random.default_rng(6)
    ids, labels = generator.integers(3, 61, size=(2, 24, 7))
    rows = Dataset.from_dict({"input_ids": ids, "labels": labels})
    changes = dict(eval_strategy="steps", eval_steps=3, predict_with_generate=True, generation_max_length=5)
    trainer = trainer_class(Seq2SeqTrainer, layout)(
        model=encoded(),
        args=arguments(Seq2SeqTrainingArguments, directory, layout, **changes),
        train_dataset=rows,
        eval_dataset=rows.select(range(16)),  # this trainer measures rows twice that fill up a last batch
        compute_metrics=lambda found: {"tokens": float(found.predictions.sum()), "rows": len(found.predictions)},
    )
    trainer.train()
    return finish(trainer, layout)


class Named(Trainer):
    """Takes further arguments of the loss by name, as many overrides do."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        return super().compute_loss(model, inputs, return_outputs=return_outputs, **more)


def classes(layout: str | None, directory: Path) -> Run:
    """A head whose loss takes no count of items; all samples of a batch count alike."""
    generator = np.random.default_rng(7)
    ids = generator.integers(3, 61, size=(24, 7))
    trainer = trainer_class(Named, layout)(
        model=model(LlamaForSequenceClassification, num_labels=3),
        args=arguments(TrainingArguments, directory, layout, gradient_accumulation_steps=2),
        train_dataset=Dataset.from_dict({"input_ids": ids, "labels": generator.integers(3, size=24)}),
    )
    trainer.train()
    return finish(trainer, layout)


def dpo(layout: str | None, directory: Path, *, lora: bool = False, given: bool = False) -> Run:
    """With a reference model of other values; with adapters the model without them is the reference.

    With `given`, the trainer gets a model that is parallel, and a reference that is not.
    """
    made, kind = model(), trainer_class(DPOTrainer, layout)
    if given and layout is not None:
        made, kind.layout = rotorch.parallelize(made, layout, device="cpu"), None
    trainer = kind(
        model=made,
        ref_model=None if lora else model(seed=1),
        args=arguments(DPOConfig, directory, layout, rows=4, gradient_checkpointing=False),
        train_dataset=Dataset.from_dict({k: [" " + t for t in v] for k, v in preferences(16).items()}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "down_proj"]) if lora else None,
    )
    assert layout is None or lora or hasattr(trainer.ref_model, "parallel")
    trainer.train()
    return finish(trainer, layout)


def reward(layout: str | None, directory: Path) -> Run:
    given = preferences(16)
    trainer = trainer_class(RewardTrainer, layout)(
        model=model(LlamaForSequenceClassification, num_labels=1),
        args=arguments(RewardConfig, directory, layout, rows=4, gradient_checkpointing=False),
        train_dataset=Dataset.from_dict({k: given[k] for k in ("chosen", "rejected")}),
        processing_class=tokenizer(),
    )
    trainer.train()
    return finish(trainer, layout)


def chosen(probabilities: torch.Tensor, num_samples: int, **_: Any) -> torch.Tensor:
    """In place of `torch.multinomial`: the likeliest token in even rows, the next one in odd ones, on any rank."""
    ranks = (torch.arange(len(probabilities)) % 2).unsqueeze(1)
    return probabilities.argsort(dim=-1, descending=True).gather(1, ranks)


def grpo(layout: str | None, directory: Path) -> Run:
    """Two texts for each prompt, made in training; those with more even tokens are better."""
    args = arguments(
        GRPOConfig, directory, layout, rows=4, num_generations=2, max_completion_length=5, num_iterations=2,
        gradient_checkpointing=False, learning_rate=1e-3,
    )  # fmt: skip
    generator = np.random.default_rng(5)
    with patch("torch.multinomial", chosen):
        trainer = trainer_class(GRPOTrainer, layout)(
            model=model(),
            args=args,
            reward_funcs=lambda completion_ids, **_: [float(sum(t % 2 == 0 for t in ids)) for ids in completion_ids],
            train_dataset=Dataset.from_dict({"prompt": [text(generator, least=4, most=5) for _ in range(16)]}),
            processing_class=tokenizer(),
        )
        trainer.train()
    return finish(trainer, layout)


# ---------------------------------------------------------------- running them


def run_page(blocks: list[str], directory: Path) -> list[str]:
    """On a rank: a page's programs one after another; the files that they leave behind."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(directory)
    ids = torch.arange(3, 23).view(2, 10)
    names: dict[str, Any] = {"__name__": "page", "batches": [{"input_ids": ids, "labels": ids}]}
    rows = (rows_of_ids(8, seed=1), Dataset.from_dict({"text": ["w1 w2 w3", "w4 w5 w6"] * 4}))
    kinds = (TrainingArguments, partial(SFTConfig, gradient_checkpointing=False))
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        for number, block in enumerate(blocks):
            if number < len(kinds):
                names |= dict(args=arguments(kinds[number], directory, "rtp=2", max_steps=1), rows=rows[number])
            exec(compile(block, "page", "exec"), names)
            names["trainer" if number < len(kinds) else "model"].parallel.close()
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*.safetensors"))


def run_all(work: list[tuple[str, Any, str | None, Path, dict[str, Any]]]) -> dict[str, Any]:
    """On a rank: scripts one after another, by name; what went wrong in the place of a run."""
    os.environ["OMP_NUM_THREADS"] = "1"
    disable_progress_bars()
    if all(layout is None for _, _, layout, _, _ in work):  # as a script without a launcher
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    found: dict[str, Any] = {}
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")  # these libraries have much to say
        for name, script, layout, directory, changes in work:
            found[name] = script(layout, directory, **changes)
    return found


def resumed(run: Run) -> Run:
    """The same, less what trainers count anew when a run is resumed."""
    anew = ("train_loss", "num_tokens")
    return Run([{k: v for k, v in entry.items() if k not in anew} for entry in run.log], run.weights)


def difference(ours: Run, theirs: Run) -> list[str]:
    """Differences of more than 1e-5, relative to the size of a number, from a run of one process."""
    found = []
    if len(ours.log) != len(theirs.log):
        return [f"{len(ours.log)} entries in the log, not {len(theirs.log)}"]
    for number, (mine, other) in enumerate(zip(ours.log, theirs.log, strict=True)):
        if mine.keys() != other.keys():
            found.append(f"entry {number} has {sorted(mine)}, not {sorted(other)}")
        for key in mine.keys() & other.keys():
            if not abs(mine[key] - other[key]) <= 1e-5 * max(1.0, abs(other[key])):
                found.append(f"entry {number}: {key} is {mine[key]}, not {other[key]}")
    for name, value in theirs.weights.items():
        error = np.abs(ours.weights[name] - value).max()
        if not error <= 1e-4:  # AdamW makes much of rounding where gradients are small
            found.append(f"{name} is off by {error:.1e}")
    return found
