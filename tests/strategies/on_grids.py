"""A tiny Llama for tests of grids, and the bytes that one of many ranks sends of it."""

import json
from pathlib import Path

import rotorch
from rotorch.models.hf import causal_lm, config_from_dict
from rotorch.strategies import num_ranks, parse_parallel
from rotorch.testing.batches import global_batch
from rotorch.testing.fake import as_rank
from rotorch.testing.traffic import sent_and_said


def llama(tiny, **changes):
    values = {**json.loads(Path(tiny("llama")).read_text()), **changes}
    with rotorch.on_meta():
        return causal_lm(config_from_dict(values, source="test"))


def sent(module, parallel, *, rank):
    """Bytes sent by kind, and those that the Layouts say, of one micro-batch; the other ranks are faked."""
    # No other rank is there to share memory with.
    parallel = parallel.replace("]", ",transport=messages]") if "]" in parallel else f"{parallel}[transport=messages]"
    batch = global_batch(seed=0, step=0, num_shares=1, num_micro_batches=1, num_rows=2, num_tokens=24, vocab_size=300)
    with as_rank(rank, num_ranks=num_ranks(parse_parallel(parallel))):
        return sent_and_said(module, parallel, batch=batch)
