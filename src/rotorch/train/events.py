"""Events of a run: `events.jsonl` beside the metrics, for `rotorch report`. Rank 0 only.

Metrics lose the steps that a roll-back or a restart repeats; this file loses nothing: starts, notes, roll-backs, and
the memory of all ranks after a hundred steps of the run. A run does not need it, so a file that cannot be written is
told once, and the run continues.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from rotorch.train.metrics import StepRecord

_LOG = logging.getLogger(__name__)

EVENTS = "events.jsonl"
MOST_RANKS = 64
"""Ranks whose memory is noted: as many as a report draws."""
MOST_PREDICTED = 8
"""Ranks whose memory is predicted: a prediction takes a tenth of a second or two if there are many ranks."""


class EventsFile:
    """A listener that appends every event to `events.jsonl`, each line whole when the call returns."""

    def __init__(
        self,
        run_dir: Path,
        *,
        after_step: int,
        text: str,
        versions: Mapping[str, str],
        predicted: Sequence[Mapping[str, int]],
    ) -> None:
        """Opens the file and notes that the run starts.

        Args:
            run_dir: directory of the run.
            after_step: the step that the run resumes from; 0 at its beginning.
            text: ranks and layout, in words.
            versions: of packages, by name.
            predicted: bytes at rest by category of each of the first ranks, from the layout's formulas.
        """
        self._path = run_dir / EVENTS
        self._step = after_step
        self._stream: TextIO | None = None
        try:
            self._stream = self._path.open("a+", encoding="utf-8")
        except OSError as error:
            self._give_up(error)
        first, *_ = by_rank = [dict(rank) for rank in predicted]
        self._write("started", text=text, versions=dict(versions), predicted=first, predicted_by_rank=by_rank)

    def on_step(self, record: StepRecord) -> None:
        """Remembers the step of the events that follow; notes the memory of ranks, where the step tells it.

        Called after the metrics' own `on_step`.
        """
        self._put_back()
        self._step = record.step
        if record.memory is not None:
            self._write("memory", **{name: list(of)[:MOST_RANKS] for name, of in record.memory.items()})

    def on_rolled_back(self, step: int) -> None:
        """Notes that the run has gone back to the end of `step`."""
        since, self._step = self._step, step
        self._write("rolled_back", text=f"from step {since}")

    def on_note(self, text: str) -> None:
        """Notes a line that the user was told."""
        self._write("note", text=text)

    def ended(
        self, *, memory: Mapping[str, int], peaks: Sequence[int], planned: Mapping[str, Any] | None = None
    ) -> None:
        """Notes the end of the training loop.

        Args:
            memory: bytes of this rank's tensors at rest, by category.
            peaks: highest memory of each rank in bytes; 0 where the system does not tell.
            planned: planned peaks of ranks beside measured ones, where they were counted.
        """
        self._write("ended", memory=dict(memory), peaks=list(peaks), **({"planned": planned} if planned else {}))

    def close(self) -> None:
        """Closes the file."""
        if self._stream is not None:
            with suppress(OSError):
                self._stream.close()

    def _write(self, event: str, **fields: Any) -> None:
        if self._stream is None:
            return
        at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        try:
            self._stream.write(json.dumps({"event": event, "step": self._step, "at": at, **fields}) + "\n")
            self._stream.flush()
        except OSError as error:
            self.close()
            self._stream = None
            self._give_up(error)

    def _put_back(self) -> None:
        """Makes a file that was removed again. Metrics have made the directory again, if it is this run's still."""
        if self._stream is None or self._path.exists():
            return
        with suppress(OSError):  # the next event says what is wrong, or goes into the file that has no name
            before, self._stream = self._stream, self._path.open("x+", encoding="utf-8")
            with before:
                before.seek(0)
                self._stream.write(before.read())
            self._stream.flush()

    def _give_up(self, error: OSError) -> None:
        _LOG.warning("%s: %s; the run goes on without it", self._path, error.strerror or error)
