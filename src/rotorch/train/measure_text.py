"""`rotorch eval`: bits per byte and perplexity of a checkpoint's model on a text, under any layout."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rotorch.core.errors import ConfigError
from rotorch.parallel_model import ParallelModel
from rotorch.run_config import RunConfig
from rotorch.strategies import batch_ranks
from rotorch.train.checks.preflight import with_published_files
from rotorch.train.checks.samples import check_data
from rotorch.train.data.batches import CheckedSource, open_windows, prepare_sources
from rotorch.train.data.windows import TokenWindows
from rotorch.train.hub import with_hub_files
from rotorch.train.loop import evaluate
from rotorch.train.saved_model import SavedModel, use_saved_model


@dataclass(frozen=True)
class Measured:
    """Result of `rotorch eval`.

    Attributes:
        checkpoint: the checkpoint's directory.
        step: optimizer steps that its model was trained.
        source: the text.
        part: "held out", or "all" of it.
        num_windows: windows measured.
        num_tokens: target tokens in them.
        num_bytes: bytes of text in them.
        loss: mean over tokens, in nats.
        perplexity: exp(loss).
        bits_per_byte: of text, whatever the tokenizer.
    """

    checkpoint: str
    step: int
    source: str
    part: str
    num_windows: int
    num_tokens: int
    num_bytes: int
    loss: float
    perplexity: float
    bits_per_byte: float


def measure_text(
    saved: SavedModel,
    *,
    source: str | None = None,
    num_windows: int | None = None,
    micro_batch: int | None = None,
    summary: Path | None = None,
) -> None:
    """Measures the model on what its run holds out, or on all of another text, and prints it. Starts ranks.

    Args:
        saved: the model.
        source: a text, JSONL or Parquet file, or a directory of them; None: what the run held out of its own.
        num_windows: windows to measure at most; None: all.
        micro_batch: windows in one pass of one rank; None: the run's.
        summary: a JSON file for a `Measured`.

    Raises:
        ConfigError: the text is missing or too short, or the run held nothing out, or held out preference pairs; the
            windows of a pass have no room.
    """
    run = _run_on(saved.run, source=source)
    rows = saved.rows_of_pass(micro_batch)
    checked = check_data(run, model_config=saved.model_config)
    prepare_sources(checked)
    windows = _windows(run, checked)
    num_measured = len(windows) if num_windows is None else min(num_windows, len(windows))
    work = partial(
        _measure,
        saved=saved,
        run=run,
        checked=checked,
        num_windows=num_measured,
        micro_batch=min(rows, -(-num_measured // batch_ranks(saved.strategies))),  # more would be padding
        part="held out" if source is None else "all",
        summary=summary,
    )
    use_saved_model(saved, work)


def _run_on(run: RunConfig, *, source: str | None) -> RunConfig:
    if run.data.kind == "preferences":
        if source is None:
            raise ConfigError(
                "eval: the run was trained on preference pairs, and its metrics have their held-out rewards. Write a "
                "text to measure the model on: --data"
            )
        run = run.model_copy(update={"data": run.data.model_copy(update={"kind": "text"})})
    if source is None and not run.data.held_out_fraction:
        text = ", ".join(part.source for part in run.data.sources) or run.data.source
        raise ConfigError(
            f"eval: the run held nothing out of {text} (data.held_out_fraction = 0). Write a text: --data"
        )
    if source is not None:
        run = run.model_copy(
            update={
                "data": run.data.model_copy(
                    update={"source": source, "sources": (), "held_out_fraction": 0.0, "stream": False}
                )
            }
        )
    return with_published_files(with_hub_files(run))


def _windows(run: RunConfig, checked: CheckedSource) -> TokenWindows:
    train, held_out, _ = open_windows(checked, seed=run.train.seed)
    return held_out if run.data.held_out_fraction else train


def _measure(
    model: ParallelModel,
    *,
    saved: SavedModel,
    run: RunConfig,
    checked: CheckedSource,
    num_windows: int,
    micro_batch: int,
    part: str,
    summary: Path | None,
) -> None:
    """One rank's part: all ranks measure, the first one prints."""
    windows = _windows(run, checked)
    found = evaluate(model, windows, micro_batch=micro_batch, max_windows=num_windows)
    assert found.bits_per_byte is not None, "of text"
    if model.mesh.size() > 1 and model.mesh.get_rank() != 0:
        return
    chosen = windows.evaluation_batches(micro_batch=1, max_windows=num_windows)
    measured = Measured(
        checkpoint=str(saved.checkpoint),
        step=saved.manifest.step,
        source=", ".join(part.corpus.source for part in checked.each),
        part=part,
        num_windows=num_windows,
        num_tokens=sum(window.num_targets for window in chosen),
        num_bytes=found.num_bytes,
        loss=found.loss,
        perplexity=math.exp(found.loss) if found.loss < _LARGEST_EXPONENT else math.inf,
        bits_per_byte=found.bits_per_byte,
    )
    print(f"checkpoint  {measured.checkpoint}, step {measured.step}")
    extent = f"{measured.num_windows} windows of {measured.num_tokens:,} tokens"
    print(f"text        {measured.source}, {measured.part}: {extent}")
    print(
        f"result      {measured.bits_per_byte:.4f} bits per byte, perplexity {measured.perplexity:.4g} per token",
        flush=True,
    )
    if summary is not None:
        summary.write_text(json.dumps(asdict(measured), indent=2) + "\n", "utf-8")


_LARGEST_EXPONENT = 700.0  # exp of more is no number
