"""Numbers with units, as people write and read them."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(num_bytes: float) -> str:
    """Formats a byte count with three significant digits, e.g. `format_bytes(1536) == "1.50 KiB"`."""
    value = float(num_bytes)
    for unit in _BINARY:
        if abs(value) < 1023.5 or unit == _BINARY[-1]:
            digits = 0 if unit == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
            return f"{value:.{digits}f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_count(count: float) -> str:
    """Formats a large count, e.g. `format_count(3_400_000) == "3.4 M"`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= 0.9995 * limit:
            return f"{float(f'{count / limit:.3g}'):g} {unit}"
    return f"{count:.0f}"


def format_duration(seconds: float) -> str:
    """Formats a duration, e.g. `format_duration(3725) == "1:02:05"` and `format_duration(42) == "0:42"`."""
    total = round(seconds)
    hours, minutes = divmod(total, 3600)
    minutes, rest = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
