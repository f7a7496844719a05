"""The papers' experiments: bytes of a rank whose neighbours are faked are those of a real one."""

import json
import sys
from pathlib import Path

import pytest

from rotorch.bench.contender import UnderLayout
from rotorch.bench.tensor_memory import measure_tensors
from rotorch.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "papers"))

import rtp  # noqa: E402

TINY = rtp.gpt2(width=128, layers=2, heads=4) | {"vocab_size": 8192}


def real_peak(task, parallel):
    contender = UnderLayout(task, parallel=parallel)
    contender.forward_backward(0)
    contender.update()
    found = measure_tensors(contender, step=1)
    contender.close()
    return found.peak_bytes


@pytest.mark.parametrize("parallel", [f"rtp=2[{rtp.MESSAGES}]", f"rtp=2[recompute=slice,{rtp.IN_PLACE}]"])
def test_a_rank_with_faked_neighbours_holds_what_a_real_one_does(parallel, warm):
    task = rtp.task_of(TINY, ranks=2, rows=2, tokens=64)
    real = run_ranks(real_peak, task, parallel, num_ranks=2)[0]
    faked = rtp.peak(TINY, parallel, rows=2, tokens=64, ranks=2)
    assert faked["peak_bytes"] == pytest.approx(real, rel=0.01)
    assert sum(n for name, n in faked.items() if name != "peak_bytes") == faked["peak_bytes"]


def test_baselines_hold_more():
    found = {name: rtp.peak(TINY, name, rows=1, tokens=64)["peak_bytes"] for name in rtp.ROWS}
    whole, one_unit, blocks, out_of_place, _ = found.values()
    assert whole > one_unit > blocks > out_of_place


@pytest.mark.parametrize("bend", [0, 3, -3])
def test_the_most_layers_are_found_and_run_with_the_next(bend):
    """Also where the two depths that it guesses from are not on the line of the others."""
    asked = []

    def at(layers):
        asked.append(layers)
        return 100 + 10 * layers + (bend * layers if layers > 8 else 0)

    layers, here, behind = rtp.most_layers(at, limit=1000)
    assert here <= 1000 < behind
    assert (here, behind) == (at(layers), at(layers + 1))
    assert {layers, layers + 1} <= set(asked[:-2])


def test_the_record_keeps_what_the_page_says():
    record = json.loads(rtp.OUT.read_text())
    of_gpt2 = [row for row in record["peaks"] if row["parallel"].startswith("rtp") and row["model"].startswith("GPT")]
    assert min(row["of_ideal"] for row in of_gpt2) > 0.99
    assert min(row["of_ideal"] for row in record["shares"] if row["again"] == "blocks") > 0.89
    assert record["capacity"][-1]["times_one_process"] > 0.95 * rtp.RANKS
    for row in record["capacity"]:
        assert row["peak_bytes"] <= row["limit_bytes"] < row["peak_bytes_one_layer_more"]
