"""Ranks end with the process that started them, even while they wait. No torch, which takes seconds to load."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Makes the kernel kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)


def die_with_torchrun() -> None:
    """Does the same for a rank of torchrun's; does nothing in other processes.

    Must be called before anything that takes long: once torchrun has died, the parent is the process that adopts
    orphans, and nothing shows that it was torchrun before.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())
