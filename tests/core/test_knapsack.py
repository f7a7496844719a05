"""The knapsack against trying every choice."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from rotorch.core.knapsack import Item, most_valuable

items_of = st.lists(st.builds(Item, st.integers(0, 30), st.integers(-3, 30)), max_size=12)


def every_choice(items, *, limit):
    """Value and size of the best one: most value, then least size."""
    found = [(0, 0)]
    for number in range(len(items) + 1):
        for chosen in combinations(items, number):
            if (size := sum(item.size for item in chosen)) <= limit:
                found.append((sum(item.value for item in chosen), -size))
    return max(found)


@given(items_of, st.integers(0, 200))
def test_no_choice_within_the_limit_is_worth_more(items, limit):
    chosen = [items[number] for number in most_valuable(items, limit=limit)]
    size, value = sum(item.size for item in chosen), sum(item.value for item in chosen)
    assert (value, -size) == every_choice(items, limit=limit)


def test_hundreds_of_equal_items_are_one_class():
    items = [Item(7, 10), Item(11, 16)] * 400 + [Item(1000, 3)]
    chosen = [items[number] for number in most_valuable(items, limit=4321)]
    assert sum(item.size for item in chosen) <= 4321
    best = max(10 * a + 16 * b for a in range(401) for b in range(401) if 7 * a + 11 * b <= 4321)
    assert sum(item.value for item in chosen) == best


def test_many_different_items_stay_within_the_limit(monkeypatch):
    monkeypatch.setattr("rotorch.core.knapsack.MOST_SUMS", 64)
    items = [Item(1000 + 37 * n, 500 + 19 * n) for n in range(30)]
    chosen = [items[number] for number in most_valuable(items, limit=20_000)]
    assert 0.9 * 20_000 < sum(item.size for item in chosen) <= 20_000
