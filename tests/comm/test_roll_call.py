"""Numbers by which ranks that share a batch notice that they were given different ones."""

import pytest
import torch

from rotorch.comm.roll_call import digest_of, number_of_batch


def total_of(batches, *, group=0):
    """The sum over ranks, modulo 2**64, as the all-reduce has it."""
    number = len(batches)
    mine = [
        number_of_batch(digest_of(batch), group=group, num_ranks=number, is_first=rank == 0)
        for rank, batch in enumerate(batches)
    ]
    return int(torch.tensor(mine).sum())


@pytest.mark.parametrize("ids", [(2, 2), (2, 2, 2), (5, 5, 5, 5)])
def test_equal_batches_add_up_to_nothing(ids):
    assert total_of([{"input_ids": torch.full((2, 3), i)} for i in ids], group=3) == 0


@pytest.mark.parametrize("ids", [(1, 2), (2, 1, 3), (2, 2, 3, 1), (3, 2, 3, 4)])
def test_batches_of_which_one_is_the_mean_of_the_others_are_noticed(ids):
    assert total_of([{"input_ids": torch.full((2, 3), i)} for i in ids]) != 0
