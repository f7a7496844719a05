"""The page of failures is what the tests have written, and each of its sections has a test behind it."""

from pathlib import Path

import failures
import pytest


def test_the_page_is_as_it_was_written():
    text = failures.PAGE.read_text()
    assert failures.render(failures.parse(text)) == text, "docs/failures.md: run make failures"
    assert list(failures.parse(text)) == list(failures.SECTIONS)


def test_every_section_has_a_test_behind_it():
    files = [path for path in Path(__file__).parents[1].rglob("test_*.py") if path != Path(__file__)]
    tests = "".join(path.read_text() for path in files)
    calls = "".join(tests.split())
    assert [t for t in failures.SECTIONS if f'seen("{"".join(t.split())}"' not in calls] == []


def test_other_words_are_noticed_and_other_numbers_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(failures, "PAGE", tmp_path / "failures.md")
    monkeypatch.setenv(failures.WRITES, "1")
    failures.seen("A rank is killed", "rank 1 was killed in step 3")
    monkeypatch.delenv(failures.WRITES)
    failures.seen("A rank is killed", "rank 0 was killed in step 17\n")
    with pytest.raises(AssertionError, match="'A rank is killed' has changed: run make failures"):
        failures.seen("A rank is killed", "rank 1 died in step 3")
