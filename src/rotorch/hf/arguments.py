"""Arguments of trainers that cannot be right on a parallel model: refused in one line before anything is made."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from torch import nn

from rotorch.core.errors import ConfigError
from rotorch.drop_in.plain_loops import check_plain_loop
from rotorch.parallel_model import ParallelModel

_REFUSED = {
    "deepspeed": "is another way to spread the model. Leave one of them out",
    "fsdp": "would cut again what is cut. Leave it out; layout='fsdp=8' is the same",
    "parallelism_config": "is another way to spread the model. Leave one of them out",
    "torch_compile": "would trace through what goes between ranks. Leave it out",
    "fp16": "is not tried under a layout. Write bf16=True",
    "fp16_full_eval": "would convert weights that ranks share. Leave it out",
    "bf16_full_eval": "would convert weights that ranks share. Leave it out",
    "auto_find_batch_size": "lets each rank choose for itself. Write per_device_train_batch_size",
    "use_liger_kernel": "replaces layers by such as read weights past them. Leave it out",
    "save_on_each_node": "wants a copy on every host, and ranks write one together. Give output_dir on a shared disk",
    "enable_jit_checkpoint": "saves when one rank is told to stop, and all must save together. Leave it out",
    "activation_offloading": "moves what passes save for backward, and slices are not saved. Leave it out",
    "precompute_ref_log_probs": "looks into the model's weights for a name of its cache. Leave it out",
    "sync_ref_model": "is not tried under a layout. Leave it out",
    "use_vllm": "copies weights of which ranks have parts. Leave it out: the model itself generates",
    "use_transformers_continuous_batching": "reads weights past the model's calls. Leave it out",
}
"""Arguments that must be left out, and why."""

_BY_ELEMENT = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Optimizers of `TrainingArguments.optim` that update each element by itself, so they are right on parts of weights."""


def check_arguments(arguments: Any) -> None:
    """Raises `ConfigError` for an argument that cannot be right on a parallel model."""
    for name, why in _REFUSED.items():
        if getattr(arguments, name, None):
            raise ConfigError(f"TrainerMixin: {name}={getattr(arguments, name)!r} {why}")
    optimizer = getattr(arguments.optim, "value", arguments.optim)
    if optimizer not in _BY_ELEMENT:
        raise ConfigError(
            f"TrainerMixin: optim={str(optimizer)!r} may want whole matrices, and ranks have parts. Write one of "
            f"{', '.join(_BY_ELEMENT)}, or give optimizers=(optimizer, scheduler) of your own"
        )


def check_accelerator(accelerator: Accelerator) -> None:
    """Raises `ConfigError` for what `accelerate launch` has been told that cannot be right on a parallel model."""
    state = accelerator.state
    asked = {
        "--use_fsdp": getattr(state, "fsdp_plugin", None) is not None,
        "--use_deepspeed": getattr(state, "deepspeed_plugin", None) is not None,
        "--mixed_precision fp16": accelerator.mixed_precision == "fp16",
        "--dynamo_backend": state.dynamo_plugin.backend not in (None, DynamoBackend.NO),
        "a parallelism config": getattr(accelerator, "parallelism_config", None) is not None,
    }
    for what in (what for what, is_asked in asked.items() if is_asked):
        raise ConfigError(f"TrainerMixin: accelerate launch was given {what}. Leave it out, or start by torchrun")


def check_values(model: nn.Module) -> None:
    """Raises `ConfigError` for a model whose weights have no values, and would get none."""
    lacking = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if lacking is not None:
        raise ConfigError(
            f"TrainerMixin: {lacking!r} lies on meta. Write rotorch.parallelize(model, 'rtp=8').load(directory), and "
            "give the trainer that without layout="
        )


def check_model(model: ParallelModel, *, arguments: Any) -> None:
    """Raises `ConfigError` for a layout or a model that a trainer's loop cannot be right with."""
    check_plain_loop(model.strategies, model.module, who="TrainerMixin")
    if model.num_batch_ranks == model.mesh.size():
        return
    if hasattr(arguments, "num_generations"):
        raise ConfigError(
            f"TrainerMixin: {type(arguments).__name__}'s trainer makes texts and compares them over all ranks, and "
            "ranks of this layout share them. Write rtp, fsdp or ddp"
        )
    if getattr(arguments, "train_sampling_strategy", None) == "batch_rebalance":
        raise ConfigError("TrainerMixin: train_sampling_strategy='batch_rebalance' knows no ranks that share a batch")
    if getattr(arguments, "eval_use_gather_object", False):
        raise ConfigError("TrainerMixin: eval_use_gather_object=True would count shares of a batch more than once")
    if arguments.accelerator_config.dispatch_batches:
        raise ConfigError(
            "TrainerMixin: dispatch_batches=True gives each rank a batch of its own, and ranks of this layout share "
            "them. Leave it out"
        )
