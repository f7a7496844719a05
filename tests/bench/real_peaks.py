"""Peaks of real steps, for tests that hold predicted ones to them."""

from rotorch.bench.contender import UnderLayout
from rotorch.bench.tensor_memory import measure_tensors


def peak_of(task, layout, steps=1):
    """Bytes of a rank's tensors at the highest moment of a step, the least of some after the first. All ranks."""
    contender = UnderLayout(task, parallel=layout)
    contender.forward_backward(0)
    contender.update()
    found = [measure_tensors(contender, step=1 + step).peak_bytes for step in range(steps)]
    contender.close()
    return min(found)
