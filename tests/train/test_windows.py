import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rotorch.core.errors import ConfigError
from rotorch.train.data.shuffle import Permutation
from rotorch.train.data.tokens import ByteTokens
from rotorch.train.data.windows import (
    IGNORED_LABEL,
    TokenWindows,
    bits_per_byte,
    check_length,
    min_tokens,
    num_accumulated,
    split_windows,
)


def windows_of(num_windows, *, sequence_length=3, seed=0, ranges=None, ids=None):
    ids = np.arange(num_windows * (sequence_length + 1) + 2, dtype=np.uint32) if ids is None else ids
    return TokenWindows(
        ids, sequence_length=sequence_length, ranges=ranges or [range(num_windows)], seed=seed, tokens=ByteTokens()
    )


@settings(max_examples=60)
@given(size=st.integers(1, 700), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**9))
def test_every_element_comes_once(size, seed, epoch):
    order = Permutation(size, seed=seed, epoch=epoch)
    assert sorted(map(order, range(size))) == list(range(size))


@given(index=st.integers(0, 10**15 - 1))
def test_a_huge_order_takes_no_memory(index):
    assert 0 <= Permutation(10**15, seed=1, epoch=2)(index) < 10**15


def test_orders_differ_between_epochs_and_seeds_and_are_the_same_everywhere():
    def order(**key):
        return [Permutation(100, **key)(index) for index in range(100)]

    assert len({tuple(order(seed=seed, epoch=epoch)) for seed in range(5) for epoch in range(5)}) == 25
    # A changed order would make every resumed run read other tokens: these numbers must never change.
    assert order(seed=7, epoch=3)[:8] == [83, 65, 29, 78, 87, 54, 31, 61]


def test_the_order_is_not_the_stored_one():
    places = np.array([[Permutation(64, seed=seed, epoch=0)(index) for index in range(64)] for seed in range(400)])
    # Each of 64 places of 64 elements is hit 6.25 times on average; chi-square with 63 * 63 degrees of freedom.
    counts = np.zeros((64, 64))
    for row in places:
        counts[np.arange(64), row] += 1
    chi_square = ((counts - 6.25) ** 2 / 6.25).sum()
    assert abs(chi_square - 63 * 63) < 6 * math.sqrt(2 * 63 * 63)


sizes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))


@settings(max_examples=40)
@given(sizes=sizes, step=st.integers(0, 1000), seed=st.integers(0, 2**32), num_windows=st.integers(1, 50))
def test_any_split_over_ranks_reads_the_same_global_batch(sizes, step, seed, num_windows):
    micro, accumulation, num_ranks = sizes
    size = micro * accumulation * num_ranks
    windows = windows_of(num_windows, seed=seed)
    whole = windows.global_batch(step, global_batch=size)
    parts = [
        batch
        for rank in range(num_ranks)
        for batch in windows.micro_batches(
            step, global_batch=size, micro_batch=micro, batch_rank=rank, num_batch_ranks=num_ranks
        )
    ]
    assert len(parts) == accumulation * num_ranks
    for name in ("input_ids", "shift_labels"):
        assert all(part[name].shape == (micro, 3) and part[name].dtype == torch.int64 for part in parts)
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])
    assert torch.equal(whole["input_ids"] + 1, whole["shift_labels"])  # the ids are 0, 1, 2, ...


@settings(max_examples=30)
@given(num_windows=st.integers(1, 40), global_batch=st.integers(1, 60), seed=st.integers(0, 99))
def test_every_epoch_reads_every_window_once(num_windows, global_batch, seed):
    windows = windows_of(num_windows, seed=seed)
    num_steps = math.ceil(2 * num_windows / global_batch)
    read = torch.cat(
        [windows.global_batch(step, global_batch=global_batch)["input_ids"][:, 0] for step in range(num_steps)]
    )
    for epoch in range(2):
        starts = read[epoch * num_windows : (epoch + 1) * num_windows]
        assert sorted(starts.tolist()) == [4 * window for window in range(num_windows)]


def test_every_epoch_of_every_seed_has_an_order_of_its_own():
    def epochs(seed):
        windows = windows_of(20, seed=seed)
        return [tuple(windows.window(epoch * 20 + place)[0] for place in range(20)) for epoch in range(4)]

    orders = [order for seed in range(3) for order in epochs(seed)]
    assert len(set(orders)) == len(orders)
    assert epochs(1) == orders[4:8]


def test_a_resumed_run_reads_on_exactly_on_other_ranks():
    before, after = windows_of(23, seed=5), windows_of(23, seed=5)
    undisturbed = [before.global_batch(step, global_batch=8)["input_ids"] for step in range(12)]
    for step in range(7, 12):  # resumed at step 7, by 4 ranks, by what they are told and nothing else
        parts = [
            batch["input_ids"]
            for rank in range(4)
            for batch in after.micro_batches(step, global_batch=8, micro_batch=1, batch_rank=rank, num_batch_ranks=4)
        ]
        assert torch.equal(torch.cat(parts), undisturbed[step])


@given(num_windows=st.integers(2, 3000), fraction=st.floats(1e-6, 0.5))
def test_train_and_held_out_share_nothing(num_windows, fraction):
    train, held_out = split_windows(num_windows, held_out_fraction=fraction)
    train_set, held_out_set = ({window for part in parts for window in part} for parts in (train, held_out))
    assert not train_set & held_out_set
    assert train_set | held_out_set == set(range(num_windows))
    assert sum(map(len, train)) == len(train_set) >= len(held_out_set)
    assert len(held_out_set) == max(1, math.floor(num_windows * fraction))
    assert num_windows - 1 in held_out_set


def test_held_out_windows_are_spread_over_the_corpus():
    _, held_out = split_windows(10_000, held_out_fraction=0.05)
    assert len(held_out) == 16
    assert max(np.diff([part.start for part in held_out])) <= 626
    assert split_windows(10, held_out_fraction=0.0) == ([range(10)], [])


def test_windows_of_several_ranges_are_found():
    windows = windows_of(10, ranges=[range(0, 2), range(2, 2), range(5, 6), range(8, 10)])
    assert [windows.stored(index)[0] // 4 for index in range(len(windows))] == [0, 1, 5, 8, 9]
    assert windows.stored(2).tolist() == [20, 21, 22, 23]
    for index in (-1, 5):
        with pytest.raises(IndexError):
            windows.stored(index)


@settings(max_examples=40)
@given(
    num_windows=st.integers(1, 30),
    micro=st.integers(1, 4),
    num_ranks=st.integers(1, 4),
    max_windows=st.none() | st.integers(1, 40),
)
def test_evaluation_reads_every_window_once_on_any_ranks(num_windows, micro, num_ranks, max_windows):
    windows = windows_of(num_windows, ids=np.arange(num_windows * 4, dtype=np.uint16) % 257)
    of_rank = [
        list(
            windows.evaluation_batches(
                micro_batch=micro, batch_rank=rank, num_batch_ranks=num_ranks, max_windows=max_windows
            )
        )
        for rank in range(num_ranks)
    ]
    assert len({len(parts) for parts in of_rank}) == 1  # or the ranks would wait for each other for ever
    alone = list(windows.evaluation_batches(micro_batch=1, max_windows=max_windows))
    rows = [
        row
        for parts in zip(*of_rank, strict=True)
        for part in parts
        for row in part.batch["shift_labels"]
        if row[0] != IGNORED_LABEL
    ]
    assert torch.equal(torch.stack(rows), torch.cat([part.batch["shift_labels"] for part in alone]))
    assert len(alone) == min(num_windows, max_windows or num_windows)
    everything = [part for parts in of_rank for part in parts]
    assert sum(part.num_targets for part in everything) == 3 * len(alone)
    assert sum(part.num_bytes for part in everything) == sum(part.num_bytes for part in alone)
    for part in everything:
        assert part.num_targets == (part.batch["shift_labels"] != IGNORED_LABEL).sum()
        assert part.batch["input_ids"].shape == part.batch["shift_labels"].shape == (micro, 3)


def test_bytes_of_a_window_are_those_of_its_targets():
    ids = np.array([97, 256, 98, 99, 256, 97, 98, 256], np.uint16)
    windows = windows_of(2, ids=ids)
    assert [windows.num_bytes(windows.stored(index)) for index in range(2)] == [2, 2]


def test_bits_per_byte():
    # A model that gives every one of 256 bytes the same chance needs 8 bits for each.
    assert bits_per_byte(100 * math.log(256), num_bytes=100) == pytest.approx(8)
    assert math.isnan(bits_per_byte(1.0, num_bytes=0))


def test_batch_sizes_must_multiply():
    assert num_accumulated(24, micro_batch=2, num_batch_ranks=3) == 4
    with pytest.raises(ConfigError, match=r"10 is not micro_batch 4 x accumulation x 2 .*Write global_batch = 8"):
        num_accumulated(10, micro_batch=4, num_batch_ranks=2)
    with pytest.raises(ConfigError, match="write 1 or more"):
        num_accumulated(0, micro_batch=4, num_batch_ranks=2)
    with pytest.raises(ConfigError):
        windows_of(4).micro_batches(0, global_batch=3, micro_batch=2)


@given(num_tokens=st.integers(1, 500), length=st.integers(1, 200), fraction=st.sampled_from([0.0, 0.01, 0.5]))
def test_a_corpus_long_enough_is_one_that_gives_windows(num_tokens, length, fraction):
    num_windows = num_tokens // (length + 1)
    if num_windows >= (2 if fraction else 1):
        check_length(num_tokens, sequence_length=length, held_out_fraction=fraction, source="x")
        train, held_out = split_windows(num_windows, held_out_fraction=fraction)
        assert sum(map(len, train)) >= 1 and sum(map(len, held_out)) >= (1 if fraction else 0)
        return
    with pytest.raises(ConfigError, match=f"corpus 'x': {num_tokens} tokens, but ") as caught:
        check_length(num_tokens, sequence_length=length, held_out_fraction=fraction, source="x")
    assume("sequence_length = " in str(caught.value))
    advised = int(str(caught.value).split("sequence_length = ")[1].split()[0])
    check_length(num_tokens, sequence_length=advised, held_out_fraction=fraction, source="x")


def test_arguments_out_of_range():
    with pytest.raises(ConfigError, match="sequence_length 0"):
        min_tokens(0, held_out_fraction=0.1)
    for fraction in (-0.1, 0.6, math.nan):
        with pytest.raises(ConfigError, match="held_out_fraction"):
            min_tokens(8, held_out_fraction=fraction)
