"""Ranks that do different things are named on all of them, and nobody waits for ever."""

import pytest
import torch
from idioms import Loop
from lockstep import build

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.hf import load_config
from rotorch.testing.ranks import run_ranks

LAYOUTS = ("ddp=2", "rtp=2", "rtp=2[transport=send_receive]")


def one_batch_more(loop, rank):
    loop.model(**loop.batch(0)).loss.backward()
    if rank == 0:
        loop.model(**loop.batch(1))
    loop.model.evaluate(loop.batch(2))


def one_forward_more(loop, rank):
    losses = [loop.model(**loop.batch(0, part)).loss for part in range(2 if rank == 0 else 1)]
    sum(losses).backward()


def a_backward_that_one_leaves_out(loop, rank):
    loss = loop.model(**loop.batch(0)).loss
    if rank == 0:
        loss.backward()
    loop.model(**loop.batch(1))


def one_micro_batch_less(loop, rank):
    loop.model.forward_backward([loop.batch(0, part) for part in range(3 - rank)])


def another_model(loop, rank):
    other = loop.make(2)
    (other if rank == 0 else loop.model)(**loop.batch(0))


def one_closes(loop, rank):
    if rank == 0:
        loop.model.close()
    else:
        loop.model(**loop.batch(0))


EXPECTED = {
    one_batch_more: "rank 0 calls the model, rank 1 calls evaluate",
    one_forward_more: "rank 0 calls the model, rank 1 calls backward",
    a_backward_that_one_leaves_out: "rank 0 calls backward, rank 1 calls the model",
    one_micro_batch_less: "ranks have different numbers of micro-batches: rank 0 3, rank 1 2",
    another_model: "calls the model that is not the others'",
    one_closes: "rank 0 closes the model, rank 1 calls the model",
}


def all_messages(config, layout):
    messages = {}
    for what in EXPECTED:

        def make(seed):
            return rotorch.parallelize(build(config, seed=seed), layout, device="cpu")

        model = make(1)
        loop = Loop(model, make, model.batch_rank, config.vocab_size)
        try:
            what(loop, torch.distributed.get_rank())
            messages[what.__name__] = "nothing was said"
        except ConfigError as error:
            messages[what.__name__] = str(error)
    return messages


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_each_does_is_said_on_all_ranks(tiny, warm, layout):
    for messages in run_ranks(all_messages, load_config(tiny("llama")), layout, num_ranks=2, timeout_s=120):
        for what, text in EXPECTED.items():
            assert text in messages[what.__name__], (what.__name__, messages[what.__name__])
