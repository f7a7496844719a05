import pytest
import torch
import torch.distributed as dist

from rotorch.testing.fake import as_rank


def test_this_process_is_that_rank_within_and_nobody_after():
    with as_rank(3, num_ranks=8):
        assert (dist.get_rank(), dist.get_world_size()) == (3, 8)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
    assert not dist.is_initialized()


def test_nothing_stays_after_an_error():
    with pytest.raises(ZeroDivisionError), as_rank(0, num_ranks=2):
        raise ZeroDivisionError
    assert not dist.is_initialized()
