"""Sums of tensors' bits, and numbers compared over ranks by sums and squares."""

import itertools

import pytest
import torch

from rotorch.comm.checksums import differ, sum_by_place, sum_of_bits, with_squares


def test_any_flipped_bit_changes_the_sum():
    values = torch.randn(11)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        tensor = values.to(dtype)
        whole = sum_of_bits(tensor)
        for bit in range(8 * tensor.nbytes):
            flipped = tensor.clone()
            flipped.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
            assert sum_of_bits(flipped) != whole, (dtype, bit)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("size", [0, 1, 7, 9, 200])
def test_a_sum_does_not_depend_on_where_a_tensor_lies(dtype, size):
    storage = torch.rand(size + 3).mul(50).to(dtype)
    values = storage[:size].clone()
    for start in range(4):
        storage[start : start + size] = values
        assert sum_of_bits(storage[start : start + size]) == sum_of_bits(values)


def test_the_order_of_words_changes_their_sum():
    words = torch.tensor([3, 1, 4, 1])
    sums = {int(sum_by_place(torch.tensor(order))) for order in itertools.permutations(words.tolist())}
    assert len(sums) > 6
    assert int(sum_by_place(words.flip(0))) != int(sum_by_place(words))


def test_numbers_that_are_not_equal_on_all_ranks_are_told_from_those_that_are():
    largest = 2**24
    for of_ranks in itertools.product((1, 7, largest), repeat=3):
        sums = [sum(column) for column in zip(*(with_squares([5, number]) for number in of_ranks), strict=True)]
        assert differ(sums, num_ranks=3) == [False, len(set(of_ranks)) > 1]
