"""`rotorch init`: a commented run file for a model and a text, which `rotorch train` runs as it is."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rotorch.cli import auto
from rotorch.cli.init_data import InitData, init_data, toml_string
from rotorch.core.errors import ConfigError
from rotorch.core.phase_line import tell_phase
from rotorch.core.quantities import format_bytes
from rotorch.models.gguf import find_gguf
from rotorch.models.hf import load_config
from rotorch.run_config import RunConfig, load_run_config
from rotorch.strategies import batch_ranks, parse_parallel
from rotorch.train.checks.preflight import check_run
from rotorch.train.data.corpus import STDLIB
from rotorch.train.data.tokens import BYTES, ByteTokens
from rotorch.train.hub import SCHEME, found, with_hub_files

_TOKENS_PER_STEP = 8192
_LONGEST, _SHORTEST = 1024, 16  # tokens of a sample, unless the model takes fewer
_LEAST_SAMPLES = 100  # that a text should have
_LEAST_STEPS, _MOST_STEPS = 20, 1000
_BYTES_PER_TOKEN = 4  # of text, by a vocabulary learnt from text; only the number of steps depends on it
_IS_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_LEAST_BYTES_PER_TOKEN = 3  # by which a record's length is estimated: one that is longer loses its end
_MOST_BYTES_PER_TOKEN = 8
_TEMPLATE_TOKENS = 32  # that a chat template adds to a record, about


@dataclass(frozen=True)
class _Sizes:
    """Lengths of a run, and their reasons."""

    sequence_length: int
    global_batch: int
    steps: int
    epochs: float


def init_command(model: str, *, data: str, file: Path, nproc: int | None, parallel: str | None) -> RunConfig:
    """Writes a run file. Starts nothing; the file is checked as `rotorch train` would before it gets its name.

    Args:
        model: a Hugging Face directory, a `config.json`, a GGUF file, or `hf://owner/name` of the hub; weights beside
            it are what the run starts from.
        data: a text, JSONL or Parquet file, a directory of them, `hf://datasets/owner/name`, or "stdlib".
        file: the file to write, or to replace.
        nproc: ranks of this machine; by default one per GPU, or per core.
        parallel: layout; by default the planner's choice.

    Returns:
        The file's contents.

    Raises:
        ConfigError: the model, its tokenizer or the text is missing or does not fit; nothing was written.
    """
    place = Path(found(model, key="init")).expanduser()
    if not place.exists() and _IS_HUB_NAME.fullmatch(model):
        raise ConfigError(
            f"init: no {model!r} here. Write the path of a Hugging Face directory, or {SCHEME}{model} for a model of "
            "the hub"
        )
    config = load_config(place).get_text_config()
    published = _has_weights(place)
    tokenizer = _tokenizer_of(place, vocab_size=config.vocab_size)
    base = file.absolute().parent
    text_files = found(data, key="init --data", is_data=True)
    tell_phase(f"looking at {data}")
    of_text = init_data(text_files, written=_written(data, base=base))
    ranks = nproc or torch.cuda.device_count() or os.cpu_count() or 1
    sizes = _sizes(of_text, config=config, in_bytes=tokenizer == BYTES, ranks=ranks)
    temporary = file.with_name(f".{file.name}.tmp-{os.getpid()}")
    where = _written(model, base=base)

    def text(layout: str, micro_batch: int, words: str) -> str:
        return _text(
            where,
            published=published,
            tokenizer=tokenizer,
            data=of_text,
            sizes=sizes,
            layout=layout,
            words=words,
            micro_batch=micro_batch,
            name=file.stem,
        )

    try:
        layout, micro_batch, words = parallel or "auto", 1, ""
        temporary.write_text(text(layout, micro_batch, words), "utf-8")
        if parallel is None and torch.cuda.is_available():
            layout, words = f"rtp={ranks}" if ranks > 1 else "single", "one rank per GPU of this machine"
        elif parallel is None:
            tell_phase("planning the layout")
            planned = auto.planned(with_hub_files(load_run_config(temporary)), nproc=ranks)
            chosen, micro_batch = planned.plan, planned.micro_batch
            layout = chosen.parallel
            words = f"planned: {chosen.step_s:.2g} s a step, {format_bytes(chosen.memory.total_bytes)} per rank"
        else:
            copies = batch_ranks(parse_parallel(layout))
            micro_batch = next((m for m in (4, 2) if sizes.global_batch % (m * copies) == 0), 1)
        temporary.write_text(text(layout, micro_batch, words), "utf-8")
        run = load_run_config(temporary)
        tell_phase("checking the run")
        check_run(run, only_plan=True)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    return load_run_config(file)


def _has_weights(model: Path) -> bool:
    if find_gguf(model) is not None or (model.is_dir() and any(model.glob("*.safetensors"))):
        return True
    if model.is_dir() and (others := sorted(model.glob("pytorch_model*.bin"))):
        raise ConfigError(
            f"init: the weights of {model} are in {others[0].name}, and rotorch reads safetensors. Save them again "
            f"with save_pretrained of transformers, or write {model / 'config.json'} for a new model of these sizes"
        )
    return False


def _tokenizer_of(model: Path, *, vocab_size: int) -> str:
    """The model's own tokenizer, or bytes where it has none and its vocabulary holds them."""
    directory = model if model.is_dir() else model.parent
    if find_gguf(model) is not None or (directory / "tokenizer.json").is_file():
        return "model"
    if vocab_size < ByteTokens().vocab_size:
        raise ConfigError(
            f"init: {directory} has no tokenizer.json, and the model's vocabulary of {vocab_size} is too small for "
            f"bytes ({ByteTokens().vocab_size}). Put the tokenizer.json of the model there"
        )
    return BYTES


def _written(path: str, *, base: Path) -> str:
    """A path as the run file has it: relative where it lies beside or below the file. Names of the hub stay."""
    if path == STDLIB or path.startswith(SCHEME):
        return path
    whole = Path(path).expanduser().absolute().resolve()
    return str(whole.relative_to(base.resolve())) if whole.is_relative_to(base.resolve()) else str(whole)


def _sizes(data: InitData, *, config: Any, in_bytes: bool, ranks: int) -> _Sizes:
    room = getattr(config, "max_position_embeddings", None) or _LONGEST
    needed = data.longest_bytes + 1 if in_bytes else data.longest_bytes // _LEAST_BYTES_PER_TOKEN + _TEMPLATE_TOKENS
    needed = needed if data.longest_bytes else 0  # for a whole record
    num_tokens = data.corpus.text_bytes // (1 if in_bytes else _BYTES_PER_TOKEN)
    length, rows = _LONGEST, 1
    while length > _SHORTEST and (
        length > room or (length // 2 >= needed and (data.num_pairs or num_tokens // length < _LEAST_SAMPLES))
    ):
        length //= 2
    least = data.least_prompt_bytes // (1 if in_bytes else _MOST_BYTES_PER_TOKEN)
    if least > length:
        raise ConfigError(
            f"init: the first prompts of {data.corpus.source} have {data.least_prompt_bytes} bytes and more, and "
            f"samples {length} tokens: no response would be left. Write shorter prompts, or another model"
        )
    if data.num_pairs:
        samples, rows = data.num_pairs, 2
    else:
        samples = max(1, num_tokens // (length + 1))
    batch = max(1, min(_TOKENS_PER_STEP // (rows * length), samples // _LEAST_STEPS) // ranks) * ranks
    steps = max(_LEAST_STEPS, min(_MOST_STEPS, samples // batch))
    return _Sizes(length, batch, steps, steps * batch / samples)


def _text(
    model: str,
    *,
    published: bool,
    tokenizer: str,
    data: InitData,
    sizes: _Sizes,
    layout: str,
    micro_batch: int,
    words: str,
    name: str,
) -> str:
    every = max(1, sizes.steps // 10)
    source = f"init = {toml_string(model)}" if published else f"config = {toml_string(model)}"
    meaning, rate, reason = "a new model: its first values follow from train.seed", 1e-3, "less for a large model"
    if published:
        meaning, rate, reason = "its weights are where the run starts", 2e-5, "small: the model has learnt already"
    samples, rows = "samples", 1
    if data.kind == "preferences":
        rate, samples, rows = rate / 20, "pairs", 2
    held_out = 0.02 if sizes.steps > _LEAST_STEPS * 5 else 0.05
    tokens = sizes.global_batch * sizes.sequence_length * rows
    lines = [
        f"# A run of rotorch: rotorch train {name}.toml [section.key=value ...]",
        "# Keys that are not here have defaults; paths start at this file's directory.",
        "",
        "[model]",
        f"{source}    # {meaning}",
        "",
        "[parallel]",
        f'layout = "{layout}"    # {words}' if words else f'layout = "{layout}"',
        "",
        "[data]",
        *data.lines,
        f'tokenizer = "{tokenizer}"    # ' + ("one token per byte" if tokenizer == BYTES else "the model's own"),
        f"sequence_length = {sizes.sequence_length}    # tokens of a sample"
        + (", a prompt with one response" if rows == 2 else ""),
        f"held_out_fraction = {held_out}    # of the text, never trained on: it measures the model",
        "",
        "[train]",
        f"steps = {sizes.steps}    # {sizes.epochs:.2g} times the text, about",
        f"global_batch = {sizes.global_batch}    # {samples} of all ranks in a step: {tokens} tokens",
        f"micro_batch = {micro_batch}    # {samples} of a rank in one pass; fewer take less memory",
        'precision = "float32"    # "bfloat16" on a GPU',
        f"eval_every = {every}",
        f"checkpoint_every = {2 * every}    # rotorch train {name}.toml --resume goes on from the last",
        f'out = "runs/{name}"',
        "",
        "[optimizer]",
        'name = "adamw"    # or sgd, adafactor, lion, muon, "torch.optim.NAdam"',
        f"lr = {rate:g}    # {reason}",
        f"warmup_steps = {max(1, sizes.steps // 20)}",
        *(["", "[dpo]", "beta = 0.1    # strength of the tie to the model as it is now"] if rows == 2 else []),
        "",
        "[sample]",
        f"prompt = {toml_string(data.prompt[:200])}    # continued at the end of the run",
        "length = 100",
    ]
    return "\n".join(lines) + "\n"


def last_lines(file: Path, run: RunConfig) -> list[str]:
    """Lines for a person after the file was written."""
    rows = 2 if run.data.kind == "preferences" else 1
    tokens = (run.train.global_batch or 1) * run.data.sequence_length * rows
    here, out = Path.cwd(), Path(run.train.out)
    out = out.relative_to(here) if out.is_relative_to(here) else out
    return [
        f"wrote     {file}: {run.parallel.layout}, {run.train.steps} steps of {tokens} tokens",
        f"train     rotorch train {file}",
        f"look      rotorch report {out}; rotorch generate {out}" + ("" if rows == 2 else f"; rotorch eval {out}"),
    ]
