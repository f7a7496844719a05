"""Tests that need a CUDA device: `make test-gpu`. None has run yet; the same state machines run on CPU in tests/comm.

Ranks are forked and share the GPU, so this process must not touch CUDA itself: it only asks the driver how many GPUs
there are. Run these tests by themselves, since others may touch it.
"""

import pytest
import torch

from rotorch.comm.transports.peer_memory import OVERLAPPING


def pytest_collection_modifyitems(items):
    there = torch.cuda.device_count() > 0
    for item in items:
        if "gpu" in item.path.parent.name:
            item.add_marker(pytest.mark.gpu)
            if not there:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: torch sees none"))
            elif torch.cuda.is_initialized():
                item.add_marker(pytest.mark.skip(reason="CUDA was used in this process before: run make test-gpu"))


@pytest.fixture(autouse=True)
def one_gpu_is_enough(monkeypatch):
    monkeypatch.setenv(OVERLAPPING, "1")
