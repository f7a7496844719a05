"""Checks of a run that goes on: of the checkpoint that it goes on from, against what is asked for.

A checkpoint of another model, other adapters or another order of data is refused by the setting that differs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rotorch.core.errors import ConfigError
from rotorch.core.spec import ModelSpec
from rotorch.run_config import BatchSizes, RunConfig, TrainSection
from rotorch.train.checkpoint.directories import latest
from rotorch.train.checkpoint.manifest import MODEL, Manifest, check_sizes, read_manifest
from rotorch.train.checkpoint.store import AnyPath
from rotorch.train.data.batches import CheckedSource
from rotorch.train.early_stop import check_not_ended


@dataclass(frozen=True)
class Resume:
    """Start of a resumed run: a checkpoint, and its manifest."""

    checkpoint: AnyPath
    manifest: Manifest


def find_resume(
    saves_in: AnyPath,
    *,
    config: RunConfig,
    sizes: BatchSizes,
    model_config: Any,
    spec: ModelSpec,
    source: CheckedSource,
) -> Resume | None:
    """The newest whole checkpoint, of this model and this order of data; None if none was written yet."""
    path = latest(saves_in, or_refuse=True)
    if path is None:
        return None
    manifest = read_manifest(path)
    check_sizes(path, manifest)
    check_same_model(path, manifest, model_config=model_config)
    check_same_adapters(path, manifest, config=config, spec=spec)
    check_same_order(path, manifest, config=config, sizes=sizes, source=source)
    return Resume(path, manifest)


def check_goes_on(resume: Resume, *, train: TrainSection) -> None:
    """A run that somebody asks to go on has steps to do."""
    path, manifest = resume.checkpoint, resume.manifest
    check_not_ended(manifest.data, train=train, checkpoint=path)
    if manifest.step >= train.steps:  # its bytes, which may be terabytes, are read by who loads them
        raise ConfigError(
            f"--resume: {path} is at step {manifest.step} and train.steps = {train.steps}: nothing is left to "
            "do, by the sizes of its files. Write train.steps=... with more steps; or have every byte of it checked by "
            f"rotorch inspect {path} --contents, and if it is damaged, remove it: --resume then goes on from the one "
            "before"
        )


def check_same_model(path: AnyPath, manifest: Manifest, *, model_config: Any) -> None:
    """A checkpoint is of the model that is asked for."""
    from rotorch.train.state import config_difference

    ours = json.loads(model_config.to_json_string(use_diff=False))
    if difference := config_difference(ours, manifest.model.config):
        raise ConfigError(f"--resume: {path} is of another model: {difference}. Write the model that it was begun with")


def check_same_adapters(path: AnyPath, manifest: Manifest, *, config: RunConfig, spec: ModelSpec) -> None:
    """A run goes on with its adapters: beside the same layers, as wide, scaled alike, however that is written.

    How many of their inputs are dropped may change.
    """
    from rotorch.models.lora import alpha_of, is_adapter

    there = {name for name in manifest.names(MODEL) if is_adapter(name)}
    here = {weight.name for weight in spec.weights if is_adapter(weight.name)}
    theirs, lora = manifest.model.adapters, config.lora
    if theirs is None or lora is None:
        if bool(there) != bool(here):
            had, write = ("", "Write its [lora]") if there else ("out", "Leave [lora] out")
            raise ConfigError(f"--resume: {path} was written by a run with{had} adapters. {write}")
        return
    written = manifest.run.get("lora")
    targets = written.get("targets") if isinstance(written, dict) else None
    alpha = alpha_of(lora.alpha, rank=lora.rank)
    for key, was, now, same in (
        ("rank", theirs["r"], lora.rank, theirs["r"] == lora.rank),
        ("alpha", theirs["lora_alpha"], alpha, theirs["lora_alpha"] == alpha),
        ("targets", targets or "all", list(lora.targets or ()) or "all", there == here),
    ):
        if not same:
            raise ConfigError(
                f"--resume: {path} was written by a run with lora.{key} = {was}, and here it is {now}. "
                f"Write lora.{key} as it was"
            )


def check_same_order(
    path: AnyPath, manifest: Manifest, *, config: RunConfig, sizes: BatchSizes, source: CheckedSource
) -> None:
    """A resumed run reads on where it stopped: same seed, same samples, as many of them in a step."""
    ours = {**data_position(config, sizes=sizes, source=source), "train.seed": config.train.seed}
    before = {
        "data.documents": "joined",
        "data.stream": False,
        "data.pack": (manifest.run.get("data") or {}).get("pack") is True,
    }
    theirs = {**before, **manifest.data, "train.seed": manifest.seed}  # `before`: of checkpoints that do not say
    for key, value in ours.items():
        if theirs.get(key, value) != value:
            again = f"{key}={_as_toml(theirs[key])}" if key != "data.sources" else "[[data.sources]] as they were then"
            raise ConfigError(
                f"--resume: {path} was written by a run with {key} = {_as_toml(theirs[key])}, and here it is "
                f"{_as_toml(value)}. Write {again}"
            )


def _as_toml(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def data_position(config: RunConfig, *, sizes: BatchSizes, source: CheckedSource) -> dict[str, Any]:
    """Returns the settings that, with corpus, seed and step, decide which tokens a step reads; as plain JSON."""
    packed = {} if source.instructions is None else {"data.pack": source.instructions.pack}
    mixed = {"data.sources": [[part.name, part.weight] for part in source.parts]} if source.parts else {}
    return {
        **packed,
        **mixed,
        **({"data.shuffle_buffer": config.data.shuffle_buffer} if config.data.stream else {}),
        "data.stream": config.data.stream,
        "data.documents": "joined" if source.documents == "joined" else "apart",
        "train.global_batch": sizes.global_batch,
        "data.sequence_length": config.data.sequence_length,
        "data.held_out_fraction": config.data.held_out_fraction,
    }
