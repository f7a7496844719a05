"""A piece of text by the model: one token at a time, by all ranks together."""

from __future__ import annotations

import torch

from rotorch.comm.collectives import all_reduce_sum
from rotorch.parallel_model import ParallelModel
from rotorch.run_config import SampleSection
from rotorch.train.data.batches import Tokens


def write_sample(
    model: ParallelModel, *, tokens: Tokens, settings: SampleSection, sequence_length: int, seed: int
) -> str:
    """Continues the prompt and returns the whole text. All ranks, with the same arguments.

    No state is kept between tokens, so a token costs a forward pass over at most `sequence_length` tokens.

    Args:
        model: the model.
        tokens: the tokens it was trained on.
        settings: prompt, number of tokens to add, and temperature.
        sequence_length: number of tokens that the model sees at a time.
        seed: decides what is drawn.
    """
    generator = torch.Generator().manual_seed(seed)
    first = tokens.encode(settings.prompt) or [tokens.end_id or 0]
    written: list[int] = []
    for _ in range(settings.length):
        seen = (first + written)[-sequence_length:]
        logits = model.next_token_logits(torch.tensor([seen], device=model.device))[0].float().cpu()
        token = agreed_token(model, _draw(logits, num_tokens=tokens.vocab_size, settings=settings, generator=generator))
        if token == tokens.end_id:
            break
        written.append(token)
    return settings.prompt + tokens.decode(written)


def _draw(logits: torch.Tensor, *, num_tokens: int, settings: SampleSection, generator: torch.Generator) -> int:
    """Draws a token; the model's vocabulary may be padded beyond `num_tokens`."""
    logits = logits[:num_tokens]
    if settings.temperature == 0.0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / settings.temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def agreed_token(model: ParallelModel, token: int) -> int:
    """Rank 0's token on all ranks: the last bits of logits differ between ranks that add slices in different order."""
    is_first = model.mesh.size() == 1 or model.mesh.get_rank() == 0
    return int(all_reduce_sum(torch.tensor([float(token) if is_first else 0.0]), mesh=model.mesh))
