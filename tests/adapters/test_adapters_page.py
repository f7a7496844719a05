"""The page's programs for Accelerate, Fabric and Lightning's Trainer, as they are written there."""

import re
from pathlib import Path

import pytest

pytest.importorskip("lightning")

from adapter_loops import model, run_page

from rotorch.models.describe import describe
from rotorch.parallelize import load_step_code
from rotorch.testing.ranks import run_ranks


@pytest.mark.filterwarnings("ignore")
def test_the_programs_on_the_page_run(tmp_path):
    load_step_code(["rtp"])
    describe(model())
    page = (Path(__file__).parents[2] / "docs" / "drop_in.md").read_text("utf-8")
    found = page.partition("<!-- tests/adapters runs these blocks -->")[2]
    blocks = re.findall(r"```python\n(.*?)```", found, re.DOTALL)[:3]
    model().save_pretrained(tmp_path / "base")
    run_ranks(run_page, [b.replace("path/to/llama", str(tmp_path / "base")) for b in blocks], tmp_path, num_ranks=2)
    for directory in ("state/parallel/model-0", "state/parallel/optimizer-0", "checkpoint/model-model"):
        assert (tmp_path / directory).is_dir(), directory
    (kept,) = tmp_path.rglob("*.ckpt")
    assert (kept / "model-net").is_dir()
    assert (tmp_path / "out" / "model.safetensors").is_file()
