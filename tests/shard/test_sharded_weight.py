"""Chunks that one rank holds of a whole weight, and torch's own checkpoints of them."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rotorch.core.spec import Cut, Weight
from rotorch.shard.sharded_weight import Chunk, ChunkedTensor, cut_chunks


@given(
    dim=st.integers(0, 2), groups=st.integers(1, 6), blocks=st.integers(1, 3), group_size=st.integers(1, 3),
    num_slices=st.integers(1, 8),
)  # fmt: skip
def test_chunks_of_all_slices_cover_the_whole_once(dim, groups, blocks, group_size, num_slices):
    shape = tuple(groups * blocks * group_size if d == dim else 2 for d in range(3))
    weight = Weight("w", shape, 4, Cut(dim, groups, blocks))
    seen = torch.zeros(shape)
    for index in range(num_slices):
        local = torch.zeros(weight.slice_shape(num_slices=num_slices, index=index))
        for chunk in cut_chunks(weight, num_slices=num_slices, index=index):
            assert chunk.of_local(local).shape == chunk.of_whole(seen).shape == torch.Size(chunk.sizes)
            chunk.of_whole(seen).add_(1)
            chunk.of_local(local).add_(1)
        assert (local == 1).all()
    assert (seen == 1).all()


def test_a_weight_that_is_not_cut_is_one_piece():
    assert cut_chunks(Weight("w", (3, 2), 4), num_slices=4, index=2) == (Chunk((0, 0), (3, 2)),)
    number = torch.tensor(5.0)
    (chunk,) = cut_chunks(Weight("w", (), 4), num_slices=4, index=2)
    assert chunk.of_local(number) is number and torch.equal(chunk.of_whole(number), number)


def chunks_of(weight, whole, *, num_slices, index):
    chunks = cut_chunks(weight, num_slices=num_slices, index=index)
    local = torch.zeros(weight.slice_shape(num_slices=num_slices, index=index))
    for chunk in chunks:
        chunk.of_local(local).copy_(chunk.of_whole(whole))
    return ChunkedTensor(local, shape=weight.shape, chunks=chunks)


def test_they_are_a_tensor_of_the_whole_shape_that_takes_part_in_nothing():
    weight = Weight("w", (6, 4), 4, Cut(0, 3, blocks=2))
    found = chunks_of(weight, torch.arange(24.0).view(6, 4), num_slices=2, index=1)
    assert isinstance(found, Tensor)
    assert (tuple(found.shape), found.dtype) == ((6, 4), torch.float32)
    assert "ChunkedTensor(shape=(6, 4)" in repr(found)
    with pytest.raises(TypeError, match=r"use \.local"):
        torch.add(found, found)


@pytest.mark.parametrize("cut", [Cut(0, 3, blocks=2), Cut(1, 5)])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_checkpoints_save_and_load_them_under_any_cut(tmp_path, cut):
    weight = Weight("w", (12, 5), 4, cut)
    whole = torch.arange(60.0).view(12, 5)
    dcp.save({"w": chunks_of(weight, whole, num_slices=1, index=0)}, checkpoint_id=tmp_path, no_dist=True)
    for num_slices in (1, 2, 3, 6):
        for index in range(num_slices):
            wanted = chunks_of(weight, torch.zeros(12, 5), num_slices=num_slices, index=index)
            dcp.load({"w": wanted}, checkpoint_id=tmp_path, no_dist=True)
            for chunk in wanted.chunks:
                assert torch.equal(chunk.of_local(wanted.local), chunk.of_whole(whole))
    plain = {"w": torch.zeros(12, 5)}
    dcp.load(plain, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(plain["w"], whole)
