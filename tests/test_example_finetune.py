"""The fine-tuning example on the real model: skipped, with the reason, where its inputs cannot be had."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "finetune_smollm2"

pytest.importorskip("gguf")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def there():
    fetch = runpy.run_path(str(EXAMPLE / "fetch.py"))
    try:
        return fetch["smollm2"](), fetch["speeches"]()
    except fetch["Unavailable"] as error:
        pytest.skip(f"an input cannot be had here: {error}")


def run(command, *, cwd):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(EXAMPLE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(cwd),
    }
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_layers_are_tuned_exported_and_speak(tmp_path):
    script = EXAMPLE / "finetune.py"
    printed = run([sys.executable, str(script), "--layers", "2", "--steps", "3", "--out", "out"], cwd=tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+)", printed)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert re.search(r"it says: '.+'", printed)
    assert (tmp_path / "out" / "export" / "model.safetensors").is_file()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_whole_model_is_loaded_within_its_memory(tmp_path, num_ranks):
    """Over its first window one process has perplexity 20.216."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    printed = run([*command, str(EXAMPLE / "perplexity.py"), "--windows", "1"], cwd=tmp_path)
    (perplexity,) = re.findall(r"perplexity ([0-9.]+) over 1023 tokens", printed)
    assert float(perplexity) == pytest.approx(20.2159, abs=0.005)
    ranks = re.findall(
        r"peak (\d+) MB after loading, (\d+) MB before; its share of the model is (\d+) MB, the largest tensor (\d+)",
        printed,
    )
    assert len(ranks) == num_ranks
    for peak, before, share, largest in ranks:
        assert int(peak) - int(before) <= int(share) + int(largest)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_whole_model_comes_out_as_it_was(tmp_path, num_ranks):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    printed = run([*command, str(EXAMPLE / "untouched.py")], cwd=tmp_path)
    assert f"rtp={num_ranks}: 272 of 272 tensors are the same to the bit" in printed
