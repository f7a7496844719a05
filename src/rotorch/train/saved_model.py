"""The model of a checkpoint of `rotorch train`, under any layout, for uses after training: text, measurements.

saved = open_saved_model("runs/demo", layout="rtp=2")    # checks; starts nothing, writes nothing
use_saved_model(saved, use)                              # starts ranks; in each calls use(model)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from rotorch.core.errors import ConfigError, StoppedEarly
from rotorch.core.phase_line import tell_phase
from rotorch.core.traffic import MicroBatch
from rotorch.mesh import device_type, pick_device
from rotorch.models.hf import config_from_dict
from rotorch.parallel_model import ParallelModel
from rotorch.parallelize import load_step_code, parallelize
from rotorch.process.forking import why_no_ranks
from rotorch.process.new_interpreter import call_fresh
from rotorch.run_config import LoraSection, RunConfig
from rotorch.shard.materialize import on_meta
from rotorch.strategies import Strategy, num_ranks, parse_parallel
from rotorch.train.checkpoint.auxiliary_files import TOKENIZER_FILES
from rotorch.train.checkpoint.directories import find_checkpoint
from rotorch.train.checkpoint.manifest import Manifest, check_sizes, read_manifest
from rotorch.train.checkpoint.saving import load
from rotorch.train.checkpoint.store import AnyPath
from rotorch.train.checks.capacity import check_measured_rows, check_number_of_ranks
from rotorch.train.checks.preflight import check_model
from rotorch.train.data.batches import BYTES
from rotorch.train.data.tokens import Tokens, open_tokens
from rotorch.train.launch.elastic import is_rank, launch
from rotorch.train.launch.status import RankPhase, StatusBoard
from rotorch.train.module import make_module, precision_arguments
from rotorch.train.state import TrainState


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint's model, checked against a layout, with the settings of the run that wrote it.

    Attributes:
        checkpoint: its directory.
        manifest: contents of the checkpoint.
        run: configuration of the run; its tokenizer is the checkpoint's own copy where there is one.
        model_config: a Hugging Face configuration.
        strategies: of the layout, outermost first.
        device: "auto", "cpu" or "cuda".
    """

    checkpoint: AnyPath
    manifest: Manifest
    run: RunConfig
    model_config: Any
    strategies: tuple[Strategy, ...]
    device: str

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the layout."""
        return num_ranks(self.strategies)

    def open_tokens(self) -> Tokens:
        """Opens the tokenizer of the run."""
        return open_tokens(self.run.data.tokenizer, eos_token=self.run.data.eos_token)

    @property
    def on_gpu(self) -> bool:
        """True if ranks use GPUs."""
        return device_type(self.device) == "cuda"

    @property
    def lora(self) -> LoraSection | None:
        """Adapters of the run, if it trained any."""
        return self.run.lora

    def rows_of_pass(self, asked: int | None) -> int:
        """Rows in one pass of one rank: those asked for, else the run's.

        Raises:
            ConfigError: they have no room on this machine in any case.
        """
        if asked is not None and not self.on_gpu:
            length, config = self.run.data.sequence_length, self.model_config
            check_measured_rows(asked, length=length, model_config=config, strategies=self.strategies)
        return asked or self.run.train.micro_batch


Use = Callable[[ParallelModel], None]
"""Called on every rank with the loaded model, in evaluation mode."""


def open_saved_model(checkpoint: AnyPath | str, *, layout: str = "single", device: str = "auto") -> SavedModel:
    """Finds a checkpoint and checks that a layout can hold its model. Writes nothing, starts nothing.

    Args:
        checkpoint: a checkpoint's directory, or a run's (then its latest), or the URL of one.
        layout: in the `--parallel` grammar.
        device: "auto", "cpu" or "cuda".

    Raises:
        ConfigError: no whole checkpoint is there, it is not of `rotorch train`, or the layout cannot hold its model.
    """
    if is_rank():
        raise ConfigError("this command starts its own ranks (--parallel). Call it without torchrun")
    strategies = parse_parallel(layout)
    found = find_checkpoint(checkpoint)
    manifest = read_manifest(found)
    check_sizes(found, manifest)
    if manifest.model.config is None or not manifest.run:
        raise ConfigError(
            f"checkpoint: {found}: was not written by `rotorch train`, so its model and tokenizer are not known. "
            "Load it in the program that wrote it (rotorch.load)"
        )
    run = _with_own_tokenizer(_run_of(found, manifest), found, manifest)
    model_config = config_from_dict(manifest.model.config, source=str(found))
    tokens = MicroBatch(1, run.data.sequence_length)
    for strategy in strategies:
        strategy.on_device(device_type(device))
    strategies, _ = check_model(model_config, strategies=strategies, batch=tokens, num_micro_batches=1, lora=run.lora)
    saved = SavedModel(found, manifest, run, model_config, strategies, device)
    if not saved.on_gpu:
        check_number_of_ranks(strategies)
    return saved


def _run_of(checkpoint: AnyPath, manifest: Manifest) -> RunConfig:
    try:
        return RunConfig.model_validate(manifest.run)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(
            f"checkpoint: {checkpoint}: the configuration of its run has {key} = {first['input']!r}, which this "
            "version of rotorch does not know. Use the version that wrote it"
        ) from None


def _with_own_tokenizer(run: RunConfig, checkpoint: AnyPath, manifest: Manifest) -> RunConfig:
    """The run, with the tokenizer that the checkpoint holds: that of the run may have been moved since."""
    name = TOKENIZER_FILES[0]
    if run.data.tokenizer == BYTES or manifest.file_of(name) != name or not isinstance(checkpoint, Path):
        return run
    return run.model_copy(update={"data": run.data.model_copy(update={"tokenizer": str(checkpoint)})})


def use_saved_model(saved: SavedModel, use: Use, *, phase: RankPhase = RankPhase.EVALUATING) -> None:
    """Starts ranks on this machine, loads the model in them, and calls `use(model)` on every rank.

    Args:
        saved: the model.
        use: called on every rank.
        phase: what ranks do in it, for the report of one that fails.

    Raises:
        ConfigError: on bad input that only a rank can see, e.g. a damaged checkpoint.
        RankFailure: a rank failed; the message names it.
        StoppedEarly: after Ctrl-C or a signal.
    """
    torch.set_num_threads(1)
    if why := why_no_ranks(on_gpu=saved.on_gpu):
        call_fresh(use_saved_model, saved, use, why=why, phase=phase)
        return
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking in the usual way spoils CUDA for forked ranks
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive a fork
    load_step_code(strategy.kind for strategy in saved.strategies)
    number = launch(
        partial(_in_rank, saved=saved, use=use, phase=phase),
        num_ranks=saved.num_ranks,
        backend="cpu:gloo,cuda:nccl" if saved.on_gpu else "gloo",
        timeout_s=saved.run.train.timeout_s,
    )
    if number:
        raise StoppedEarly("asked to stop", exit_code=128 + number)


def _in_rank(board: StatusBoard, *, saved: SavedModel, use: Use, phase: RankPhase) -> bool:
    board.doing(RankPhase.BUILDING)
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        tell_phase(f"loading {saved.checkpoint}")
    with on_meta():
        module = make_module(saved.model_config, lora=saved.lora)
    precision = precision_arguments(saved.run.train.precision)
    model = parallelize(module, saved.strategies, device=pick_device(saved.device), **precision)
    board.name_units(model.write_status_to(board.position))
    board.doing(RankPhase.LOADING)
    load(saved.checkpoint, TrainState(model=model), random_states=False)
    model.module.eval()
    if is_first:
        tell_phase()
    board.doing(phase)
    use(model)
    model.close()
    return True
