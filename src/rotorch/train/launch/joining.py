"""One rank of a job that torchrun, Slurm or an operator started: its place, and its agreement with other ranks.

[Note: what ranks compare]
    Each rank reads the configuration, the text and the model for itself, so ranks may have read different ones.
    They compare twice, before anything of the run is written: settings and versions, and, after reading the
    files, their contents. Paths count, too: ranks with two values of `train.out` would each
    write half of a checkpoint. `PER_HOST` names keys that may differ.

    Ranks that the launcher forks have its configuration and its data; they compare only the arguments of `parallelize`.

    No torch is loaded before `join`: errors are reported before the seconds that loading takes.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotorch.core.errors import ConfigError, RankFailure

if TYPE_CHECKING:
    import torch.distributed as dist

    from rotorch.comm.agreement import Agreement
    from rotorch.train.checks.preflight import CheckedRun

PER_HOST = frozenset({"data.cache_dir"})
"""Keys of a run that may differ between hosts: token files are compared by their contents, wherever they lie."""

_TELL_S = 60.0
"""For how long a rank that refused tries to find the others, and waits until all have heard of it."""
_MOST_RANKS = 1 << 20


class JobRank:
    """This process as one of the ranks that something else started.

    Attributes:
        rank: its number.
        num_ranks: number of ranks.
        store: store of all ranks, once joined.
    """

    def __init__(self, *, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.store: dist.Store | None = None
        self._agreement: Agreement | None = None
        self._is_lost = False
        self._has_told = False
        self._has_agreed = False

    def __str__(self) -> str:
        return f"rank {self.rank} on {socket.gethostname()}"

    def join(self, *, timeout_s: float) -> None:
        """Finds the store of all ranks.

        Raises:
            RankFailure: nobody serves it within `timeout_s`.
            ConfigError: its host has no address, this process cannot serve it, or is not the only one of its number.
        """
        if self._agreement is not None:
            return
        import torch.distributed as dist

        from rotorch._torch_private import default_store
        from rotorch.comm.agreement import Agreement
        from rotorch.mesh import find_store

        if dist.is_initialized():  # whoever started the ranks has joined them, as Ray Train does
            self.store = default_store()
        else:
            where = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
            self._is_lost = True  # until the store is found: whoever did not find it need not look for it again
            try:
                self.store = find_store(timeout_s=timeout_s)
            except RankFailure:
                raise
            except RuntimeError as error:
                why = " ".join(str(error).split())
                if "EADDRINUSE" in why or "EADDRNOTAVAIL" in why:
                    raise ConfigError(
                        f"rank 0 cannot listen at {where}: the port is taken, or the address is another host's. Write "
                        "the address of rank 0's host, and a free port"
                    ) from None
                raise RankFailure(
                    f"{self} did not find rank 0 at {where} within {timeout_s:g} s: {why}. Start rank 0, and give all "
                    "ranks the address of its host and its port"
                ) from None
        self._is_lost = False
        agreement = Agreement(dist.PrefixStore("agreement", self.store), rank=self.rank, num_ranks=self.num_ranks)
        self._agreement = agreement
        agreement.enter()

    def compare(self, table: Mapping[str, Any], *, round_number: int, timeout_s: float) -> None:
        """Joins, and returns when `table` is the same on all ranks (see `comm/agreement.py`). All ranks."""
        if self.num_ranks == 1:
            return
        self.join(timeout_s=timeout_s)
        assert self._agreement is not None
        from rotorch.comm.agreement import ROUNDS, Disagreement

        try:
            self._agreement.compare(table, round_number=round_number, timeout_s=timeout_s)
        except Disagreement:
            self._has_told = True
            raise
        self._has_agreed = round_number == ROUNDS - 1

    def tell(self, text: str) -> None:
        """Tells the other ranks why this one does not start, if they can be found, and stays until they have heard it.

        After a disagreement, which all know of, it only stays. Once the ranks have agreed nobody listens here any more.
        """
        if self.num_ranks == 1 or self._has_agreed or self._is_lost:
            return
        try:
            self.join(timeout_s=_TELL_S)
        except (ConfigError, RankFailure):
            if self._agreement is None:
                return  # nobody is there to be told
        assert self._agreement is not None
        with suppress(RuntimeError):  # the others have gone, and the store with them
            if not self._has_told:
                self._agreement.refuse(f"{self} did not start: {text}")
            self._agreement.leave(patience_s=_TELL_S)


@contextmanager
def telling(job: JobRank) -> Iterator[None]:
    """Tells the other ranks of an error within it that keeps this one from starting."""
    try:
        yield
    except (ConfigError, OSError) as error:
        job.tell(str(error))
        raise


def job_rank() -> JobRank | None:
    """This process's place among ranks that something else started; None if it starts ranks itself.

    Raises:
        ConfigError: the environment cannot be right.
    """
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in os.environ:
            raise ConfigError(
                f"{other}={os.environ[other]!r} is set, and {name} is not. Set both for a rank of several, or neither"
            )
    num_ranks = _number("WORLD_SIZE", least=1, most=_MOST_RANKS, what="how many ranks there are")
    rank = _number("RANK", least=0, most=num_ranks - 1, what=f"this rank's number among WORLD_SIZE={num_ranks}")
    local = num_ranks
    if "LOCAL_WORLD_SIZE" in os.environ:
        local = _number("LOCAL_WORLD_SIZE", least=1, most=num_ranks, what="how many ranks this host has")
    if "LOCAL_RANK" in os.environ:
        _number("LOCAL_RANK", least=0, most=local - 1, what="this rank's number on its host")
    if not _has_joined():
        if not os.environ.get("MASTER_ADDR"):
            raise ConfigError("RANK is set, and MASTER_ADDR is not. Set it to the name or address of rank 0's host")
        if "MASTER_PORT" not in os.environ:
            raise ConfigError("RANK is set, and MASTER_PORT is not. Set it to a free port of rank 0's host, e.g. 29500")
        _number("MASTER_PORT", least=1, most=65535, what="a free port of rank 0's host")
    return JobRank(rank=rank, num_ranks=num_ranks)


def _number(name: str, *, least: int, most: int, what: str) -> int:
    text = os.environ[name]
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise ConfigError(f"{name}={text!r}: write {what}, a number from {least} to {most}")
    return int(text)


def _has_joined() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_initialized()


# ---------------------------------------------------------------- what they compare


def rank_settings(config: Mapping[str, Any], *, resume: bool, num_ranks: int) -> dict[str, Any]:
    """Returns a rank's settings by keys as a user writes them, as plain JSON.

    Args:
        config: the `RunConfig`, as plain JSON.
        resume: True if it goes on from a checkpoint.
        num_ranks: as many as it was told of.
    """
    told = flat(config)
    return {
        **{key: value for key, value in told.items() if key not in PER_HOST},
        "--resume": resume,
        "WORLD_SIZE": num_ranks,
        **versions(),
    }


def rank_findings(run: CheckedRun, *, corpus: str) -> dict[str, Any]:
    """Contents of the files that a rank has read, and values derived from them; as plain JSON.

    Of published weights it is names and sizes: to read all bytes of them would take each rank as long as the run needs
    to load its part.
    """
    files = {path.name: path.stat().st_size for path in published_files(Path(run.config.model.init))}
    model = json.loads(run.model_config.to_json_string(use_diff=False))
    return {
        "parallel.layout, complete": ",".join(map(str, run.strategies)),
        "train.global_batch": run.sizes.global_batch,
        "the text as tokens (number-checksum)": corpus,
        "the step of the checkpoint that --resume goes on from": run.resume and run.resume.manifest.step,
        **flat(model, prefix="model.config."),
        **{f"model.init: bytes of {name}": size for name, size in files.items()},
    }


def published_files(init: Path) -> list[Path]:
    """The files of published weights that `model.init` names; none of weights that are initialised."""
    from rotorch.models.gguf import find_gguf

    gguf = find_gguf(init)
    return sorted(init.glob("*.safetensors")) if gguf is None else [gguf]


def versions() -> dict[str, str]:
    """Versions that could make two ranks compute differently. Python's patch releases may differ."""
    found = {"version of python": ".".join(platform.python_version_tuple()[:2])}
    for package in ("rotorch", "torch", "transformers"):
        try:
            found[f"version of {package}"] = version(package)
        except PackageNotFoundError:
            found[f"version of {package}"] = "unknown"
    return found


def flat(table: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """Values of a table of tables by their whole keys: `train.steps`."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            found.update(flat(value, prefix=f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found
