"""A suite: many cases of a bench in one TOML file, and the results that exist already. No torch.

[Note: measured already]
    A case's result carries a key: a digest of its inputs, that is, the package's source, the run's file, the rows, the
    number of rounds and steps, and the versions of the libraries. A case with a result of the same key is skipped:
    only the machine could change it. So an interrupted suite continues at the first missing case.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from rotorch.bench.peers import PEERS, find_peer, how_to_install
from rotorch.core.errors import ConfigError, nearest


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Batch(_Table):
    """Batch of one rank in a step.

    Attributes:
        sequence_length: tokens per sample.
        micro_batch: samples.
    """

    sequence_length: PositiveInt
    micro_batch: PositiveInt


class Rows(_Table):
    """Defaults of a suite for all of its cases; a case may override each of them.

    Attributes:
        rounds: turns of every row.
        steps: of a row per turn.
        process_memory: True if processes are measured, too.
        parallel: layouts; `{n}` is the number of ranks.
        peers: other libraries' rows; those that are not installed are left out, and bars that name them.
        bars: bars that must be reached.
    """

    rounds: PositiveInt = 5
    steps: PositiveInt = 5
    process_memory: bool = False
    parallel: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    bars: tuple[str, ...] = ()


class CaseSection(Rows):
    """[[case]]: one run, on several numbers of ranks, with several batches.

    Attributes:
        run: file of the run, beside the suite's.
        nproc: numbers of ranks.
        batch: batch of each rank.
    """

    run: str
    nproc: tuple[PositiveInt, ...] = Field(min_length=1)
    batch: tuple[Batch, ...] = Field(min_length=1)


class _SuiteFile(Rows):
    case: tuple[CaseSection, ...] = Field(min_length=1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of `rotorch bench`.

    Attributes:
        name: "llama-h384-2ranks-512tokens".
        run: path of the run's file.
        nproc: number of ranks.
        overrides: `key=value` for the run.
        rows: settings of its measurement; texts have their `{n}` filled in, peers are installed.
        missing: peers that are left out, and why.
    """

    name: str
    run: Path
    nproc: int
    overrides: tuple[str, ...]
    rows: Rows
    missing: tuple[str, ...]

    def key(self) -> str:
        """Digest of all that its result depends on (see [Note: measured already])."""
        says = {
            "source": _digest_of_source(),
            "run": self.run.read_text("utf-8"),
            "overrides": self.overrides,
            "nproc": self.nproc,
            "rows": self.rows.model_dump(mode="json"),
            "versions": {
                name: _version(name) for name in sorted({"transformers", *(p.library for p in PEERS.values())})
            },
        }
        return hashlib.blake2b(json.dumps(says, sort_keys=True).encode(), digest_size=12).hexdigest()


def load_suite(path: str | Path, *, rounds: int | None = None, steps: int | None = None) -> list[Case]:
    """Reads a suite and lists its cases.

    Args:
        path: the TOML file.
        rounds: in place of what the file says.
        steps: in place of what the file says.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, a run is missing, or two cases have one name.
    """
    path = Path(path)
    try:
        raw = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}. Write the path of a suite's TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    try:
        suite = _SuiteFile.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where, key = ".".join(map(str, first["loc"])), str(first["loc"][-1])
        known = {*_SuiteFile.model_fields, *CaseSection.model_fields, *Batch.model_fields}
        hint = nearest(key, known=known) if first["type"] == "extra_forbidden" else ""
        raise ConfigError(f"{path}: {where}: {first['msg'].lower()}{hint}") from None
    given = {name: value for name, value in (("rounds", rounds), ("steps", steps)) if value is not None}
    cases = [
        _case(section, suite=suite, given=given, nproc=nproc, batch=batch, directory=path.absolute().parent)
        for section in suite.case
        for nproc in section.nproc
        for batch in section.batch
    ]
    names = [case.name for case in cases]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path}: two cases are {twice!r}. Leave one of them out")
    return cases


def select(cases: Sequence[Case], *, patterns: Sequence[str]) -> list[Case]:
    """The cases that a pattern (`llama-*-2ranks-*`) matches; all, if there is none.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    for pattern in patterns:
        if not fnmatch.filter([case.name for case in cases], pattern):
            raise ConfigError(
                f"suite: no case {pattern!r}{nearest(pattern, known=[case.name for case in cases])}. "
                f"Cases: {', '.join(case.name for case in cases)}"
            )
    return [case for case in cases if not patterns or any(fnmatch.fnmatch(case.name, p) for p in patterns)]


def read_result(file: Path) -> dict[str, Any] | None:
    """Reads the record of a case; None if there is none, or if no suite wrote it."""
    try:
        record: dict[str, Any] = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and "suite" in record else None


def _case(
    section: CaseSection, *, suite: _SuiteFile, given: dict[str, int], nproc: int, batch: Batch, directory: Path
) -> Case:
    run = directory / section.run
    if not run.is_file():
        known = [file.name for file in directory.glob("*.toml")]
        raise ConfigError(f"suite: no run {section.run!r} in {directory}{nearest(section.run, known=known)}")
    values = {name: getattr(suite, name) for name in Rows.model_fields}
    values |= {name: getattr(section, name) for name in section.model_fields_set & set(Rows.model_fields)}
    for name in ("parallel", "bars"):
        values[name] = tuple(text.replace("{n}", str(nproc)) for text in values[name])
    missing = []
    for name in values["peers"]:
        if name in PEERS and not PEERS[name].installed:
            missing.append(f"{name}: {how_to_install(PEERS[name])}")
        else:
            find_peer(name)
    gone = {name for name in values["peers"] if not PEERS[name].installed}
    values["peers"] = tuple(name for name in values["peers"] if name not in gone)
    values["bars"] = tuple(bar for bar in values["bars"] if gone.isdisjoint(bar.split()))
    rows = Rows.model_validate(values | given)
    return Case(
        name=f"{run.stem}-{nproc}ranks-{batch.sequence_length * batch.micro_batch}tokens",
        run=run,
        nproc=nproc,
        overrides=(f"data.sequence_length={batch.sequence_length}", f"train.micro_batch={batch.micro_batch}"),
        rows=rows,
        missing=tuple(missing),
    )


def _digest_of_source() -> str:
    """Digest of the package's Python files."""
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=12)
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
