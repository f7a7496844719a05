"""Ids of a slice of a vocabulary: masks in place of positions."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rotorch.core.spec import Range
from rotorch.ops.ids_in_slice import add_rows, check_ids, ids_in_slice, look_up, pick, put

VOCABULARY, WIDTH = 11, 3
SLICES = [Range(0, 4), Range(4, 4), Range(8, 3), Range(11, 0)]


@pytest.fixture
def ids():
    return torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def table():
    return torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_each_id_lies_in_one_slice_at_its_row(ids):
    found = torch.full_like(ids, -1)
    for rows in SLICES:
        inside, local = ids_in_slice(ids, rows)
        assert (found[inside] == -1).all()
        assert (local >= 0).all()
        assert (local < max(rows.length, 1)).all()
        found[inside] = local[inside] + rows.start
    assert torch.equal(found, ids)


@pytest.mark.parametrize("padding_idx", [None, 5])
def test_look_ups_of_all_slices_sum_to_the_table_s(ids, table, padding_idx):
    whole, sliced = table.clone().requires_grad_(), table.clone().requires_grad_()
    dense = F.embedding(ids, whole, padding_idx)
    parts = [look_up(ids, sliced[r.start : r.stop], rows=r, padding_idx=padding_idx) for r in SLICES]
    assert torch.equal(torch.stack(parts).sum(0), dense)
    weights = torch.arange(1.0, dense.numel() + 1).view_as(dense)
    (dense * weights).sum().backward()
    (torch.stack(parts).sum(0) * weights).sum().backward()
    assert torch.equal(sliced.grad, whole.grad)


def test_rows_add_up_as_in_the_whole_table(ids, table):
    ids_B, grad_BD = ids.reshape(-1), torch.randn(ids.numel(), WIDTH, dtype=table.dtype)
    whole, sliced = table.clone().index_add_(0, ids_B, grad_BD), table.clone()
    for rows in SLICES:
        add_rows(sliced[rows.start : rows.stop], ids_B, grad_BD, rows=rows)
    assert torch.equal(sliced, whole)


def test_one_value_per_token_is_read_and_written():
    logits, local = torch.arange(12.0).view(3, 4), torch.tensor([1, 0, 3])
    assert pick(logits, local).tolist() == [1.0, 4.0, 11.0]
    put(logits, local, torch.tensor([-1.0, -2.0, -3.0]), where=torch.tensor([True, False, True]))
    assert pick(logits, local).tolist() == [-1.0, 4.0, -3.0]
    assert logits.sum() == 66 - 1 - 1 - 11 - 3


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_no_value_is_asked_for_by_the_host(ids, table):
    with Names() as names:
        look_up(ids, table, rows=SLICES[0])
        add_rows(table[:4], ids.reshape(-1), table.new_zeros(ids.numel(), WIDTH), rows=SLICES[0])
        inside, local = ids_in_slice(ids.reshape(-1)[:VOCABULARY], Range(0, WIDTH))
        put(table, local, pick(table, local) + 1.0, where=inside)
    assert not names.seen & {"aten::nonzero", "aten::_local_scalar_dense", "aten::item", "aten::masked_select"}
    assert "aten::masked_fill" in names.seen


@pytest.mark.parametrize("bad", [VOCABULARY, -1])
def test_an_id_outside_of_the_table_is_an_error(bad):
    ids = torch.tensor([[0, bad]])
    with pytest.raises(IndexError, match=f"token {bad} is outside of a vocabulary of {VOCABULARY}"):
        check_ids(ids, num_rows=VOCABULARY, of="token")
    check_ids(ids, num_rows=VOCABULARY, of="token", ignore_index=bad)
