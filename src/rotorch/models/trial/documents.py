"""Check that a model keeps documents apart that share a row: a token sees nothing of those before its own.

Models of transformers are told by positions that begin again: masks of attention follow from them. What else carries
something from token to token (the state of a Mamba, a convolution, chunks counted from the row's beginning), and
positions that a model numbers for itself, know nothing of that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rotorch.models.trial.slices import one_thread
from rotorch.models.trial.tiny import NUM_DRAWN_TOKENS, shrunk_like

_LENGTHS = ((5, 11), (13, 3))
"""Tokens of the documents of two rows: borders differ, and windows and chunks of tiny models are shorter than some."""
_ROUNDING = 1e-5


def why_documents_meet(config: Any) -> str:
    """Returns why documents of a row are not apart in a causal language model of this kind; "" if they are.

    Tried on a tiny model of the same configuration; draws from no generator of the caller's.
    """
    from transformers import AutoModelForCausalLM

    why = "no small model of its kind could be made to try it"
    for tiny in shrunk_like(config):
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad(), one_thread():
                torch.default_generator.manual_seed(0)
                model = AutoModelForCausalLM.from_config(tiny).eval()
                ids = torch.randint(NUM_DRAWN_TOKENS, (len(_LENGTHS), sum(_LENGTHS[0])))
                alone = torch.stack([_alone(model, row, lengths=n) for row, n in zip(ids, _LENGTHS, strict=True)])
                positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in _LENGTHS])
                try:
                    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
                except TypeError as error:
                    return f"it takes no positions ({' '.join(str(error).split())})"
        except Exception as error:
            why = f"a small model of its kind does not run ({type(error).__name__}: {' '.join(str(error).split())})"
            continue
        difference = float((packed - alone).abs().max() / alone.abs().max())
        return "" if difference < _ROUNDING else f"a document's outputs change by {difference:.0e} with those before it"
    return why


def _alone(model: Any, row: Tensor, *, lengths: tuple[int, ...]) -> Tensor:
    """Logits of a row's documents, each of which the model sees by itself."""
    return torch.cat([model(input_ids=part[None], use_cache=False).logits[0] for part in row.split(lengths)])
