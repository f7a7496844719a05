"""`make mutants`: shows a sample of mutants to the tests, and writes the page about them. Goes on where it was."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from mutant_changes import Mutant, OnceSurvived, sample, subjects
from mutant_page import Outcome, is_equivalent, page
from mutant_runs import Report, Request, Run, copy_tree, merged, preload
from mutant_tests import Baseline, candidates
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache"
BASELINES = CACHE / "mutants-baseline.jsonl"
OUTCOMES = Path(__file__).with_name("outcomes.jsonl")
"""The last one of each mutant of the default sample; committed, since a sample takes hours."""
COUNT, SEED = 200, 0
PAGE, REASONS = ROOT / "docs" / "mutants.md", Path(__file__).with_name("reasons.toml")
NAMED, ONCE = Path(__file__).with_name("named.toml"), Path(__file__).with_name("once.toml")
ONCE_OUTCOMES = ONCE.with_suffix(".jsonl")
"""Of the changes of `once.toml`, the last time that all of them were noticed."""

FILE_LIMIT_S = 600.0  # for a test file as it is; what it has not done by then is not asked
SLACK_S, SLOWER = 60.0, 10.0  # a mutant's tests may take so many times what they took, and so much more
MAX_TESTS, MAX_SECONDS, TESTS_PER_FILE = 80, 120.0, 20  # that a mutant is shown to
SLOW_S = 20.0  # a test that takes longer is asked after all others

Step = Generator[Request | None, Report, Outcome]


class Sample:
    """The mutants of a seed, what is known of them, and the tests on the source as it is."""

    def __init__(self, outcomes: Path, *, count: int, seed: int, older: bool, levels: int) -> None:
        self._outcomes = outcomes
        self.texts = {_below(path): path.read_text("utf-8") for path in subjects(ROOT)}
        tests = {_below(path): path.read_text("utf-8") for path in (ROOT / "tests").rglob("*.py")}
        source = {_below(path): path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")}
        self.test_files = {path: text for path, text in tests.items() if path.rsplit("/", 1)[1].startswith("test_")}
        support = [text for path, text in tests.items() if path not in self.test_files and "mutants/" not in path]
        self.source_state = _digest(*sorted([*source.values(), *support]))
        self.state = _digest(self.source_state, *sorted(self.test_files.values()))
        self.commit = _commit()
        self.mutants = sample(self.texts, count=count, seed=seed)
        self.levels = levels
        self._named, self._noticed_by = named(), self._read_noticed()
        self.known = self._read_results(older=older)
        self.baselines = self._read_baselines()
        self.begun: set[str] = set()

    def examine(self, mutant: Mutant) -> Step:
        """Asks tests, one run at a time, until one notices the mutant."""
        asked: list[str] = []
        for tests in (self._noticed_by.get(mutant.key, ()), self._named.get(mutant.path, ())):
            outcome = yield from self._ask_first(mutant, tests, asked)
            if outcome is not None:
                return outcome
        waiting: list[str] = []
        slow: list[tuple[str, float]] = []
        seconds = 0.0
        levels = candidates(mutant.path, self.test_files)[: self.levels]
        files = [f for files in levels for f in sorted(files, key=lambda f: f not in self.baselines)]
        for file in [*files, None]:
            if file is not None:
                baseline = yield from self._baseline(file)
                found = baseline.reaching(mutant.path, first=mutant.first, last=mutant.last)[:TESTS_PER_FILE]
                found = [test for test in found if test not in asked]
                slow += [(test, baseline.seconds[test]) for test in found if baseline.seconds[test] > SLOW_S]
                quick = [test for test in found if baseline.seconds[test] <= SLOW_S]
                waiting, seconds = [*waiting, *quick], seconds + sum(baseline.seconds[test] for test in quick)
            else:
                for test, cost in slow:  # one of them is asked whatever it takes if there are no others
                    if seconds + cost < MAX_SECONDS or not (asked or waiting):
                        waiting, seconds = [*waiting, test], seconds + cost
            enough = len(waiting) + len(asked) >= MAX_TESTS or seconds >= MAX_SECONDS
            if waiting and (not asked or len(waiting) >= 8 or enough or file is None):
                now, waiting = waiting, []
                asked = [*asked, *now]
                outcome = yield from self._ask(mutant, now, seconds=seconds, asked=asked)
                if outcome is not None:
                    return outcome
            if enough:
                break
        return self._outcome(mutant, "survived" if asked else "unreached", by="", asked=asked)

    def _ask_first(
        self, mutant: Mutant, tests: Sequence[str], asked: list[str]
    ) -> Generator[Request | None, Report, Outcome | None]:
        """Asks those of the tests that reach the line; all, if none is seen to, as of numbers used elsewhere."""
        reaching, every = [], {}
        for test in tests:
            baseline = yield from self._baseline(test)
            reaching += baseline.reaching(mutant.path, first=mutant.first, last=mutant.last)
            every |= baseline.seconds
        found = sorted((test for test in reaching or every if test not in asked), key=lambda test: every[test])
        if not found:
            return None
        asked += found
        return (yield from self._ask(mutant, found, seconds=sum(every[test] for test in found), asked=asked))

    def _ask(
        self, mutant: Mutant, tests: Sequence[str], *, seconds: float, asked: list[str]
    ) -> Generator[Request | None, Report, Outcome | None]:
        """Runs tests on the mutant; returns its outcome if one has noticed it."""
        changed = mutant.path, mutant.applied_to(self.texts[mutant.path])
        report = yield Request(tuple(tests), limit_s=SLACK_S + SLOWER * seconds, mutated=changed)
        if report.killed in ("late", "memory"):
            return self._outcome(mutant, report.killed, by=report.running, asked=asked)
        if report.failed or report.code is None:
            return self._outcome(mutant, "killed", by=(report.failed or [report.running])[0], asked=asked)
        return None

    def _baseline(self, file: str) -> Generator[Request | None, Report, Baseline]:
        """Results of a test file, or of one test, on the source as it is."""
        while file not in self.baselines and file in self.begun:
            yield None  # another mutant waits for it already
        if file not in self.baselines:
            self.begun.add(file)
            report = yield Request((file,), limit_s=FILE_LIMIT_S, lines=True, goes_on=True)
            lines = {test: found for test, found in report.reached.items() if test in report.passed}
            shared = merged([report.reached.get("", {})])
            found = Baseline(report.passed, lines, shared, report.failed)
            self.baselines[file] = found
            kept = {"file": file, "state": self._state_of(file), **asdict(found)}
            _append(BASELINES, {**kept, "said": report.said if report.failed or report.killed else ""})
        return self.baselines[file]

    def _outcome(self, mutant: Mutant, verdict: str, *, by: str, asked: list[str]) -> Outcome:
        digest = _digest(self.texts[mutant.path])
        what = mutant.key, mutant.path, mutant.line, mutant.before, mutant.after, mutant.package
        last = [] if verdict == "killed" else asked[-20:]
        outcome = Outcome(*what, verdict, by, len(asked), last, digest, self.state, self.commit, self.levels)
        self.known[mutant.key] = outcome
        _append(self._outcomes, asdict(outcome))
        return outcome

    def _read_results(self, *, older: bool) -> dict[str, Outcome]:
        """Mutants that tests noticed while the file was as it is, or that are equivalent; survivors of this very state.

        Confirming an equivalent one runs every test file. A reason may rest on other files, which are not compared.
        """
        equivalent = {key for key, why in reasons().items() if is_equivalent(why)}
        drawn = {mutant.key: mutant for mutant in self.mutants}
        known = {}
        for fields in _lines_of(self._outcomes):
            outcome = Outcome(**fields)
            if outcome.key in drawn:
                same = outcome.file_digest == _digest(self.texts[outcome.path])
                stands = outcome.is_killed or outcome.key in equivalent
                if older or outcome.state == self.state or (stands and same):
                    known[outcome.key] = outcome
        return known

    def _read_noticed(self) -> dict[str, Sequence[str]]:
        """The test that noticed a mutant in whatever state of the source: it is asked first, and spares the search."""
        noticed = [fields for fields in _lines_of(self._outcomes) if fields["verdict"] != "survived"]
        return {
            fields["key"]: (fields["by"],) for fields in noticed if fields["by"].partition("::")[0] in self.test_files
        }

    def _read_baselines(self) -> dict[str, Baseline]:
        found = {}
        for fields in _lines_of(BASELINES):
            file, state = fields.pop("file"), fields.pop("state")
            del fields["said"]
            if file.partition("::")[0] in self.test_files and state == self._state_of(file):
                found[file] = Baseline(**fields)
        return found

    def _state_of(self, file: str) -> str:
        return _digest(self.source_state, self.test_files[file.partition("::")[0]])


def main() -> int:
    """Returns 1 if some of the sample have not been run; with `--once`, if no test notices some change."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=COUNT, help="how many mutants")
    parser.add_argument("--seed", type=int, default=SEED, help="which mutants; another sample stays in .cache")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many runs of pytest at a time")
    parser.add_argument("--levels", type=int, default=5, help="how far from the changed file tests are asked, 1 to 5")
    parser.add_argument("--older", action="store_true", help="take over what other states of the source gave")
    parser.add_argument("--survivors", action="store_true", help="run again what survived; implies --older")
    parser.add_argument(
        "--only", nargs="*", default=(), metavar="PATH", help="only changes of files with this in their path"
    )
    parser.add_argument("--only-page", action="store_true", help="run nothing, write the page of what is known")
    parser.add_argument("--once", action="store_true", help="run only changes that survived before (once.toml)")
    options = parser.parse_args()
    if options.once:
        unused = [k for k, v in vars(options).items() if k not in ("once", "jobs") and v != parser.get_default(k)]
        if unused:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
            parser.error(f"--once runs all changes of once.toml. Leave out {names}")
        return _run_once(jobs=options.jobs)
    CACHE.mkdir(exist_ok=True)
    is_usual = (options.count, options.seed) == (COUNT, SEED)
    outcomes, about = (OUTCOMES, PAGE) if is_usual else (CACHE / "mutants.jsonl", CACHE / "mutants.md")
    drawn = Sample(
        outcomes,
        count=options.count,
        seed=options.seed,
        older=options.older or options.survivors,
        levels=options.levels,
    )
    known = drawn.known
    todo = [m for m in drawn.mutants if m.key not in known or (options.survivors and not known[m.key].is_killed)]
    todo = [m for m in todo if not options.only or any(part in m.path for part in options.only)]
    if todo and not options.only_page:
        preload()
        _run_all({mutant: drawn.examine(mutant) for mutant in todo}, total=len(drawn.mutants), jobs=options.jobs)
    latest = {fields["key"]: fields for fields in _lines_of(outcomes)}
    kept = [latest[mutant.key] for mutant in drawn.mutants if mutant.key in latest]
    outcomes.write_text("".join(json.dumps(fields) + "\n" for fields in kept), "utf-8")
    found = [Outcome(**fields) for fields in kept]
    to_come = len(drawn.mutants) - len(found)
    about.write_text(_page(found, seed=options.seed, to_come=to_come), "utf-8")
    print(f"{sum(o.is_killed for o in found)} of {len(found)} killed: {about.relative_to(ROOT)}")
    return 1 if to_come else 0


def _run_once(*, jobs: int) -> int:
    """Shows each change of `once.toml` to its test; returns 1 if one is not noticed, else writes the page."""
    steps: dict[Mutant, Step] = {}
    commit = _commit()  # now: a run takes minutes, and reads the tree as it is when it begins
    for change in once():
        text = (ROOT / change.path).read_text("utf-8")
        steps[change.mutant_of(text)] = shown_to_its_test(change, text)
    preload()
    found = [replace(outcome, commit=commit) for outcome in _run_all(steps, total=len(steps), jobs=jobs)]
    unnoticed = [outcome for outcome in found if outcome.verdict != "killed"]
    print(f"{len(steps) - len(unnoticed)} of {len(steps)} changes that once survived are noticed")
    for outcome in unnoticed:
        why = "does not pass without it either" if outcome.verdict == "unreached" else outcome.verdict
        print(f"{outcome.path}:{outcome.line}: {outcome.after}: {outcome.by}: {why}")
    if not unnoticed:
        in_order = sorted(found, key=lambda outcome: outcome.key)
        ONCE_OUTCOMES.write_text("".join(json.dumps(asdict(outcome)) + "\n" for outcome in in_order), "utf-8")
        PAGE.write_text(committed_page(), "utf-8")
    return 1 if unnoticed else 0


def committed_page() -> str:
    """The page of the committed outcomes, of whatever state of the source they are."""
    found = [Outcome(**fields) for fields in _lines_of(OUTCOMES)]
    return _page(found, seed=SEED, to_come=COUNT - len(found))


def _page(found: Sequence[Outcome], *, seed: int, to_come: int) -> str:
    noticed = {fields["key"]: fields["commit"] for fields in _lines_of(ONCE_OUTCOMES)}
    return page(found, seed=seed, reasons=reasons(), to_come=to_come, once=once(), noticed=noticed)


def shown_to_its_test(change: OnceSurvived, text: str) -> Step:
    """Runs the test of a change, without the change and then with it: it must pass first, and then fail."""
    mutant, verdict = change.mutant_of(text), "unreached"
    # Without this run, a wrong id, or a test that fails anyway, would seem to notice the change.
    report = yield Request((change.test,), limit_s=FILE_LIMIT_S)
    if report.code == 0 and report.passed:
        limit_s = SLACK_S + SLOWER * sum(report.passed.values())
        report = yield Request((change.test,), limit_s=limit_s, mutated=(mutant.path, mutant.applied_to(text)))
        noticed = report.failed and report.failed != ["collecting"]
        verdict = report.killed or ("killed" if noticed else "survived")
    what = mutant.key, mutant.path, mutant.line, mutant.before, mutant.after, mutant.package
    return Outcome(*what, verdict, change.test, 1, [change.test], _digest(text), "", "")


def _run_all(steps: Mapping[Mutant, Step], *, total: int, jobs: int) -> list[Outcome]:
    """Examines mutants, several at a time, each in runs of its own; some of the `total` have been examined before."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    scratch = Path(tempfile.mkdtemp(prefix="rotorch-mutants-"))
    runs: dict[Mutant, tuple[Step, Run | None]] = {}
    waiting, outcomes = list(reversed(steps)), list[Outcome]()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is under way is ended, as by Ctrl-C
    try:
        tree = scratch / "as-it-is"
        copy_tree(ROOT, tree)
        with Progress(*columns, console=Console()) as progress:
            task = progress.add_task("mutants", total=total, completed=total - len(steps))
            while waiting or runs:
                while waiting and len(runs) < jobs:
                    runs[waiting[-1]] = steps[waiting[-1]], None
                    waiting.pop()
                for mutant, (step, run) in list(runs.items()):
                    report = None if run is None else run.report()
                    if run is not None and report is None:
                        continue
                    try:
                        request = next(step) if report is None else step.send(report)
                        runs[mutant] = step, None if request is None else Run(request, tree=tree, scratch=scratch)
                    except StopIteration as ended:
                        del runs[mutant]
                        outcome = ended.value
                        outcomes.append(outcome)
                        told = f"{outcome.verdict} {outcome.by or f'({outcome.num_tests} tests)'}"
                        at = f"{mutant.path}:{mutant.line}"
                        progress.console.print(f"{at}: {mutant.after}: {told}", markup=False, highlight=False)
                        progress.advance(task)
                time.sleep(0.05)
    finally:
        for _, run in runs.values():
            if run is not None:
                run.end()
        shutil.rmtree(scratch, ignore_errors=True)
    return outcomes


def once() -> list[OnceSurvived]:
    """Changes that once survived, each with a test that notices it."""
    found = tomllib.loads(ONCE.read_text("utf-8"))["change"]
    return [OnceSurvived(**{**fields, "path": f"src/rotorch/{fields['path']}"}) for fields in found]


def reasons() -> Mapping[str, str]:
    """Why mutants survive, by their keys."""
    found = tomllib.loads(REASONS.read_text("utf-8")) if REASONS.exists() else {}
    return {f"src/rotorch/{r['path']}|{r['before']}|{r['after']}": r["why"] for r in found.get("survivor", ())}


def named() -> Mapping[str, Sequence[str]]:
    """Tests that are asked first, by path of the source file."""
    found = tomllib.loads(NAMED.read_text("utf-8"))["tests"]
    return {f"src/rotorch/{path}": tests for path, tests in found.items()}


def _commit() -> str:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False).stdout

    changed = git("status", "--porcelain", "src", "tests", ":!tests/mutants").strip()
    return git("rev-parse", "--short", "HEAD").strip() + (" with changes" if changed else "")


def _below(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _digest(*texts: str) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for text in texts:
        digest.update(text.encode())
    return digest.hexdigest()


def _lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def _append(path: Path, fields: Mapping[str, object]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


if __name__ == "__main__":
    sys.exit(main())
