"""Log-probabilities of preference pairs under the frozen reference, computed once, before the first step.

[Note: the reference]
    The reference of direct preference optimisation is the model as the run begins with it; an adapter adds nothing
    then. So no second model is held and no second forward pass is made in a step: the two numbers of each pair that
    the run will read are computed by the same ranks, before training starts, and kept beside the token cache, where a
    run that goes on finds them under any layout. They are known by the tokens of their pair, so other texts, seeds and
    lengths of a run share them. A run that goes on without them (on another machine) takes its first weights once more.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rotorch.comm.collectives import all_reduce_sum
from rotorch.core.errors import ConfigError, FinalFailure
from rotorch.core.phase_line import tell_phase
from rotorch.models.losses import Batch
from rotorch.parallel_model import ParallelModel
from rotorch.run_config import RunConfig
from rotorch.train.checkpoint.manifest import json_digest
from rotorch.train.checks.divergence import READ_AHEAD
from rotorch.train.checks.preflight import CheckedRun, read_model_config
from rotorch.train.data.batches import TokenWindows
from rotorch.train.data.preferences import pairs_in

REFERENCE = "reference"
"""The entry of a checkpoint's data position that says which reference its run has."""

_LOOK_BYTES, _MOST_LOOKS = 4096, 4096
"""Of a file of weights: bytes at a time, at so many places beside the beginnings of its tensors."""
_KEY = np.dtype("<u8")
_TABLE = np.dtype([("key", _KEY), ("log_probs", "<f8", (2,))])
"""A row of the cache."""


@dataclass(frozen=True, eq=False)
class Reference:
    """Log-probabilities of pairs, by their tokens.

    Attributes:
        keys: of pairs, rising, uint64 [pairs].
        values: of the chosen and the rejected row, float64 [pairs, 2].
    """

    keys: npt.NDArray[np.uint64]
    values: npt.NDArray[np.float64]

    def of(self, windows: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.float64]:
        """Log-probabilities of both rows of each window, shape [windows, 2]; each was prepared for."""
        keys = np.array([key_of(window) for window in windows], _KEY)
        found = np.searchsorted(self.keys, keys)
        assert np.array_equal(self.keys[found], keys), "a pair that the run was not expected to read"
        return self.values[found]


def key_of(window: npt.NDArray[np.int64]) -> int:
    """A number that stands for the tokens of a pair."""
    return int.from_bytes(hashlib.blake2b(window.tobytes(), digest_size=8).digest(), "little")


def prepare_reference(
    model: ParallelModel,
    run: CheckedRun,
    *,
    train: TokenWindows,
    measured: Sequence[TokenWindows],
    take_first_values: Callable[[], object],
) -> None:
    """Gives windows of pairs the reference's log-probabilities, computed where they are not in the cache. All ranks.

    Sends two numbers per pair. Rank 0 reads and writes the cache.

    Args:
        model: the model, in training mode; with its first values, or `take_first_values` gives it these.
        run: the run.
        train: windows to train on.
        measured: windows to measure, of which an evaluation reads some.
        take_first_values: called before the first of them is computed, if any is.

    Raises:
        FinalFailure: the first model gives a pair no finite log-probability.
    """
    pairs = dict(_pairs_to_read(run, train=train, measured=measured))
    keys = np.array(sorted(pairs), _KEY)
    rank = model.mesh.get_rank() if model.mesh.size() > 1 else 0
    path = cache_of(run)
    known = _read(path) if rank == 0 else {}
    values = torch.zeros(len(keys), 2, dtype=torch.float64)
    if rank == 0:
        nothing = (np.nan, np.nan)
        values = torch.tensor([known.get(int(key), nothing) for key in keys], dtype=torch.float64).view(-1, 2)
    values = all_reduce_sum(values.contiguous(), mesh=model.mesh)
    missing = [int(row) for row in torch.isnan(values).any(-1).nonzero().flatten()]
    if missing:
        take_first_values()
        windows = [pairs[int(keys[row])] for row in missing]
        values[missing] = _computed(model, windows, micro_batch=run.config.train.micro_batch, tells=rank == 0)
        if rank == 0:
            _write(path, {**known, **{int(key): pair for key, pair in zip(keys, values.tolist(), strict=True)}})
    reference = Reference(keys, values.numpy())
    for windows_of in (train, *measured):
        for part in pairs_in(windows_of):
            part.reference = reference


def _pairs_to_read(
    run: CheckedRun, *, train: TokenWindows, measured: Sequence[TokenWindows]
) -> Iterator[tuple[int, tuple[TokenWindows, int]]]:
    """Yields keys of all pairs that the run may read, and where each lies: windows, and its number in them."""
    settings = run.config.train
    found = 0 if run.resume is None else run.resume.manifest.data.get(READ_AHEAD, 0)
    ahead = found if isinstance(found, int) else 0  # of steps whose samples a roll-back has left behind
    num_samples = (settings.steps + ahead) * run.sizes.global_batch
    reads_on = settings.on_nonfinite == "roll_back" or settings.spike_factor > 0  # behind its last sample, then
    if reads_on or num_samples >= len(train):
        yield from ((key_of(train.stored(index)), (train, index)) for index in range(len(train)))
    else:
        for sample in range(num_samples):
            index = train.index_of(sample)
            yield key_of(train.stored(index)), (train, index)
    for windows in measured:
        for index in windows.measured(settings.eval_windows):
            yield key_of(windows.stored(index)), (windows, index)


def _computed(
    model: ParallelModel, windows: Sequence[tuple[TokenWindows, int]], *, micro_batch: int, tells: bool
) -> torch.Tensor:
    """Log-probabilities of both rows of each window, float64 [windows, 2]: each rank computes some. All ranks."""
    found = torch.zeros(len(windows), 2, dtype=torch.float64)
    per_round = micro_batch * model.num_batch_ranks
    for start in range(0, len(windows), per_round):
        if tells:
            tell_phase(f"log-probabilities of the reference: {start} of {len(windows)} pairs")
        first = min(start + model.batch_rank * micro_batch, len(windows))
        mine = windows[first : first + micro_batch]
        (beside,) = model.evaluate(_batch_of(mine, like=windows[0][0], num_rows=micro_batch)).beside
        found[first : first + len(mine)] = beside["log_probs"].cpu().view(2, -1).T[: len(mine)]
    found = all_reduce_sum(found, mesh=model.mesh) * (model.num_batch_ranks / model.mesh.size())
    if not bool(torch.isfinite(found).all()):
        raise FinalFailure(
            "the reference, which is the model as the run begins with it, gives some pair no finite log-probability. "
            "Check that model.init is whole, and gives a finite loss in transformers"
        )
    return found


def _batch_of(windows: Sequence[tuple[TokenWindows, int]], *, like: TokenWindows, num_rows: int) -> Batch:
    return like.to_batch([part.stored(index) for part, index in windows], num_rows=num_rows)


# ---------------------------------------------------------------- the cache


_DIGESTED = {"bfloat16": "param_bfloat16", "autocast_bfloat16": "bfloat16"}
"""Precisions under their names of the release before, so that digests of caches and checkpoints stay right."""


def reference_digest(config: RunConfig) -> str:
    """A digest of the reference's weights and precision."""
    first: list[Any] = [config.train.seed] if config.model.init == "random" else _files(Path(config.model.init))
    return json_digest([_DIGESTED.get(config.train.precision, config.train.precision), first])


def _files(place: Path) -> list[list[Any]]:
    """Names, sizes and samples of a published model's weights: those of another place are the same."""
    files = [place] if place.is_file() else sorted(p for p in place.iterdir() if p.suffix in (".safetensors", ".gguf"))
    return [[file.name, file.stat().st_size, _sampled(file)] for file in files]


def _sampled(file: Path) -> str:
    """A digest of some bytes of each tensor, and of the file all along: a part that was trained further shows."""
    size = file.stat().st_size
    places = set(range(0, size, max(_LOOK_BYTES, size // _MOST_LOOKS)))
    with file.open("rb") as stream:
        if file.suffix == ".safetensors":
            start = 8 + int.from_bytes(stream.read(8), "little")
            tensors = json.loads(stream.read(start - 8))
            places |= {start + t["data_offsets"][0] for name, t in tensors.items() if name != "__metadata__"}
        digest = hashlib.sha256()
        for place in sorted(places):
            stream.seek(place)
            digest.update(stream.read(_LOOK_BYTES))
    return digest.hexdigest()


def check_same_reference(run: CheckedRun) -> None:
    """Checks that a run goes on with the reference that it was begun with.

    Raises:
        ConfigError: its first weights are others.
    """
    if run.resume is None or run.config.data.kind != "preferences":
        return
    ours = reference_digest(run.config)
    theirs = str(run.resume.manifest.data.get(REFERENCE, ours))
    if theirs != ours:
        raise ConfigError(
            f"--resume: model.init = {run.config.model.init!r}, its files or train.precision differ from those of "
            f"the reference in {run.resume.checkpoint} ({ours[:8]} now, {theirs[:8]} then). Write them as they were"
        )


def cache_of(run: CheckedRun) -> Path:
    """The file of the reference, beside the token cache."""
    described = json.loads(read_model_config(run.config).to_json_string(use_diff=False))  # as no model has changed it
    return run.source.path.with_name(f"{json_digest([reference_digest(run.config), described])}.reference")


def _read(path: Path) -> dict[int, tuple[float, float]]:
    """Pairs of the cache; none of a file that is not there or no such file: they are computed again."""
    try:
        with path.open("rb") as stream:
            table = np.load(stream, allow_pickle=False)
        if table.dtype != _TABLE:
            return {}
    except (OSError, ValueError, EOFError):
        return {}
    return {int(row["key"]): (float(row["log_probs"][0]), float(row["log_probs"][1])) for row in table}


def _write(path: Path, pairs: dict[int, Any]) -> None:
    """Replaces the cache; where it cannot be written the run goes on without."""
    table = np.array([(key, tuple(value)) for key, value in sorted(pairs.items())], _TABLE)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        with partial.open("wb") as stream:
            np.save(stream, table, allow_pickle=False)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
