"""The state of random number generators, to draw the same again: dropout's mask, when a slice is recomputed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


@dataclass(frozen=True)
class RandomState:
    """Of the CPU's generator, and of that of the device on which a unit computes.

    Attributes:
        cpu: state of the CPU's.
        device_type: kind of the device.
        devices: its index; empty for the CPU.
        states: its state.
    """

    cpu: Tensor
    device_type: str
    devices: list[int]
    states: list[Tensor]

    @staticmethod
    def now(like: Tensor) -> RandomState:
        """The state at this moment, of the CPU and of the device of `like`."""
        devices, states = get_device_states(like)
        return RandomState(torch.get_rng_state(), like.device.type, devices, states)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within it, what was drawn after `now` is drawn again; then random numbers go on as before."""
        with torch.random.fork_rng(self.devices, device_type=self.device_type if self.devices else None):
            torch.set_rng_state(self.cpu)
            if self.devices:
                set_device_states(self.devices, self.states, device_type=self.device_type)
            yield
