"""Mutants: what is changed and what is left alone, who is asked, and the page."""

import ast
import json
import os
import sys
from dataclasses import asdict, replace

import make_mutants
import pytest
from make_mutants import ONCE_OUTCOMES, OUTCOMES, PAGE, Sample, committed_page, main, named, once, shown_to_its_test
from mutant_changes import SUBJECTS, Mutant, OnceSurvived, mutants_of, sample, subjects
from mutant_page import Outcome, page
from mutant_runs import Report
from mutant_tests import Baseline, candidates

PATH = "src/rotorch/core/x.py"


def afters(text):
    return {m.after for m in mutants_of(text, path=PATH)}


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a is not None", {"x = a is None"}),
        ("x = a not in b", {"x = a in b"}),
        ("x = (a) + (b)", {"x = (a) - (b)"}),
        ("x = 'ä' if a and b else c", {"x = 'ä' if a or b else c", "x = 'ä' if (not (a and b)) else c"}),
        ("x = not a", {"x = a"}),
        ("x = f(a, keep=True)", {"x = f(a, keep=False)"}),
        ("x = 7", {"x = 8"}),
        ("x = 0.5", {"x = 1.0"}),
        ("x = -a", {"x = a"}),
        ("x = min(a, b)", {"x = max(a, b)"}),
        ("x = a.clone()", {"x = a"}),
        ("x += a", {"x -= a", "pass"}),
        ("x.y = a", {"pass"}),
        ("os.fsync(a)", {"pass"}),
        ("def f(a=1): return a", {"def f(a=2): return a", "def f(a=1): return None"}),
        ("x = [a for a in b if a]", {"x = [a for a in b if (not (a))]"}),
    ],
)
def test_a_line_is_changed_in_each_of_its_ways(line, changed):
    assert afters(line) == changed


def test_steps_backward_and_blocks_are_taken_out():
    assert "x = a" in afters("x = a[::-1]")
    assert afters("with lock:\n    f()") == {"if True:", "pass"}
    assert afters("for a in b:\n    continue") == {"break"}
    assert afters("with open(a) as b:\n    pass") == set()


@pytest.mark.parametrize(
    "text",
    [
        '"""Says 1 < 2."""',
        "def f(a: int | None) -> A | B: pass",
        "class A:\n    def __repr__(self):\n        return f(self.a + 1)",
        "assert a < b",
        "@dataclass(frozen=True)\nclass A: pass",
        "x = f'{a + 1}'",
        "logger.info(a + 1)",
        "x = zip(a, b, strict=True)",
        "x = a + 'text'",
        "def f():\n    if TYPE_CHECKING:\n        a = 1",
    ],
)
def test_text_annotations_and_assertions_are_left_alone(text):
    assert {after for after in afters(text) if after != "pass"} == set()


def test_a_mutant_changes_its_line_only():
    text = "def f(a):\n    if a < 1:\n        return a\n    return 0\n"
    for mutant in mutants_of(text, path=PATH):
        new = mutant.applied_to(text).splitlines()
        assert [i for i, (a, b) in enumerate(zip(text.splitlines(), new, strict=True), 1) if a != b] == [mutant.line]
        assert mutant.first <= mutant.line <= mutant.last


def test_what_runs_at_import_is_seen_by_all_that_use_the_function_or_the_file():
    (default,) = [m for m in mutants_of("import os\ndef f(a=1):\n    b\n    return 2\n", path=PATH) if m.line == 2]
    assert (default.first, default.last) == (2, 4)
    (constant,) = mutants_of("import os\nA = 3\ndef f(): ...\n", path=PATH)
    assert (constant.first, constant.last) == (1, 3)


def test_a_sample_follows_from_its_seed_and_stays_when_other_lines_change():
    text = "".join(f"x{i} = a{i} < {i}\n" for i in range(200))
    drawn = sample({PATH: text}, count=20, seed=1)
    assert drawn == sample({PATH: text}, count=20, seed=1) != sample({PATH: text}, count=20, seed=2)
    assert len({m.line for m in drawn}) == 20
    moved = sample({PATH: "import os\n" + text}, count=20, seed=1)
    assert [m.key for m in moved] == [m.key for m in drawn]


def test_a_change_that_is_no_python_is_not_drawn():
    text = "def f():\n    for a in b: break\nraise Wrong(\n    1\n)\nwith a: f()\n"
    assert {m.after for m in sample({PATH: text}, count=99, seed=0)} <= afters(text)
    for mutant in sample({PATH: text}, count=99, seed=0):
        compile(mutant.applied_to(text), PATH, "exec")


def test_every_subject_is_there(pytestconfig):
    found = {
        path.relative_to(pytestconfig.rootpath / "src" / "rotorch").as_posix()
        for path in subjects(pytestconfig.rootpath)
    }
    assert {name for name in SUBJECTS if name.endswith(".py")} <= found
    folders = {name for name in SUBJECTS if not name.endswith(".py")}
    assert {folder for folder in folders if any(path.startswith(f"{folder}/") for path in found)} == folders


def test_files_are_asked_from_the_most_specific_to_the_widest():
    texts = {
        "tests/comm/test_ring.py": "",
        "tests/ops/test_linear.py": "from rotorch.comm.ring import Ring",
        "tests/comm/test_line.py": "from rotorch.comm.axis_group import Line",
        "tests/conformance/test_invariants.py": "",
        "tests/test_cli.py": "",
        "tests/gpu/test_ring_on_gpu.py": "from rotorch.comm.ring import Ring",
    }
    levels = candidates("src/rotorch/comm/ring.py", texts)
    assert [file for level in levels for file in level] == list(texts)[:-1]
    assert len(levels) == 5
    apply = candidates("src/rotorch/strategies/rtp/apply.py", {"tests/strategies/test_rtp_models.py": ""})
    assert apply[0] == ["tests/strategies/test_rtp_models.py"]


def test_every_named_test_and_what_it_is_named_for_are_there(pytestconfig):
    for path, tests in named().items():
        assert (pytestconfig.rootpath / path).is_file(), path
        assert tests, path
        for test in tests:
            assert is_there(test, pytestconfig.rootpath), test


def is_there(test, root):
    """True if a test's function is in its file, or if it is a file that is there."""
    file, _, name = test.partition("::")
    text = (root / file).read_text("utf-8")
    return not name or f"def {name.partition('[')[0]}(" in text


def test_every_change_that_once_survived_has_its_line_and_its_test(pytestconfig):
    seen = {json.loads(line)["key"] for line in ONCE_OUTCOMES.read_text("utf-8").splitlines()}
    assert len(seen) == len(once()), "run make mutants ARGS=--once"
    for change in once():
        text = (pytestconfig.rootpath / change.path).read_text("utf-8")
        changed = change.mutant_of(text).applied_to(text)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), change
        assert change.mutant_of(text).key in seen, "run make mutants ARGS=--once"
        assert "::" in change.test and is_there(change.test, pytestconfig.rootpath), change


CHANGE = OnceSurvived("adds nothing", PATH, "x += 1", "pass", "tests/test_x.py::test_x")


def test_a_change_that_once_survived_needs_its_line_once():
    mutant = CHANGE.mutant_of("def f(x):\n    x += 1\n    return x\n")
    assert (mutant.line, mutant.applied_to("def f(x):\n    x += 1\n")) == (2, "def f(x):\n    pass\n")
    for text in ("x += 2\n", "x += 1\nx += 1\n"):
        with pytest.raises(ValueError, match="lines are 'x \\+= 1'"):
            CHANGE.mutant_of(text)


def test_options_that_would_change_nothing_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["make_mutants.py", "--once", "--only-page", "--levels", "2"])
    with pytest.raises(SystemExit):
        main()
    assert "--once runs all changes of once.toml. Leave out --levels, --only-page" in capsys.readouterr().err


PASSES = Report(0, {CHANGE.test: 2.0}, [], "", {}, "")
FAILS = Report(1, {}, [CHANGE.test], CHANGE.test, {}, "")


@pytest.mark.parametrize(
    ("reports", "verdict"),
    [
        ([PASSES, FAILS], "killed"),
        ([PASSES, PASSES], "survived"),
        ([PASSES, replace(FAILS, failed=["collecting"])], "survived"),
        ([PASSES, replace(FAILS, code=None, failed=[], killed="late")], "late"),
        ([FAILS], "unreached"),
        ([Report(0, {}, [], "", {}, "")], "unreached"),  # skipped
        ([Report(4, {}, ["collecting"], "", {}, "")], "unreached"),  # no such test
    ],
)
def test_a_change_is_noticed_by_a_test_that_passes_without_it_and_fails_with_it(reports, verdict):
    step = shown_to_its_test(CHANGE, "x += 1\n")
    requests = [next(step)]
    with pytest.raises(StopIteration) as ended:
        for report in reports:
            requests.append(step.send(report))
    assert ended.value.value.verdict == verdict
    assert [request.mutated for request in requests] == [None, (PATH, "pass\n")][: len(reports)]
    assert all(request.tests == (CHANGE.test,) for request in requests)


def test_the_test_that_noticed_a_mutant_before_is_asked_first(tmp_path, monkeypatch):
    monkeypatch.setattr(make_mutants, "BASELINES", tmp_path / "baselines.jsonl")
    outcomes, by = tmp_path / "outcomes.jsonl", "tests/mutants/test_mutants.py::test_a_mutant"
    drawn = {"count": 1, "seed": 0, "older": False, "levels": 5}
    (mutant,) = Sample(outcomes, **drawn).mutants
    told = {"key": mutant.key, "path": mutant.path, "line": 1, "before": "", "after": "", "package": ""}
    old = {"num_tests": 1, "tests": [], "file_digest": "other", "state": "other", "commit": "", "levels": 5}
    outcomes.write_text(json.dumps({**told, "verdict": "killed", "by": by, **old}) + "\n")
    sample = Sample(outcomes, **drawn)
    assert not sample.known  # the file has changed since
    step = sample.examine(mutant)
    as_it_is = next(step)
    assert (as_it_is.tests, as_it_is.mutated) == ((by,), None)
    reached = {by: {mutant.path: [mutant.first]}}
    shown = step.send(Report(0, {by: 1.0}, [], "", reached, ""))
    assert shown.tests == (by,)
    assert shown.mutated[0] == mutant.path
    with pytest.raises(StopIteration) as ended:
        step.send(Report(1, {}, [by], by, {}, ""))
    assert (ended.value.value.verdict, ended.value.value.by) == ("killed", by)


@pytest.mark.parametrize(("why", "known"), [("Equivalent: nobody reads it", True), ("No test for it yet", False)])
def test_an_equivalent_mutant_is_not_run_again_while_its_file_is_as_it_was(tmp_path, monkeypatch, why, known):
    outcomes, drawn = tmp_path / "outcomes.jsonl", {"count": 1, "seed": 0, "older": False, "levels": 5}
    sample = Sample(outcomes, **drawn)
    (mutant,) = sample.mutants
    monkeypatch.setattr(make_mutants, "reasons", lambda: {mutant.key: why})
    of_file = {"file_digest": make_mutants._digest(sample.texts[mutant.path]), "state": "other", "commit": ""}
    survived = Outcome(mutant.key, mutant.path, 1, "", "", "", "survived", "", 1, [], **of_file)
    for outcome, still in ((survived, known), (replace(survived, file_digest="other"), False)):
        outcomes.write_text(json.dumps(asdict(outcome)) + "\n")
        assert bool(Sample(outcomes, **drawn).known) is still


def test_tests_that_reach_a_line_are_asked_and_the_quickest_first():
    baseline = Baseline({"slow": 2.0, "quick": 0.1, "other": 0.1}, {"slow": {PATH: [5]}, "quick": {PATH: [4, 5]}})
    assert baseline.reaching(PATH, first=5, last=6) == ["quick", "slow"]
    assert baseline.reaching("src/rotorch/core/y.py", first=5, last=6) == []
    fixtures = replace(baseline, shared={PATH: [9]})
    assert set(fixtures.reaching(PATH, first=9, last=9)) == {"slow", "quick", "other"}


def test_the_committed_page_is_that_of_the_committed_outcomes():
    assert OUTCOMES.read_text("utf-8")
    assert PAGE.read_text("utf-8") == committed_page()


def test_the_page_says_score_survivors_and_why():
    mutant = Mutant(PATH, 7, "a < b | c", "a <= b | c", 0, 7, 7)
    about = mutant.key, PATH, 7, mutant.before, mutant.after, mutant.package
    lived = Outcome(*about, "survived", "", 3, ["t"], "f", "s", "abc")
    rows = [lived, *(replace(lived, key=str(n), verdict=v) for n, v in enumerate(["killed", "killed", "late"]))]
    text = page(rows, seed=5, reasons={mutant.key: "Equivalent: b is never a"}, to_come=2)
    assert "**4 mutants (seed 5), 3 killed: 75.0 %.**" in text
    assert "1 survive, 1 of them equivalent. 2 of the sample have not been run." in text
    assert "Of these 1 by the limit of time" in text
    assert "| `core/x.py:7` | `a < b \\| c` | `a <= b \\| c` | 3 | Equivalent: b is never a |" in text
    assert "near the changed file" not in text
    assert "1 of the survivors were shown only" in page([replace(lived, levels=3)], seed=5, reasons={})
    assert "TODO" not in text and "TODO" in page(rows, seed=5, reasons={})
    assert "once survived" not in text
    assert page(rows, seed=5, reasons={}, once=[CHANGE]).endswith(
        "| change | test that notices it |\n|---|---|\n| `core/x.py`: adds nothing | `tests/test_x.py::test_x` |\n"
    )
    assert "Noticed on commit abc (1)." in page(rows, seed=5, reasons={}, once=[CHANGE], noticed={"x": "abc"})


SUM = "def add(a, b):\n    return a + b\n"
TESTS = """
import os, signal, sys, time
sys.path.insert(0, "src")
from subject import add

def test_in_a_rank():
    pid = os.fork()
    if pid == 0:
        os._exit(add(1, 2))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3

def test_that_leaves_a_process(tmp_path):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        print(os.getpid(), file=open(os.environ["LEFT"], "w"))
        time.sleep(600)
    while not os.path.exists(os.environ["LEFT"]) or not open(os.environ["LEFT"]).read():
        time.sleep(0.01)
"""


@pytest.fixture
def run(tmp_path):
    """Runs in a fork of a new, small process: in this one rotorch is loaded."""
    import subprocess
    import sys
    from pathlib import Path

    tree, scratch = tmp_path / "tree", tmp_path / "scratch"
    (tree / "src").mkdir(parents=True)
    scratch.mkdir()
    (tree / "src" / "subject.py").write_text(SUM)
    (tree / "test_subject.py").write_text(TESTS)
    left = tmp_path / "left"
    code = (
        "import sys, json, time, dataclasses, pathlib\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from mutant_runs import Request, Run\n"
        "tree, scratch, request = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), json.loads(sys.argv[3])\n"
        "run = Run(Request(**request), tree=tree, scratch=scratch)\n"
        "while (report := run.report()) is None: time.sleep(0.02)\n"
        "print(json.dumps(dataclasses.asdict(report)))\n"
    )

    def run(**request):
        request = {"tests": ["test_subject.py"], "limit_s": 120.0, **request}
        environment = {**os.environ, "LEFT": str(left)}
        command = [sys.executable, "-c", code, str(tree), str(scratch), json.dumps(request)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert list(scratch.iterdir()) == []
        assert (tree / "src" / "subject.py").read_text() == SUM
        return json.loads(done.stdout), left

    return run


def test_lines_of_ranks_are_noted_and_nothing_is_left_behind(run):
    report, left = run(lines=True, goes_on=True)
    assert (report["code"], report["failed"], len(report["passed"])) == (0, [], 2), report["said"]
    assert report["reached"]["test_subject.py::test_in_a_rank"] == {"src/subject.py": [1, 2]}
    assert not os.path.exists(f"/proc/{left.read_text().strip()}")


def test_a_mutant_is_noticed_and_one_that_hangs_is_late(run):
    report, _ = run(mutated=["src/subject.py", SUM.replace("+", "-")])
    assert report["failed"] == ["test_subject.py::test_in_a_rank"]
    report, _ = run(
        limit_s=3.0, mutated=["src/subject.py", SUM.replace("return", "while True: ").replace("a + b", "a")]
    )
    assert (report["killed"], report["code"]) == ("late", None)
    report, _ = run(mutated=["src/subject.py", "import nowhere_to_be_found"])
    assert report["failed"] == ["collecting"]
