"""Slices of weights: what [Note: slices] in core/spec.py promises, for any number of groups, blocks and slices."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotorch.core.spec import Combine, Cut, ModelSpec, Range, Unit, UnitKind, Weight

CUTS = st.builds(Cut, dim=st.just(0), groups=st.integers(1, 12), blocks=st.integers(1, 3))
GROUP_SIZES = st.integers(1, 5)
SLICES = st.integers(1, 16)


@given(CUTS, GROUP_SIZES, SLICES)
def test_slices_partition_every_block_in_order(cut, group_size, num_slices):
    size = cut.groups * group_size * cut.blocks
    slices = [cut.ranges(size, num_slices=num_slices, index=k) for k in range(num_slices)]
    block = size // cut.blocks
    for b in range(cut.blocks):
        at = b * block
        for ranges in slices:
            assert ranges[b].start == at or ranges[b].length == 0
            assert ranges[b].length % group_size == 0
            at += ranges[b].length
        assert at == (b + 1) * block


@given(CUTS, GROUP_SIZES, SLICES)
def test_slices_differ_by_one_group_at_most_and_the_first_are_larger(cut, group_size, num_slices):
    size = cut.groups * group_size * cut.blocks
    slices = [cut.ranges(size, num_slices=num_slices, index=k) for k in range(num_slices)]
    groups = [ranges[0].length // group_size for ranges in slices]
    assert groups == sorted(groups, reverse=True)
    assert groups[0] - groups[-1] <= 1
    assert all(len({r.length for r in ranges}) == 1 for ranges in slices)  # every block is cut alike


def test_three_groups_over_two_and_four_slices():
    cut = Cut(0, 3)
    assert [cut.ranges(6, num_slices=2, index=k) for k in range(2)] == [(Range(0, 4),), (Range(4, 2),)]
    assert [cut.ranges(6, num_slices=4, index=k)[0].length for k in range(4)] == [2, 2, 2, 0]


def test_fused_halves_are_cut_each():
    assert Cut(0, 4, blocks=2).ranges(8, num_slices=2, index=1) == (Range(2, 2), Range(6, 2))


@pytest.mark.parametrize(("size", "groups", "blocks"), [(7, 2, 1), (6, 3, 4), (6, 2, 2)])
def test_a_size_that_does_not_divide_is_refused(size, groups, blocks):
    with pytest.raises(ValueError, match=f"size {size} is not a multiple of {blocks} blocks x {groups} groups"):
        Cut(0, groups, blocks).ranges(size, num_slices=2, index=0)


@given(CUTS, GROUP_SIZES, SLICES, st.lists(st.integers(1, 4), max_size=2), st.sampled_from([2, 4]))
def test_slices_of_a_weight_add_up_to_it(cut, group_size, num_slices, other_dims, itemsize):
    weight = Weight("w", (cut.groups * group_size * cut.blocks, *other_dims), itemsize, cut)
    shapes = [weight.slice_shape(num_slices=num_slices, index=k) for k in range(num_slices)]
    assert all(shape[1:] == weight.shape[1:] for shape in shapes)
    assert sum(math.prod(shape) for shape in shapes) == weight.numel
    total = sum(weight.slice_bytes(num_slices=num_slices, index=k) for k in range(num_slices))
    assert total == weight.num_bytes == weight.numel * itemsize


def test_a_weight_that_is_not_cut_is_whole_in_every_slice():
    weight = Weight("scale", (5,), 4)
    assert weight.slice_shape(num_slices=3, index=2) == (5,)
    assert weight.slice_bytes(num_slices=3, index=2) == 20


def test_the_cut_dim_may_be_any():
    assert Weight("down", (8, 6), 4, Cut(1, 6)).slice_shape(num_slices=4, index=0) == (8, 2)


def test_a_spec_counts_tied_weights_once():
    table = Weight("embed", (10, 4), 4, Cut(0, 10), aliases=("head",))
    norm = Weight("norm", (4,), 4)
    units = (
        Unit("embed", UnitKind.WEIGHT, Combine.SUM, (table,), uses=2),
        Unit("replicated", UnitKind.REPLICATED, Combine.NONE, (norm,)),
    )
    spec = ModelSpec("Tiny", units)
    assert spec.weights == (table, norm)
    assert (spec.num_parameters, spec.num_bytes) == (44, 176)
    assert spec.cut_units == units[:1]
    assert [units[0].slice_bytes(num_slices=3, index=k) for k in range(3)] == [64, 48, 48]
