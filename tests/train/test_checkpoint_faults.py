"""Checkpoints under faults: killed at any point, full disks, flipped bytes, other programs' files."""

import errno
import io
import json
import logging
import os
import random
import resource
import shutil
import signal
import threading
from pathlib import Path

import pytest
import torch
from failures import seen
from forked import result_of
from three_weights import WEIGHTS, Config, make, read_back, step, steps_of
from torch import nn

from rotorch.core.errors import ConfigError, RankFailure
from rotorch.core.spec import Weight
from rotorch.testing.ranks import run_ranks
from rotorch.train.checkpoint import storage
from rotorch.train.checkpoint.directories import leftovers
from rotorch.train.checkpoint.manifest import (
    DamagedCheckpoint,
    NewerFormat,
    errors_as_damage,
    json_digest,
    manifest_text,
    read_manifest,
)
from rotorch.train.checkpoint.saving import check, latest, load, load_newest, save
from rotorch.train.checkpoint.store import StorePath


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Imports here what torch imports at an optimizer's first step, so that not every forked rank does it."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()


def save_steps(run_dir, num_steps, keep=2):
    state = make()
    for _ in range(num_steps):
        step(state)
        save(run_dir, state, keep=keep)


# ---------------------------------------------------------------- killed


class Countdown:
    """Kills this process at the `at`-th thing that a save does to the disk, before it does it."""

    def __init__(self, at):
        self.at, self.count = at, 0
        for owner, name in [
            *((os, name) for name in ("rename", "fsync", "mkdir", "rmdir", "unlink", "open")),
            (storage, "_row_blocks"),
            (storage, "write_safetensors"),
            (storage.Manifest, "to_json"),
        ]:
            setattr(owner, name, self.counted(getattr(owner, name)))

    def counted(self, function):
        def call(*args, **options):
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **options)

        return call


def save_third(run_dir, at):
    """The third save of a run, killed at point `at`; returns how many points there are."""
    state = make()
    load(latest(run_dir), state)
    step(state)
    points = Countdown(at)
    save(run_dir, state, keep=2)
    return points.count


def test_killed_at_any_point_of_a_save(tmp_path, caplog):
    before = tmp_path / "before"
    run_ranks(save_steps, before, 2, num_ranks=1)
    shutil.copytree(before, tmp_path / "counted")
    num_points = result_of(save_third, tmp_path / "counted", 0)
    assert num_points > 15
    last_seen = []
    for at in range(1, num_points + 1):
        run_dir = tmp_path / f"killed-{at}"
        shutil.copytree(before, run_dir)
        assert result_of(save_third, run_dir, at) is None
        found = latest(run_dir)
        last_seen.append(check(found).step)
        if leftovers(run_dir / "checkpoints"):
            assert "left by a save that was cut off" in caplog.text
        caplog.clear()
    # First the one before is found, from the rename on the new one; nothing else ever.
    assert sorted(last_seen) == last_seen
    assert set(last_seen) == {2, 3}
    run_ranks(go_on, tmp_path / "killed-12", num_ranks=1)
    assert steps_of(tmp_path / "killed-12") == [2, 3]
    assert not leftovers(tmp_path / "killed-12" / "checkpoints")


def go_on(run_dir):
    state = make()
    load(latest(run_dir), state)
    if state.step == 2:
        step(state)
    save(run_dir, state, keep=2)


def save_until_killed(run_dir, delay_s):
    state = make()
    while state.step < 10_000:
        step(state)
        save(run_dir, state, keep=2)
        if state.step == 1 and state.rank == 1:  # a first one is there, however slow the machine is
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_one_of_two_ranks_killed_at_random(seed, tmp_path):
    delay_s = random.Random(seed).uniform(0.3, 0.7)
    with pytest.raises(RankFailure, match=r"^rank 1 died: exit code -9"):  # not that anybody was waited for in vain
        run_ranks(save_until_killed, tmp_path, delay_s, num_ranks=2)
    assert len(steps_of(tmp_path)) <= 3  # between the rename of a new one and the removal of the oldest
    (saved, same), _ = run_ranks(read_back, tmp_path, num_ranks=2)
    assert saved == steps_of(tmp_path)[-1]
    assert same


def replace_same_step(run_dir):
    save_steps(run_dir, 2, keep=2)
    state = make()
    load(latest(run_dir), state)
    save(run_dir, state, keep=2)


def test_saving_a_step_again_replaces_it(tmp_path):
    run_ranks(replace_same_step, tmp_path, num_ranks=2)
    assert steps_of(tmp_path) == [1, 2]
    assert not leftovers(tmp_path / "checkpoints")
    assert check(latest(tmp_path)).step == 2


def test_killed_while_replacing_the_only_one(tmp_path):
    run_ranks(save_steps, tmp_path, 1, num_ranks=1)
    parent = tmp_path / "checkpoints"
    os.rename(parent / "step-00000001", parent / ".step-00000001.old")  # where a kill between two renames leaves it
    assert latest(tmp_path) == parent / ".step-00000001.old"
    run_ranks(go_on, tmp_path, num_ranks=1)
    assert check(parent / "step-00000001").step == 1
    assert not leftovers(parent)


# ---------------------------------------------------------------- kept


@pytest.mark.parametrize("keep", [1, 3])
def test_the_last_k_are_kept(keep, tmp_path):
    run_ranks(save_steps, tmp_path, 5, keep, num_ranks=2)
    assert steps_of(tmp_path) == list(range(6 - keep, 6))


def save_an_earlier_step(run_dir):
    state = make()
    step(state)
    save(run_dir, state, keep=1)


def test_what_was_just_written_stays(tmp_path):
    run_ranks(save_steps, tmp_path, 3, 1, num_ranks=1)
    run_ranks(save_an_earlier_step, tmp_path, num_ranks=1)  # begun anew: step 1, while step 3 lies there
    assert steps_of(tmp_path) == [1]


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    run_ranks(save_steps, tmp_path, 2, num_ranks=1)
    (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    run_ranks(go_on_from_first, tmp_path, num_ranks=1)
    assert steps_of(tmp_path) == [1, 2, 3]  # keep=2: steps 1 and 3, and 2 is not whole


def go_on_from_first(run_dir):
    state = make()
    load(latest(run_dir), state)
    assert state.step == 1
    state.step = 3
    save(run_dir, state, keep=2)


def go_on_from_what_is_whole(run_dir, steps):
    state = make()
    load_newest(latest(run_dir), state)
    for state.step in steps:
        save(run_dir, state, keep=2)
    return steps_of(run_dir)


@pytest.mark.parametrize(("steps", "left"), [([3], [2, 3, 4]), ([3, 5], [3, 4, 5]), ([4, 5], [4, 5])], ids=str)
def test_one_found_damaged_does_not_count_until_it_is_written_again(steps, left, tmp_path):
    """Its sizes are right, and the one that the run went on from would go in its place."""
    run_ranks(save_steps, tmp_path, 2, num_ranks=1)
    run_ranks(go_on_from_what_is_whole, tmp_path, [4], num_ranks=1)
    flip(tmp_path / "checkpoints" / "step-00000004" / "rank-00000.safetensors", -1)
    assert run_ranks(go_on_from_what_is_whole, tmp_path, steps, num_ranks=1) == [left]


# ---------------------------------------------------------------- no room


def save_with_a_file_limit(run_dir):
    """Step 2 fails on rank 1 in the middle of its file, as on a full disk; says what each rank was told."""
    state = make()
    step(state)
    save(run_dir, state, keep=3)
    step(state)
    if state.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, resource.RLIM_INFINITY))
    try:
        save(run_dir, state, keep=3)
    except RankFailure as error:
        told = str(error)
    if state.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    left = sorted(p.name for p in (run_dir / "checkpoints").iterdir())
    state.step += 1
    save(run_dir, state, keep=3)
    return told, left


def test_a_write_that_fails_on_one_rank_fails_on_all(tmp_path):
    results = run_ranks(save_with_a_file_limit, tmp_path, num_ranks=3)
    told, left = results[0]
    assert [other[0] for other in results] == [told] * 3
    assert "rank 1: File too large; earlier checkpoints are untouched" in told
    seen(
        "The disk fills up during a save",
        f"rotorch: rank 1 failed in step 2, writing a checkpoint: {told}",
        instead={"File too large": "No space left on device"},
    )
    assert "step-00000002" in told
    assert left == ["step-00000001"]
    assert steps_of(tmp_path) == [1, 3]


def save_without_room(run_dir):
    state = make()
    state.step = 1
    save(run_dir, state, keep=3)
    state.step = 2
    usage = shutil.disk_usage(run_dir)
    shutil.disk_usage = lambda path: usage._replace(free=1000)
    try:
        save(run_dir, state, keep=3)
    except RankFailure as error:
        return str(error)


def test_a_disk_with_no_room_is_noticed_before_writing(tmp_path):
    messages = run_ranks(save_without_room, tmp_path, num_ranks=2)
    assert messages[0] == messages[1]
    assert "KiB needed, 1000 B free; nothing was written, earlier checkpoints are untouched" in messages[0]
    seen(
        "The disk is full before a save",
        f"rotorch: rank 0 failed in step 2, writing a checkpoint: {messages[0]}",
        instead={r"checkpoint: /tmp/\S*:": "checkpoint: runs/my_run/checkpoints:"},
    )
    assert steps_of(tmp_path) == [1]


def save_into_a_file(run_dir):
    (run_dir / "checkpoints").touch()
    try:
        save(run_dir, make(), keep=3)
    except RankFailure as error:
        return str(error)


def test_a_directory_that_cannot_be_made(tmp_path):
    messages = run_ranks(save_into_a_file, tmp_path, num_ranks=2)
    assert messages[0] == messages[1]
    assert "File exists" in messages[0]


# ---------------------------------------------------------------- damaged, foreign, other


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The checkpoint of step 2 of a run on two ranks."""
    run_dir = tmp_path_factory.mktemp("whole")
    run_ranks(save_steps, run_dir, 2, num_ranks=2)
    return latest(run_dir)


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole.parents[1], tmp_path / "run")) / "checkpoints" / whole.name


def load_and_tell(path, options):
    """Loads and returns the error and whether anything was changed."""
    state = make(**options)
    before = {name: held.local.clone() for name, held in state.model.weights.items()}
    random_before = torch.get_rng_state()
    try:
        load(path, state)
    except ConfigError as error:
        unchanged = all(torch.equal(held.local, before[name]) for name, held in state.model.weights.items())
        unchanged &= not state.optimizer.state and state.step == 0
        return str(error), unchanged and torch.equal(torch.get_rng_state(), random_before)


def refused(path, *, num_ranks=2, **options):
    """The one line with which all ranks refuse to load, leaving everything as it was."""
    told = run_ranks(load_and_tell, path, options, num_ranks=num_ranks)
    assert told == [told[0]] * num_ranks
    message, unchanged = told[0]
    assert unchanged
    assert "\n" not in message
    return message


def flip(file, position, *, bits=0x10):
    content = bytearray(file.read_bytes())
    content[position] ^= bits
    file.write_bytes(content)


def test_a_flipped_byte_anywhere_is_found_and_named(copy):
    rng = random.Random(0)
    for file in sorted(copy.iterdir()):
        whole_file = file.read_bytes()
        for position in {0, len(whole_file) - 1, *(rng.randrange(len(whole_file)) for _ in range(40))}:
            flip(file, position, bits=rng.randrange(1, 256))
            with pytest.raises(ConfigError) as caught:
                check(copy)
            assert str(file) in str(caught.value), position
            file.write_bytes(whole_file)
    check(copy)


def test_a_manifest_with_any_byte_flipped_or_cut_off(copy):
    """The file that says what the others must be: every byte of it counts, those between its values too."""
    file = copy / "manifest.json"
    whole_file, rng = file.read_bytes(), random.Random(1)
    end = len(whole_file)
    for position in (*range(30), *range(30, end - 80, 13), *range(end - 80, end)):
        content = bytearray(whole_file)
        content[position] ^= rng.randrange(1, 256)
        for text in (bytes(content), whole_file[:position]):
            file.write_bytes(text)
            with pytest.raises(ConfigError, match=r"manifest\.json: (damaged|written by another program)"):
                read_manifest(copy)
    for before, after in ((b" ", b"\t"), (b'"version": 2', b'"version": 9'), (b"}\n", b"}\n\n")):
        file.write_bytes(whole_file.replace(before, after, 1))
        with pytest.raises(ConfigError, match=r"manifest\.json: damaged"):
            read_manifest(copy)


def test_a_file_cut_off_anywhere_is_skipped(copy, caplog):
    """As on a disk that lost what it said to have: the manifest is there, the end of another file is not."""
    rng = random.Random(2)
    for file in sorted(copy.glob("rank-*")):
        content = file.read_bytes()
        for length in {0, len(content) - 1, *(rng.randrange(len(content)) for _ in range(30))}:
            file.write_bytes(content[:length])
            assert latest(copy.parents[1]).name == "step-00000001"
            assert f"{file}: truncated ({length} bytes instead of {len(content)}) (skipped" in caplog.text
            told = caplog.messages[-1]
        file.write_bytes(content)
    seen("A file of a checkpoint is too short", told)
    assert latest(copy.parents[1]) == copy


def load_what_is_whole(path):
    state, lines, handler = make(), [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("rotorch").addHandler(handler)
    try:
        return load_newest(path, state).name, state.step, lines
    except ConfigError as error:
        return str(error), state.step, lines


def test_a_damaged_one_gives_way_to_the_one_before(copy):
    flip(copy / "rank-00001.safetensors", 900)
    (*loaded, said), other = run_ranks(load_what_is_whole, copy, num_ranks=2)
    assert loaded == ["step-00000001", 1] and other == ("step-00000001", 1, [])  # rank 0 speaks
    seen("A byte of the last checkpoint has changed", said[-1])
    flip(copy.parent / "step-00000001" / "rank-00000.safetensors", -1)
    (told, step, _), other = run_ranks(load_what_is_whole, copy, num_ranks=2)
    assert other[:2] == (told, step) and step == 0
    assert "step-00000001/rank-00000.safetensors: damaged" in told and "there is none before it" in told
    seen("A byte of the only checkpoint has changed", f"rotorch: {told}")


class BadSector(io.RawIOBase):
    """A file of a disk that cannot give it back."""

    def readable(self):
        return True

    def seek(self, *args):
        return 0

    def readinto(self, buffer):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def load_from_a_bad_disk(path, name, at):
    """As `load_what_is_whole`; from the `at`-th time on the file cannot be read."""
    opened, count = Path.open, 0

    def opening(self, *args, **options):
        nonlocal count
        count += self == path / name
        return BadSector() if self == path / name and count >= at else opened(self, *args, **options)

    Path.open = opening
    return load_what_is_whole(path)


@pytest.mark.parametrize(
    ("name", "at"),
    [("manifest.json", 1), ("rank-00001.safetensors", 1), ("rank-00001.safetensors", 2)],
    ids=["manifest", "against its digest", "into the weights"],
)
def test_one_that_the_disk_cannot_read_gives_way_to_the_one_before(name, at, copy):
    told = run_ranks(load_from_a_bad_disk, copy, name, at, num_ranks=2)
    assert [(loaded, step) for loaded, step, _ in told] == [("step-00000001", 1)] * 2
    said = told[0][2][-1]
    assert f"{copy / name}: damaged (Input/output error where it was read): skipped, going on from" in said


def test_an_error_of_a_store_is_no_damage(tmp_path):
    """There it may be trouble on the way, and the checkpoint before would cost steps."""
    for place, number, kind in (
        (tmp_path / "x", errno.EIO, DamagedCheckpoint),
        (tmp_path / "x", errno.EACCES, OSError),
        (StorePath("memory://x"), errno.EIO, OSError),
    ):
        with pytest.raises(kind), errors_as_damage(place):
            raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("file", ["rank-00000.safetensors", "rank-00001.safetensors", "manifest.json"])
def test_a_flipped_byte_is_refused_by_all_ranks(file, copy):
    flip(copy / file, 500)
    assert f"{file}: damaged" in refused(copy)


@pytest.mark.parametrize("file", ["rank-00001.safetensors", "manifest.json"])
def test_truncated_or_missing(file, copy, caplog):
    content = (copy / file).read_bytes()
    for length in (0, 7, len(content) // 2, len(content) - 3):
        (copy / file).write_bytes(content[:length])
        with pytest.raises(ConfigError, match=f"{file}: (truncated|damaged)"):
            check(copy)
        assert latest(copy.parents[1]).name == "step-00000001"
        assert "skipped; looking for the one before" in caplog.text
    assert file in refused(copy)
    (copy / file).unlink()
    assert file in refused(copy)


def rewrite(copy, **changes):
    """Changes a manifest and signs it again, as another version of this library or an attacker would."""
    file = copy / "manifest.json"
    content = json.loads(file.read_text())
    del content["digest"]
    for dotted, value in changes.items():
        *parents, last = dotted.split("__")
        inner = content
        for key in parents:
            inner = inner[key]
        inner[last] = value
    file.write_text(manifest_text({**content, "digest": json_digest(content)}))


def test_a_newer_format(copy):
    rewrite(copy, version=3, something_new=[])
    told = refused(copy)
    assert "format version 3, and this rotorch reads up to 2. Use a newer rotorch" in told
    seen("A checkpoint of a later rotorch", f"rotorch: {told}")
    with pytest.raises(NewerFormat):  # not to be skipped in favour of an older one
        latest(copy.parents[1])


def norm_lies(offset, file="x"):
    return {"tensors__model/norm__chunks": [{"offsets": [offset], "sizes": [16], "file": file, "start": 0}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensors__model/up__shape": [640, 16]}, "'model/up' has 10240 elements, its chunks 1024"),
        ({"tensors__model/up__dtype": "F33"}, "'model/up' has unknown dtype 'F33'"),
        ({"tensors__model/up__chunks": [{"offsets": [0], "sizes": [4], "file": "x", "start": 0}]}, "of other rank"),
        (norm_lies(8), "a chunk outside its shape"),
        (norm_lies(-8), "a chunk outside its shape"),
        (norm_lies(0, file="/etc/passwd"), "lies in the unlisted file '/etc/passwd'"),
        ({"files__../../x": {"num_bytes": 1, "sha256": ""}}, "'../../x' leaves the checkpoint's directory"),
        ({"step": -1}, "step: Input should be greater than or equal to 0"),
        ({"step": "two"}, "step: Input should be a valid integer"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
        ({"format": "x"}, "written by another program"),
    ],
)
def test_a_manifest_that_makes_no_sense(changes, message, copy):
    rewrite(copy, **changes)
    with pytest.raises(ConfigError) as caught:
        check(copy)
    assert message in str(caught.value)
    assert "manifest.json" in str(caught.value)


def test_a_chunk_past_the_end_of_its_file(copy):
    chunk = {"offsets": [0], "sizes": [16], "file": "rank-00000.safetensors", "start": 10**6}
    rewrite(copy, **{"tensors__model/norm__chunks": [chunk]})
    with pytest.raises(ConfigError, match=r"lies past the end of 'rank-00000\.safetensors'"):
        check(copy)


def test_not_a_checkpoint_at_all(tmp_path):
    assert "no such directory" in refused(tmp_path / "nothing")
    (tmp_path / "file").touch()
    assert "not a directory" in refused(tmp_path / "file")
    assert "not a checkpoint of rotorch (no manifest.json)" in refused(tmp_path)
    (tmp_path / "manifest.json").write_text('{"name": "a web app"}')
    assert "written by another program" in refused(tmp_path)
    (tmp_path / "manifest.json").write_text("[" * 100_000)
    assert "not valid JSON" in refused(tmp_path)
    assert latest(tmp_path) is None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_a_torch_checkpoint_of_another_program(tmp_path):
    torch.distributed.checkpoint.save({"model": torch.zeros(3)}, checkpoint_id=tmp_path)
    assert "a torch.distributed.checkpoint of another program (.metadata, but no manifest.json)" in refused(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weights": (*WEIGHTS[:2], Weight("bias", (16,), 4))},
            "of another model (Module): it lacks 'bias'; the model lacks 'norm'",
        ),
        ({"weights": (*WEIGHTS[:2], Weight("norm", (17,), 4))}, "'norm' has shape [16] there and [17] here"),
        ({"dtype": torch.bfloat16}, "'up' has dtype F32 there and BF16 here"),
        ({"config": Config(rope_theta=5e5)}, "of another model: rope_theta is 10000.0 there and 500000.0 here"),
        ({"optimizer": torch.optim.SGD}, "written by a run with AdamW, and this run has SGD"),
        ({"optimizer": lambda p, lr: torch.optim.AdamW([{"params": p[:1]}, {"params": p[1:]}], lr=lr)}, "1 parameter"),
    ],
    ids=["names", "shape", "dtype", "config", "optimizer", "groups"],
)
def test_of_another_model_or_optimizer(options, message, whole):
    assert message in refused(whole, **options)


def load_different(paths):
    state = make()
    try:
        load(paths[state.rank], state)
    except ConfigError as error:
        return str(error)


def test_ranks_that_see_different_checkpoints(tmp_path):
    run_ranks(save_steps, tmp_path, 2, num_ranks=2)
    paths = sorted((tmp_path / "checkpoints").iterdir())
    for message in run_ranks(load_different, paths, num_ranks=2):
        assert "ranks see different contents" in message


def test_leftovers_are_removed_with_a_word(tmp_path, caplog):
    parent = tmp_path / "checkpoints"
    (parent / ".step-00000007.tmp-123").mkdir(parents=True)
    (parent / ".step-00000003.gone-9").mkdir()
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path) is None
    assert caplog.text.count("left by a save that was cut off") == 2
    seen("A save was cut off", next(message for message in caplog.messages if "tmp-" in message))
    run_ranks(save_steps, tmp_path, 1, num_ranks=2)
    assert [p.name for p in parent.iterdir()] == ["step-00000001"]
