"""Sums that products add to: values of parts added up; a slice runs again where more follows the layer."""

from unittest import mock

import pytest
import torch

from rotorch.core.errors import ConfigError
from rotorch.ops import running_sum
from rotorch.ops.running_sum import OutputSum, RunningSum, add_product


def parts(num_parts, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(2, 3, 4, generator=generator).to(dtype), torch.randn(4, 5, generator=generator).to(dtype))
        for _ in range(num_parts)
    ]


@pytest.mark.parametrize("first_is_a_tensor", [False, True])
def test_products_add_to_a_sum_and_leave_its_first_part_alone(first_is_a_tensor):
    total, given = RunningSum(), parts(3)
    first = given[0][0] @ given[0][1]
    before = first.clone()
    total.add(first) if first_is_a_tensor else total.add_product(*given[0])
    for a, b in given[1:]:
        total.add_product(a, b)
    torch.testing.assert_close(total.value, sum(a @ b for a, b in given))
    assert torch.equal(first, before)


def test_a_product_adds_to_a_sum_of_tensors_that_lie_transposed():
    total, given = RunningSum(), parts(3)
    (a, b), *_ = given
    tensors = [torch.matmul(a, b).transpose(0, 1).contiguous().transpose(0, 1) for a, b in given[1:]]
    for tensor in tensors:
        total.add(tensor)
    total.add_product(a, b)
    torch.testing.assert_close(total.value, sum(tensors) + a @ b)


def layer(total, number, x, weight):
    """A linear layer of a slice, as `ops/slice_linear.py` makes it."""
    y = total.product(number, x, weight.t())
    y = x @ weight if y is None else y
    total.note(number, y)
    return y


def test_a_layer_whose_output_is_the_slices_adds_to_the_sum():
    total, given = OutputSum(), parts(3)
    for a, b in given:
        layer(total, 0, a, torch.ones_like(b))  # another layer of the module
        assert total.take(layer(total, 1, a, b))
    torch.testing.assert_close(total.value, sum(a @ b for a, b in given))
    assert total._has_added is False and total._adds == 1


def test_slices_after_the_second_add_in_place():
    """The first one's output is its graph's, and the second's sum would be lost if its slice ran again."""
    total, places = OutputSum(), []
    for a, b in parts(4):
        assert total.take(layer(total, 1, a, b))
        places.append(total.value.data_ptr())
    assert places[0] != places[1] == places[2] == places[3]


@pytest.mark.parametrize("behind", [lambda y: 2 * y, lambda y: y.mul_(2)])
def test_where_something_comes_behind_the_layer_after_all_the_slice_runs_again(behind):
    total, given, runs = OutputSum(), parts(4), 0
    for number, (a, b) in enumerate(given):
        while True:
            runs += 1
            y = layer(total, 1, a, b)
            if total.take(behind(y) if number >= 1 else y):
                break
    expected = sum(a @ b for a, b in given[:1]) + 2 * sum(a @ b for a, b in given[1:])
    torch.testing.assert_close(total.value, expected)
    assert runs == 5  # one slice again, and from then on the layer adds to nothing


@pytest.mark.parametrize("behind", [lambda y: 2 * y, lambda y: y.mul_(2)])
def test_a_module_that_goes_by_values_is_refused_once_slices_add_in_place(behind):
    total, given = OutputSum(), parts(3)
    for a, b in given[:2]:
        assert total.take(layer(total, 1, a, b))
    (a, b) = given[2]
    y = layer(total, 1, a, b)
    assert y.data_ptr() == total.value.data_ptr()
    with pytest.raises(ConfigError, match="its forward goes by values"):
        total.take(behind(y))


@pytest.mark.parametrize("behind", [lambda y: 2 * y, lambda y: y.mul_(2)])
def test_a_layer_with_something_behind_it_adds_to_nothing(behind):
    total, given = OutputSum(), parts(3)
    for a, b in given:
        assert total.take(behind(layer(total, 1, a, b)))
    torch.testing.assert_close(total.value, 2 * sum(a @ b for a, b in given))


@pytest.mark.parametrize("fresh", [False, True])
def test_a_product_adds_in_place_or_says_that_it_cannot(fresh):
    ((a, b),) = parts(1)
    a = a[0]
    target = torch.full((3, 5), float("nan") if fresh else 1.0, dtype=torch.float64)
    assert add_product(target, a, b, fresh=fresh)
    torch.testing.assert_close(target, a @ b + (not fresh))
    narrow = torch.zeros(3, 5)
    assert not add_product(narrow, a.bfloat16(), b.bfloat16(), fresh=fresh)  # torch has no such product on CPU
    assert not narrow.any()


@pytest.mark.parametrize("fresh", [False, True])
def test_where_torch_has_products_with_wider_sums_they_are_used(fresh):
    target, a, b = (torch.empty(*shape, device="meta") for shape in ((3, 5), (3, 4), (4, 5)))
    a, b = a.bfloat16(), b.bfloat16()
    assert not add_product(target, a, b, fresh=fresh)
    with mock.patch.object(running_sum, "_WIDENS", ("meta",)):
        assert add_product(target, a, b, fresh=fresh)
        assert not add_product(target, a.double(), b.double(), fresh=fresh)
    assert target.dtype == torch.float32


def with_wider_sums(product):
    """torch's product of that name as a GPU has it: factors in bfloat16, the sum in `out_dtype`."""

    def run(*given, out_dtype, out):
        return out.copy_(product(*(each.to(out_dtype) for each in given)))

    return run


@pytest.mark.parametrize("fresh", [False, True])
def test_products_with_wider_sums_add_unrounded(fresh):
    ((a, b),) = parts(1, torch.bfloat16)
    a = a[0]
    target = torch.full((3, 5), float("nan") if fresh else 1.0)
    with (
        mock.patch.object(running_sum, "_WIDENS", ("cpu",)),
        mock.patch.object(torch, "mm", with_wider_sums(torch.mm)),
        mock.patch.object(torch, "addmm", with_wider_sums(torch.addmm)),
    ):
        assert add_product(target, a, b, fresh=fresh)
    torch.testing.assert_close(target, a.float() @ b.float() + (not fresh))
