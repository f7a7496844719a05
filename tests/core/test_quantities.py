import pytest

from rotorch.core.quantities import format_bytes, format_count, format_duration


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (200 * 1024, "200 KiB"),
        (5 * 1024**2, "5.00 MiB"), (3.25 * 1024**3, "3.25 GiB"), (2**60, "1024 PiB"), (1000 * 1024, "1000 KiB"),
        (1023.9 * 1024, "1.00 MiB"), (99.99 * 1024, "100 KiB"), (15 * 1024, "15.0 KiB"), (-2048, "-2.00 KiB"),
    ],
)  # fmt: skip
def test_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1 k"),
        (3_400_000, "3.4 M"),
        (7e9, "7 B"),
        (1.5e12, "1.5 T"),
        (999_999, "1 M"),
        (1e15, "1000 T"),
    ],
)
def test_counts(count, text):
    assert format_count(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (42, "0:42"), (59.6, "1:00"), (3725, "1:02:05")])
def test_durations(seconds, text):
    assert format_duration(seconds) == text
