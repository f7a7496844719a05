"""Rings whose gradients hold no numbers until a step writes them."""

from __future__ import annotations

from rotorch.comm.home_gradients import ComingGradients
from rotorch.comm.ring import Ring


def without_gradients(ring: Ring) -> None:
    """Fills home gradients with NaN, now and where they get new memory: what is read before it was written shows."""
    gradients = ring._home_gradients
    for item in range(len(ring.numels)):
        gradients[item].fill_(float("nan"))
    if isinstance(gradients, ComingGradients):
        make = gradients._make
        gradients._make = lambda numel: make(numel).fill_(float("nan"))
