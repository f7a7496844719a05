"""The threads that carry gloo's messages, beside the one that computes.

A thread that wakes up preempts the running one, and gloo's wakes up whenever a socket has room or bytes for it, a few
hundred times a step; where ranks have a core each or less, it preempts computing. Under Linux's `SCHED_BATCH` a thread
waits for its turn instead: then gloo's finds more bytes at once, and computing keeps its caches. That took 5 to
20 % off most steps of two ranks and of four on two cores (docs/lab_log.md). Where a core is free nothing changes.

Threads are known by their names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rotorch._torch_private import GLOO_THREADS


def let_computing_go_first() -> int:
    """Makes this process's threads that carry gloo's messages wait for their turn, from now on.

    Leaves alone threads that have been given another policy, and systems that forbid it or have no such policy.

    Returns:
        Number of threads that do so.
    """
    if sys.platform != "linux":
        return 0
    return sum(_waits_for_its_turn(task.parent) for task in Path("/proc/self/task").glob("*/comm"))


def _waits_for_its_turn(task: Path) -> bool:
    number = int(task.name)
    try:
        if (task / "comm").read_text(errors="replace").strip() not in GLOO_THREADS:
            return False
        if os.sched_getscheduler(number) == os.SCHED_OTHER:
            os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))
        return os.sched_getscheduler(number) == os.SCHED_BATCH
    except OSError:  # it has ended meanwhile, or a container forbids it
        return False
