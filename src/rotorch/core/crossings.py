"""Slices that a ring over several hosts sends between them, by the hosts of its ranks. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby


def slices_between_hosts(hosts: Sequence[str]) -> tuple[int, int]:
    """Number of slices of one unit that cross between hosts in a pass, and the least number that would be enough.

    Every rank takes every slice from its owner, so a slice goes to each rank of another host. It would be enough if one
    rank of each host took it and shared it there.

    Args:
        hosts: host of each rank of the ring, by position.
    """
    on_host = Counter(hosts)
    return sum(len(hosts) - on_host[host] for host in hosts), len(hosts) * (len(on_host) - 1)


def even_hosts(hosts: Sequence[str]) -> int:
    """Number of hosts, if there are several and each has as many ranks, more than one, side by side; otherwise 0.

    Args:
        hosts: host of each rank of the ring, by position.
    """
    blocks = [len(list(ranks)) for _, ranks in groupby(hosts)]
    alike = len(blocks) == len(set(hosts)) > 1 and len(set(blocks)) == 1
    return len(blocks) if alike and blocks[0] > 1 else 0


def warning_of_crossings(hosts: Sequence[str]) -> str:
    """The warning for a ring whose slices cross between hosts more often than they must; empty if they do not."""
    crossing, enough = slices_between_hosts(hosts)
    if crossing <= enough:
        return ""
    num_hosts, size = len(set(hosts)), len(hosts)
    advice = ""
    if even_hosts(hosts):
        layout = f"ddp={num_hosts},rtp={size // num_hosts}"
        advice = f". If a host has memory for the model's state, write {layout}: then only gradients cross"
    return (
        f"rtp: the {size} ranks of a ring are on {num_hosts} hosts: in each pass {crossing} slices of a unit cross "
        f"between hosts, where {enough} would be enough if the ranks of a host shared them{advice}"
    )
