"""Bytes of tensors to files and back, through a buffer that holds however little of them."""

import gc
import hashlib
import io
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from three_weights import WEIGHTS, make
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from rotorch.core.errors import FinalFailure, RankFailure
from rotorch.core.spec import Weight
from rotorch.train.checkpoint import manifest, saving, storage
from rotorch.train.checkpoint.directories import leftovers
from rotorch.train.checkpoint.manifest import StoredChunk, read_manifest
from rotorch.train.checkpoint.saving import check, latest, load, save
from rotorch.train.checkpoint.storage import (
    CheckpointReader,
    ChunksLoadPlanner,
    ChunksSavePlanner,
    LazyTensor,
    _read_box,
    write_safetensors,
)
from rotorch.train.state import model_tensors

BUFFER_BYTES = 24  # six float32


class Stream(io.BytesIO):
    """Remembers the longest read."""

    most = 0

    def readinto(self, buffer):
        self.most = max(self.most, len(buffer))
        return super().readinto(buffer)


@pytest.fixture
def tiny_buffer(monkeypatch):
    monkeypatch.setattr(storage, "_BUFFER_BYTES", BUFFER_BYTES)


SHAPES = [(), (20,), (3, 4), (4, 9), (3, 5, 4), (2, 3, 9), (2, 3, 2, 7), (0, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_is_written_through_the_buffer(shape, tiny_buffer, tmp_path):
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    blocks = list(storage._row_blocks(tensor))
    assert all(block.numel() * 4 <= BUFFER_BYTES for block in blocks)
    written = write_safetensors(tmp_path / "file", [LazyTensor("a", "F32", shape, lambda: tensor)])
    content = (tmp_path / "file").read_bytes()
    assert content[written.starts[0] :] == tensor.numpy().tobytes()
    assert written.file.sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if math.prod(shape)], ids=str)
def test_every_box_of_a_tensor_is_read_through_the_buffer(shape, tiny_buffer):
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    stream = Stream(b"12345678" + tensor.numpy().tobytes())
    chunk = StoredChunk(offsets=(0,) * len(shape), sizes=shape, file="x", start=8)
    boxes = [((), ())]
    for length in shape:
        ends = [(a, b) for a in range(length) for b in range(a + 1, length + 1) if b - a in (1, 2, length)]
        boxes = [
            ((*offsets, a), (*sizes, b - a)) for offsets, sizes in boxes for a, b in ends[:: max(1, len(ends) // 6)]
        ]
    for offsets, sizes in boxes:
        expected = tensor
        for dim, (start, length) in enumerate(zip(offsets, sizes, strict=True)):
            expected = expected.narrow(dim, start, length)
        into = torch.full(sizes, -1.0)
        _read_box(stream, chunk, torch.float32, offsets=offsets, into=into, file=Path("x"))
        assert torch.equal(into, expected), (offsets, sizes)
    assert 0 < stream.most <= BUFFER_BYTES


def test_no_manifest_is_written_that_could_not_be_read_again(tmp_path, monkeypatch):
    state = make()
    path = save(tmp_path, state, keep=1)
    num_bytes = (path / "manifest.json").stat().st_size
    state.step = 1
    monkeypatch.setattr(manifest, "_MOST_BYTES", num_bytes - 1)
    with pytest.raises(FinalFailure, match=r"would have .* for \d+ tensors in \d+ chunks, .* over fewer ranks$"):
        save(tmp_path, state, keep=1)
    monkeypatch.setattr(manifest, "_MOST_BYTES", num_bytes)
    assert latest(tmp_path) == path and not leftovers(path.parent)
    save(tmp_path, state, keep=1)
    assert check(latest(tmp_path)).step == 1


def test_a_chunk_ends_with_its_file_or_before(tmp_path):
    written = manifest.read_manifest(save(tmp_path, make(), keep=1))
    entry = written.tensors["model/norm"]
    (chunk,) = entry.chunks
    last = written.files[chunk.file].num_bytes - 4 * math.prod(entry.shape)
    for start, problem in ((last, None), (last + 1, f"tensor 'model/norm' lies past the end of {chunk.file!r}")):
        moved = entry.model_copy(update={"chunks": (chunk.model_copy(update={"start": start}),)})
        changed = written.model_copy(update={"tensors": {**written.tensors, "model/norm": moved}})
        assert manifest._nonsense(changed) == problem


def test_a_plan_for_loading_stays_on_its_rank(tmp_path):
    """Rank 0 collects what `create_local_plan` gives, of every rank."""
    save(tmp_path, make(), keep=1)
    tensors, planner = model_tensors(make().model), ChunksLoadPlanner()
    reader = CheckpointReader(latest(tmp_path), manifest=read_manifest(latest(tmp_path)))
    planner.set_up_planner(tensors, reader.read_metadata(), is_coordinator=False)
    sent = planner.create_local_plan()
    assert sent.items == []
    assert {item.dest_index.fqn for item in planner.finish_plan(sent).items} == tensors.keys()


def plan_of(*chunks, shape=(4, 6)):
    """A rank's plan to save chunks of a tensor, by their first rows and columns, and their lengths."""
    items = [
        WriteItem(
            MetadataIndex("w", offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)), TensorProperties(), torch.Size(shape)
            ),
        )
        for offsets, sizes in chunks
    ]
    return SavePlan(items)


def places(plan):
    return [tuple(item.tensor_data.chunk.offsets) for item in plan.items]


def test_each_chunk_is_saved_by_one_of_its_holders_and_none_has_much_more_to_write():
    left, right = ((0, 0), (4, 3)), ((0, 3), (4, 3))
    plans, _ = ChunksSavePlanner().create_global_plan([plan_of(left, right), plan_of(left, right), plan_of(right)])
    assert sorted(places(plans[0]) + places(plans[1]) + places(plans[2])) == [(0, 0), (0, 3)]
    assert max(len(plan.items) for plan in plans) == 1


class Collecting(ChunksSavePlanner):
    """Notes whether the collector of cycles works when the plans of all ranks are there; fails then if told to."""

    fails = False
    found = None

    def create_global_plan(self, all_plans):
        Collecting.found = gc.isenabled()
        if self.fails:
            raise RuntimeError("as told")
        return super().create_global_plan(all_plans)


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_rests_while_plans_come_in_and_not_after_a_save(fails, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "ChunksSavePlanner", Collecting)
    monkeypatch.setattr(Collecting, "fails", fails)
    assert gc.isenabled()
    with pytest.raises(RankFailure, match="as told") if fails else nullcontext():
        save(tmp_path, make(), keep=1)
    assert Collecting.found is False and gc.isenabled()


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (((0, 3), (4, 2)), "'w' has 24 elements, its chunks 20"),
        (((0, 4), (4, 3)), "'w' has a chunk outside its shape"),
        (((0, 2), (3, 4)), "'w' has chunks that overlap"),
    ],
)
def test_chunks_that_do_not_fill_a_tensor_are_not_saved(second, why):
    with pytest.raises(AssertionError, match=why):
        ChunksSavePlanner().create_global_plan([plan_of(((0, 0), (4, 3))), plan_of(second)])


def test_a_weight_that_all_ranks_leave_to_others_is_not_left_out_silently(tmp_path):
    state = make()
    norm = state.model.weights["norm"]
    norm.num_holders, norm.holder = 2, 1
    save(tmp_path, state, keep=1)  # the second of two has the second half of the model, in which it begins
    norm.holder = 0
    with pytest.raises(RankFailure, match="no rank saves 'model/norm'"):
        save(tmp_path, state, keep=1)


def test_a_last_weight_without_elements_is_saved(tmp_path):
    """It begins where the model's bytes end, in no holder's share of them."""
    weights = (*WEIGHTS, Weight("nothing", (0,), 4))
    save(tmp_path, make(weights=weights), keep=1)
    assert "model/nothing" in read_manifest(latest(tmp_path)).tensors
    load(latest(tmp_path), make(weights=weights))
