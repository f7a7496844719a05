"""Names of the Hugging Face hub: directories where it is reached, one line where it is not."""

import json
import tomllib

import huggingface_hub
import pytest
from commands import Command, rotorch, write_run

from rotorch.core.errors import ConfigError
from rotorch.run_config import load_run_config
from rotorch.train.hub import found, with_hub_files

OVERRIDES = [
    "model.init=hf://owner/model@v2",
    "data.tokenizer=hf://owner/other",
    "data.source=hf://datasets/owner/texts",
    'train.eval=[{name="news", source="hf://datasets/owner/news"}]',
]


def test_names_become_directories(tmp_path, monkeypatch):
    asked = []

    def download(name, *, repo_type, revision, allow_patterns):
        asked.append((name, repo_type, revision, "*.parquet" in allow_patterns, "*.safetensors" in allow_patterns))
        directory = tmp_path / name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "file.json").write_text("{}")
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    config = with_hub_files(load_run_config(write_run(tmp_path), overrides=OVERRIDES))
    assert config.model.init == str(tmp_path / "owner/model") and config.data.tokenizer == str(tmp_path / "owner/other")
    assert config.data.source == str(tmp_path / "owner/texts")
    assert config.train.eval[0].source == str(tmp_path / "owner/news")
    assert isinstance(config.model.config, dict)  # the run's own
    assert ("owner/model", "model", "v2", False, True) in asked
    assert ("owner/texts", "dataset", None, True, False) in asked
    plain = load_run_config(tmp_path / "run.toml")
    assert with_hub_files(plain) == plain


def test_init_writes_names_of_the_hub(tmp_path, monkeypatch, warm):
    """Files of the hub lie here; the run file has their names."""
    model, texts = tmp_path / "model", tmp_path / "texts"
    model.mkdir(), texts.mkdir()
    (model / "config.json").write_text(json.dumps(load_run_config(write_run(tmp_path)).model.config))
    (texts / "a.jsonl").write_text('{"story": "Rings go round and come home."}\n' * 200)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **_: str({"owner/m.1": model, "owner/texts": texts}[name])
    )
    told = ["hf://owner/m.1@v2", "--data", "hf://datasets/owner/texts", "--nproc", 2]
    done = Command(tmp_path / "log", "init", *told, cwd=tmp_path)
    assert done.wait() == 0, done.stderr
    written = tomllib.loads((tmp_path / "m.1.toml").read_text())
    assert written["model"] == {"config": "hf://owner/m.1@v2"} and written["parallel"]["layout"] != "auto"
    assert written["data"]["source"] == "hf://datasets/owner/texts" and written["data"]["text_field"] == "story"


@pytest.mark.parametrize(
    ("name", "is_data"),
    [("hf://model", False), ("hf://a/b/c", False), ("hf://a/b", True), ("hf://datasets/a/b", False), ("hf://", True)],
)
def test_what_is_no_name_is_refused(name, is_data):
    with pytest.raises(ConfigError, match="is no name of the hub"):
        found(name, key="model.init", is_data=is_data)


def test_a_repository_without_a_file_to_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ConfigError, match="has no file that rotorch reads"):
        found("hf://a/b", key="model.init")


def test_without_a_network_one_line_says_so(tmp_path, monkeypatch, warm):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    done = rotorch(tmp_path / "log", "train", write_run(tmp_path), "model.init=hf://owner/model")
    assert done.code == 2 and not (tmp_path / "run").exists()
    assert "model.init = 'hf://owner/model': cannot be had from the hub" in done.stderr
    assert done.stderr.count("\n") == 1 and "Write the path of a directory" in done.stderr
