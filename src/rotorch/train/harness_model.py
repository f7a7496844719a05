"""A parallel model as lm-eval asks for one. Imports that package, so it is imported where a command names tasks.

Every rank runs the whole harness and gets the same answers: of each round of rows a rank computes those of its batch
rank, and the numbers of all are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from rotorch.comm.collectives import all_reduce_sum
from rotorch.core.errors import ConfigError
from rotorch.parallel_model import ParallelModel
from rotorch.train.data.tokens import Tokens
from rotorch.train.sample import agreed_token

_LONGEST = 2048
"""Tokens that a model sees at once if its configuration does not say."""
_MOST_NEW = 256
"""Tokens that are added at most where a task does not say."""

Pair = tuple[Sequence[int], Sequence[int]]
"""Ids of a context, and of its continuation."""


class HarnessModel(TemplateLM):
    """Log-likelihoods and greedy continuations by a parallel model. All ranks, with the same requests."""

    def __init__(self, model: ParallelModel, *, tokens: Tokens, longest: int | None, micro_batch: int) -> None:
        """Takes the model as it is.

        Args:
            model: the model, in evaluation mode.
            tokens: its tokenizer.
            longest: tokens that it sees at once.
            micro_batch: rows of one pass of a rank.
        """
        super().__init__()
        self._model, self._tokens, self._rows = model, tokens, micro_batch
        self._start = tokens.start_ids
        self.max_length = longest or _LONGEST

    @property
    def eot_token_id(self) -> int:
        return self._tokens.end_id or 0

    @property
    def prefix_token_id(self) -> int:
        return self._start[0] if self._start else self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Ids of a text, begun as the tokenizer begins one, which is the harness's own default."""
        return [*([] if add_special_tokens is False else self._start), *self._tokens.encode(string)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Sequence[int], Sequence[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._scores([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        pairs: list[Pair] = []
        ends = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs += map(make_disjoint_window, windows)
            ends.append(len(pairs))
        scores = [score for score, _ in self._scores(pairs)]
        return [sum(scores[start:end]) for start, end in zip([0, *ends], ends, strict=False)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return [self._continued(*request.args) for request in requests]

    def _scores(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is the likeliest one, token by token."""
        rows = [[*context, *continuation][-(self.max_length + 1) :] for context, continuation in pairs]
        found = torch.zeros(len(pairs), 2, dtype=torch.float64)
        longest_first = sorted(range(len(pairs)), key=lambda number: -len(rows[number]))
        per_round = self._rows * self._model.num_batch_ranks
        for start in range(0, len(pairs), per_round):
            of_round = longest_first[start : start + per_round]
            first = self._model.batch_rank * self._rows
            mine = of_round[first : first + self._rows]
            length = max(1, len(rows[of_round[0]]) - 1)  # the same on all ranks
            ids = torch.zeros(self._rows, length, dtype=torch.int64)
            for row, number in enumerate(mine):
                ids[row, : len(rows[number]) - 1] = torch.tensor(rows[number][:-1])
            logits = self._model.predict({"input_ids": ids.to(self._model.device)}).logits
            for row, number in enumerate(mine):
                found[number] = _score(logits[row], rows[number], num_targets=len(pairs[number][1]))
        sharing = self._model.num_batch_ranks / self._model.mesh.size()
        found = all_reduce_sum(found, mesh=self._model.mesh) * sharing
        return [(float(score), round(float(greedy)) == 1) for score, greedy in found]

    def _continued(self, context: str, settings: dict[str, Any]) -> str:
        """The likeliest continuation, up to the first of the texts that end it. All ranks write the same one."""
        if settings.get("do_sample") or (settings.get("temperature") or 0.0) > 0.0:
            raise ConfigError("eval: a task asks for drawn tokens, and layouts write the likeliest. Leave it out")
        until = settings.get("until") or []
        until = [until] if isinstance(until, str) else list(until)
        length = int(settings.get("max_gen_toks") or settings.get("max_new_tokens") or _MOST_NEW)
        length = max(1, min(length, self.max_length - 1))
        ids = (self.tok_encode(context) or [self.eot_token_id])[-(self.max_length - length) :]
        module: Any = self._model.module
        vocabulary = module.config.get_text_config().vocab_size
        written = module.generate(
            torch.tensor([ids], device=self._model.device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=self._model.device),
            max_new_tokens=length,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            logits_processor=LogitsProcessorList([_Agreed(self._model)]),
            stopping_criteria=StoppingCriteriaList([_Until(until, tokens=self._tokens, start=len(ids))]),
            eos_token_id=self._tokens.end_id,
            pad_token_id=self.eot_token_id,
            suppress_tokens=list(range(self._tokens.vocab_size, vocabulary)) or None,
        )
        text = self._tokens.decode(written[0, len(ids) :].tolist())
        return text[: min((at for end in until if (at := text.find(end)) >= 0), default=len(text))]


def _score(logits: torch.Tensor, row: Sequence[int], *, num_targets: int) -> torch.Tensor:
    """Log-probability of a row's last `num_targets` ids, and 1.0 if each is the likeliest, float64 [2].

    Args:
        logits: of the row's ids but its last, [sequence, vocabulary]; what fills it up comes after them.
        row: the ids.
        num_targets: of the continuation; more than the row has are all of it that is predicted.
    """
    end = len(row) - 1
    start = max(0, end - num_targets)
    log_probs = logits[start:end].float().log_softmax(-1)
    targets = torch.tensor(row[start + 1 :], device=logits.device).unsqueeze(-1)
    score = log_probs.gather(-1, targets).sum(dtype=torch.float64)
    greedy = (log_probs.argmax(-1, keepdim=True) == targets).all()
    return torch.stack([score, greedy.to(score.dtype)]).cpu()


class _Agreed(LogitsProcessor):
    """Leaves the likeliest token of the first rank: the last bits of logits differ between ranks."""

    def __init__(self, model: ParallelModel) -> None:
        self._model = model

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = agreed_token(self._model, int(scores[0].argmax()))
        only = torch.full_like(scores, -torch.inf)
        only[:, token] = 0.0
        return only


class _Until(StoppingCriteria):
    """Ends a continuation that has one of some texts in it."""

    def __init__(self, until: Sequence[str], *, tokens: Tokens, start: int) -> None:
        self._until, self._tokens, self._start = until, tokens, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        text = self._tokens.decode(input_ids[0, self._start :].tolist())
        return torch.tensor([any(end in text for end in self._until)], device=input_ids.device)
