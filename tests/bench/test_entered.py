"""The count of what a step enters."""

from pathlib import Path

import pytest


class Thing:
    def method(self):
        return [self.other() for _ in range(2)]

    def other(self):
        return (lambda: 1)()


@pytest.fixture
def entered(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import entered

    return entered


def test_files_classes_and_functions_are_counted_once(entered):
    counted = entered.Entered("/bench/test_entered.py").count(Thing().method)
    assert counted == {"files": 1, "classes": 1, "functions": 2}


def test_what_lies_elsewhere_is_not_counted(entered):
    assert entered.Entered("/nowhere/").count(Thing().method) == {"files": 0, "classes": 0, "functions": 0}
