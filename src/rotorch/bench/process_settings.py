"""Process settings of `parallelize` on CPU, for the ranks of every row: so that only layouts differ.

[Note: equal processes]
    `parallelize` makes two settings of a process that are no part of any layout: the allocator keeps memory that a step
    frees (`process/host_memory.py`), and gloo's threads yield to computation (`process/gloo_threads.py`). Any library
    gains by them, so a comparison in which only one side has them compares processes. The bench's ranks make them for
    every row, the limit and other libraries included. Peers "as torch leaves them" run without: beside the same peers
    with these settings they show their value.
"""

from __future__ import annotations

from dataclasses import dataclass

from rotorch.mesh import pick_device
from rotorch.process.gloo_threads import let_computing_go_first
from rotorch.process.host_memory import keep_freed_memory


@dataclass(frozen=True)
class ProcessSettings:
    """The settings of one process.

    Attributes:
        keeps_freed_memory: True if the allocator keeps memory that a step frees.
        waiting_threads: of gloo's, those that let computing go first.
    """

    keeps_freed_memory: bool = False
    waiting_threads: int = 0


class ProcessSetter:
    """Makes the settings of this process (see [Note: equal processes]).

    Args:
        device: "auto", "cpu" or "cuda"; nothing is set for an accelerator.
        as_torch_leaves_it: set nothing.
    """

    def __init__(self, device: str, *, as_torch_leaves_it: bool = False) -> None:
        self._sets = not as_torch_leaves_it and pick_device(device).type == "cpu"
        self._keeps = keep_freed_memory() if self._sets else False

    def settings(self) -> ProcessSettings:
        """Returns the settings in force, and applies them to threads started since the last call."""
        return ProcessSettings(self._keeps, let_computing_go_first() if self._sets else 0)
