"""`rotorch generate`: text by the model of a checkpoint, under any layout that is not a pipeline."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from rotorch.core.errors import ConfigError
from rotorch.parallel_model import ParallelModel
from rotorch.pipelining.stage_strategy import StageStrategy
from rotorch.train.data.instructions import open_chat
from rotorch.train.data.tokens import BYTES, Tokens, check_vocabulary
from rotorch.train.launch.status import RankPhase
from rotorch.train.sample import agreed_token
from rotorch.train.saved_model import SavedModel, use_saved_model


@dataclass(frozen=True)
class Wanted:
    """A text to write.

    Attributes:
        prompt: its beginning; of a model that has learnt instructions, the user's message.
        length: tokens to add at most.
        temperature: 0 takes the likeliest token.
        top_p: tokens are drawn from the likeliest ones whose probabilities add up to this.
        seed: decides what is drawn.
    """

    prompt: str
    length: int = 200
    temperature: float = 0.7
    top_p: float = 1.0
    seed: int = 0


def generate_text(saved: SavedModel, wanted: Wanted, *, summary: Path | None = None) -> None:
    """Prints the prompt's continuation as it is written, token by token. Starts ranks.

    Args:
        saved: the model.
        wanted: the text.
        summary: a JSON file for the text and its numbers.

    Raises:
        ConfigError: the tokenizer is gone or does not fit, the prompt leaves no room, or the layout is a pipeline.
    """
    if any(isinstance(strategy, StageStrategy) for strategy in saved.strategies):
        raise ConfigError("generate: a pipeline writes no text. Write another --parallel, e.g. single, fsdp=2 or rtp=2")
    data = saved.run.data
    tokens = saved.open_tokens()
    text_config = saved.model_config.get_text_config()
    check_vocabulary(tokens.vocab_size, model_vocab=text_config.vocab_size)
    ids = _prompt_ids(wanted.prompt, tokens=tokens, answers=data.kind != "text")
    room = getattr(text_config, "max_position_embeddings", None)
    if room is not None and len(ids) >= room:
        raise ConfigError(
            f"generate: the prompt has {len(ids)} tokens, and the model takes {room} positions. Write a shorter one"
        )
    length = wanted.length if room is None else min(wanted.length, room - len(ids))
    if length < wanted.length:
        print(f"rotorch: the model takes {room} positions: at most {length} tokens are added", file=sys.stderr)
    work = partial(_write, ids=ids, wanted=wanted, length=length, saved=saved, summary=summary)
    use_saved_model(saved, work, phase=RankPhase.SAMPLING)


def _prompt_ids(prompt: str, *, tokens: Tokens, answers: bool) -> list[int]:
    """Ids of the prompt; of a model that answers, as its chat template writes a user's message."""
    chat = open_chat(tokens.name) if answers and tokens.name != BYTES else None
    if chat is None:
        return tokens.encode(prompt) or [tokens.end_id or 0]
    text = chat.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
    return [int(token) for token in chat(text, add_special_tokens=False).input_ids]


class _Draw(LogitsProcessor):
    """Leaves one token of the next ones, drawn by a generator of its own: layouts draw from torch's as they need."""

    def __init__(self, model: ParallelModel, wanted: Wanted) -> None:
        self._model = model
        self._generator = torch.Generator().manual_seed(wanted.seed)
        warpers = [TemperatureLogitsWarper(wanted.temperature)]
        warpers += [TopPLogitsWarper(wanted.top_p)] if wanted.top_p < 1.0 else []
        self._warpers = LogitsProcessorList(warpers)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(self._warpers(input_ids, scores)[0].float().cpu(), dim=-1)
        token = agreed_token(self._model, int(torch.multinomial(probabilities, 1, generator=self._generator)))
        only = torch.full_like(scores, -math.inf)
        only[:, token] = 0.0
        return only


class Printer(BaseStreamer):
    """Prints whole characters of the continuation as their tokens arrive."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self.ids: list[int] = []
        self._num_printed = 0
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._is_prompt:  # generate hands it over first
            self._is_prompt = False
            return
        self.ids += [int(token) for token in value.reshape(-1)]
        text = self.text
        whole = len(text) - len(text[-4:]) + len(text[-4:].rstrip("\ufffd"))  # a character may lack its last bytes
        self._print(text[self._num_printed : whole])

    def end(self) -> None:
        self._print(self.text[self._num_printed :] + "\n")

    @property
    def text(self) -> str:
        """The continuation so far, without the token that ends it."""
        return self._tokens.decode(token for token in self.ids if token != self._tokens.end_id)

    def _print(self, text: str) -> None:
        self._num_printed += len(text)
        sys.stdout.write(text)
        sys.stdout.flush()


def _write(
    model: ParallelModel, *, ids: list[int], wanted: Wanted, length: int, saved: SavedModel, summary: Path | None
) -> None:
    """One rank's part: all ranks write, each its own rows or the same ones; the first one prints."""
    module: Any = model.module
    first = model.mesh.size() == 1 or model.mesh.get_rank() == 0
    tokens = saved.open_tokens()
    printer = Printer(tokens) if first else None
    if first and saved.run.data.kind == "text":
        sys.stdout.write(wanted.prompt)
    draws = [_Draw(model, wanted)] if wanted.temperature > 0.0 else []
    padding = list(range(tokens.vocab_size, module.config.get_text_config().vocab_size))
    with torch.no_grad():
        module.generate(
            torch.tensor([ids], device=model.device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=model.device),
            max_new_tokens=length,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            logits_processor=LogitsProcessorList(draws),
            eos_token_id=tokens.end_id,
            pad_token_id=tokens.end_id or 0,
            suppress_tokens=padding or None,  # rows of the vocabulary that no token has
            streamer=printer,
        )
    if printer is not None and summary is not None:
        found = {
            "checkpoint": str(saved.checkpoint),
            "step": saved.manifest.step,
            "prompt": wanted.prompt,
            "text": printer.text,
            "num_prompt_tokens": len(ids),
            "num_tokens": len(printer.ids),
        }
        summary.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
