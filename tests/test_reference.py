"""The pages of keys and options are those of the code."""

import json
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from rotorch.run_config import RunConfig
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


def test_every_key_and_option_has_a_meaning(reference):
    text = reference.PAGE.read_text("utf-8")
    for section in RunConfig.model_fields:
        assert f"[{section}]" in text
    for kind, strategy in STRATEGIES.items():
        meanings = reference.meanings_of(strategy)
        assert f"### `{kind}`" in text and set(strategy.model_fields) <= set(meanings)


def test_the_schema_knows_every_key_and_no_other(reference):
    schema = json.loads(reference.SCHEMA.read_text("utf-8"))
    assert set(schema["properties"]) == set(RunConfig.model_fields) and set(schema["required"]) == {"model", "train"}
    for section in schema["$defs"].values():
        assert section["additionalProperties"] is False
        assert all(entry["description"] for entry in section["properties"].values())
    demo = tomllib.loads((ROOT / "configs" / "demo.toml").read_text("utf-8"))
    assert set(demo["train"]) <= set(schema["$defs"]["TrainSection"]["properties"])
