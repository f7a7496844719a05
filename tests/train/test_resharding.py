"""A checkpoint of any layout goes on under any other: to the bit what was saved, and the losses of one long run."""

import checkpoint_page
import pytest
from resharding import BAR, matrix

LAYOUTS = (
    "single",
    "ddp=2",
    "fsdp=2",
    "rtp=2",
    "megatron=2",
    "atp=1x2",
    "pp=2",
    "rtp=3",
    "summa=2x2",
    "tesseract=2x2x1",
    "atp=2x2",
    "zeropp=2x2",
    "ddp=2,rtp=2",
    "pp=2,rtp=2",
    "pp=2,fsdp=2",
)
FEW = ("rtp=3", "tesseract=2x2x1", "zeropp=2x2")
"""Uneven slices; blocks of two dims; stages in shards. Between them, every way to cut a weight."""


@pytest.mark.parametrize(
    ("layouts", "also_same"), [(FEW, False), pytest.param(LAYOUTS, True, marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_every_layout_goes_on_from_every_other_exactly(layouts, also_same, tmp_path, warm):
    cells = matrix(layouts, tmp_path, also_same=also_same)
    assert len(cells) == len(layouts) * (len(layouts) - (not also_same))
    assert {pair: cell for pair, cell in cells.items() if not cell.is_exact} == {}
    if layouts is LAYOUTS:
        checkpoint_page.write("matrix", checkpoint_page.matrix_table(LAYOUTS, cells))


def test_the_page_has_every_pair():
    rows = [line for line in checkpoint_page.section("matrix").splitlines() if line.startswith("| ")]
    assert [row.split("`")[1] for row in rows[1:]] == list(LAYOUTS), "docs/checkpoints.md: run make checkpoints"
    assert all(float(cell) < BAR for row in rows[1:] for cell in row.split("|")[2:-1])
