"""Messages under way while a product is computed: their order, on one rank that has no others."""

import pytest
import torch

from rotorch._torch_private import TorchDispatchMode
from rotorch.comm.axis_group import AxisGroup
from rotorch.ops.plane_use import Plane, _column, _row
from rotorch.ops.summa import Grid, summa_linear, summa_table_linear

PRODUCTS = {"mm", "addmm", "addmm_"}


class Watched(AxisGroup):
    """Sends nothing, and writes down when something would begin to be sent, and when it is waited for."""

    def __init__(self, axis, size, events):
        super().__init__(axis, size, 0, None)
        self.events = events
        self.number = 0

    def _begin(self, what):
        name = f"{what} {self.axis} {self.number}"
        self.number += 1
        self.events.append(f"post {name}")
        return lambda: self.events.append(f"wait {name}")

    def broadcast(self, block, *, source):
        return self._begin("block")

    def reduce(self, part, *, target):
        return self._begin("part")

    def all_reduce_later(self, tensor):
        return self._begin("sum")


class Products(TorchDispatchMode):
    def __init__(self, events):
        super().__init__()
        self.events = events
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.partition("::")[2] in PRODUCTS:
            self.events.append(f"product {self.number}")
            self.number += 1
        return func(*args, **(kwargs or {}))


def watched(q):
    events = []
    return events, Watched("row", q, events), Watched("col", q, events)


def test_the_next_blocks_are_under_way_during_each_product():
    events, down, across = watched(3)
    x, w = torch.zeros(4, 2, requires_grad=True), torch.zeros(5, 2, requires_grad=True)
    with Products(events):
        y = summa_linear(Grid(down, across), x, w)
    at = {event: place for place, event in enumerate(events)}
    for t in range(3):
        for axis in ("row", "col"):
            assert at[f"wait block {axis} {t}"] < at[f"product {t}"]
            if t < 2:
                assert at[f"post block {axis} {t + 1}"] < at[f"product {t}"] < at[f"wait block {axis} {t + 1}"]

    events.clear()
    down.number = across.number = 0
    with Products(events):
        y.sum().backward()
    at = {event: place for place, event in enumerate(events)}
    # Of each t a product for x, with the next weight under way, then one for the weight. Messages of a line count on.
    posted = {axis: [e for e in events if e.startswith("post") and f" {axis} " in e] for axis in ("row", "col")}
    assert [e.split()[1] for e in posted["row"]] == ["block", "block", "part", "block", "part", "part"]
    assert [e.split()[1] for e in posted["col"]] == ["part", "block", "block", "part", "block", "part"]
    parts = {axis: [e[len("post ") :] for e in posted[axis] if " part " in e] for axis in posted}
    for t in range(2):
        for axis, product in (("col", 2 * t), ("row", 2 * t + 1)):  # dx leaves along the row, dw along the column
            part = parts[axis][t]
            assert at[f"product {product}"] < at[f"post {part}"] < at[f"product {product + 2}"] < at[f"wait {part}"]


def test_a_table_s_next_block_is_under_way_too():
    events, down, across = watched(2)
    x, table = torch.zeros(4, 2), torch.zeros(3, 2)
    with Products(events):
        summa_table_linear(Grid(down, across), x, table, num_rows=[3, 3])
    at = {event: place for place, event in enumerate(events)}
    assert at["post block row 1"] < at["product 0"] < at["wait block row 1"] < at["product 1"]
    assert at["product 0"] < at["post part col 0"] < at["product 1"] < at["wait part col 0"]


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_sum_of_a_chunk_is_under_way_during_the_next_product(chunks):
    """atp: of a column's product in forward, of a row's in backward."""
    events, features, _ = watched(2)
    plane = Plane(AxisGroup("interior", 1, 0, None), features, chunks)
    x, w = torch.zeros(6, 4, requires_grad=True), torch.zeros(5, 4, requires_grad=True)

    def check():
        at = {event: place for place, event in enumerate(events)}
        for k in range(3):
            assert at[f"product {k}"] < at[f"post sum row {k}"] < at[f"wait sum row {k}"]
            if k < 2:
                assert at[f"post sum row {k}"] < at[f"product {k + 1}"]
                assert at["product 2"] < at[f"wait sum row {k}"]

    with Products(events):
        _column(plane, x, w, None)
    if chunks == 1:
        assert events == ["product 0"]  # one sum, behind it, which nothing waits beside
        return
    check()
    y = _row(plane, x, w, None)
    events.clear()
    features.number = 0
    with Products(events):
        y.sum().backward()
    check()
