"""Ranks end with what started them, whatever they are waiting for. No torch: that takes seconds to load."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Has the kernel kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)


def die_with_torchrun() -> None:
    """The same for a rank of torchrun's; anything else is left alone.

    Called before the first thing that takes long: once torchrun is gone, the parent is whoever takes in orphans, and
    nothing tells that it was another one.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())
