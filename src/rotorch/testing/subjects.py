"""Subjects of a comparison with one process: how to build a model, its training data, and its loss.

[Note: any architecture]
    A `TinySubject` is made from a configuration class alone. The model class is found among the classes that the
    modeling module defines for the configuration; one with a loss of its own is preferred. Arguments of its forward are
    made up by name: token ids, images, patches with their grid, embeddings. Without a loss of its own, the loss is a
    fixed function of its first output. Weights that the model's own code leaves uninitialised get small random values.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rotorch.core.errors import ConfigError
from rotorch.models.hf import causal_lm, longest_sequence
from rotorch.models.losses import Batch, LossFn, count_targets, loss_of
from rotorch.models.trial.tiny import NUM_DRAWN_TOKENS, inputs_for, never_set, number_for, shrunk, with_values
from rotorch.testing.arithmetic import exact_arithmetic, widen
from rotorch.testing.batches import Rows, global_batch, share_of, with_documents

NUM_MICRO_BATCHES, NUM_ROWS, NUM_TOKENS = 2, 2, 32
"""Of each share of a step, if nobody says; rows of a micro-batch, tokens of a row."""


class Subject(Protocol):
    """A model and its training data."""

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of each share of a step."""

    @property
    def loss(self) -> LossFn | None:
        """Loss as `parallelize` takes it; None: the model's own."""

    def build(self) -> nn.Module:
        """Makes the model, in the current device context."""

    def batch(self, *, seed: int, step: int, num_shares: int) -> Rows:
        """The global batch of a step; every tensor's rows divide among shares and their micro-batches."""


@dataclass(frozen=True)
class CausalLM:
    """A causal language model with its own loss; with `documents`, rows of every second step hold several."""

    config: Any
    num_micro_batches: int = NUM_MICRO_BATCHES
    documents: bool = False

    @property
    def loss(self) -> None:
        return None

    def build(self) -> nn.Module:
        return causal_lm(self.config)

    def batch(self, *, seed: int, step: int, num_shares: int) -> Rows:
        rows = global_batch(
            seed=seed,
            step=step,
            num_shares=num_shares,
            num_micro_batches=self.num_micro_batches,
            num_rows=NUM_ROWS,
            num_tokens=min(NUM_TOKENS, longest_sequence(self.config) or NUM_TOKENS),
            vocab_size=self.config.get_text_config().vocab_size,
        )
        return with_documents(rows, seed=seed) if self.documents and step % 2 else rows


@dataclass(frozen=True)
class TinySubject:
    """A tiny model of any architecture (see [Note: any architecture]); if `embedded`, it is given no tokens."""

    config: Any
    model_class: type
    embedded: bool = False
    num_micro_batches: int = NUM_MICRO_BATCHES
    num_tokens: int = NUM_TOKENS

    @property
    def loss(self) -> LossFn | None:
        return None if self._has_loss and not self.embedded else output_loss

    @property
    def _has_loss(self) -> bool:
        return "labels" in inspect.signature(self.model_class.forward).parameters  # type: ignore[attr-defined]

    def build(self) -> nn.Module:
        return with_values(self.model_class, self.config, never_set_names=self._never_set)

    @cached_property
    def _never_set(self) -> tuple[str, ...]:
        return never_set(self.model_class, self.config)

    def batch(self, *, seed: int, step: int, num_shares: int) -> Rows:
        total = num_shares * self.num_micro_batches * NUM_ROWS
        made = inputs_for(
            self.model_class,
            self.config,
            num_rows=total,
            num_tokens=self.num_tokens,
            seed=1000 * seed + step + 1,
            embedded=self.embedded,
        )
        if "input_ids" not in made:
            return {**made, "labels": torch.zeros(total, dtype=torch.int64)}
        text = global_batch(
            seed=seed,
            step=step,
            num_shares=num_shares,
            num_micro_batches=self.num_micro_batches,
            num_rows=NUM_ROWS,
            num_tokens=self.num_tokens,
            vocab_size=NUM_DRAWN_TOKENS,
        )
        text["labels"][:, 0] = -100  # no target whether a loss shifts labels or not
        return made | text


def output_loss(module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
    """A loss for models that have none: fixed weights on their first output `[rows.., D]`, at targets only."""
    targets = batch["shift_labels"] if "shift_labels" in batch else batch["labels"]
    outputs = module(**{name: rows for name, rows in batch.items() if name not in ("labels", "shift_labels")})
    values = outputs.values() if hasattr(outputs, "values") else outputs
    hidden = next(t for t in values if isinstance(t, Tensor) and t.is_floating_point() and t.dim() >= 2)
    per_row = hidden.reshape(len(targets), -1, hidden.shape[-1])
    weights = torch.sin(torch.arange(1, 1 + per_row.shape[-1], dtype=per_row.dtype, device=per_row.device))
    score = (torch.tanh(per_row) * weights).sum(-1)
    if targets.dim() == 1:
        score = score.mean(-1) * (targets != -100)
    elif "shift_labels" in batch:
        score = score * (targets != -100)
    else:
        score = score[:, : targets.shape[1] - 1] * (targets[:, 1 : 1 + score.shape[1]] != -100)
    return score.sum() / num_targets


def model_classes(config_class: type) -> list[type]:
    """The model classes that transformers has for a configuration class; those with a loss of their own first.

    Some are declared for a configuration that has this one as a part (an encoder, for that of encoder and decoder).
    """
    from transformers import PreTrainedModel
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found: list[Any] = []
    if config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        found.append(MODEL_FOR_CAUSAL_LM_MAPPING[config_class])
    own: list[Any] = []
    for base in config_class.__mro__:
        name = base.__module__.replace(".configuration_", ".modeling_")
        if name == base.__module__:
            continue
        try:
            modeling = importlib.import_module(name)
        except ImportError:
            continue
        classes: list[Any] = [
            c
            for c in vars(modeling).values()
            if inspect.isclass(c) and issubclass(c, PreTrainedModel) and c.__module__ == name and "forward" in vars(c)
        ]
        own += [c for c in classes if c.config_class is base] or [c for c in classes if _takes_part(c, base)]
    own.sort(key=lambda c: not ("labels" in inspect.signature(c.forward).parameters and _has_tied_output(c)))
    return list(dict.fromkeys([*found, *own]))


def _takes_part(model_class: Any, config_class: type) -> bool:
    """True if a model class, declared for a configuration, may be made of a part of it."""
    parts = getattr(model_class.config_class, "sub_configs", {}).values()
    return config_class in parts and model_class.main_input_name == "input_ids"


def _has_tied_output(model_class: Any) -> bool:
    return bool(getattr(model_class, "_tied_weights_keys", None))


def tiny_subject(config_class: type) -> TinySubject:
    """The richest tiny model of a configuration class that runs forward and backward in float64 on one process.

    Raises:
        ConfigError: none does; says why for the first.
    """
    why: list[str] = []
    try:
        for config in shrunk(config_class):
            compute_exactly(config)
            for model_class in model_classes(config_class):
                for embedded in (False, True):
                    subject = TinySubject(config, model_class, embedded)
                    error = _first_error(subject)
                    if error is None:
                        return subject
                    why.append(f"{model_class.__name__}: {error}")
    except Exception as error:  # of the configuration itself
        why.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
    raise ConfigError(f"no tiny {config_class.__name__} runs: {why[0] if why else 'transformers has no model for it'}")


def compute_exactly(config: Any) -> None:
    """Attention and experts in plain torch operations: the fused ones know no float64."""
    config.use_cache = False
    config._experts_implementation = "eager"


def _first_error(subject: TinySubject) -> str | None:
    for _ in range(8):
        try:
            with torch.random.fork_rng(devices=[]), exact_arithmetic():
                torch.manual_seed(0)
                module = widen(subject.build()).train()
                batch = share_of(
                    subject.batch(seed=0, step=0, num_shares=1),
                    share=0,
                    num_shares=1,
                    num_micro_batches=subject.num_micro_batches,
                )[0]
                loss = (subject.loss or loss_of(module))(module, batch, count_targets(batch))
                loss.backward()
            return None if bool(torch.isfinite(loss)) else f"its loss is {float(loss)}"
        except AttributeError as error:
            # What a configuration gets from the one that it is nested in, which there is none of here.
            name = error.name if error.obj is subject.config else None
            value = number_for(name) if name else None
            if name is None or value is None:
                return _said(error)
            setattr(subject.config, name, value)
        except Exception as error:
            return _said(error)
    return "its configuration lacks many fields"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def configurations() -> Iterator[type]:
    """Every configuration class of the installed transformers that has a tensor-parallel plan, by name."""
    import pkgutil

    import transformers.models as models
    from transformers import PretrainedConfig

    found: dict[str, type] = {}
    for family in pkgutil.iter_modules(models.__path__):
        folder = f"{models.__path__[0]}/{family.name}"
        for part in pkgutil.iter_modules([folder]):
            if not part.name.startswith("configuration_"):
                continue
            module = importlib.import_module(f"transformers.models.{family.name}.{part.name}")
            for value in vars(module).values():
                own = inspect.isclass(value) and value.__module__ == module.__name__
                if own and issubclass(value, PretrainedConfig) and getattr(value, "base_model_tp_plan", None):
                    found[value.__name__] = value
    yield from (found[name] for name in sorted(found))
