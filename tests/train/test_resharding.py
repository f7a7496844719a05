"""A checkpoint of any layout goes on under any other: to the bit what was saved, and the losses of one long run."""

import shutil

import checkpoint_page
import pytest
from commands import rotorch, write_run
from resharding import BAR, matrix

from rotorch.train.checkpoint.directories import checkpoints_of, step_name
from rotorch.train.metrics import read_metrics

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
    "megatron=2[sequence_parallel=true]",
    "tesseract=1x1x2[zero=true]",
    "tesseract=2x2x2",
    "fsdp=2,megatron=2",
    "rtp=2,megatron=2",
)
FEW = ("rtp=3", "summa=2x2", "tsp=2", "zeropp=2x2", "tesseract=1x1x2[zero=true]", "fsdp=2,megatron=2")
"""Uneven slices; blocks of two dims; shards under shared sequences; stages in shards; shards of blocks; rows of slices.

Between them, every way to cut a weight: each is written and read once, and by every other among `LAYOUTS`.
"""

SOME_WHOLE = ("fsdp=2", "osdp=2[memory=9MB]", "osdp=3[memory=8MB,inner=fsdp]")
"""Units that are whole beside others that are cut."""

ROWS_OF_SLICES = ("pp=2,fsdp=2,megatron=2", "rtp=3")
"""Slices of a stage, of which ranks have some rows each."""

EXPERTS = ("fsdp=2", "ep=3", "rtp=2[experts=whole]")
"""Experts in rows of a block, and in sets: four of them as 2 + 1 + 1, and as 2 + 2."""


@pytest.mark.parametrize(
    ("layouts", "readers"),
    [
        (FEW, "next"),
        (SOME_WHOLE, "next"),
        (EXPERTS, "next"),
        pytest.param(SOME_WHOLE, "others", marks=pytest.mark.slow),
        pytest.param(ROWS_OF_SLICES, "others", marks=pytest.mark.slow),  # few: the same without stages
        pytest.param(EXPERTS, "others", marks=pytest.mark.slow),
        pytest.param(LAYOUTS, "all", marks=pytest.mark.slow),
    ],
    ids=["few", "some whole", "experts", "some whole, others", "rows of slices", "experts, others", "all"],
)
def test_every_layout_goes_on_from_every_other_exactly(layouts, readers, tmp_path, warm):
    cells = matrix(layouts, tmp_path, readers=readers, kind="mixtral" if layouts is EXPERTS else "qwen3")
    assert len(cells) == len(layouts) * {"next": 1, "others": len(layouts) - 1, "all": len(layouts)}[readers]
    assert {pair: cell for pair, cell in cells.items() if not cell.is_exact} == {}
    if layouts is LAYOUTS:
        checkpoint_page.write("matrix", checkpoint_page.matrix_table(LAYOUTS, cells))


ELSEWHERE = {"single": 12, "ddp=2": 6, "fsdp=3": 4, "rtp=4": 3, "megatron=2": 12, "tesseract=2x2x1": 6, "zeropp=2x2": 3}
"""Layouts, and samples in a micro-batch of each: the global batch stays 12."""


@pytest.mark.slow  # the test above has the same of two steps, and more exactly
def test_fifty_steps_elsewhere_have_the_losses_of_an_undisturbed_run(tmp_path, warm):
    run_toml = write_run(tmp_path)
    settings = ["train.global_batch=12", "model.config.num_hidden_layers=2", "train.keep=9", "train.eval_windows=1"]
    begin, steps = 10, 60
    options = ["train", run_toml, *settings, f"train.checkpoint_every={begin}", f"train.steps={steps}"]
    done = rotorch(tmp_path / "log", *options, "--parallel", "rtp=2", "train.micro_batch=3")
    assert done.code == 0, done.stderr
    undisturbed = [line["loss"] for line in read_metrics(tmp_path / "run")][begin:]
    errors = {}
    for layout, micro_batch in ELSEWHERE.items():
        out = tmp_path / layout
        shutil.copytree(checkpoints_of(tmp_path / "run") / step_name(begin), checkpoints_of(out) / step_name(begin))
        done = rotorch(tmp_path / "log", *options, "--parallel", layout, f"train.micro_batch={micro_batch}",
                       f"train.out={out}", "--resume")  # fmt: skip
        assert done.code == 0, done.stderr
        losses = [line["loss"] for line in read_metrics(out)]
        assert len(losses) == steps - begin == 50
        errors[layout] = max(abs(a - b) / b for a, b in zip(losses, undisturbed, strict=True))
    assert max(errors.values()) < 1e-5, errors
    assert undisturbed[-1] < undisturbed[0] - 0.2  # it learns meanwhile
    checkpoint_page.write("fifty", checkpoint_page.fifty_steps(errors))


def test_the_page_has_every_pair():
    rows = [line for line in checkpoint_page.section("matrix").splitlines() if line.startswith("| ")]
    assert [row.split("`")[1] for row in rows[1:]] == list(LAYOUTS), "docs/checkpoints.md: run make checkpoints"
    assert all(float(cell) < BAR for row in rows[1:] for cell in row.split("|")[2:-1])
