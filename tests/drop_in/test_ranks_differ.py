"""Ranks that do different things are named on all of them, and nobody waits for ever."""

from functools import cache

import pytest
import torch
from idioms import Loop
from lockstep import build

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.hf import load_config
from rotorch.testing.ranks import run_ranks

LAYOUTS = {
    2: (
        "ddp=2",
        "fsdp=2",
        "rtp=2",
        "rtp=2[recompute=slice]",
        "rtp=2[transport=send_receive]",
        "rtp=2[transport=send_receive,buffering=in_place]",
        "megatron=2",
        "megatron=2[sequence_parallel=true]",
        "atp=1x2",
    ),
    4: ("summa=2x2", "tesseract=2x2x1", "ddp=2,rtp=2"),
}
"""By the number of ranks: those of one line share a group of ranks, forked once."""

SLOW = (
    *LAYOUTS[4],  # four ranks are forked for these alone, and say what two say
    "rtp=2[recompute=slice]",
    "rtp=2[transport=send_receive,buffering=in_place]",
    "megatron=2[sequence_parallel=true]",
)
"""Those that repeat what others of the same code prove, of a group of their own."""

CASES = [
    pytest.param(num_ranks, layout, marks=pytest.mark.slow if layout in SLOW else ())
    for num_ranks, layouts in LAYOUTS.items()
    for layout in layouts
]


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
    loop.model.forward_backward([loop.batch(0, part) for part in range(3 if rank == 0 else 2)])


def one_freezes_a_weight(loop, rank):
    loop.model(**loop.batch(0)).loss.backward()
    loop.model.model.embed_tokens.weight.requires_grad_(rank != 0)
    loop.model(**loop.batch(1))


def another_model(loop, rank):
    other = loop.make(2)
    (other if rank == 0 else loop.model)(**loop.batch(0))


def one_closes(loop, rank):
    if rank == 0:
        loop.model.close()
    else:
        loop.model(**loop.batch(0))


def a_step_that_one_leaves_out(loop, rank, **kind):
    optimizer = torch.optim.AdamW(loop.model.parameters(), lr=0.1, **kind)
    loop.model(**loop.batch(0)).loss.backward()
    if rank == 0:
        optimizer.step()
    optimizer.zero_grad()
    loop.model(**loop.batch(1))


def a_fused_step_that_one_leaves_out(loop, rank):
    a_step_that_one_leaves_out(loop, rank, fused=True)


def a_step_over_lists_that_one_leaves_out(loop, rank):
    a_step_that_one_leaves_out(loop, rank, foreach=True)


def gradients_that_one_does_not_clear(loop, rank):
    optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    for number in range(3):
        loop.model(**loop.batch(number)).loss.backward()
        optimizer.step()
        if rank == 0 or number == 0:
            optimizer.zero_grad()


def one_gathers_whole_weights(loop, rank):
    if rank == 0:
        loop.model.full_state_dict()
    else:
        loop.model(**loop.batch(0))


def one_saves(loop, rank):
    if rank == 0:
        rotorch.save("nowhere", loop.model, step=1)
    else:
        loop.model(**loop.batch(0))


def one_loads(loop, rank):
    if rank == 0:
        rotorch.load("nowhere", loop.model)
    else:
        rotorch.save("nowhere", loop.model, step=1)


EXPECTED = {
    one_gathers_whole_weights: "rank 0 gathers whole weights, {others} calls the model",
    one_saves: "rank 0 calls rotorch.save, {others} calls the model",
    one_loads: "rank 0 calls rotorch.load, {others} calls rotorch.save",
    **dict.fromkeys(
        (a_step_that_one_leaves_out, a_fused_step_that_one_leaves_out, a_step_over_lists_that_one_leaves_out),
        "others have not: rank 0 yes, {others} no. Let all of them call optimizer.step()",
    ),
    gradients_that_one_does_not_clear: "not cleared: rank 0 none, {others} some. Let all of them call",
    one_batch_more: "rank 0 calls the model, {others} calls evaluate",
    one_forward_more: "rank 0 calls the model, {others} calls backward",
    a_backward_that_one_leaves_out: "rank 0 calls backward, {others} calls the model",
    one_micro_batch_less: "ranks have different numbers of micro-batches: rank 0 3, {others} 2",
    one_freezes_a_weight: "they train: 'model.embed_tokens.weight' (rank 0 frozen, {others} trained). Let all ranks",
    another_model: "calls the model that is not the others'",
    one_closes: "rank 0 closes the model, {others} calls the model",
}


def steps_without_gradients(config):
    """One rank alone calls an optimizer that has nothing to write; the next call goes on."""
    model = rotorch.parallelize(build(config, seed=1), "ddp=2", device="cpu")
    rank = torch.distributed.get_rank()
    loop = Loop(model, None, model.batch_rank, model.config.vocab_size)
    model(**loop.batch(0)).loss.backward()
    model.zero_grad()
    if rank == 0:
        torch.optim.AdamW(model.parameters(), fused=True).step()
    return model(**loop.batch(1)).loss.item()


def test_a_step_that_writes_nothing_is_none(tiny):
    assert len(run_ranks(steps_without_gradients, load_config(tiny("llama")), num_ranks=2)) == 2


def another_batch(loop, rank):
    other = Loop(loop.model, None, rank, loop.vocab_size)
    loop.model(**other.batch(0)).loss.backward()
    with torch.no_grad():
        loop.model(**other.batch(1))


def another_batch_of_a_step(loop, rank):
    other = Loop(loop.model, None, rank, loop.vocab_size)
    loop.model.forward_backward([other.batch(0, part) for part in range(2)])


SHARING = ("megatron=2", "megatron=2[sequence_parallel=true]", "atp=1x2", "summa=2x2", "tesseract=2x2x1")
"""Layouts in which several ranks have one batch."""


def all_messages(config, layouts):
    """Messages of this rank, by layout and mistake."""
    whats = (*EXPECTED, another_batch, another_batch_of_a_step)
    return {(layout, what.__name__): message_of(what, config, layout) for layout in layouts for what in whats}


def message_of(what, config, layout):
    def make(seed):
        return rotorch.parallelize(build(config, seed=seed), layout, device="cpu")

    model = make(1)
    loop = Loop(model, make, model.batch_rank, config.vocab_size)
    try:
        what(loop, torch.distributed.get_rank())
    except ConfigError as error:
        return str(error)
    return "nothing was said"


@pytest.fixture(scope="module")
def told(tiny, warm):
    """Returns the messages of each rank, of the layouts measured together with one."""
    config = load_config(tiny("llama"))
    config.num_hidden_layers, config.vocab_size = 1, 90

    @cache
    def measured(num_ranks, *, slow):
        layouts = [layout for layout in LAYOUTS[num_ranks] if (layout in SLOW) == slow]
        # So long without a result: all layouts are one, and a machine may be busy.
        return run_ranks(all_messages, config, layouts, num_ranks=num_ranks, timeout_s=1800)

    return lambda num_ranks, layout: measured(num_ranks, slow=layout in SLOW)


@pytest.mark.parametrize(("num_ranks", "layout"), CASES)
def test_what_each_does_is_said_on_all_ranks(told, num_ranks, layout):
    for messages in told(num_ranks, layout):
        for what, text in EXPECTED.items():
            expected = text.format(others="rank 1" if num_ranks == 2 else f"ranks 1-{num_ranks - 1}")
            assert expected in messages[layout, what.__name__], (what.__name__, messages[layout, what.__name__])


@pytest.mark.parametrize(("num_ranks", "layout"), CASES)
def test_different_batches_of_ranks_that_share_one_are_named(told, num_ranks, layout):
    for messages in told(num_ranks, layout):
        for what in (another_batch, another_batch_of_a_step):
            said = messages[layout, what.__name__]
            if layout in SHARING:
                assert "ranks that share a batch were given different ones" in said and "DistributedSampler" in said
            else:
                assert said == "nothing was said"
