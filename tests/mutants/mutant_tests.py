"""Tests that may notice a mutant, in the order in which they are asked. Pure.

[Note: how tests are chosen]
    The test that noticed the mutant in an earlier state of the source is asked first, alone. If there is none, or it
    notices no longer, tests are searched: a test file is run once on the source as it is, and the lines are noted that
    each test reaches, in its own process and in every rank that it forks. A mutant is then shown to the tests that
    reach its line. Files are asked from the one of the same name over those that import the module and those of its
    folder to suites of behaviour, and files further on are only run, for their lines, if those before do not notice.
    Where neither a name nor an import leads to the test that would know, `named.toml` names it. It is asked before the
    search, however long it takes: without it hours go by in suites of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WIDER = ("conformance", "strategies", "shard", "ops", "comm", "pipelining", "testing", "train", "models", "planner")
"""Folders of tests that are asked after the mutated file's own, `.` being the root."""
LEFT_OUT = re.compile(
    r"^tests/(gpu|chaos|mutants|bench)/|test_(architecture|examples|example_\w+|two_hosts|object_store)\.py$"
)
"""Test files that are not asked: they need other machines, or read the source rather than run it."""


@dataclass(frozen=True)
class Baseline:
    """Result of a test file on the source as it is.

    Attributes:
        seconds: that each test took which passed, by its id.
        lines: that each of these reached, by path.
        shared: lines that fixtures reached, which may serve any test of the file.
        failed: tests that do not pass here, and are not asked.
    """

    seconds: Mapping[str, float]
    lines: Mapping[str, Mapping[str, Sequence[int]]]
    shared: Mapping[str, Sequence[int]] = field(default_factory=dict)
    failed: Sequence[str] = ()

    def reaching(self, path: str, *, first: int, last: int) -> list[str]:
        """Tests that reach any of the lines, the quickest first."""

        def hits(lines: Mapping[str, Sequence[int]]) -> bool:
            return any(first <= line <= last for line in lines.get(path, ()))

        everyone = hits(self.shared)
        found = [test for test in self.seconds if everyone or hits(self.lines.get(test, {}))]
        return sorted(found, key=lambda test: self.seconds[test])


def candidates(path: str, texts: Mapping[str, str]) -> list[list[str]]:
    """Test files that may notice a change of a source file, from the most specific to the widest, in levels.

    Args:
        path: of the source file, below the root of the repository.
        texts: of the test files, by path.
    """
    parts = path.removeprefix("src/rotorch/").removesuffix(".py").split("/")
    folder, names = parts[0], {parts[-1], "_".join(parts[-2:]), parts[-2] if parts[-1] in ("apply", "plan") else ""}
    module = re.compile(rf"\brotorch\.{re.escape('.'.join(parts))}\b")
    files = sorted((f for f in texts if not LEFT_OUT.search(f)), key=lambda f: len(texts[f]))

    def rank(file: str) -> int:
        stem, where = file.rsplit("/", 1)[1].removeprefix("test_").removesuffix(".py"), file.split("/")[1]
        if stem in names or any(name and stem.startswith(f"{name}_") for name in names):
            return 0
        if module.search(texts[file]):
            return 1
        if where == folder or (folder == "strategies" and where == "conformance"):
            return 2
        return 3 if where in WIDER else 4

    return [[f for f in files if rank(f) == level] for level in range(5)]
