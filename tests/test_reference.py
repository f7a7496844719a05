"""The pages of keys and options are those of the code."""

import json
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import get_args

import pytest

from rotorch.run_config import OptimizerGroup, RunConfig
from rotorch.run_data import DataSource, EvalText
from rotorch.strategies import STRATEGIES

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def reference():
    spec = spec_from_file_location("make_reference", ROOT / "docs" / "make_reference.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_of_this_code(reference):
    assert reference.PAGE.read_text("utf-8") == reference.page(), "run: make reference"
    assert reference.SCHEMA.read_text("utf-8") == reference.schema(), "run: make reference"


def keys_of(text, title):
    """Keys in the first column of a section's table."""
    section = text[text.index(f"### `{title}`\n") :].partition("\n## ")[0].split("\n### ")[0]
    return [line.split("|")[1].strip(" `") for line in section.splitlines() if line.startswith("| `")]


def test_every_key_and_option_has_its_row(reference):
    text, found = reference.PAGE.read_text("utf-8"), []
    for name, section in RunConfig.model_fields.items():
        (cls,) = [cls for cls in (section.annotation, *get_args(section.annotation)) if hasattr(cls, "model_fields")]
        assert keys_of(text, f"[{name}]") == list(cls.model_fields)
        found += [f"[{name}]"]
    for title, cls in {"data.sources": DataSource, "train.eval": EvalText, "optimizer.groups": OptimizerGroup}.items():
        assert keys_of(text, f"[[{title}]]") == list(cls.model_fields)
        assert f"list of tables `[[{title}]]`" in text
        found += [f"[[{title}]]"]
    for kind, strategy in STRATEGIES.items():
        assert keys_of(text, kind) == list(strategy.model_fields)
        assert set(strategy.model_fields) <= set(reference.meanings_of(strategy))
    assert sorted(line.split("`")[1] for line in text.splitlines() if line.startswith("### `[")) == sorted(found)


def test_the_schema_knows_every_key_and_no_other(reference):
    schema = json.loads(reference.SCHEMA.read_text("utf-8"))
    assert set(schema["properties"]) == set(RunConfig.model_fields) and set(schema["required"]) == {"model", "train"}
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
        assert all(entry["description"] for entry in section["properties"].values())
    demo = tomllib.loads((ROOT / "configs" / "demo.toml").read_text("utf-8"))
    assert set(demo["train"]) <= set(schema["$defs"]["TrainSection"]["properties"])
