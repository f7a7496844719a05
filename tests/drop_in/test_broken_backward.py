"""Passes that an exception breaks off: earlier gradients are kept, or gone with a warning; never changed."""

import warnings
from contextlib import suppress

import pytest
import torch
from idioms import Loop
from lockstep import build

import rotorch
from rotorch.models.hf import load_config
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks

KEPT = ("ddp=2", "megatron=2", "atp=1x2")
GONE = (
    "fsdp=2",
    "rtp=2",
    "rtp=2[recompute=slice]",
    "rtp=2[transport=send_receive]",
    "rtp=2[transport=send_receive,buffering=in_place]",
)
"""Layouts whose backward adds to earlier gradients in their own memory; of fsdp torch says that they are lost."""


@pytest.fixture(scope="module")
def ranks(tiny):
    """Results of each rank, by layout."""
    config = load_config(tiny("llama"))
    config.num_hidden_layers, config.vocab_size = 2, 91
    load_step_code(["ddp", "fsdp", "megatron", "atp", "rtp"])
    return run_ranks(everything, config, num_ranks=2, timeout_s=300)


def everything(config):
    found = {layout: broken_off(config, layout) for layout in KEPT + GONE}
    return {**found, "first pass": {layout: never_begun(config, layout) for layout in ("ddp=2", "fsdp=2", "rtp=2")}}


def never_begun(config, layout):
    """The error of a hook of the user's that ends the very first pass before it begins; the loss of the next one."""
    model = rotorch.parallelize(build(config, seed=1), layout, device="cpu")
    loop = Loop(model, None, model.batch_rank, config.vocab_size)

    def fail(*_):
        raise KeyError("hook")

    handle = model.register_forward_pre_hook(fail, prepend=True)
    try:
        model(**loop.batch(0))
    except Exception as error:
        seen = repr(error)
    handle.remove()
    loss = model(**loop.batch(0)).loss.item()
    model.close()
    return seen, loss


def break_off(loop, batch):
    """Runs a backward that fails in the end; returns what was warned of."""

    def fail(_):
        raise KeyError("hook")

    handle = loop.model.get_input_embeddings().register_forward_hook(
        lambda _, __, output: output.register_hook(fail) and None
    )
    loss = loop.model(**batch).loss
    handle.remove()
    with warnings.catch_warnings(record=True) as caught, suppress(KeyError):
        warnings.simplefilter("always")
        loss.backward()
    return [str(each.message) for each in caught]


def broken_off(config, layout):
    """The fate of earlier gradients; warnings; the next pass's error after they are zeroed in place."""
    model = rotorch.parallelize(build(config, seed=1), layout, device="cpu")
    loop, parameters = Loop(model, None, model.batch_rank, config.vocab_size), list(model.parameters())

    def gradients():
        return [None if p.grad is None else p.grad.to_local().clone() for p in parameters]

    model(**loop.batch(0)).loss.backward()
    alone = gradients()
    nothing_before = break_off_after_clearing(loop, parameters)
    model(**loop.batch(0)).loss.backward()
    with suppress(TypeError):
        model(**loop.batch(1), unheard_of=1.0)
    after_forward = same_as(alone, gradients())
    said = break_off(loop, loop.batch(1))
    # Read as an optimizer does, with no word to the model in between.
    now = gradients()
    same = same_as(alone, now)
    cut = [not all(each.is_replicate() for each in p.placements) for p in parameters]
    gone = all(g is None for g, is_cut in zip(now, cut, strict=True) if is_cut)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
    model(**loop.batch(0)).loss.backward()
    off = max(float((g - a).abs().max()) if g.numel() else 0.0 for g, a in zip(gradients(), alone, strict=True))
    model.close()
    return same, gone, said, off, after_forward, nothing_before


def same_as(expected, found):
    return all(g is not None and torch.equal(g, e) for g, e in zip(found, expected, strict=True))


def break_off_after_clearing(loop, parameters):
    for parameter in parameters:
        parameter.grad = None
    said = break_off(loop, loop.batch(1))
    left = [p for p in parameters if p.grad is not None]
    return said, len(left)


@pytest.mark.parametrize("layout", KEPT + GONE)
def test_earlier_gradients_are_kept_or_gone_with_a_warning(ranks, layout):
    for told in ranks:
        same, gone, said, *_ = told[layout]
        if layout in KEPT:
            assert same and not said
        else:
            assert gone
            (text,) = said
            assert "earlier gradients are gone" in text and "zero_grad" in text and "\n" not in text


@pytest.mark.parametrize("layout", KEPT + GONE)
def test_nothing_is_said_or_left_where_nothing_was_there(ranks, layout):
    for told in ranks:
        assert told[layout][-1] == ([], 0)


@pytest.mark.parametrize("layout", KEPT + GONE)
def test_gradients_zeroed_after_it_stay_zero(ranks, layout):
    for told in ranks:
        assert told[layout][3] < 1e-10


@pytest.mark.parametrize("layout", KEPT + GONE)
def test_a_broken_forward_changes_no_gradients(ranks, layout):
    for told in ranks:
        assert told[layout][4]


def test_an_error_before_the_first_pass_is_the_users_own(ranks):
    for told in ranks:
        found = told["first pass"]
        assert {seen for seen, _ in found.values()} == {"KeyError('hook')"}
        losses = [loss for _, loss in found.values()]
        assert max(losses) - min(losses) < 1e-10
