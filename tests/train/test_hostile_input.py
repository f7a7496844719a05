"""Hostile files that a user names: read, or refused in one line that says what is wrong. Never a traceback."""

import json
import os
import re
import shutil
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hostile import FEW, JSON, MANY, is_one_line, spoilt
from hypothesis import given
from hypothesis import strategies as st
from three_weights import make, step

from rotorch import cli
from rotorch.core.errors import ConfigError, RotorchError
from rotorch.models.hf import load_config
from rotorch.run_config import load_run_config
from rotorch.testing.ranks import run_ranks
from rotorch.train.checkpoint.contents import inspect_checkpoint
from rotorch.train.checkpoint.manifest import json_digest, manifest_text, read_manifest
from rotorch.train.checkpoint.saving import load, save
from rotorch.train.data.corpus import find_corpus
from rotorch.train.data.token_file import HEADER_BYTES, DamagedTokenFile, TokenFile

# ---------------------------------------------------------------- configurations


@MANY
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_as_a_run_s_file(content, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_run_config(file)
    is_one_line(caught.value)


KEYS = st.sampled_from(
    [
        *("model.config", "model.init", "train.steps", "train.out", "train.checkpoint_dir", "train.elastic", "train"),
        *("data.source", "optimizer.betas", "parallel.layout", "lora.rank", "x.y"),
    ]
)


@MANY
@given(overrides=st.lists(st.tuples(KEYS, st.text(max_size=20) | JSON.map(json.dumps)).map("=".join), max_size=3))
def test_any_override(overrides, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "whole.toml"
    file.write_text('[model]\nconfig = "x"\n[train]\nsteps = 3\n')
    try:
        load_run_config(file, overrides=overrides)
    except ConfigError as error:
        is_one_line(error)


LLAMA = json.loads((Path(__file__).resolve().parents[2] / "configs" / "tiny" / "llama.json").read_text())


@FEW
@given(content=spoilt(LLAMA).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=100))
def test_any_config_json(content, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "config.json"
    file.write_bytes(content)
    try:
        load_config(file)
    except ConfigError as error:
        is_one_line(error)


@pytest.mark.parametrize("kind", ["a file of 3 GiB", "a device without an end", "nested too deep"])
def test_what_is_far_too_large_is_not_read(kind, tmp_path, capsys):
    for name, command in {
        "run.toml": lambda file: ["train", str(file)],
        "config.json": lambda file: ["verify", str(file), "--parallel", "rtp=1"],
        "manifest.json": lambda file: ["inspect", str(file.parent)],
    }.items():
        file = tmp_path / name
        if kind == "a file of 3 GiB":
            file.touch()
            os.truncate(file, 3 << 30)
        elif kind == "a device without an end":
            if name != "run.toml":
                continue  # a manifest may be a gigabyte, and a config.json has to be a file
            file.symlink_to("/dev/zero")
        else:
            file.write_text("x = " + "[" * 200_000 if name == "run.toml" else "[" * 200_000)
        assert cli.run(command(file)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        expected = {
            "a file of 3 GiB": "has at most",
            "a device without an end": "is a device, and a run's TOML file is a file",
            "nested too deep": "not valid TOML|not readable JSON|not valid JSON",
        }[kind]
        assert str(file) in line and any(words in line for words in expected.split("|")), line


# ---------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A whole checkpoint."""
    run_dir = tmp_path_factory.mktemp("saved")
    run_ranks(save_one, run_dir, num_ranks=1)
    return next((run_dir / "checkpoints").iterdir())


def save_one(run_dir):
    state = make()
    step(state)
    save(run_dir, state, keep=1)


def put(directory, content):
    """Writes a manifest whose digest is right, so that only its contents are wrong."""
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key != "digest"}
        content = {**content, "digest": json_digest(content)}
    (directory / "manifest.json").write_text(manifest_text(content))


def test_any_manifest_with_a_right_digest(saved, tmp_path):
    whole = json.loads((saved / "manifest.json").read_text())
    shutil.copytree(saved, tmp_path / "copy")
    outside = sorted(tmp_path.iterdir())

    @MANY
    @given(content=spoilt(whole))
    def hold(content):
        put(tmp_path / "copy", content)
        try:
            inspect_checkpoint(tmp_path / "copy", contents=True)
        except ConfigError as error:
            is_one_line(error)
        assert sorted(tmp_path.iterdir()) == outside

    hold()


def test_loading_from_any_manifest_is_one_error(saved, tmp_path):
    whole = json.loads((saved / "manifest.json").read_text())
    shutil.copytree(saved, tmp_path / "copy")

    @FEW
    @given(content=spoilt(whole))
    def hold(content):
        put(tmp_path / "copy", content)
        try:
            load(tmp_path / "copy", make())
        except RotorchError as error:
            is_one_line(error)

    hold()


def test_chunks_that_overlap_leave_holes(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    content = json.loads((saved / "manifest.json").read_text())
    (chunk,) = content["tensors"]["model/up"]["chunks"]
    half = {**chunk, "sizes": [32, 16]}
    content["tensors"]["model/up"]["chunks"] = [half, half]
    put(tmp_path / "copy", content)
    with pytest.raises(ConfigError, match="'model/up' has chunks that overlap"):
        read_manifest(tmp_path / "copy")
    content["tensors"]["model/up"]["chunks"] = [half, {**half, "offsets": [32, 0]}]
    put(tmp_path / "copy", content)
    read_manifest(tmp_path / "copy")


# ---------------------------------------------------------------- what is trained on


HEADER = {"source": "x", "tokens": "bytes", "tokens_digest": "d", "vocab_size": 257, "end_id": 256, "dtype": "uint16",
          "num_tokens": 8, "num_documents": 1, "text_bytes": 7, "crc32": 0, "version": 1}  # fmt: skip


@MANY
@given(header=spoilt(HEADER) | st.just(["[" * 1500]))
def test_any_header_of_a_token_file(header, tmp_path_factory):
    line = header[0].encode() if header == ["[" * 1500] else json.dumps(header).encode()[: HEADER_BYTES - 20]
    file = tmp_path_factory.getbasetemp() / "fuzzed.tokens"
    file.write_bytes((line + b"\n%08x\n" % zlib.crc32(line)).ljust(HEADER_BYTES) + np.zeros(8, np.uint16).tobytes())
    try:
        opened = TokenFile.open(file)
    except DamagedTokenFile as error:
        is_one_line(error)
    else:
        assert opened.ids.dtype.kind == "u" and opened.fingerprint


@MANY
@given(content=st.binary(max_size=300))
def test_any_bytes_as_a_token_file(content, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "bytes.tokens"
    file.write_bytes(content)
    with pytest.raises(DamagedTokenFile):
        TokenFile.open(file)


def read_all(file):
    try:
        return list(find_corpus(file).pieces())
    except ConfigError as error:
        is_one_line(error)


@MANY
@given(
    content=st.binary(max_size=200)
    | st.lists(st.dictionaries(st.sampled_from(["text", "x"]), JSON).map(json.dumps), max_size=4).map(
        lambda lines: "\n".join(lines).encode()
    ),
    suffix=st.sampled_from([".txt", ".jsonl"]),
)
def test_any_bytes_as_text(content, suffix, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / f"fuzzed{suffix}"
    file.write_bytes(content)
    read_all(file)


@FEW
@given(at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_a_parquet_file_with_any_byte_changed_or_cut_off(at, byte, cut, tmp_path_factory):
    file = tmp_path_factory.getbasetemp() / "fuzzed.parquet"
    pa.parquet.write_table(pa.table({"text": ["a ring", "goes round"]}), file)
    content = bytearray(file.read_bytes())
    content[at % len(content)] = byte
    file.write_bytes(content[: max(1, cut % (2 * len(content)))])
    read_all(file)


def test_a_line_without_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr("rotorch.train.data.corpus._MOST_LINE_BYTES", 1 << 10)
    (tmp_path / "long.jsonl").write_text('{"text": "' + "x" * 2000)
    with pytest.raises(ConfigError, match=r"line 1: longer than 1.00 KiB\. Write one record a line"):
        find_corpus(tmp_path / "long.jsonl")


# ---------------------------------------------------------------- what could run code of others


def test_no_file_is_unpickled_and_no_model_s_own_code_runs():
    source = Path(cli.__file__).parents[1]
    calls = r"torch\.load\((?!.*weights_only=True)|\bpickle\.loads?\("
    unpickling = re.compile(rf"{calls}|allow_pickle=True|trust_remote_code=True")
    found = [p.relative_to(source).as_posix() for p in source.rglob("*.py") if unpickling.search(p.read_text())]
    # What a rank of the same run has sent, and what a process has sent to one that it has started.
    # Whoever calls Fabric's `load` may write weights_only=False there, as without rotorch.
    assert sorted(found) == ["comm/stage_messages.py", "process/new_interpreter.py", "train/checkpoint/parts.py"]
