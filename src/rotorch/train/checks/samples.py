"""Checks of a run's text, and the choice of what shares a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rotorch.core.errors import ConfigError
from rotorch.core.strategy import Strategy
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.run_config import RunConfig
from rotorch.run_data import DataSection, DpoSection
from rotorch.strategies import context_ranks
from rotorch.train.data.batches import CheckedSource, MixedPart, check_source
from rotorch.train.data.mixture import places


def check_data(config: RunConfig, *, model_config: Any) -> CheckedSource:
    """The text and the tokenizer are there, long enough, and fit the model's vocabulary and the disk.

    Documents that are to be kept apart are, by this model.
    """
    if config.data.sources:
        return _check_mixture(config, model_config=model_config)
    text_config = model_config.get_text_config() if hasattr(model_config, "get_text_config") else model_config
    data = config.data
    pack, apart = _documents(data, model_config=model_config)
    return check_source(
        data.source,
        tokens=data.tokenizer,
        eos_token=data.eos_token,
        text_field=data.text_field,
        suffixes=data.suffixes,
        sequence_length=data.sequence_length,
        held_out_fraction=data.held_out_fraction,
        model_vocab=getattr(text_config, "vocab_size", None),
        cache_dir=data.cache_dir,
        instructions=(data.prompt_field, data.response_field) if data.kind == "instructions" else None,
        preferences=(data.prompt_field, data.chosen_field, data.rejected_field) if data.kind == "preferences" else None,
        pack=pack,
        apart=apart,
        stream=data.shuffle_buffer if data.stream else None,
    )


def _check_mixture(config: RunConfig, *, model_config: Any) -> CheckedSource:
    """Each source of a mixture is as `check_data` wants it; returns the first, which has all of them as its parts."""
    places([source.weight for source in config.data.sources])
    parts = []
    for source in config.data.sources:
        of_source = config.model_copy(update={"data": source.as_data(config.data)})
        try:
            parts.append(MixedPart(source.name, source.weight, check_data(of_source, model_config=model_config)))
        except ConfigError as error:
            raise ConfigError(f"data.sources {source.name!r}: {error}") from error.__cause__
    return replace(parts[0].checked, parts=tuple(parts))


def check_evals(config: RunConfig, *, model_config: Any) -> tuple[tuple[str, CheckedSource], ...]:
    """Each text of `train.eval` is as `check_data` wants it; returns them by name."""
    found = []
    for text in config.train.eval:
        of_text = config.model_copy(update={"data": text.as_data(config.data)})
        try:
            found.append((text.name, check_data(of_text, model_config=model_config)))
        except ConfigError as error:
            raise ConfigError(f"train.eval {text.name!r}: {error}") from error.__cause__
    return tuple(found)


def check_stream(data: DataSection) -> None:
    """Checks that a stream is asked for with what goes with it, and its buffer with nothing else."""
    if not data.stream:
        if data.shuffle_buffer != DataSection().shuffle_buffer:
            raise ConfigError(
                f"data.shuffle_buffer = {data.shuffle_buffer} is of streams; other texts are shuffled as a whole. "
                "Write data.stream = true too, or leave it out"
            )
        return
    if data.kind != "text":
        raise ConfigError(f"data.stream reads text, and data.kind = {data.kind!r}. Leave one of them out")
    if data.held_out_fraction:
        raise ConfigError(
            f"data.held_out_fraction = {data.held_out_fraction:g}: a stream is not read to its end, so nothing is held "
            "out of it. Write data.held_out_fraction=0, and texts to measure under [[train.eval]]"
        )


def check_preferences(config: RunConfig, *, strategies: Sequence[Strategy]) -> None:
    """Checks that preference pairs are asked for with what goes with them, and `[dpo]` with nothing else."""
    if config.data.kind != "preferences":
        if config.dpo != DpoSection():
            raise ConfigError("[dpo] is the loss of data.kind = 'preferences'. Write that, or leave [dpo] out")
        return
    if any(isinstance(strategy, StageStrategy) for strategy in strategies):
        raise ConfigError(
            "data.kind = 'preferences': a pipeline computes the model's own loss alone. Write another layout, e.g. "
            "fsdp=2 or rtp=2"
        )
    if context_ranks(strategies) > 1:
        raise ConfigError(
            "data.kind = 'preferences': a pair's log-probabilities are of whole rows, and ranks share each (context). "
            "Write a layout without context"
        )
    for key, asked in (("pack", config.data.pack is True), ("documents", config.data.documents == "apart")):
        if asked:
            raise ConfigError(f"data.{key} = {getattr(config.data, key)!r}: pairs share no rows. Leave it out")


def _documents(data: DataSection, *, model_config: Any) -> tuple[bool, bool]:
    """Returns two facts: records of instructions share samples, and documents of a sample are kept apart.

    Raises:
        ConfigError: they were to be kept apart, and are not.
    """
    from rotorch.models.trial.documents import why_documents_meet

    if data.kind == "preferences":
        return False, False
    pack = data.kind == "instructions" and data.pack is not False
    apart = data.documents == "apart" if data.kind == "text" else pack and data.documents != "joined"
    if not apart:
        return pack, apart
    if not (why := why_documents_meet(model_config)):
        return pack, apart
    why = f"{getattr(model_config, 'model_type', 'the model')!r}: {why}"
    if data.pack is None and data.documents is None:
        return False, False
    asked = "data.documents = 'apart'" if data.documents == "apart" else "data.pack = true"
    instead = "data.documents = 'joined'" if data.kind == "text" else "data.pack = false"
    raise ConfigError(f"{asked}: documents that share a sample would not be kept apart: {why}. Write {instead}")
