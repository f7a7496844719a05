"""Every bad input of `bad_inputs.CASES` gets one line and exit code 2, soon, and leaves nothing behind."""

from collections import Counter

import bad_input_page
import bad_inputs
import pytest
from commands import Command, write_run


def everything(directory):
    return {path: path.lstat().st_mtime_ns for path in directory.rglob("*")}


@pytest.fixture(scope="module")
def loaded(warm, tmp_path_factory):
    """The run that the cases spoil is well; a process that has seen it forks quicker ones."""
    directory = tmp_path_factory.mktemp("well")
    (directory / "work").mkdir()
    write_run(directory / "work")
    assert run(directory, "train", "RUN", "--dry-run").code == 0


def run(directory, *arguments, environment=None):
    """Runs a command in a directory that has all that it may write to; returns it when it has ended."""
    for name in ("log", "tmp", "shm", "home", "work"):
        (directory / name).mkdir(exist_ok=True)
    places = {
        **{"TMPDIR": str(directory / "tmp"), "ROTORCH_SHARED_MEMORY_DIR": str(directory / "shm")},
        **{"HOME": str(directory / "home"), "XDG_CACHE_HOME": str(directory / "home")},
    }
    file = str(directory / "work" / "run.toml")
    command = Command(
        directory / "log",
        *(file if argument == "RUN" else argument for argument in arguments),
        cwd=directory / "work",
        environment={**places, **(environment or {})},
    )
    command.wait()
    return command


@pytest.mark.parametrize("case", bad_inputs.CASES, ids=lambda case: f"{case.section}: {case.shown}"[:100])
def test_a_bad_input_is_refused(case, tmp_path, loaded):
    work = tmp_path / "work"
    work.mkdir()
    write_run(work)
    case.spoil(work)
    before = everything(work)
    done = run(tmp_path, *case.arguments, environment=case.environment)
    message = done.stderr
    assert done.code == 2, (done.stdout, message)
    assert message.count("\n") == 1 and message.startswith("rotorch: ") and "Traceback" not in message, message
    assert case.words in message, message
    assert done.stdout == "" and done.left() == []
    assert everything(work) == before
    assert [p for name in ("tmp", "shm", "home") for p in everything(tmp_path / name)] == []
    bad_input_page.seen(case, message, directory=work)


def test_the_page_is_as_it_was_written():
    text = bad_input_page.PAGE.read_text()
    assert bad_input_page.render(bad_input_page.parse(text)) == text, "docs/bad_inputs.md: run make failures"
    assert list(bad_input_page.parse(text)) == [(c.section, c.shown) for c in _in_the_order_of_the_page()]


def _in_the_order_of_the_page():
    sections = list(dict.fromkeys(case.section for case in bad_inputs.CASES))
    return sorted(bad_inputs.CASES, key=lambda case: sections.index(case.section))


def test_no_case_is_there_twice():
    assert [
        shown for shown, number in Counter((c.section, c.shown) for c in bad_inputs.CASES).items() if number > 1
    ] == []
