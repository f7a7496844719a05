"""Checks of a run's inputs, made before any rank starts and before anything is written.

`check_run` is the list; each check is a small function that raises `ConfigError` with one line that names a correction.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rotorch.core.compiling import RECORDED
from rotorch.core.errors import ConfigError
from rotorch.core.precision import Precision, copies_itemsize, dtype_of_passes, itemsize_of_passes
from rotorch.core.small_files import read_small
from rotorch.core.spec import ModelSpec
from rotorch.core.stage_balance import LayerCost
from rotorch.core.strategy import Strategy
from rotorch.core.traffic import MicroBatch
from rotorch.models.held_warnings import held_warnings
from rotorch.run_config import BatchSizes, LoraSection, RunConfig, batch_sizes
from rotorch.strategies import (
    batch_ranks,
    check_compiled,
    context_ranks,
    cuts_context,
    cuts_features,
    cuts_tokens,
    for_batch,
    num_ranks,
    parse_parallel,
)
from rotorch.train.checkpoint.directories import candidates, checkpoints_of
from rotorch.train.checkpoint.store import AnyPath, StorePath, as_path, check_no_password, check_writable, is_url
from rotorch.train.checks.capacity import (
    check_batch_fits,
    check_number_of_ranks,
    check_room,
    check_text_lasts,
    check_weights_fit,
    rows_per_sample,
)
from rotorch.train.checks.resuming import Resume, check_goes_on, find_resume
from rotorch.train.checks.samples import check_data, check_evals, check_preferences, check_stream
from rotorch.train.data.batches import BYTES, CheckedSource, default_cache_dir
from rotorch.train.events import EVENTS
from rotorch.train.hub import with_hub_files
from rotorch.train.launch.failure_report import REPORT
from rotorch.train.launch.run_lock import LOCK
from rotorch.train.loggers import check_listeners
from rotorch.train.metrics import METRICS, read_metrics

RUN_FILE = "run.json"
"""Marks a directory as a run's, and says which."""

_MOST_BYTES = 1 << 24


@dataclass(frozen=True)
class CheckedRun:
    """A run in which nothing wrong was found.

    Attributes:
        config: configuration as the user wrote it.
        strategies: `config.parallel`, read, and what follows for this batch.
        sizes: of the batch, complete.
        model_config: the Hugging Face configuration.
        spec: the model's units.
        source: the corpus and its tokens.
        out: the run's directory.
        saves_in: directory or store of its checkpoints.
        resume: checkpoint to resume from, or None at the beginning.
        command: the command that goes on with this run.
        evals: the texts of `train.eval`, by name.
    """

    config: RunConfig
    strategies: tuple[Strategy, ...]
    sizes: BatchSizes
    model_config: Any
    spec: ModelSpec
    source: CheckedSource
    out: Path
    saves_in: AnyPath
    resume: Resume | None
    command: str
    evals: tuple[tuple[str, CheckedSource], ...] = ()

    @property
    def num_ranks(self) -> int:
        return num_ranks(self.strategies)

    @property
    def strategies_in_passes(self) -> tuple[Strategy, ...]:
        """The strategies, with what follows from the precision of passes and from the device."""
        return in_passes(self.config, self.strategies)


def check_run(
    config: RunConfig,
    *,
    nproc: int | None = None,
    resume: bool = False,
    may_be_over: bool = False,
    command: str = "",
    only_plan: bool = False,
) -> CheckedRun:
    """Checks a run from the cheapest check to the dearest. Leaves nothing behind: see `check_checkpoint_dir`.

    Args:
        config: the run.
        nproc: number of ranks that the user asked for; by default as many as the layout has.
        resume: go on from the last checkpoint in the run's directory.
        may_be_over: that may be the run's last one: what comes after the last step failed, and is done again.
        command: the command that goes on with this run, for messages.
        only_plan: nothing will be started, so nothing is written to a store to see whether one can.

    Raises:
        ConfigError: for the first thing that is wrong.
    """
    strategies = parse_parallel(config.parallel.layout)
    check_ranks(strategies, nproc=nproc)
    check_restarts(config, strategies=strategies)
    check_listeners(config.train)
    sizes = batch_sizes(config.train, batch_ranks=batch_ranks(strategies))
    for strategy in strategies:
        strategy.check_micro_batches(sizes.accumulation)
    saves_in = check_checkpoint_dir(config, probes=not only_plan)
    out = Path(config.train.out)
    check_out(out, saves_in=saves_in, resume=resume, command=command)
    if resume:
        read_metrics(out)  # a resumed run goes on in it, and rank 0 alone would find what is wrong there
    check_roll_back(config)
    check_device(config, strategies=strategies)
    config = with_published_files(with_hub_files(config))
    with held_warnings():
        model_config = read_model_config(config)
        check_sequence(config, model_config=model_config)
        check_context(config, strategies=strategies)
        check_preferences(config, strategies=strategies)
        check_stream(config.data)
        on_this_machine = not only_plan and "RANK" not in os.environ and not _on_gpu(config)
        if on_this_machine:
            check_number_of_ranks(strategies)
            check_batch_fits(config, strategies=strategies, sizes=sizes, model_config=model_config)
        check_init(config)
        source = check_data(config, model_config=model_config)
        evals = check_evals(config, model_config=model_config)
        check_text_lasts(sizes, config=config, source=source)
        strategies, spec = check_model(
            model_config,
            strategies=strategies,
            init=config.model.init,
            lora=config.lora,
            precision=config.train.precision,
            batch=micro_batch_of(config),
            num_micro_batches=sizes.accumulation,
        )
        _check_optimizer(config, spec)
        if on_this_machine:
            check_weights_fit(spec, optimizer=config.optimizer)
        going_on = None
        if resume:
            going_on = find_resume(
                saves_in, config=config, sizes=sizes, model_config=model_config, spec=spec, source=source
            )
        if going_on is not None and not may_be_over:
            check_goes_on(going_on, train=config.train)
        check_room(saves_in, spec=spec, keep=config.train.keep, optimizer=config.optimizer)
        return CheckedRun(
            config, strategies, sizes, model_config, spec, source, out, saves_in, going_on, command, evals
        )


def _on_gpu(config: RunConfig) -> bool:
    from rotorch.mesh import device_type

    return device_type(config.train.device) == "cuda"


def with_published_files(config: RunConfig) -> RunConfig:
    """Names the model's own tokenizer where that is asked for, and what GGUF files say by the directories it goes to.

    A GGUF file's configuration and tokenizer are written to the cache, once; its weights are read where they are.
    """
    model, data = config.model, config.data
    tokenizer = data.tokenizer
    if tokenizer == "model":
        tokenizer = model.init if model.init != "random" else model.config if isinstance(model.config, str) else ""
        if not tokenizer:
            raise ConfigError(
                "data.tokenizer = 'model', but model.init and model.config name no directory. "
                "Write the path of a tokenizer.json, or 'bytes'"
            )
    directory = Path(data.cache_dir) if data.cache_dir is not None else default_cache_dir()
    described = model.config if isinstance(model.config, dict) else described_by(model.config, cache=directory)
    return config.model_copy(
        update={
            "model": model.model_copy(update={"config": described}),
            "data": data.model_copy(
                update={"tokenizer": tokenizer if tokenizer == BYTES else described_by(tokenizer, cache=directory)}
            ),
        }
    )


def described_by(path: str, *, cache: Path) -> str:
    """`path`, or for a GGUF file the directory of its configuration and tokenizer."""
    from rotorch.models.gguf import find_gguf, read_gguf_metadata

    gguf = find_gguf(Path(path))
    return path if gguf is None else str(read_gguf_metadata(gguf, cache / "gguf"))


def check_ranks(strategies: Sequence[Strategy], *, nproc: int | None) -> None:
    """The sizes multiply to the number of ranks that are asked for, or that torchrun started."""
    from rotorch.mesh import check_world_size

    if nproc is not None and nproc < 1:
        raise ConfigError(f"--nproc {nproc}: write a positive number of ranks, e.g. --nproc {num_ranks(strategies)}")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        check_world_size(strategies, world_size=int(os.environ["WORLD_SIZE"]))
    elif nproc is not None:
        check_world_size(strategies, world_size=nproc)


def check_checkpoint_dir(config: RunConfig, *, probes: bool) -> AnyPath:
    """Checks that checkpoints go to a directory that can be made, or to a known store that takes a small file.

    Args:
        config: the run.
        probes: write that file, and remove it.
    """
    out, where = config.train.out, config.train.saves_in
    try:
        check_no_password(out)
    except ConfigError as error:
        raise ConfigError(f"train.out: {error}") from None
    if is_url(out):
        raise ConfigError(
            f"train.out = {out!r}: metrics and messages go to a directory. Write train.checkpoint_dir={out} for the "
            "checkpoints, and a directory for train.out"
        )
    try:
        path = as_path(where)
        if isinstance(path, StorePath):
            if path.url.startswith("memory://"):
                raise ConfigError(f"{where}: is in the memory of one process. Write a directory, or a URL of a store")
            if probes:
                check_writable(path)
        elif config.train.checkpoint_dir is not None:
            _check_can_be_made(path, key="train.checkpoint_dir")
            _check_own_files(path, (LOCK,), key="train.checkpoint_dir")
    except ConfigError as error:
        raise ConfigError(f"train.checkpoint_dir: {error}" if is_url(where) else str(error)) from error.__cause__
    return path


def _check_can_be_made(directory: Path, *, key: str) -> None:
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{key}: {directory} is a file. Write a directory")
    existing = next(parent for parent in (directory, *directory.parents) if parent.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}: {existing} cannot be written. Write {key}=... with a directory that can be")


def _check_own_files(directory: Path, names: Sequence[str], *, key: str) -> None:
    """Raises `ConfigError` for what has the name of a run's file and is none: to open a pipe waits for ever."""
    for path in (directory / name for name in names):
        if path.exists() and not path.is_file():
            raise ConfigError(
                f"{key}: {path} is no file, and a run writes one of that name. Remove it, or write another {key}=..."
            )


def check_out(out: Path, *, saves_in: AnyPath, resume: bool, command: str) -> None:
    """The run's directory can be made and is no other run's; a resumed run is there."""
    _check_can_be_made(out, key="train.out")
    _check_own_files(out, (LOCK, RUN_FILE, METRICS, EVENTS), key="train.out")
    has_checkpoints = saves_in != out and bool(candidates(checkpoints_of(saves_in)))
    if resume and not holds_run(out) and not has_checkpoints:
        raise ConfigError(f"--resume: {out} holds no run to go on with. Leave --resume out, or write its train.out=...")
    if has_checkpoints and not resume:
        raise ConfigError(
            f"train.checkpoint_dir: {saves_in} already holds checkpoints. Write --resume to go on from them, or "
            "another train.checkpoint_dir=..."
        )
    if resume or not out.is_dir():
        return
    if holds_run(out):
        raise ConfigError(
            f"train.out: {out} already holds a run. Write --resume to go on with it, another train.out=..., "
            f"or remove it (rm -r {out})"
        )
    # What a failure before the first step left says that there was no run.
    left = (REPORT, LOCK)
    if any(path.name not in left and not path.name.startswith("traceback-rank") for path in out.iterdir()):
        raise ConfigError(f"train.out: {out} is not empty, and is no run of rotorch. Write another train.out=...")


def check_roll_back(config: RunConfig) -> None:
    """Checks that a run that goes back to checkpoints writes some, and does not go back for any loss."""
    train = config.train
    if 0 < train.spike_factor <= 1:
        raise ConfigError(
            f"train.spike_factor = {train.spike_factor:g}: most losses are above that many times their median. "
            "Write more than 1, e.g. 3, or 0 for never"
        )
    wanted = "train.on_nonfinite = 'roll_back'" if train.on_nonfinite == "roll_back" else ""
    wanted = wanted or (f"train.spike_factor = {train.spike_factor:g}" if train.spike_factor else "")
    if wanted and not train.checkpoint_every:
        raise ConfigError(
            f"{wanted} goes back to checkpoints, and there are none: write train.checkpoint_every=... too"
        )


def holds_run(out: Path) -> bool:
    """True if a directory belongs to a run."""
    return any((out / name).exists() for name in (RUN_FILE, METRICS)) or checkpoints_of(out).is_dir()


def begun_by(out: Path) -> str | None:
    """The launcher's name for the job that began the run in a directory, if it says."""
    try:
        found = json.loads(read_small(out / RUN_FILE, most_bytes=_MOST_BYTES, what="what a run says of itself"))
    except (OSError, ValueError, RecursionError):
        return None
    return found.get("job") if isinstance(found, dict) else None


def check_restarts(config: RunConfig, *, strategies: Sequence[Strategy]) -> None:
    """There will be something to go on from, and the layout is one of those that the run may go on with."""
    if config.train.max_restarts and not config.train.checkpoint_every:
        raise ConfigError(
            f"train.max_restarts = {config.train.max_restarts}: a run goes on from checkpoints, and there are none "
            "before its end: write train.checkpoint_every=... too"
        )
    if config.train.elastic is None:
        return
    least, most = config.train.elastic_ranks
    if not least <= num_ranks(strategies) <= most:
        raise ConfigError(
            f"train.elastic = {config.train.elastic!r}, but {config.parallel.layout!r} takes {num_ranks(strategies)} "
            "ranks. Write the least and the most ranks so that it is among them"
        )


def check_device(config: RunConfig, *, strategies: Sequence[Strategy]) -> None:
    """The device is there, and the strategies work on it.

    Does not touch it: forked ranks could not use CUDA any more.
    """
    import torch

    if config.train.compile:
        check_compiled(strategies, recorded=config.train.compile == RECORDED)
    in_passes(config, strategies)
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device = 'cuda', but torch sees no CUDA device. Write train.device=cpu or auto")


def in_passes(config: RunConfig, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
    """Returns strategies with what follows from the precision of a run's passes and from its device."""
    from rotorch.mesh import device_type

    dtype, device = dtype_of_passes(config.train.precision), device_type(config.train.device)
    return tuple(strategy.at_precision(dtype).on_device(device) for strategy in strategies)


def read_model_config(config: RunConfig) -> Any:
    """Reads the model's Hugging Face configuration; weights published in any dtype are trained in float32."""
    import torch

    from rotorch.models.hf import config_from_dict, load_config

    model = config.model.config
    found = (
        load_config(model) if isinstance(model, str) else config_from_dict(model, source="model.config", is_own=True)
    )
    _check_not_quantised(found)
    found.dtype = torch.float32
    return found


def _check_not_quantised(model_config: Any) -> None:
    """Weights are trained as real numbers: a published model would lose its own way to compute, without a word."""
    for each in (model_config, model_config.get_text_config()):
        if (how := getattr(each, "quantization_config", None)) is not None:
            how = how if isinstance(how, dict) else how.to_dict()
            raise ConfigError(
                f"model.config: quantization_config (quant_method = {how.get('quant_method')!r}): quantised weights "
                "are not trained. Save the model dequantised (model.dequantize() of transformers), or to train its "
                "architecture in train.precision leave quantization_config out of its config.json"
            )


def check_sequence(config: RunConfig, *, model_config: Any) -> None:
    """Samples are no longer than the model's positions."""
    from rotorch.models.hf import longest_sequence

    longest, asked = longest_sequence(model_config), config.data.sequence_length
    if longest is not None and asked > longest:
        raise ConfigError(
            f"data.sequence_length = {asked} is longer than the model's max_position_embeddings {longest}. "
            f"Write data.sequence_length={longest} or less"
        )


def check_context(config: RunConfig, *, strategies: Sequence[Strategy]) -> None:
    """Samples are long enough for the ranks that share them, and nothing is asked for that does not go with it."""
    if (sharing := context_ranks(strategies)) == 1:
        return
    if config.data.sequence_length < sharing:
        raise ConfigError(
            f"data.sequence_length = {config.data.sequence_length}, and {sharing} ranks share each sample (context). "
            f"Write data.sequence_length={sharing} or more, or a smaller context"
        )
    if config.train.compile:
        raise ConfigError(
            "train.compile would trace through the exchange of keys and values (context). Leave one of them out"
        )


def check_init(config: RunConfig) -> None:
    """The weights to start from are there; `check_model` sees whether they fit."""
    from rotorch.models.gguf import find_gguf

    init = Path(config.model.init)
    if config.lora is not None and config.model.init == "random":
        raise ConfigError(
            "lora: adapters are trained beside the weights of a published model, and model.init = 'random'. "
            "Write model.init=... with its directory, or leave [lora] out"
        )
    if config.model.init == "random" or find_gguf(init) is not None:
        return
    if not init.is_dir():
        raise ConfigError(f"model.init: no directory {init}. Write a Hugging Face directory, a GGUF file, or 'random'")
    if not any(init.glob("*.safetensors")):
        raise ConfigError(f"model.init: {init} holds no *.safetensors. Write a Hugging Face directory, or 'random'")


def micro_batch_of(config: RunConfig) -> MicroBatch:
    """Returns the batch that one rank computes on at once."""
    itemsize = itemsize_of_passes(config.train.precision)
    rows = config.train.micro_batch * rows_per_sample(config.data)
    return MicroBatch(rows, config.data.sequence_length, itemsize=itemsize)


def check_model(
    model_config: Any,
    *,
    strategies: Sequence[Strategy],
    batch: MicroBatch,
    num_micro_batches: int,
    init: str = "random",
    lora: LoraSection | None = None,
    precision: Precision = "float32",
) -> tuple[tuple[Strategy, ...], ModelSpec]:
    """Every strategy can hold the model, and the weights to start from fit it. Builds it without memory for weights.

    Returns:
        The strategies, as they are for this batch, and the model's units.
    """
    from rotorch.models.describe import describe
    from rotorch.models.lora import ADAPTERS
    from rotorch.models.pretrained import open_pretrained
    from rotorch.models.trial.causality import why_not_trained
    from rotorch.shard.load import check_fit
    from rotorch.shard.materialize import on_meta
    from rotorch.shard.sites import persistent_buffers
    from rotorch.train.module import make_module

    with on_meta():
        module = make_module(model_config, lora=lora)
    if why := why_not_trained(model_config):
        raise ConfigError(f"model: {why}")
    spec = describe(
        module,
        features=cuts_features(strategies),
        tokens=cuts_tokens(strategies),
        context=cuts_context(strategies),
    ).with_copies(copies_itemsize(precision))

    def counted() -> Sequence[LayerCost] | None:  # a second or two: for options that ask for it
        from rotorch.traced.counted_memory import CountedPasses

        make = partial(make_module, lora=lora)
        passes = CountedPasses(model_config, spec, batch.num_tokens, precision, make)
        return passes.layer_costs(strategies, batch=batch)

    strategies = for_batch(strategies, spec, batch=batch, num_micro_batches=num_micro_batches, costs=counted)
    for strategy in strategies:
        strategy.check(spec)
    if init != "random":
        buffers = persistent_buffers(module)
        names = {name for weight in spec.weights for name in (weight.name, *weight.aliases)} | set(buffers)
        with open_pretrained(init, module=module, names=names) as found:
            check_fit(
                found.tensors,
                weights=spec.weights,
                dtypes={name: parameter.dtype for name, parameter in module.named_parameters()},
                source=init,
                buffers=buffers,
                may_lack=ADAPTERS,
                may_have=found.ignored,
            )
    return strategies, spec


def _check_optimizer(config: RunConfig, spec: ModelSpec) -> None:
    from rotorch.train.choose_optimizer import check_optimizer

    check_optimizer(config.optimizer, spec)
