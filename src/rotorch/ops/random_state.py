"""The state of random number generators, to draw the same numbers again: dropout's mask in a slice's recomputation.

[Note: ranks that share a batch]
    Outside of modules that are cut they must draw the same numbers, or their activations would differ; inside, each has
    other heads or columns and draws its own. So a pass begins from a state that all of them share, and drawing inside
    does not advance it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states


@dataclass(frozen=True)
class RandomState:
    """State of the CPU's generator, and of that of the device on which a unit computes.

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
        # The device of `like` only: a state of each GPU of the host would be copied otherwise.
        devices, states = get_device_states(like)
        return RandomState(torch.get_rng_state(), like.device.type, devices, states)

    def put_back(self) -> None:
        """Sets the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.devices:
            set_device_states(self.devices, self.states, device_type=self.device_type)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draws the numbers after `now` again inside the block; afterwards the generators go on as before it."""
        with torch.random.fork_rng(self.devices, device_type=self.device_type if self.devices else None):
            self.put_back()
            yield


def seed_generators(seed: int) -> None:
    """Seeds the generators of the CPU, and of GPUs if this process uses any.

    `torch.manual_seed` notes the call for a GPU that may come to be used later, with the stack of now: milliseconds.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Makes ranks with the same `seed` draw the same inside the block; afterwards the generators go on as before it."""
    # Without initialising CUDA on a rank that computes on CPU: its context alone takes hundreds of MB.
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        seed_generators(seed)
        yield


def draw_seed() -> int:
    """Draws from the CPU's generator on every device: no GPU is waited for."""
    return int(torch.randint(2**62, (), device="cpu"))


@contextmanager
def own_rng(position: int, *, like: Sequence[Any], active: bool) -> Iterator[None]:
    """Makes each rank draw numbers of its own inside the block; afterwards all go on alike (see the module's note).

    Args:
        position: this rank's among the ranks that share a batch.
        like: tensors (and other objects), whose device's generator is saved, too.
        active: False: do nothing.
    """
    if not active:
        yield
        return
    # From the shared generator, so all ranks have the same seed and go on alike; the position tells them apart.
    seed = draw_seed()
    devices, states = get_device_states(*like)
    # After the draw, so that the next block gets another seed.
    cpu = torch.get_rng_state()
    try:
        seed_generators(seed + position)
        yield
    finally:
        torch.set_rng_state(cpu)
        if devices:
            set_device_states(devices, states, device_type="cuda")
