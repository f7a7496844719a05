import linecache
import os
import subprocess
import sys
import weakref

import pytest

from rotorch.process import host_memory
from rotorch.process.host_memory import available_bytes, keep_freed_memory, make_room

linux = pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
STEPS = """
import resource, sys
import torch
from rotorch.process.host_memory import give_back_freed_memory, keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step = [torch.ones(1 << 20) for _ in range(8)]
    del step
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
if sys.argv[1] == "keep":
    give_back_freed_memory()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(8 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode, **environment):
    """Pages that the kernel gives to a process, of which 8,192 are what it asks for.

    To a sixth step of 8 tensors of 4 MiB (the first steps find their places), and to a tensor of 32 MiB after what was
    kept is given back.
    """
    printed = subprocess.run(
        [sys.executable, "-c", STEPS, mode],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(line) for line in printed.stdout.split()]


@linux
def test_a_step_gets_no_page_anew_until_kept_memory_is_given_back():
    small_threshold = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    assert faults("leave", **small_threshold)[0] > 8_000  # so that the count can tell
    of_a_step, of_a_tensor = faults("keep")
    assert of_a_step < 100
    assert of_a_tensor > 8  # 8,192 pages, or 16 of 2 MiB


@linux
@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD", "GLIBC_TUNABLES"])
def test_what_the_user_has_set_up_stays(monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert keep_freed_memory() is False


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        (
            "0::/job/rank",
            {"job/memory.max": "max", "job/rank/memory.max": "700", "job/rank/memory.current": "300"},
            [400],
        ),
        ("0::/job/rank", {"job/memory.max": "500", "job/memory.current": "450", "memory.max": "9"}, [50]),
        ("0::/", {"memory.max": "max", "memory.current": "5"}, []),
        (
            "3:cpu:/x\n2:memory:/x",
            {"memory/x/memory.limit_in_bytes": "80", "memory/x/memory.usage_in_bytes": "20"},
            [60],
        ),
    ],
)
def test_what_is_left_in_cgroups(own, files, left, tmp_path):
    for name, text in {"own": own, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    limits = host_memory._limits_of_cgroups(tmp_path, tmp_path / "own")
    assert [limit - used for limit, used in limits] == left


def test_some_memory_is_left():
    assert 1 << 20 < available_bytes() < 1 << 60


@linux
def test_what_is_left_of_the_address_space():
    code = (
        "import resource; from rotorch.process.host_memory import address_space_left_bytes as left; print(left());"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 31, resource.RLIM_INFINITY)); print(left())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert printed[0] == "None" and 1 << 30 < int(printed[1]) < 1 << 31


class Node:
    pass


def test_room_is_made_by_what_can_be_had_again(monkeypatch):
    monkeypatch.setattr(linecache, "cache", {"<cell 1>": (7, None, ["x = 1\n"], "<cell 1>")})
    assert linecache.getline(__file__, 1) and __file__ in linecache.cache
    node = Node()
    node.itself = node
    gone = weakref.ref(node)
    del node
    make_room()
    assert gone() is None
    assert list(linecache.cache) == ["<cell 1>"]
    assert linecache.getline(__file__, 1) == "import linecache\n"
