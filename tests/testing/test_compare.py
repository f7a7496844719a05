"""Errors, the data that comparisons run on, and what of a module's outputs compares."""

import math

import pytest
import torch
from torch import nn

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Cut, Weight
from rotorch.shard.sharded_weight import ShardedWeight, cut_chunks
from rotorch.testing.batches import global_batch, share_of
from rotorch.testing.compare import gradient_errors, gradients_along, relative_error, value_errors
from rotorch.testing.parity import NUM_ROWS, my_micro_batches, parity_batch
from rotorch.testing.trace import output_errors, recorded


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_relative_errors():
    assert relative_error(tensor(1, 2), tensor(1, 2)) == 0
    assert relative_error(tensor(1, 2.2), tensor(1, 2)) == pytest.approx(0.1)
    assert relative_error(tensor(1e-9), tensor(0), floor=1e-8) == pytest.approx(0.1)
    assert relative_error(tensor(0), tensor(0)) == 0
    assert relative_error(tensor(1e-300), tensor(0)) == math.inf
    assert relative_error(tensor(math.nan), tensor(1)) == math.inf
    assert relative_error(tensor(1), tensor(math.nan)) == math.inf
    assert relative_error(torch.empty(0), torch.empty(0)) == 0


def held(weight, whole, *, num_slices, index, grad=None):
    chunks = cut_chunks(weight, num_slices=num_slices, index=index)
    local = torch.cat([p.of_whole(whole) for p in chunks]) if chunks else whole[:0].clone()
    parameter = nn.Parameter(local.clone())
    if grad is not None:
        parameter.grad = torch.cat([p.of_whole(grad) for p in chunks])
    return ShardedWeight(weight, local, chunks, parameter)


def test_every_rank_compares_its_shards_on_the_scale_of_the_whole():
    weight = Weight("w", (8, 2), 8, Cut(0, 4, blocks=2))
    whole = torch.arange(16, dtype=torch.float64).view(8, 2)
    wrong = whole.clone()
    wrong[5] += 1.5  # in the second block, in slice 1 of 4
    errors = [value_errors({"w": held(weight, wrong, num_slices=4, index=k)}, {"w": whole})["w"] for k in range(4)]
    assert errors == [0, pytest.approx(0.1), 0, 0]


def test_a_tiny_gradient_is_measured_on_the_scale_of_the_model():
    weights = {n: Weight(n, (4,), 8) for n in ("large", "noise")}
    theirs = {"large": tensor(1, 0, 0, 0), "noise": tensor(1e-18, 0, 0, 0)}
    ours = {n: held(w, torch.zeros(4).double(), num_slices=1, index=0, grad=theirs[n] * 2) for n, w in weights.items()}
    errors = gradient_errors(ours, theirs)
    assert errors["large"] == pytest.approx(1.0)
    assert errors["noise"] == pytest.approx(1e-15)
    assert gradients_along(ours, theirs)["large"] == (2.0, 1.0)


def test_a_missing_gradient_is_zero_on_either_side():
    weight = Weight("w", (2,), 8)
    one = {"w": held(weight, tensor(1, 1), num_slices=1, index=0)}
    assert gradient_errors(one, {"w": None}) == {"w": 0}
    assert gradient_errors(one, {"w": tensor(1, 3)}) == {"w": 1}


# ---- data ---------------------------------------------------------------------------------------------------------


def test_shares_make_up_the_batch_and_no_two_rows_have_equally_many_targets():
    batch = global_batch(seed=0, step=3, num_shares=3, num_micro_batches=2, num_rows=2, num_tokens=32, vocab_size=50)
    shares = [share_of(batch, share=k, num_shares=3, num_micro_batches=2) for k in range(3)]
    rows = torch.cat([m["input_ids"] for share in shares for m in share])
    assert torch.equal(rows, batch["input_ids"])
    targets = [int((m["labels"] != -100).sum()) for share in shares for m in share]
    assert targets[-1] == 0
    assert len(set(targets)) == len(targets)
    assert int(rows.min()) >= 0 and int(rows.max()) < 50


def test_batches_are_a_function_of_seed_and_step():
    a, b, c = (parity_batch(step=s, vocab_size=30, seed=k) for s, k in ((0, 0), (0, 0), (1, 0)))
    assert torch.equal(a["input_ids"], b["input_ids"])
    assert not torch.equal(a["input_ids"], c["input_ids"])
    assert len(a["input_ids"]) == NUM_ROWS


class OfRank:
    def __init__(self, batch_rank, num_batch_ranks):
        self.batch_rank, self.num_batch_ranks = batch_rank, num_batch_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
def test_ranks_share_a_parity_batch_in_two_micro_batches_each(num_ranks):
    batch = parity_batch(step=0, vocab_size=30)
    parts = [my_micro_batches(OfRank(k, num_ranks), batch) for k in range(num_ranks)]
    assert all(len(p) == 2 for p in parts)
    assert torch.equal(torch.cat([m["labels"] for p in parts for m in p]), batch["labels"])


def test_a_parity_batch_that_does_not_divide_is_refused():
    with pytest.raises(ConfigError, match="12 rows do not divide over 5 ranks"):
        my_micro_batches(OfRank(0, 5), parity_batch(step=0, vocab_size=30))


# ---- outputs of modules -------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def forward(self, x):
        return x * 2


class Outer(nn.Module):
    def __init__(self, times=1):
        super().__init__()
        self.inner, self.times = Inner(), times

    def forward(self, x):
        for _ in range(self.times):
            x = self.inner(x)
        return {"out": x, "loss": x.sum()}


def compare(ours, theirs, whole):
    with recorded(ours) as passes:
        for rows in whole.split(2):
            ours(rows)
    with recorded(theirs) as reference:
        theirs(whole)
    return output_errors(passes, reference[0], first_rows=[0, 2], num_rows=2, total_rows=4)


WHOLE = torch.arange(12.0).view(4, 3)


def test_outputs_compare_row_by_row_in_the_order_of_completion():
    assert compare(Outer(), Outer(), WHOLE) == {"inner": 0.0, "": 0.0}
    wrong = Outer()
    wrong.inner.register_forward_hook(lambda m, args, out: out + (1.0 if args[0].max() > 10 else 0.0))
    assert compare(wrong, Outer(), WHOLE) == {"inner": pytest.approx(1 / 22), "": pytest.approx(1 / 22)}


def test_what_ran_more_often_or_has_another_shape_does_not_compare():
    assert list(compare(Outer(times=2), Outer(), WHOLE)) == [""]
    narrow = Outer()
    narrow.inner.register_forward_hook(lambda m, args, out: out[:, :2])
    assert compare(narrow, Outer(), WHOLE) == {}


def test_calls_outside_the_outermost_forward_are_not_recorded():
    module = Outer()
    with recorded(module) as passes:
        module.inner(WHOLE)
        module(WHOLE)
        module.inner(WHOLE)
    assert len(passes) == 1 and len(passes[0]["inner"]) == 1
    module(WHOLE)
    assert len(passes) == 1  # hooks are gone


def test_a_forward_that_raises_ends_its_recording():
    module = Outer()
    handle = module.inner.register_forward_hook(lambda *_: 1 / 0)
    with recorded(module) as passes:
        with pytest.raises(ZeroDivisionError):
            module(WHOLE)
        handle.remove()
        module(WHOLE)
    assert len(passes) == 2 and "inner" in passes[1]
