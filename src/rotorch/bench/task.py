"""Training task that all contenders of a bench share: model, first weights, data, optimizer and precision.

[Note: tokens]
    The data are random tokens, made anew by every rank from (seed, step): nothing is read from disk while the clock
    runs. Steps alternate between `NUM_BATCHES` global batches, so that the model learns them by heart and its loss
    falls with every step; a layout whose gradients are wrong shows in the second loss already, which fresh random
    tokens would hide.

[Note: global batch]
    It is the same for every row: micro batch x accumulation x number of ranks. A layout in which fewer ranks see
    different data (`single`, or one that splits the model only) gives each of them a larger share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rotorch.core.compiling import Compile
from rotorch.core.errors import ConfigError
from rotorch.core.precision import Precision, dtype_of_passes
from rotorch.core.strategy import Strategy
from rotorch.models.hf import config_from_dict, load_config, longest_sequence
from rotorch.run_config import OptimizerSection, RunConfig, batch_sizes
from rotorch.strategies import batch_ranks, format_parallel

NUM_BATCHES = 2


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of one step, the same for all contenders.

    Attributes:
        name: name of the model in the output.
        model: contents of its `config.json`, without dropout (rows could not be compared).
        vocabulary: number of tokens that the model knows.
        num_ranks: ranks of every row (`single` has one).
        micro_batch: samples per forward pass of a rank, if all ranks see different data.
        accumulation: forward passes per step.
        sequence_length: tokens per sample.
        seed: of the first weights and of the data.
        precision: of passes.
        compile: True if blocks run by torch.compile.
        optimizer: AdamW's numbers and clipping; the learning rate is constant.
        device: "auto", "cpu" or "cuda".
        own_loop: layouts are measured in a loop of one's own, which calls the model and backward.
    """

    name: str
    model: dict[str, Any]
    vocabulary: int
    num_ranks: int
    micro_batch: int
    accumulation: int = 1
    sequence_length: int
    seed: int = 0
    precision: Precision = "float32"
    compile: Compile = False
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    device: str = "cpu"
    own_loop: bool = False

    @property
    def global_batch(self) -> int:
        """Samples per step, over all ranks."""
        return self.micro_batch * self.accumulation * self.num_ranks

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step, over all ranks."""
        return self.global_batch * self.sequence_length

    def to_json(self) -> dict[str, Any]:
        """Returns the whole task as plain JSON."""
        return {**vars(self), "optimizer": self.optimizer.model_dump(mode="json")}

    @property
    def dtype_of_passes(self) -> str | None:
        """The name of the dtype of products, if it is not the weights' own."""
        return dtype_of_passes(self.precision)

    @property
    def half_dtype(self) -> torch.dtype | None:
        """The same, for libraries: by a policy of their own if they have one, else by autocast."""
        return None if self.dtype_of_passes is None else torch.bfloat16

    def batches(self, step: int, *, share: int, num_shares: int) -> list[dict[str, Tensor]]:
        """Returns the micro-batches of one of `num_shares` equal shares of a global batch (see [Note: tokens])."""
        generator = torch.Generator().manual_seed((self.seed * NUM_BATCHES + step % NUM_BATCHES) % 2**63)
        shape = (self.global_batch, self.sequence_length)
        tokens = torch.randint(self.vocabulary, shape, generator=generator)
        mine = tokens.view(num_shares, self.accumulation, -1, self.sequence_length)[share]
        return [{"input_ids": part.clone(), "labels": part.clone()} for part in mine]


def task_from_run(run: RunConfig, *, name: str, num_ranks: int) -> Task:
    """Takes the entries of a bench from a run's configuration.

    Raises:
        ConfigError: the model's configuration cannot be read, the sequence is too long for it, the batch does not
            divide, or the run is one of adapters.
    """
    if run.lora is not None:
        raise ConfigError("bench: adapters are not measured. Leave [lora] out")
    if run.data.kind == "preferences":
        raise ConfigError("bench: the loss of preference pairs is not measured. Write data.kind=text")
    given = run.model.config
    config = (
        load_config(given) if isinstance(given, str) else config_from_dict(given, source="model.config", is_own=True)
    )
    longest = longest_sequence(config)
    if longest is not None and run.data.sequence_length > longest:
        raise ConfigError(
            f"data.sequence_length = {run.data.sequence_length} is longer than the {longest} positions of the model. "
            f"Write data.sequence_length={longest} or less"
        )
    sizes = batch_sizes(run.train, batch_ranks=num_ranks)
    text_config = config.get_text_config()
    return Task(
        name=name,
        model=_without_dropout(config.to_dict()),
        vocabulary=text_config.vocab_size,
        num_ranks=num_ranks,
        micro_batch=sizes.micro_batch,
        accumulation=sizes.accumulation,
        sequence_length=run.data.sequence_length,
        seed=run.train.seed,
        precision=run.train.precision,
        compile=run.train.compile,
        optimizer=run.optimizer,
        device=run.train.device,
    )


def check_shares(task: Task, *, layouts: Sequence[Sequence[Strategy]]) -> None:
    """Raises `ConfigError` for a layout whose batch ranks do not divide the samples of a pass."""
    samples = task.micro_batch * task.num_ranks
    for strategies in layouts:
        shares = batch_ranks(strategies)
        if samples % shares:
            raise ConfigError(
                f"bench: '{format_parallel(strategies)}' has {shares} batch ranks, which do not divide the {samples} "
                f"samples of a pass. Write train.micro_batch={shares}"
            )


def _without_dropout(values: dict[str, Any]) -> dict[str, Any]:
    is_dropout = [
        key for key, value in values.items() if ("dropout" in key or "pdrop" in key) and isinstance(value, float)
    ]
    return {**values, **dict.fromkeys(is_dropout, 0.0)}
