"""Models that an earlier plan has described: equal to what was written, and absent wherever that is in doubt."""

import json
import os
from dataclasses import replace

import pytest
from shapes import on_grids, transformer

from rotorch.core.spec import KeptWhole
from rotorch.core.whole_experts import WholeExperts
from rotorch.planner import known_models
from rotorch.planner.known_models import KnownModel, known_file
from rotorch.planner.traced import BackwardPoint, PerRow, Traced, TracedLayer

POINTS = (BackwardPoint(1.0, -2.5, 1 / 7), BackwardPoint(0.0, 4.0, 0.0))
LAYER = TracedLayer(stream=PerRow(0.1, 2.0), interior=PerRow(1e300), given=PerRow(1 / 3), backward=POINTS)
TRACED = Traced((LAYER, LAYER), PerRow(4.0), PerRow(100.0), PerRow(4.0))


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rotorch" / "models"


def model():
    spec = on_grids(transformer(layers=3))
    spec = replace(spec, order=replace(spec.order, kinds=("full", "sliding", "full")))
    units = (spec.units[0].with_note(WholeExperts(4)), *spec.units[1:])
    return KnownModel(replace(spec, units=units, kept_whole=(KeptWhole("a", 1, "why"),)), TRACED)


def file_of(contents, *, tokens=8, precision="float32"):
    return known_file(contents, tokens=tokens, precision=precision)


def test_what_is_written_is_read_again(directory):
    file = file_of({"a": 1})
    assert file.read() is None
    file.write(model())
    assert file.read() == model()
    assert [path.name for path in directory.iterdir()] == [file.path.name]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"class": "Cut", "dim": 0}', '{"class": "os"}', "\0", '"KnownModel"'])
def test_a_file_that_is_something_else_counts_as_absent(text):
    file = file_of({"a": 1})
    file.write(model())
    whole = file.path.read_text()
    file.path.write_text(text or whole[:-1])
    assert file.read() is None


def test_the_name_follows_from_all_that_a_trace_depends_on(monkeypatch, tmp_path):
    def name(contents=None, **changes):
        return file_of(contents or {"a": 1}, **changes).path.name

    names = [name(), name({"a": 2}), name(tokens=9), name(precision="bfloat16")]
    monkeypatch.setenv("TORCH_ANYTHING", "1")
    names.append(name())
    monkeypatch.setattr(known_models, "_source", lambda: "changed")
    names.append(name())
    monkeypatch.setattr(known_models, "_installed", lambda package: f"another {package}")
    names.append(name())
    assert len(set(names)) == len(names)
    assert name() == name()


def test_a_package_that_is_not_where_its_list_of_files_is_has_no_name(monkeypatch, tmp_path):
    assert known_models._installed("torch") != known_models._installed("transformers")
    assert known_models._installed("no_such_package") is None
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").touch()
    monkeypatch.delitem(__import__("sys").modules, "transformers", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert known_models._installed("transformers") is None
    assert file_of({"a": 1}) is None


def test_a_directory_with_other_formats_is_not_known(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    both = [file_of(str(path)).path for path in (tmp_path, tmp_path / "config.json")]
    assert both[0] == both[1]
    (tmp_path / "model.GGUF").touch()
    assert file_of(str(tmp_path)) is None
    assert file_of(str(tmp_path / "none")) is None


def test_the_oldest_files_go(directory, monkeypatch):
    monkeypatch.setattr(known_models, "MOST_FILES", 2)
    files = [file_of({"a": number}) for number in range(4)]
    for age, file in enumerate(files):
        file.write(model())
        os.utime(file.path, (age, age))
    assert {path.name for path in directory.iterdir()} == {file.path.name for file in files[2:]}


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    file = file_of(json.loads("{}"))
    file.write(model())
    assert file.read() is None
