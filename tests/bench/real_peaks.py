"""Peaks of real steps, for tests that hold predicted ones to them."""

from rotorch.bench.contender import UnderLayout
from rotorch.bench.tensor_memory import measure_tensors


def peak_of(task, layout):
    """Bytes of a rank's tensors at the highest moment of its second step. All ranks."""
    contender = UnderLayout(task, parallel=layout)
    contender.forward_backward(0)
    contender.update()
    found = measure_tensors(contender, step=1)
    contender.close()
    return found.peak_bytes
