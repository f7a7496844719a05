"""Crossings of a ring between hosts."""

from rotorch.core.crossings import even_hosts, slices_between_hosts, warning_of_crossings


def test_a_flat_ring_sends_each_slice_to_every_rank_of_another_host():
    assert slices_between_hosts(["a"] * 8 + ["b"] * 8) == (128, 16)
    assert slices_between_hosts(["a", "b", "c", "d"]) == (12, 12)
    assert slices_between_hosts(["a"] * 4) == (0, 0)
    assert slices_between_hosts(["a", "a", "b"]) == (4, 3)


def test_a_warning_says_how_many_cross_and_what_to_write():
    assert warning_of_crossings(["a", "b"]) == warning_of_crossings(["a"] * 4) == ""
    assert warning_of_crossings(["a"] * 8 + ["b"] * 8) == (
        "rtp: the 16 ranks of a ring are on 2 hosts: in each pass 128 slices of a unit cross between hosts, where 16 "
        "would be enough if the ranks of a host shared them. If a host has memory for the model's state, write "
        "ddp=2,rtp=8: then only gradients cross"
    )
    for hosts in (["a", "a", "b"], ["a", "b", "a", "b"]):  # not in equal blocks: no layout to propose
        assert warning_of_crossings(hosts).endswith("would be enough if the ranks of a host shared them")


def test_hosts_are_even_with_as_many_ranks_each_side_by_side():
    found = {hosts: even_hosts(hosts) for hosts in ("aabb", "aaabbbccc", "abab", "aab", "abc", "aaaa", "aabbaa")}
    assert {hosts: number for hosts, number in found.items() if number} == {"aabb": 2, "aaabbbccc": 3}
