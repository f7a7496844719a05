"""Check that a model with a head for the next token cannot see that token.

Encoders of transformers may have such a head, too (`is_decoder` decides on their masks). Trained for the next token
they copy it from the input: the loss falls to zero without an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rotorch.models.trial.slices import one_thread
from rotorch.models.trial.tiny import shrunk_like

_NUM_TOKENS = 8
_ROUNDING = 1e-5


def why_not_trained(config: Any) -> str:
    """Returns the reason why a model of this kind is not trained for the next token, in a sentence; "" if none."""
    if not reads_ahead(config):
        return ""
    return (
        f"{config.model_type!r} reads in both directions: its tokens see the next one. "
        "Write is_decoder = true in its configuration, or a decoder's"
    )


def reads_ahead(config: Any) -> bool:
    """True if tokens of a causal language model see later ones: tried on a tiny model of this kind.

    Only for configurations that could be an encoder's, those whose `is_decoder` is false; draws from no generator of
    the caller's. False where no tiny model runs.
    """
    from transformers import AutoModelForCausalLM

    if getattr(config, "is_decoder", True):
        return False
    for tiny in shrunk_like(config):
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), one_thread():
                torch.default_generator.manual_seed(0)
                model = AutoModelForCausalLM.from_config(tiny).eval()
                ids = torch.arange(1, _NUM_TOKENS + 1).unsqueeze(0)
                other = ids.index_fill(1, torch.tensor([_NUM_TOKENS - 1]), _NUM_TOKENS + 1)  # another last token
                return _differ(model(input_ids=ids).logits, model(input_ids=other).logits)
        except Exception:
            continue
    return False


def _differ(logits: Tensor, with_another_end: Tensor) -> bool:
    before, after = logits[:, :-1], with_another_end[:, :-1]
    return bool((before - after).abs().max() > _ROUNDING * before.abs().max())
