"""The examples and the picture in the documentation: they run, and say what they should."""

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rotorch.strategies.rtp import plan
from rotorch.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[1]
DRAWING = ROOT / "docs" / "draw_rotation.py"


RTP_IN_30_LINES = ROOT / "examples" / "01_rtp_in_30_lines.py"


def check_rtp_in_30_lines(printed: str) -> None:
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", printed)]
    assert losses[0] > losses[-1] and losses[-1] < 2.0
    held = re.findall(r"rank (\d) holds ([0-9,]+) of ([0-9,]+) bytes", printed)
    assert {rank for rank, _, _ in held} == {"0", "1"}
    for _, part, whole in held:
        assert 0.5 <= int(part.replace(",", "")) / int(whole.replace(",", "")) < 0.51


def printed_by_rtp_in_30_lines() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        sys.modules.pop("this", None)  # the example trains on what its import prints
        runpy.run_path(str(RTP_IN_30_LINES))
    return printed.getvalue()


def test_rtp_in_30_lines_on_two_ranks(warm: None, no_cuda: None) -> None:
    check_rtp_in_30_lines("".join(run_ranks(printed_by_rtp_in_30_lines, num_ranks=2)))


@pytest.mark.slow  # three processes load torch
def test_torchrun_starts_rtp_in_30_lines(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # NCCL wants one device per rank
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(tmp_path),
    }
    run = subprocess.run(
        [*command, str(RTP_IN_30_LINES)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    check_rtp_in_30_lines(run.stdout)


@pytest.fixture(scope="module")
def models_loaded() -> None:
    """Modules that forked ranks would each load for themselves."""
    from transformers import BertForMaskedLM, T5ForConditionalGeneration, ViTForImageClassification  # noqa: F401

    from rotorch.strategies.rtp import apply  # noqa: F401


def run_example(name: str, steps: int) -> list[float]:
    """Runs an example on this rank and returns its losses; on generated digits, which are the same on every machine."""
    sys.argv = [name, str(steps)]
    sys.path.insert(0, str(ROOT / "examples"))
    import inputs

    inputs._handwritten = cannot_be_had
    return runpy.run_path(str(ROOT / "examples" / name))["losses"]


def cannot_be_had() -> bytes:
    raise OSError


@pytest.mark.parametrize(
    ("name", "steps", "below"),
    [
        ("04_bert.py", 15, 3.9),
        # 08_vit_on_grids.py, below, trains the same model.
        pytest.param("05_vit.py", 40, 2.2, marks=pytest.mark.slow),
        ("06_t5.py", 10, 3.3),
    ],
)
def test_an_example_has_the_same_losses_on_two_ranks_as_on_one(
    models_loaded: None, no_cuda: None, name: str, steps: int, below: float
) -> None:
    (alone,) = run_ranks(run_example, name, steps, num_ranks=1)
    assert alone[-1] < below < alone[0]
    for losses in run_ranks(run_example, name, steps, num_ranks=2):
        assert losses == pytest.approx(alone, rel=1e-4)  # rounding of float32 after so many steps
        assert losses[:5] == pytest.approx(alone[:5], rel=1e-5)


@pytest.mark.parametrize(("name", "steps"), [("02_mnist_cnn.py", 12), ("03_resnet.py", 5)])
def test_an_example_with_dropout_or_batch_norms_learns_on_two_ranks(
    models_loaded: None, no_cuda: None, name: str, steps: int
) -> None:
    first, second = run_ranks(run_example, name, steps, num_ranks=2)
    assert first == second and min(first[-2:]) < 0.95 * first[0]


def run_pipeline(layout: str) -> list[float]:
    sys.argv = ["09_pipelines.py", layout, "3"]
    return runpy.run_path(str(ROOT / "examples" / "09_pipelines.py"))["losses"]


def test_the_same_losses_in_pipelines(warm: None, no_cuda: None) -> None:
    (alone,) = run_ranks(run_pipeline, "single", num_ranks=1)
    assert alone[-1] < alone[0]
    for losses in run_ranks(run_pipeline, "zeropp=2x2[inner=rtp,unit=2]", num_ranks=4):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_a_vision_transformer_is_as_accurate_on_a_grid(
    models_loaded: None, no_cuda: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import inputs

    images, labels = inputs.generated_digits(320)
    example = runpy.run_path(str(ROOT / "examples" / "08_vit_on_grids.py"))
    found = example["curves"](images, labels, layouts=["single", "tesseract=2x2x1"], num_tested=80, num_epochs=1)
    alone, grid = found.values()
    assert grid["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    assert grid["accuracy"] == pytest.approx(alone["accuracy"], abs=0.02)
    assert example["as_picture"](found).count("<polyline") == 2 and "tesseract=2x2x1" in example["as_page"](found)


def test_digits_can_be_generated_where_there_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import inputs

    images, labels = inputs.generated_digits(50)
    assert images.shape == (50, 1, 28, 28) and float(images.min()) >= 0 and float(images.max()) <= 1
    assert set(labels.tolist()) <= set(range(10))
    same = [image for image, label in zip(images, labels, strict=True) if label == labels[0]]
    assert len(same) > 1 and not torch.equal(same[0], same[1])


def test_the_picture_is_what_its_script_draws() -> None:
    drawing = runpy.run_path(str(DRAWING))
    assert DRAWING.with_name("rotation.svg").read_text("utf-8") == drawing["draw"]()


def test_the_picture_shows_the_order_that_the_strategy_documents() -> None:
    drawing = runpy.run_path(str(DRAWING))
    rows = re.findall(r"rank (\d) \|([ 0-9]+)\|([ 0-9]+)\|", plan.__doc__ or "")
    assert len(rows) == drawing["NUM_RANKS"]
    for rank, forward, backward in rows:
        assert [int(k) for k in forward.split()] == drawing["slices_met"](int(rank), backward=False)
        assert [int(k) for k in backward.split()] == drawing["slices_met"](int(rank), backward=True)


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages do not name a device; forked ranks cannot use CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_readme_block_runs(tmp_path: Path, warm: None, no_cuda: None) -> None:
    from rotorch.models.hf import causal_lm, load_config

    causal_lm(load_config(ROOT / "configs" / "tiny" / "llama.json")).save_pretrained(tmp_path)
    block = python_block(ROOT / "README.md").replace("path/to/llama", str(tmp_path)).replace("ddp=2,rtp=4", "rtp=2")
    first, second = run_ranks(run_block, block, "loss", num_ranks=2)
    assert first == second > 0


def test_the_block_of_loops_of_ones_own_runs(warm: None, no_cuda: None, tmp_path: Path) -> None:
    from rotorch.models.hf import causal_lm, load_config

    causal_lm(load_config(ROOT / "configs" / "tiny" / "llama.json")).save_pretrained(tmp_path)
    block = python_block(ROOT / "docs" / "drop_in.md").replace("path/to/llama", str(tmp_path))
    first, second = run_ranks(run_block, block.replace('"out"', f'"{tmp_path}/out"'), "loss", num_ranks=2)
    assert first == second > 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def python_block(page: Path) -> str:
    """The page's program: the first of its blocks of Python; others may belong to further libraries."""
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)[0]


def run_block(block: str, loss: str) -> float:
    """Runs a page's program on this rank, gives it batches, and returns the loss that it leaves under that name."""
    ids = torch.arange(64).view(2, 32)
    names: dict[str, Any] = {"__name__": "page", "batches": [{"input_ids": ids, "labels": ids}] * 2}
    exec(compile(block, "page", "exec"), names)
    names["model"].close()
    return float(names[loss].detach())
