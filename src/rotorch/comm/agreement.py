"""Comparison of the ranks' commands and files, through the rendezvous store, before the first message is sent.

[Note: one verdict per round]
    Rank 0 writes down a digest of its table of values, and the table. Every other rank compares the digest with its
    own, and only where that differs the table; then it writes down which of its values differ. So where all agree, a
    rank reads one digest and one verdict, and rank 0 two numbers, however many ranks there are.

    A rank that cannot start writes its refusal in place of every round's verdict. Ranks that wait in a round, or reach
    one later, read it there instead of waiting for that rank.

    The store may be a thread of rank 0's process, so no rank leaves before all have read a verdict that ends the job.
    All waiting is polling at growing distances: a wait inside of the store cannot be interrupted, and warns on stderr.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from rotorch.core.errors import ConfigError, RankFailure

Table = Mapping[str, Any]
"""Names and values, both as plain JSON, that have to be the same on all ranks."""

ROUNDS = 2
"""Largest number of comparisons per agreement: first the command, then the files it names."""

_AGREED, _REFUSED = "agreed", "refused"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.002, 0.25
_LEAVING_PAUSE_S = 0.05
_FOR_OTHERS_S = 2.0
"""Time after the first difference in which other ranks can report theirs: it decides how many ranks are named."""
_MOST_KEYS, _MOST_RANKS, _MOST_CHARACTERS = 4, 8, 80


class Disagreement(ConfigError):
    """Ranks were started differently, or another one refused to start; all ranks have been told."""


class Agreement:
    """One rank's side of the comparison.

    Args:
        store: a store that all ranks reach and that was not used for an agreement before.
        rank: this one.
        num_ranks: number of ranks.
    """

    def __init__(self, store: dist.Store, *, rank: int, num_ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._readers = num_ranks  # of a verdict that ends the job

    def enter(self) -> None:
        """Registers this rank.

        Raises:
            ConfigError: another process has this rank's number; the caller tells the others by `refuse`.
        """
        if self._store.add(f"came/{self._rank}", 1) > 1:
            raise ConfigError(f"RANK={self._rank} was given to two processes. Give each its own, from 0")

    def compare(self, table: Table, *, round_number: int, timeout_s: float) -> None:
        """Compares `table` with the other ranks' and returns if it is the same on all. All ranks.

        Args:
            table: values to compare.
            round_number: which comparison it is, less than `ROUNDS`.
            timeout_s: how long to wait for others.

        Raises:
            Disagreement: it is not, or a rank has refused to start: names keys, ranks and values. Call `leave` then.
            RankFailure: a rank did not come.
        """
        store = dist.PrefixStore(f"round-{round_number}", self._store)
        text = json.dumps(table, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        differs = False
        if self._rank == 0:
            store.set("table", text)  # before the digest, which says that it is there
            store.set("digest", digest)
        else:
            self._wait(store, "digest", timeout_s=timeout_s)
            theirs = store.get("digest").decode()
            if theirs not in (digest, _REFUSED):
                differs = True
                store.set(f"differs/{self._rank}", json.dumps(_differences(table, json.loads(store.get("table")))))
                store.add("differing", 1)
        # The first difference ends rank 0's wait too: the job ends in any case.
        if store.add("arrived", 1) == self._num_ranks or differs:
            store.set("ready", "yes")
        if self._rank == 0:
            self._wait(store, "ready", timeout_s=timeout_s)
            if not store.check(["verdict"]):  # else a rank has refused, and there is nothing to wait for
                # A refusal that another rank has written meanwhile stays.
                store.compare_set("verdict", "", json.dumps(self._judge(store, table)))
        self._wait(store, "verdict", timeout_s=timeout_s)
        verdict = json.loads(store.get("verdict"))
        if verdict["kind"] != _AGREED:
            self._readers = verdict["readers"]
            raise Disagreement(verdict["text"])

    def refuse(self, text: str) -> None:
        """Tells all ranks that this one does not start, and the reason; they read it in their next comparison."""
        verdict = json.dumps({"kind": _REFUSED, "text": text, "readers": self._num_ranks})
        for number in range(ROUNDS):
            store = dist.PrefixStore(f"round-{number}", self._store)
            store.compare_set("verdict", "", verdict)
            store.compare_set("digest", "", _REFUSED)  # ends the wait for rank 0, which may come later, and
            store.set("ready", "yes")  # its wait for this rank; both then find the verdict

    def leave(self, *, patience_s: float) -> None:
        """Waits, after a refusal or a disagreement, until all ranks have heard of it, or for `patience_s`."""
        if self._store.add("heard", 1) >= self._readers:
            self._store.set("all heard", "yes")
        end = time.monotonic() + patience_s
        while not self._store.check(["all heard"]) and time.monotonic() < end:
            time.sleep(_LEAVING_PAUSE_S)
        if self._rank:
            self._store.add("left", 1)  # its last word to the store, which goes with rank 0
            return
        while self._store.add("left", 0) < self._readers - 1 and time.monotonic() < end:
            time.sleep(_LEAVING_PAUSE_S)

    def _wait(self, store: dist.Store, key: str, *, timeout_s: float) -> None:
        end, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        while not store.check([key]):
            if time.monotonic() > end:
                raise RankFailure(f"rank {self._rank} waited {timeout_s:.0f} s for {self._missing()} to start")
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)

    def _missing(self) -> str:
        missing = [r for r in range(self._num_ranks) if not self._store.check([f"came/{r}"])]
        return format_ranks(missing) if missing else "other ranks"

    def _judge(self, store: dist.Store, table: Table) -> dict[str, Any]:
        """Rank 0's verdict; called when all ranks have come or one of them differs."""
        end = time.monotonic() + _FOR_OTHERS_S
        # Ranks that come now may differ as well: the message names all that are known by the end of this wait.
        while (arrived := store.add("arrived", 0)) < self._num_ranks and time.monotonic() < end:
            time.sleep(_FIRST_PAUSE_S)
        if not store.add("differing", 0):
            return {"kind": _AGREED}
        found = {}
        for rank in range(1, self._num_ranks):
            if store.check([f"differs/{rank}"]):
                found[rank] = json.loads(store.get(f"differs/{rank}"))
        return {"kind": "differ", "text": describe_differences(table, found), "readers": arrived}


_MISSING = "nothing"


def _differences(ours: Table, theirs: Table) -> dict[str, str]:
    """This rank's values, as text, of all keys that are not the same; `_MISSING` where it has none."""
    # As text, as the digest has them: 1, 1.0 and True are equal otherwise, and the message would name nothing.
    ours, theirs = (
        {key: json.dumps(value, sort_keys=True) for key, value in table.items()} for table in (ours, theirs)
    )
    keys = [key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)]
    return {key: _text({key: json.loads(ours[key])} if key in ours else {}, key) for key in keys}


def gathered_differences(tables: Sequence[Table], *, what: str, instead: str) -> str | None:
    """The same line for tables that ranks have given one another already, by rank; None if they are the same.

    Args:
        tables: of all ranks.
        what: begins the line: "ranks save different things".
        instead: ends it: what to do.
    """
    found = {rank: _differences(table, tables[0]) for rank, table in enumerate(tables) if table != tables[0]}
    return describe_differences(tables[0], found, what=what, instead=instead) if found else None


def describe_differences(
    table: Table,
    found: Mapping[int, Mapping[str, str]],
    *,
    what: str = "ranks were started differently",
    instead: str = "Start all of them with the same",
) -> str:
    """One line: which values differ from rank 0's, on which ranks.

    Args:
        table: rank 0's.
        found: values of other ranks that differ, as text, by rank.
        what: begins the line.
        instead: ends it: what to do.
    """
    table = json.loads(json.dumps(table))
    keys = sorted({key for values in found.values() for key in values})
    parts = []
    for key in keys[:_MOST_KEYS]:
        ranks_of: dict[str, list[int]] = {}
        for rank, values in found.items():
            if key in values:
                ranks_of.setdefault(values[key], []).append(rank)
        others = " and ".join(f"{value} on {format_ranks(ranks)}" for value, ranks in ranks_of.items())
        parts.append(f"{key} is {_text(table, key)} on rank 0 and {others}")
    more = f"; and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return f"{what}: {'; '.join(parts)}{more}. {instead}"


def format_ranks(ranks: list[int]) -> str:
    """`rank 3`, or `ranks 1, 2 and 3`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MOST_RANKS:
        return f"ranks {', '.join(map(str, ranks[:_MOST_RANKS]))} and {len(ranks) - _MOST_RANKS} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _text(table: Table, key: str) -> str:
    text = json.dumps(table[key], ensure_ascii=False) if key in table else _MISSING
    half = _MOST_CHARACTERS // 2
    # Both ends: paths begin alike.
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:half]}...{text[-half:]}"
