"""Preference pairs: records of a prompt with a chosen and a rejected response, as windows of two rows.

A record has `prompt`, `chosen` and `rejected`: three texts, or, where the tokenizer has a chat template, lists of
messages (`{"role": ..., "content": ...}`). Without `prompt` both responses begin with it: the prompt is then the
beginning that they have in common, up to the last space of texts, or whole messages. Prompts and responses become
tokens as in `instructions.py`.

[Note: windows of pairs] A window is two rows of `sequence_length + 1` ids: prompt and chosen response, then prompt and
rejected response, each filled up. A row that is longer loses its end; a pair of which a row has no response left is
left out. Only responses are targets.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from rotorch.core.errors import ConfigError
from rotorch.models.preference_loss import REFERENCE
from rotorch.train.data.instructions import Instructions, check_messages, fields_of
from rotorch.train.data.mixture import MixedWindows
from rotorch.train.data.windows import NOT_A_TARGET, Batch, TokenWindows

_log = logging.getLogger(__name__)

Messages = list[dict[str, str]]


@dataclass(frozen=True, eq=False)
class Preferences(Instructions):
    """Records of pairs, and how they become windows; `response_field` is that of the chosen response.

    Attributes:
        rejected_field: the field of the rejected response.
    """

    rejected_field: str = "rejected"

    def digest(self) -> str:
        return hashlib.sha256(f"{super().digest()} {self.rejected_field}".encode()).hexdigest()

    def check_first(self) -> None:
        for where, record in self.records():
            self._rows(record, where=where)
            return
        raise ConfigError(f"corpus '{self.corpus.source}': empty: no record in {len(self.corpus.files)} files")

    def windows(self) -> Iterator[tuple[npt.NDArray[np.uint32], int, int]]:
        """Streams windows.

        Yields:
            (ids, 1, text_bytes): ids of shape [2 * (sequence_length + 1)], and the bytes of the pair's text.

        Raises:
            ConfigError: if a record is broken; names file and line.
        """
        length, num_cut, num_lost, first_lost = self.sequence_length + 1, 0, 0, ""
        num_equal = 0
        for where, record in self.records():
            rows, text_bytes = self._rows(record, where=where)
            num_cut += any(len(row) > length for row in rows)
            rows = [row[:length] for row in rows]
            if any(all(token >= NOT_A_TARGET for token in row[1:]) for row in rows):
                num_lost, first_lost = num_lost + 1, first_lost or where
                continue
            if rows[0] == rows[1]:
                num_equal += 1
                continue
            for row in rows:
                row[0] |= NOT_A_TARGET  # nothing before it predicts it
            yield np.concatenate([self.filled(row, length) for row in rows]), 1, text_bytes
        if num_cut:
            _log.warning("%s: %d pairs are longer than a row and lose an end", self.corpus.source, num_cut)
        if num_equal:
            _log.warning(
                "%s: %d pairs left out, whose responses are the same as far as a row goes. Write a longer "
                "data.sequence_length to keep them",
                self.corpus.source,
                num_equal,
            )
        if num_lost:
            _log.warning(
                "%s: %d pairs left out, whose prompts alone fill a row (the first: %s). Write a longer "
                "data.sequence_length to keep them",
                self.corpus.source,
                num_lost,
                first_lost,
            )

    @property
    def _example(self) -> str:
        return ", ".join(f'"{field}": "..."' for field in (self.prompt_field, self.response_field, self.rejected_field))

    def _rows(self, record: dict[str, Any], *, where: str) -> tuple[list[list[int]], int]:
        """The ids of both rows, those of the prompt marked, and the bytes of their text."""
        prompt, chosen, rejected = self._checked(record, where=where)
        rows, num_bytes = [], 0
        for response in (chosen, rejected):
            of_prompt, of_response = self._tokenised(prompt, response, where=where)
            rows.append([token | NOT_A_TARGET for token in of_prompt] + list(of_response))
            num_bytes += _num_bytes(prompt) + _num_bytes(response)
        return rows, num_bytes

    def _tokenised(self, prompt: str | Messages, response: str | Messages, *, where: str) -> tuple[Sequence[int], ...]:
        if isinstance(prompt, str) or isinstance(response, str):
            segments = self.without_template([str(prompt), str(response)], where=where)
            return tuple(ids for ids, _ in segments)
        before = self.render(prompt, where=where, add_generation_prompt=True)
        whole = self.render([*prompt, *response], where=where)
        if not whole.startswith(before):
            raise ConfigError(
                f"{where}: the tokenizer's chat template writes the prompt otherwise once a response follows, so the "
                "response cannot be told from it. Write texts in place of messages"
            )
        return self.encode(before, where=where), self.encode(whole[len(before) :], where=where)

    def _checked(self, record: dict[str, Any], *, where: str) -> tuple[str | Messages, ...]:
        """Prompt, chosen and rejected response: all texts, or all lists of messages."""
        names = [self.response_field, self.rejected_field]
        names = [self.prompt_field, *names] if self.prompt_field in record else names
        for name in names:
            if name not in record:
                raise ConfigError(
                    f"{where}: no field '{name}'; the fields are {fields_of(record)}. Write data.prompt_field=..., "
                    "data.chosen_field=... and data.rejected_field=... with those that hold the pair"
                )
        values = [record[name] for name in names]
        for name, value in zip(names, values, strict=True):
            if not isinstance(value, type(values[0])) or not isinstance(value, str | list):
                raise ConfigError(
                    f"{where}: field '{name}' is of type {type(value).__name__}: write strings, or lists of messages, "
                    f"in all of {', '.join(names)}"
                )
            if isinstance(value, list):
                check_messages(value, field=name, where=where)
        if isinstance(values[0], list) and self.chat is None:
            raise ConfigError(
                f"{where}: lists of messages need a tokenizer with a chat template. Write strings, or another "
                "data.tokenizer"
            )
        prompt, chosen, rejected = values if len(values) == 3 else _with_prompt(*values)
        for name, value in zip(names[-2:], (chosen, rejected), strict=True):
            if not value:
                raise ConfigError(f"{where}: field '{name}' has no response: there is nothing to compare")
        if chosen == rejected:
            raise ConfigError(f"{where}: '{names[-2]}' and '{names[-1]}' are the same: there is nothing to learn")
        return prompt, chosen, rejected


def _with_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Splits the beginning that both have off them: texts before its last space, messages behind a whole one."""
    length = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if isinstance(chosen, str):
        length = max(chosen.rfind(" ", 0, length), chosen.rfind("\n", 0, length), 0)
    return chosen[:length], chosen[length:], rejected[length:]


def _num_bytes(text: str | Messages) -> int:
    parts = [text] if isinstance(text, str) else [message["content"] for message in text]
    return sum(len(part.encode("utf-8", errors="replace")) for part in parts)


class LogProbsOfPairs(Protocol):
    """Log-probabilities of pairs under a reference."""

    def of(self, windows: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.float64]:
        """Log-probabilities of both rows of each window, shape [windows, 2]."""


class PairWindows(TokenWindows):
    """Windows of pairs; a batch of them is as in `models/preference_loss.py`, [Note: rows of a pair]."""

    num_rows = 2
    reference: LogProbsOfPairs | None = None

    @classmethod
    def check_length(cls, num_tokens: int, *, sequence_length: int, held_out_fraction: float, source: str) -> None:
        found, needed = num_tokens // (2 * (sequence_length + 1)), 2 if held_out_fraction else 1
        if found < needed:
            both = "one to train on and one to hold out" if held_out_fraction else "one to train on"
            raise ConfigError(f"corpus '{source}': {found} pairs, and {both} are needed. Write more of them")

    def to_batch(self, windows: Sequence[npt.NDArray[np.int64]], *, num_rows: int | None = None) -> Batch:
        sides = [
            super(PairWindows, self).to_batch([window.reshape(2, -1)[side] for window in windows], num_rows=num_rows)
            for side in range(2)
        ]
        batch = {name: torch.cat([side[name] for side in sides]) for name in sides[0]}
        if self.reference is not None:
            found = torch.zeros(2, len(windows) if num_rows is None else num_rows, dtype=torch.float64)
            found[:, : len(windows)] = torch.from_numpy(self.reference.of(windows)).T
            batch[REFERENCE] = found.flatten()
        return batch


def pairs_in(windows: TokenWindows) -> list[PairWindows]:
    """Windows of pairs, one for each source of a mixture; none of text."""
    parts = windows.parts if isinstance(windows, MixedWindows) else (windows,)
    return [part for part in parts if isinstance(part, PairWindows)]
