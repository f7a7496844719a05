import os
import resource
import subprocess
import sys

import pytest

from rotorch.host_memory import give_back_freed_memory, keep_freed_memory

linux = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
STEPS = """
import resource, sys
import torch
from rotorch.host_memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = [torch.ones(1 << 20) for _ in range(8)]
    del step
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults_of_sixth_step(mode, **environment):
    """Pages that the kernel gave to a sixth step of 8 tensors of 4 MiB: 8,192 if none is kept.

    The first steps find their places.
    """
    printed = subprocess.run(
        [sys.executable, "-c", STEPS, mode],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(printed.stdout)


@linux
def test_a_step_gets_no_page_anew():
    small_threshold = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    assert faults_of_sixth_step("leave", **small_threshold) > 8_000  # so that the count can tell
    assert faults_of_sixth_step("keep") < 100


@linux
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD", "GLIBC_TUNABLES"])
def test_what_the_user_has_set_up_stays(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert keep_freed_memory() is False


@linux
def test_kept_memory_can_be_given_back():
    import torch

    keep_freed_memory()
    held = [torch.ones(1 << 20) for _ in range(8)]
    del held
    give_back_freed_memory()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(8 << 20)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before > 4_000
