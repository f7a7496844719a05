import pytest

from rotorch.strategies import format_parallel, parse_parallel
from rotorch.strategies.resize import resized


@pytest.mark.parametrize(
    ("layout", "num_ranks", "expected"),
    [
        ("rtp=4", 3, "rtp=3"),
        ("rtp=4[recompute=slice]", 1, "rtp=1[recompute=slice]"),
        ("ddp=4,rtp=2", 6, "ddp=3,rtp=2"),
        ("ddp=4,rtp=2[transport=send_receive]", 2, "rtp=2[transport=send_receive]"),
        ("ddp=4,rtp=2", 5, "rtp=5"),
        ("ddp=2,fsdp=4", 3, "fsdp=3"),
        ("tesseract=2x2x4", 8, "tesseract=2x2x2"),
        ("tesseract=2x2x2", 6, None),
        ("ddp=2,tesseract=2x2x2", 4, "tesseract=2x2x1"),
        ("summa=2x2", 2, None),
        ("atp=2x2", 6, "atp=2x3"),
        ("single", 1, "single"),
        ("single", 2, None),
    ],
)
def test_a_layout_on_other_ranks(layout, num_ranks, expected):
    found = resized(parse_parallel(layout), num_ranks=num_ranks)
    assert (None if found is None else format_parallel(found)) == expected
