"""Random numbers drawn again, without disturbing those that follow."""

import pytest
import torch

from rotorch.ops import random_state
from rotorch.ops.random_state import RandomState


def test_the_same_is_drawn_again_and_then_goes_on():
    state = RandomState.now(torch.empty(1))
    first, second = torch.rand(3), torch.rand(3)
    torch.manual_seed(5)
    with state.again():
        assert torch.equal(torch.rand(3), first)
        with state.again():
            assert torch.equal(torch.rand(3), first)
        assert torch.equal(torch.rand(3), second)
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), after)


def test_also_after_an_exception():
    state = RandomState.now(torch.empty(1))
    torch.manual_seed(5)
    with pytest.raises(KeyError), state.again():
        torch.rand(3)
        raise KeyError
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), after)


def test_the_device_s_generator_is_among_them(monkeypatch):
    """Without a GPU: that of the device on which the unit computes is asked for, kept, and set."""
    calls = []
    monkeypatch.setattr(random_state, "get_device_states", lambda like: ([2], [torch.tensor([7])]))
    monkeypatch.setattr(random_state, "set_device_states", lambda *a, **k: calls.append((*a, k)))
    forked = []

    class Fork:
        def __init__(self, devices, device_type=None):
            forked.append((devices, device_type))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(torch.random, "fork_rng", Fork)
    state = RandomState.now(torch.empty(1, device="meta"))
    with state.again():
        assert calls == [([2], [torch.tensor([7])], {"device_type": "meta"})]
    assert forked == [([2], "meta")]
