"""`RunConfig`: all settings of a training run, read from a TOML file and `key=value` overrides. No torch.

    [model]                          [data]                      [optimizer]
    config = "llama/config.json"     source = "stdlib"           lr = 1e-3
    [parallel]                       sequence_length = 256       warmup_steps = 20
    layout = "ddp=2,rtp=4"           [train]
                                     steps = 200

Unknown keys are errors that name the nearest known key. Relative paths in the file start at the file's directory, paths
in overrides at the working directory.
"""

from __future__ import annotations

import codecs
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
)

from rotorch.core.compiling import CompileField
from rotorch.core.errors import ConfigError, nearest
from rotorch.core.precision import PrecisionField
from rotorch.core.small_files import read_small
from rotorch.run_data import HELD_OUT, MOST_AT_ONCE, DataSection, DpoSection, EvalText, Section, Word, Words

_MOST_BYTES = 1 << 22

_PATHS = {
    ("model", "config"): (),
    ("model", "init"): ("random",),
    ("data", "source"): ("stdlib",),
    ("data", "tokenizer"): ("bytes", "model"),
    ("data", "cache_dir"): (),
    ("train", "out"): (),
    ("train", "checkpoint_dir"): (),
}
"""Keys that hold a path, and the words they take instead of one."""
_TABLES = (("train", "eval"), ("data", "sources"))
"""Lists of tables whose `source` is a path, or a word of `data.source`."""

Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
_MOST_STEPS = 10**12
_MOST_SEED = 2**63 - 1
_MOST_S = 1e8  # three years; torch's clocks overflow above


class ModelSection(Section):
    """[model]: the model to train.

    Attributes:
        config: path of a `config.json`, of a Hugging Face directory or of a GGUF file, or the contents of a config.json
            as a table; if `init` names a published model, its own by default.
        init: "random", or a published model to start from: a directory of safetensors, a GGUF file, or
            `hf://owner/name` of the Hugging Face hub.
    """

    config: Word | dict[str, Any]
    init: Word = "random"


class ParallelSection(Section):
    """[parallel]: the layout over ranks.

    Attributes:
        layout: in the `--parallel` grammar; "auto" (or `atp=auto`, for a grid): the choice of `rotorch plan`.
        cluster: the cluster that "auto" plans for, by name or as a TOML file; left out: CPU ranks of this machine.
    """

    layout: str = "single"
    cluster: str = ""


class TrainSection(Section):
    """[train]: length of the run, batch sizes, precision, output and restarts.

    Attributes:
        steps: optimizer steps of the whole run.
        micro_batch: samples in one forward pass of one rank.
        accumulation: forward passes of one rank per optimizer step; 1, or as many as `global_batch` needs.
        global_batch: samples of all ranks per optimizer step; must be micro batch x accumulation x batch ranks.
        seed: of initial weights, order of the data and the sample.
        precision: "float32"; "bfloat16": passes compute with copies of the weights in it, so that activations have it;
            or "autocast_bfloat16". Weights at rest, gradients and the optimizer's state stay float32.
        compile: run blocks by torch.compile ("reduce-overhead": with rtp's CUDA graphs); the first step takes long.
        device: "auto", "cpu" or "cuda".
        eval_every: steps between evaluations on held-out text; 0 evaluates at the end only.
        eval_windows: samples per evaluation, of the held-out text and of each text of `eval`.
        eval: further texts to measure the model on, with it and by name, see `[[train.eval]]`.
        patience: the run ends, with a checkpoint, after so many evaluations without a new lowest loss; 0 never.
        patience_on: the text that `patience` goes by: "held-out", or the name of one of `eval` or
            of `data.sources`.
        min_improvement: nats per token by which a loss must be lower to count.
        out: the run's directory; by default `runs/<name of the TOML file>` in the working directory.
        checkpoint_dir: a directory, or a URL of a store (`s3://bucket/my_run`), for `checkpoints/` in place of `out`.
        checkpoint_every: steps between checkpoints; 0 writes one at the end only.
        keep: number of checkpoints that are kept.
        async_save: train while a checkpoint is written, from a copy in host memory of all tensors at rest.
        timeout_s: if no rank makes progress for this long, or one has waited a little longer for another, the run ends
            and names the waiting ranks. Must exceed the time of a block, or of a compiled model's micro-batch.
        on_nonfinite: if the loss or a gradient is not finite no weight is updated, and the run will "stop", "skip" the
            batch, or "roll_back" to the last checkpoint and continue with the data behind the batch.
        spike_factor: a loss above this multiple of the median of the last 32 rolls back; 0 never.
        check_every: steps between bitwise checks of weights and optimizer state: copies are compared over ranks, and
            each tensor with itself before the next update; if set, also before each checkpoint; 0 never. A check
            takes about 2 % of a step of 1024 tokens per rank, a quarter of a percent of a step of 8192.
        max_restarts: number of restarts from the last checkpoint after a rank failed.
        elastic: "least:most" ranks for a restart; by default as many as the layout has.
        tensorboard: also write TensorBoard files.
        loggers: also log to "wandb" or "mlflow" (packages of their own, set up by their environment variables).
        callbacks: import paths of what is told of every step on the first rank: each is called with a
            `rotorch.train.loggers.RunInfo`, and what it returns has any of `on_step(record)`, `on_note(text)`,
            `on_rolled_back(step)` and `close()`.
    """

    steps: Annotated[PositiveInt, Field(le=_MOST_STEPS)]
    micro_batch: Annotated[PositiveInt, Field(le=MOST_AT_ONCE)] = 4
    accumulation: Annotated[PositiveInt, Field(le=MOST_AT_ONCE)] | None = None
    global_batch: Annotated[PositiveInt, Field(le=MOST_AT_ONCE)] | None = None
    seed: Annotated[NonNegativeInt, Field(le=_MOST_SEED)] = 0
    precision: PrecisionField = "float32"
    compile: CompileField = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    eval_every: NonNegativeInt = 0
    eval_windows: PositiveInt = 128
    eval: Annotated[tuple[EvalText, ...], Field(strict=False)] = ()
    patience: NonNegativeInt = 0
    patience_on: Word = HELD_OUT
    min_improvement: NonNegativeFloat = 0.0
    out: str = ""
    checkpoint_dir: Word | None = None
    checkpoint_every: NonNegativeInt = 0
    keep: PositiveInt = 2
    async_save: bool = False
    timeout_s: Annotated[PositiveFloat, Field(le=_MOST_S)] = 600.0
    on_nonfinite: Literal["stop", "skip", "roll_back"] = "stop"
    spike_factor: NonNegativeFloat = 0.0
    check_every: NonNegativeInt = 0
    max_restarts: NonNegativeInt = 0
    elastic: str | None = None
    tensorboard: bool = True
    loggers: Annotated[tuple[Literal["wandb", "mlflow"], ...], Field(strict=False)] = ()
    callbacks: Annotated[tuple[Word, ...], Field(strict=False)] = ()

    @field_validator("elastic")
    @classmethod
    def _is_two_numbers(cls, text: str | None) -> str | None:
        if text is not None:
            match = re.fullmatch(r"([0-9]+):([0-9]+)", text)
            if match is None or not 1 <= int(match[1]) <= int(match[2]):
                raise ValueError('write the least and the most ranks, e.g. "2:4"')
        return text

    @property
    def saves_in(self) -> str:
        """Place of checkpoints: a directory or a URL."""
        return self.checkpoint_dir or self.out

    @property
    def elastic_ranks(self) -> tuple[int, int]:
        """The least and the most ranks; call it only if `elastic` is given."""
        assert self.elastic is not None
        least, most = self.elastic.split(":")
        return int(least), int(most)


class OptimizerGroup(Section):
    """[[optimizer.groups]]: weights that are trained in another way, by their names; the first group that fits counts.

    Attributes:
        match: pattern of names, e.g. "*.embed_tokens.weight"; `*` stands for anything.
        lr: peak learning rate of these; that of all by default.
        weight_decay: on all of these; by default what they would have without the group.
        use_muon: with name = "muon", whether these are Muon's or AdamW's; by default Muon's are the matrices between
            embedding and head.
    """

    match: Word
    lr: Annotated[PositiveFloat, Field(le=1e3)] | None = None
    weight_decay: NonNegativeFloat | None = None
    use_muon: bool | None = None


class OptimizerSection(Section):
    """[optimizer]: the optimizer, its schedule and clipping.

    Attributes:
        name: "adamw", "sgd", "adafactor", "lion", "muon" (AdamW for embeddings, head and vectors), or the import path
            of a class: "torch.optim.NAdam", "my_package.MyOptimizer".
        arguments: further arguments of its class, as a table: `momentum = 0.9`. Muon gets
            `adjust_lr_fn = "match_rms_adamw"` unless it is written there, so that one `lr` fits all weights.
        groups: weights with settings of their own, see `[[optimizer.groups]]`.
        lr: peak learning rate.
        betas: decay rates of the two moments; of Lion's update and moment.
        eps: added to the denominator.
        weight_decay: on matrices, experts, convolutions and embeddings (also of positions); never on norms, biases,
            scales and other vectors, nor on a state space's rates (`A_log`, `D`). See `models/decay.py`.
        clip_norm: the global gradient norm is scaled down to this; 0 leaves it alone.
        warmup_steps: steps over which the learning rate rises from 0 to `lr`.
        schedule: "cosine" and "linear" fall to `min_lr_ratio * lr` at the last step, "wsd" (warm up, stay, decay) falls
            there over the last steps only (arXiv 2404.06395), "constant" stays.
        min_lr_ratio: see `schedule`.
        decay_fraction: of "wsd": share of the steps over which it falls.
    """

    name: Word = "adamw"
    arguments: dict[str, Any] = Field(default_factory=dict)
    groups: Annotated[tuple[OptimizerGroup, ...], Field(strict=False)] = ()
    lr: Annotated[PositiveFloat, Field(le=1e3)] = 1e-3
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    eps: Annotated[float, Field(ge=1e-30, le=1.0)] = 1e-8  # a smaller one is 0 in float32
    weight_decay: NonNegativeFloat = 0.1
    clip_norm: NonNegativeFloat = 1.0
    warmup_steps: NonNegativeInt = 0
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    min_lr_ratio: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    decay_fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 0.2

    @property
    def least_moments(self) -> int:
        """Numbers beside each element of a trained weight that the optimizer keeps at the least."""
        if self.name == "sgd":
            return 1 if self.arguments.get("momentum") else 0
        return {"adamw": 2, "lion": 1, "muon": 1}.get(self.name, 0)


class LoraSection(Section):
    """[lora]: small trained matrices beside frozen layers of `model.init` (arXiv 2106.09685); needs the package peft.

    Attributes:
        rank: inner width of the adapters.
        alpha: the output of adapters is scaled by `alpha / rank`; twice the rank by default.
        dropout: share of an adapter's inputs that are dropped in training.
        targets: last parts of the names of the layers that get adapters; by default all linear layers but the head.
    """

    rank: Annotated[PositiveInt, Field(le=1 << 20)]
    alpha: Annotated[PositiveFloat, Field(le=1e6)] | None = None
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    targets: Words | None = None


class SampleSection(Section):
    """[sample]: the text written at the end.

    Attributes:
        prompt: beginning of the text.
        length: tokens to add; 0 writes no sample.
        temperature: 0 takes the likeliest token.
    """

    prompt: str = "def "
    length: Annotated[NonNegativeInt, Field(le=1_000_000)] = 200
    temperature: Annotated[NonNegativeFloat, Field(le=1e3)] = 0.7

    @field_validator("temperature")
    @classmethod
    def _divides_logits(cls, temperature: float) -> float:
        if 0.0 < temperature < 1e-3:
            raise ValueError("write 0 for the likeliest token, or 0.001 or more")
        return temperature


class RunConfig(Section):
    """A whole run. `load_run_config` reads it."""

    model: ModelSection
    parallel: ParallelSection = ParallelSection()
    data: DataSection = DataSection()
    train: TrainSection
    optimizer: OptimizerSection = OptimizerSection()
    lora: LoraSection | None = None
    dpo: DpoSection = DpoSection()
    sample: SampleSection = SampleSection()


@dataclass(frozen=True)
class BatchSizes:
    """`global_batch = micro_batch x accumulation x batch_ranks`."""

    micro_batch: int
    accumulation: int
    batch_ranks: int

    @property
    def global_batch(self) -> int:
        return self.micro_batch * self.accumulation * self.batch_ranks


def batch_sizes(train: TrainSection, *, batch_ranks: int) -> BatchSizes:
    """Completes the batch sizes for a number of ranks that see different data.

    Raises:
        ConfigError: if the sizes given do not satisfy `global batch = micro batch x accumulation x batch ranks`.
    """
    micro, total = train.micro_batch, train.global_batch
    if total is None:
        return BatchSizes(micro, train.accumulation or 1, batch_ranks)
    accumulation = train.accumulation or total // (micro * batch_ranks)
    sizes = BatchSizes(micro, accumulation, batch_ranks)
    if sizes.global_batch != total:
        per_pass = micro * batch_ranks * (train.accumulation or 1)
        near = max(1, round(total / per_pass)) * per_pass
        given = "accumulation" if train.accumulation is None else f"accumulation {train.accumulation}"
        fits = next((m for m in range(micro, 0, -1) if total % (m * batch_ranks) == 0), None)
        keep = ""  # a run goes on with no other global batch
        if fits is not None:
            keep = f"train.micro_batch={fits} train.accumulation={total // (fits * batch_ranks)} to keep it, or "
        raise ConfigError(
            f"train.global_batch = {total} is not micro_batch {micro} x {given} x {batch_ranks} batch ranks. Write "
            f"{keep}train.global_batch={near if train.accumulation is None else sizes.global_batch}, or leave it out"
        )
    return sizes


def load_run_config(path: str | Path, *, overrides: Sequence[str] = (), content: bytes | None = None) -> RunConfig:
    """Reads a run from a TOML file and `key=value` overrides.

    Args:
        path: the TOML file.
        content: text of the file, if it was read already, from standard input: then `path` only names it in messages.
        overrides: `section.key=value`; the value is written as in TOML, and quotes around text may be left out.

    Raises:
        ConfigError: if the file or an override cannot be read, a key is unknown or a value is not allowed; one line.
    """
    path = Path(path)
    raw = _parsed(_read(path) if content is None else content, path=path)
    _make_paths_absolute(raw, base=path.absolute().parent)
    for override in overrides:
        _apply_override(raw, override=override)
    _complete_model(raw)
    _check_sources(raw, path=path)
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_explain(error, path=path)) from None
    _check_schedule(config, path=path)
    _check_evaluations(config, path=path)
    if config.train.out:
        return config
    out = str(Path("runs", path.stem).absolute())
    return config.model_copy(update={"train": config.train.model_copy(update={"out": out})})


def _check_schedule(config: RunConfig, *, path: Path) -> None:
    """The learning rate comes to its peak within the run, and weights do not decay past zero there."""
    steps, optimizer = config.train.steps, config.optimizer
    if optimizer.warmup_steps > steps:
        raise ConfigError(
            f"{path}: optimizer.warmup_steps = {optimizer.warmup_steps} is longer than the run, train.steps = {steps}. "
            f"Write optimizer.warmup_steps={steps // 10}, for example, or more steps"
        )
    rates = [("optimizer", optimizer.lr, optimizer.weight_decay)]
    for group in optimizer.groups:
        lr = optimizer.lr if group.lr is None else group.lr
        decay = optimizer.weight_decay if group.weight_decay is None else group.weight_decay
        rates.append((f"optimizer.groups {group.match!r}", lr, decay))
    for where, lr, decay in rates:
        if lr * decay >= 1.0:
            raise ConfigError(
                f"{path}: {where}.lr = {lr:g} times {where}.weight_decay = {decay:g} is 1 "
                "or more: each step would decay the weights to zero or past it. Write a smaller one of the two"
            )


def _check_sources(raw: dict[str, Any], *, path: Path) -> None:
    """A run has one source or several, not both."""
    data = raw.get("data")
    if isinstance(data, dict) and data.get("sources"):
        for key in ("source", "suffixes"):
            if key in data:
                raise ConfigError(f"{path}: data.{key} beside data.sources: leave out one of the two")


def _check_evaluations(config: RunConfig, *, path: Path) -> None:
    """Texts to measure have names of their own, and patience goes by one that is measured."""
    train = config.train
    sources = [text.name for text in config.data.sources]
    names = [*sources, *(text.name for text in train.eval)]
    if twice := next((name for name in names if names.count(name) > 1 or name in (HELD_OUT, "held_out")), None):
        where = "data.sources" if twice in sources else "train.eval"
        raise ConfigError(f"{path}: {where}: the name {twice!r} is taken already. Write another one")
    if train.patience_on not in (HELD_OUT, *(names if config.data.held_out_fraction else names[len(sources) :])):
        raise ConfigError(
            f"{path}: train.patience_on = {train.patience_on!r}: there is no text of that name"
            f"{nearest(train.patience_on, known=[HELD_OUT, *names])}. Write {HELD_OUT}, or a name of train.eval"
        )
    if not train.patience:
        return
    if not train.eval_every:
        raise ConfigError(
            f"{path}: train.patience = {train.patience} counts evaluations, and there is none before the end. Write "
            "train.eval_every=... too"
        )
    if train.patience_on == HELD_OUT and not config.data.held_out_fraction:
        raise ConfigError(
            f"{path}: train.patience goes by held-out text, and data.held_out_fraction = 0. Write another "
            "fraction, or train.patience_on=... with the name of a text of train.eval"
        )


def _complete_model(raw: dict[str, Any]) -> None:
    """A published model brings its own configuration, unless another one is given."""
    model = raw.get("model")
    if isinstance(model, dict) and isinstance(model.get("init"), str) and model["init"] != "random":
        model.setdefault("config", model["init"])


def _read(path: Path) -> bytes:
    try:
        return read_small(path, most_bytes=_MOST_BYTES, what="a run's TOML file")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_beside(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory. Write the path of a run's TOML file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{str(path)!r} is no path: {error}. Write another one") from None  # a null byte


def _parsed(content: bytes, *, path: Path) -> dict[str, Any]:
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{path}: more than {_MOST_BYTES} bytes, too large for a run's TOML file. Write another one")
    try:
        return tomllib.loads(_decode(content, path=path))
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # no TOML, a number too long, nested too deep
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _decode(content: bytes, *, path: Path) -> str:
    """The text of a TOML file, which is UTF-8; some editors write a byte-order mark before it."""
    for name, marks in {
        "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
        "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
    }.items():
        if content.startswith(marks):
            raise ConfigError(f"{path}: the file is {name}, and TOML is UTF-8. Save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}: line {line} is not UTF-8 (byte 0x{content[error.start]:02x}). Save the file as UTF-8"
        ) from None


def _beside(path: Path) -> str:
    try:
        return nearest(path.name, known=[p.name for p in path.absolute().parent.glob("*.toml")])
    except OSError:
        return ""


def _make_paths_absolute(raw: dict[str, Any], *, base: Path) -> None:
    for (section, key), words in _PATHS.items():
        table = raw.get(section)
        if isinstance(table, dict) and isinstance(table.get(key), str):
            table[key] = _absolute(table[key], words=words, base=base)
    for section, key in _TABLES:
        if isinstance(raw.get(section), dict):
            _make_sources_absolute(raw[section].get(key), base=base)


def _make_sources_absolute(tables: Any, *, base: Path) -> None:
    for table in tables if isinstance(tables, list) else ():
        if isinstance(table, dict) and isinstance(table.get("source"), str):
            table["source"] = _absolute(table["source"], words=_PATHS["data", "source"], base=base)


def _absolute(text: str, *, words: Sequence[str], base: Path) -> str:
    """`text` as an absolute path, unless it is one of `words`, a URL or empty."""
    if not text or text in words or "://" in text:
        return text
    try:
        return str((base / Path(text).expanduser()).resolve())
    except (ValueError, RuntimeError, OSError) as error:  # a null byte, no such user, links in a circle
        raise ConfigError(f"{text!r} is no path: {error}. Write another one") from None


def _apply_override(raw: dict[str, Any], *, override: str) -> None:
    name, equals, text = override.partition("=")
    keys = [part.strip() for part in name.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r}: write section.key=value, e.g. train.steps=100")
    if keys[0] in RunConfig.model_fields and len(keys) == 1:
        raise ConfigError(f"override {override!r}: {keys[0]!r} is a section. Write {keys[0]}.key=value")
    if len(keys) == 1:
        raise ConfigError(f"override {override!r}: {keys[0]!r} names no section{_suggest(keys)}")
    value = _parse_value(text.strip(), override=override)
    if tuple(keys) in _PATHS and isinstance(value, str):
        value = _absolute(value, words=_PATHS[keys[0], keys[1]], base=Path.cwd())
    elif tuple(keys) in _TABLES:
        _make_sources_absolute(value, base=Path.cwd())
    table = raw
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {key!r} is {table!r}, not a table")
    table[keys[-1]] = value


def _parse_value(text: str, *, override: str) -> Any:
    """Reads a TOML value; anything else is text, unless it begins like a list, a table or a quotation."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text[:1] in tuple("[{\"'"):
            raise ConfigError(f"override {override!r}: not a TOML value: {error}") from None
        return text
    value = parsed["value"]
    return text if len(parsed) > 1 or isinstance(value, date | time) else value


def _known_keys(model: type[BaseModel] = RunConfig, *, prefix: str = "") -> list[str]:
    """Lists all keys with their sections: `train.steps`."""
    keys = []
    for name, field in model.model_fields.items():
        sections = [t for t in (field.annotation, *get_args(field.annotation)) if _is_section(t)]
        keys += _known_keys(sections[0], prefix=f"{prefix}{name}.") if sections else [f"{prefix}{name}"]
    return keys


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _suggest(where: Sequence[str]) -> str:
    """Suggests a known key for an unknown one: the same word in another section, else the nearest one in its own."""
    known = sorted(_known_keys(), key=lambda key: key.count("."))  # a section's own keys before those of its tables
    homes = [key for key in known if key.rpartition(".")[2] == where[-1]]
    if homes:
        return f" (did you mean {homes[0]!r}?)"
    siblings = (
        [key for key in known if key.startswith(f"{where[0]}.")] if len(where) > 1 else list(RunConfig.model_fields)
    )
    return nearest(".".join(where), known=siblings) or nearest(".".join(where), known=known)


def _explain(error: ValidationError, *, path: Path) -> str:
    """Returns one line for a validation's first error; unknown keys first, since a misspelt key also goes missing."""
    found = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    first = found[0]
    where = [str(part) for part in first["loc"] if part not in ("str", "constrained-str", "dict[str,any]")]
    key = ".".join(where)
    if first["type"] == "extra_forbidden":
        return f"{path}: unknown key {key!r}{_suggest(where)}"
    if first["type"] == "missing" and key in _HINTS:
        return f"{path}: {key} is missing. {_HINTS[key]}"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    write = _WRITE.get(first["type"], "")
    return f"{path}: {key} = {_shown(first['input'])}: {message}{write}"


def _shown(value: Any) -> str:
    """A value as Python writes it, of which a message has room for the beginning."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN_CHARS else f"{text[:_MOST_SHOWN_CHARS]}..."


_MOST_SHOWN_CHARS = 100
_WRITE = {
    "int_type": ". Write a whole number, without quotes and without a point",
    "float_type": ". Write a number, without quotes",
    "bool_type": ". Write true or false, without quotes",
    "string_type": '. Write text, in quotes: "..."',
    "string_too_short": ". Write one, or leave the key out",
    "tuple_type": ". Write a list, in brackets",
    "finite_number": ". Write a number",
    "model_type": ". Write a table of keys: [section], and key = value below it",
}
"""Advice per type for a value of another type."""

_HINTS = {
    "model": 'Write [model] with config = "config.json"',
    "model.config": 'Write config = "config.json" (or a Hugging Face directory) under [model]',
    "lora.rank": "Write rank = 8, for example, under [lora]",
    "train": "Write [train] with steps = ...",
    "train.steps": "Write steps = ... under [train]",
}
