"""Checkpoints in stores: as whole, as checked and as many as on a disk, without renaming."""

import json
import re
import shutil
from pathlib import Path

import fsspec
import pytest
import torch
from commands import rotorch, write_run
from forked import result_of
from fsspec.registry import known_implementations
from stores import Objects, url_of
from three_weights import make, read_back, step

from rotorch.core.errors import ConfigError, RankFailure
from rotorch.testing.ranks import run_ranks
from rotorch.train.checkpoint.contents import inspect_checkpoint
from rotorch.train.checkpoint.directories import candidates, checkpoints_of, prune, remove_directory, remove_leftovers
from rotorch.train.checkpoint.export import export_checkpoint
from rotorch.train.checkpoint.manifest import DamagedCheckpoint
from rotorch.train.checkpoint.saving import check, latest, load, load_newest, save
from rotorch.train.checkpoint.store import StorePath, as_path, check_writable, creating
from rotorch.train.checks.out_of_memory import is_out_of_memory
from rotorch.train.metrics import read_metrics


@pytest.fixture
def memory():
    """fsspec's store in memory, empty before and after."""
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]


def steps_in(url):
    return [int(path.name.removeprefix("step-")) for path in candidates(checkpoints_of(url))]


def save_steps(url, num_steps, keep=2):
    state = make()
    for _ in range(num_steps):
        step(state)
        save(url, state, keep=keep)
    return state


# ---------------------------------------------------------------- in memory, one process


def test_a_store_keeps_checkpoints_as_a_disk_does(memory, caplog):
    url = "memory://bucket/run"
    state = save_steps(url, 4, keep=2)
    assert steps_in(url) == [3, 4]
    assert read_back(url) == (4, True)
    path = latest(url)
    assert str(path) == "memory://bucket/run/checkpoints/step-00000004"
    assert inspect_checkpoint(url, contents=True)["step"] == check(str(path)).step == 4
    save(url, state, keep=2)  # the same step again: what is not the new one's is removed
    assert sorted(p.name for p in latest(url).iterdir())[0] == "manifest.json" and len(list(path.iterdir())) == 2
    assert read_back(url) == (4, True)

    (path / "manifest.json").unlink()  # as a save looks that was cut off
    assert latest(url) == path.parent / "step-00000003"
    assert f"skipping {path}, left by a save that was cut off" in caplog.text
    step(state)
    save(url, state, keep=2)
    assert f"removing {path}, left by a save that was cut off" in caplog.text
    assert steps_in(url) == [3, 5] and not list(path.iterdir())


def test_a_checkpoint_that_is_being_removed_does_not_look_whole(memory, monkeypatch):
    """Its manifest goes first: a store has no name to take away from all of its files at once."""
    url = "memory://bucket/run"
    save_steps(url, 2)
    before, path = candidates(checkpoints_of(url))
    monkeypatch.setattr(type(path), "remove_below", lambda path: None)  # a kill in between
    remove_directory(path)
    assert latest(url) == before and list(path.iterdir())


def test_a_flipped_byte_is_named_and_the_one_before_is_used(memory, caplog):
    url = "memory://bucket/run"
    save_steps(url, 2)
    name = "/bucket/run/checkpoints/step-00000002/rank-00000.safetensors"
    content = bytearray(memory.cat_file(name))
    content[-3] ^= 1
    memory.pipe_file(name, bytes(content))
    with pytest.raises(DamagedCheckpoint, match=r"memory:/.*step-00000002/rank-00000.safetensors: damaged"):
        load(latest(url), make())
    state = make()
    assert str(load_newest(latest(url), state)).endswith("step-00000001") and state.step == 1
    memory.pipe_file(name, bytes(content[:100]))
    assert str(latest(url)).endswith("step-00000001")
    assert "truncated (100 bytes instead of" in caplog.text


def test_what_is_half_written_is_told_and_removed(memory, monkeypatch):
    url = "memory://bucket/run"
    state = save_steps(url, 1)
    step(state)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: (_ for _ in ()).throw(OSError(5, "no route", "host")))
    with pytest.raises(RankFailure, match=r"rank 0: .*no route; earlier checkpoints are untouched"):
        save(url, state, keep=2)
    monkeypatch.undo()
    assert read_back(url) == (1, True) and len(list(checkpoints_of(url).iterdir())) == 1


class Busy:
    """Makes a method of fsspec's store in memory fail at its n-th call about a path that ends so, and count."""

    def __init__(self, monkeypatch, method, *, ending, at=1):
        self.calls = 0
        store = type(fsspec.filesystem("memory"))
        asked = getattr(store, method)

        def busy(store, path, *args, **kwargs):
            self.calls += str(path).endswith(ending)
            if self.calls == at and str(path).endswith(ending):
                raise TimeoutError("the store is busy")
            return asked(store, path, *args, **kwargs)

        monkeypatch.setattr(store, method, busy)
        monkeypatch.setattr(store, "exists", fsspec.AbstractFileSystem.exists)  # which takes any error for absence
        monkeypatch.setattr(store, "isdir", fsspec.AbstractFileSystem.isdir)


@pytest.mark.parametrize("ending", ["manifest.json", "step-00000001"])
def test_a_store_that_fails_once_is_not_one_without_checkpoints(ending, memory, monkeypatch):
    url = "memory://bucket/run"
    save_steps(url, 2)
    with monkeypatch.context() as patched:
        Busy(patched, "info", ending=ending)
        with pytest.raises(OSError, match="the store is busy"):
            candidates(checkpoints_of(url))
    with monkeypatch.context() as patched:
        Busy(patched, "info", ending="manifest.json")
        with pytest.raises(OSError, match="the store is busy"):
            remove_leftovers(checkpoints_of(url))
    assert steps_in(url) == [1, 2] and check(latest(url)).step == 2


def test_a_store_that_fails_once_during_a_save_costs_no_other_checkpoint(memory, monkeypatch):
    url = "memory://bucket/run"
    state = save_steps(url, 2, keep=9)
    step(state)
    for at in range(1, 99):
        with monkeypatch.context() as patched:
            busy = Busy(patched, "info", ending="manifest.json", at=at)
            try:
                save(url, state, keep=9)
            except RankFailure as error:
                assert "the store is busy; earlier checkpoints are untouched" in str(error)
        assert steps_in(url)[:2] == [1, 2]
        assert all(check(path) for path in candidates(checkpoints_of(url)))
        if busy.calls < at:  # it never failed
            break
    assert at > 10 and steps_in(url) == [1, 2, 3]


def test_a_store_that_fails_while_old_ones_are_looked_for_does_not_end_a_run(memory, monkeypatch, caplog):
    url = "memory://bucket/run"
    state = save_steps(url, 2)
    path = latest(url)
    with monkeypatch.context() as patched:
        Busy(patched, "info", ending="manifest.json")
        prune(path.parent, keep=1, just_written=path)
    assert "cannot be looked through for old ones: the store is busy" in caplog.text
    step(state)
    save(url, state, keep=1)
    assert steps_in(url) == [3]


def test_a_store_that_fails_while_replaced_files_are_removed_does_not_end_a_run(memory, monkeypatch, caplog):
    url = "memory://bucket/run"
    state = save_steps(url, 1)
    with monkeypatch.context() as patched:
        Busy(patched, "rm_file", ending="rank-00000.safetensors")
        state.tokens = 7
        path = save(url, state, keep=2)
    assert re.search(f"{path}/rank-00000.safetensors: cannot be removed, .*: the store is busy", caplog.text)
    assert check(path).tokens == 7 and len(list(path.iterdir())) == 3
    step(state)
    save(url, state, keep=2)
    assert {p.name for p in path.iterdir()} == {"manifest.json", *check(path).files}


OF_TORCH = RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize(
    ("in_store", "error"),
    [
        (True, OF_TORCH),
        (False, MemoryError()),
        pytest.param(True, MemoryError(), marks=pytest.mark.slow),
        pytest.param(False, OF_TORCH, marks=pytest.mark.slow),
    ],
    ids=["store-torch", "disk-python", "store-python", "disk-torch"],
)
def test_memory_that_runs_out_in_a_save_is_not_the_store_s_failure(error, in_store, memory, tmp_path, monkeypatch):
    where = "memory://bucket/run" if in_store else tmp_path
    state = save_steps(where, 1)
    step(state)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda self: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)) as caught:
        save(where, state, keep=2)
    assert type(caught.value) is type(error) and is_out_of_memory(caught.value)
    monkeypatch.undo()
    assert read_back(where) == (1, True)


def test_memory_that_runs_out_in_a_store_s_library_is_told_as_that(memory, monkeypatch):
    monkeypatch.setattr(type(memory), "_open", lambda *args, **kwargs: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MemoryError), creating(as_path("memory://bucket/file")):
        pass


# ---------------------------------------------------------------- several ranks


def go_on(url):
    state = make()
    load(latest(url), state)
    step(state)
    save(url, state, keep=1)
    return state.step


def test_ranks_write_and_other_ranks_go_on(tmp_path):
    url = url_of(tmp_path / "bucket")
    run_ranks(save_steps_of_ranks, url, num_ranks=2)
    assert run_ranks(go_on, url, num_ranks=3) == [3] * 3
    assert run_ranks(read_back, url, num_ranks=1) == [(3, True)]
    assert steps_in(url) == [3]
    assert check(latest(url)).num_ranks == 3


def save_steps_of_ranks(url):
    save_steps(url, 2)


def auxiliary_files_of(url, *, text):
    """A file to take along, of what one save or another is given."""
    file = Path(url.removeprefix("objects://")).parent / f"given-{len(text)}.json"
    file.write_text(text)
    return {"tokenizer.json": file}


def save_first(url):
    state = make()
    step(state)
    state.auxiliary_files = auxiliary_files_of(url, text="{}")
    save(url, state, keep=2)


def save_second(url, at, again):
    """A save of step 2 beside, or of step 1 in place of, the one that is there; returns how many points it has."""
    state = make()
    load(latest(url), state)
    step(state)
    state.step = 1 if again else 2
    state.tokens = 7
    state.auxiliary_files = auxiliary_files_of(url, text='{"of": "the second"}')
    Objects.kill_at, Objects.count = at, 0
    save(url, state, keep=2)
    return Objects.count


@pytest.mark.parametrize("again", [False, True], ids=["beside", "in-place"])
def test_killed_at_any_point_of_a_save_to_a_store(again, tmp_path, caplog):
    before = tmp_path / "before"
    run_ranks(save_first, url_of(before), num_ranks=1)
    shutil.copytree(before, tmp_path / "counted")
    num_points = result_of(save_second, url_of(tmp_path / "counted"), 0, again)
    assert num_points >= 4
    found = []
    for at in range(1, num_points + 1):
        bucket = tmp_path / f"killed-{at}"
        shutil.copytree(before, bucket)
        assert result_of(save_second, url_of(bucket), at, again) is None
        manifest = check(latest(url_of(bucket)))  # every byte of it
        found.append(manifest.tokens)
        tokenizer = latest(url_of(bucket)) / manifest.file_of("tokenizer.json")
        assert tokenizer.read_bytes() == (b'{"of": "the second"}' if manifest.tokens else b"{}")
    assert sorted(found) == found and set(found) <= {0, 7}  # the old one, then the new one; nothing else ever
    assert found[0] == 0 and (found[-1] == 7) == again
    run_ranks(go_on, url_of(bucket), num_ranks=1)
    assert all(check(path) for path in candidates(checkpoints_of(url_of(bucket))))
    last = latest(url_of(bucket))
    assert {p.name for p in last.iterdir()} == {"manifest.json", *check(last).files}


def test_a_run_saves_to_a_store_and_goes_on_from_it(tmp_path, warm):
    run_toml = write_run(tmp_path)
    url = url_of(tmp_path / "bucket")
    settings = ["train", run_toml, f"train.checkpoint_dir={url}", "train.checkpoint_every=2", "train.async_save=true"]
    done = rotorch(tmp_path / "log", *settings, "--parallel", "rtp=2", "train.steps=4")
    assert done.code == 0, done.stderr
    assert f"saves   {url}" in done.stdout and f"checkpoint  {url}/checkpoints/step-00000004" in done.stdout
    assert steps_in(url) == [2, 4] and not (tmp_path / "run" / "checkpoints").exists()

    again = rotorch(tmp_path / "log", *settings, "--parallel", "rtp=2", f"train.out={tmp_path / 'other'}")
    assert again.code == 2 and "already holds checkpoints. Write --resume" in again.stderr
    shutil.rmtree(tmp_path / "run")  # the machine is gone, the store is there
    micro = ["train.micro_batch=4"]
    done = rotorch(tmp_path / "log", *settings, "--parallel", "single", *micro, "--resume")
    assert done.code == 0, done.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [5, 6]
    assert steps_in(url) == [4, 6]

    said = tmp_path / "said.json"
    assert rotorch(tmp_path / "log", "inspect", url, "--contents", "--json", said).code == 0
    assert json.loads(said.read_text())["step"] == 6
    assert export_checkpoint(url, tmp_path / "exported")["step"] == 6


# ---------------------------------------------------------------- what is wrong


def test_a_file_url_is_a_directory():
    assert as_path("file:///a/b") == Path("/a/b") and as_path("runs/x") == Path("runs/x")
    assert as_path("file://localhost/a") == Path("/a") and as_path("local:///a") == Path("/a")
    assert as_path("objects:///a/") == StorePath("objects:///a")


@pytest.mark.parametrize("url", ["file://runs/x", "local://runs", "file://~/runs", "file://", "file:///"])
def test_a_file_url_has_a_whole_path(url):
    with pytest.raises(ConfigError, match=rf"^{url}: a file URL .* Write the directory itself, or file:///"):
        as_path(url)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("s4://bucket/run", r"no store is called 's4' \(did you mean 's3'\?\)\. Write a directory, or a URL"),
        ("simplecache::s3://bucket/run", "cannot be written to"),
        ("memory://bucket/run", "is in the memory of one process"),
        ("lacking://bucket/run", "the package for lacking:// is not installed. fsspec says: Install it"),
        ("readonly://bucket/run", "cannot be written: the store is read-only. Write a place that can be"),
    ],
)
def test_what_is_wrong_with_a_store_is_said_before_anything_starts(where, message, tmp_path, monkeypatch, warm):
    monkeypatch.setitem(known_implementations, "lacking", {"class": "no_such_package.Store", "err": "Install it"})
    fsspec.register_implementation("readonly", ReadOnly, clobber=True)
    done = rotorch(tmp_path / "log", "train", write_run(tmp_path), f"train.checkpoint_dir={where}")
    assert done.code == 2 and not (tmp_path / "run").exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"rotorch: train.checkpoint_dir: {where}")
    assert re.search(message, line), line


@pytest.mark.parametrize("key", ["checkpoint_dir", "out"])
def test_a_password_in_a_url_is_refused_and_not_repeated(key, tmp_path, warm):
    done = rotorch(tmp_path / "log", "train", write_run(tmp_path), f"train.{key}=sftp://me:s3cr@t@host/run")
    assert done.code == 2 and not (tmp_path / "run").exists()
    (line,) = done.stderr.splitlines()
    assert f"train.{key}: sftp://me:...@host: a password in a URL would be written" in line and "Leave it out" in line
    assert "s3cr" not in done.stdout + done.stderr


@pytest.mark.parametrize("url", ["memory://me@host/a:b@c", "memory://bucket/run"])
def test_a_url_without_a_password_is_taken(url):
    assert str(as_path(url)) == url


class ReadOnly(fsspec.AbstractFileSystem):
    protocol = "readonly"

    def ls(self, path, detail=True, **kwargs):
        return []


def test_a_run_s_directory_is_on_a_disk(tmp_path, warm):
    done = rotorch(tmp_path / "log", "train", write_run(tmp_path), "train.out=s3://bucket/run")
    assert done.code == 2
    assert "Write train.checkpoint_dir=s3://bucket/run for the checkpoints" in done.stderr


def test_a_store_that_refuses_is_named(tmp_path, monkeypatch):
    place = as_path(url_of(tmp_path / "bucket"))

    def refuse(self, path, mode, *args, **kwargs):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(Objects, "_open", refuse)
    with pytest.raises(
        ConfigError, match=r"objects://.*: cannot be written: Access Denied\. Write a place that can be"
    ):
        check_writable(place)
    monkeypatch.setattr(Objects, "_open", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(OSError, match="ZeroDivisionError"), creating(place / "file"):
        pass
