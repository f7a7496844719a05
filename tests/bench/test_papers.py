"""The papers' experiments: bytes of a rank whose neighbours are faked are those of a real one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from real_peaks import peak_of

from rotorch.testing.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "papers"))

import rtp  # noqa: E402

TINY = rtp.gpt2(width=128, layers=2, heads=4) | {"vocab_size": 8192}


LAYOUTS = (f"rtp=2[{rtp.MESSAGES}]", f"rtp=2[recompute=slice,{rtp.IN_PLACE}]")
COMPARED = list(rtp.ROWS)[:4]
"""The page's rows but for the last one, a ring in place: it is among the layouts above."""


def faked(*cases):
    """Figures of faked ranks by (layout, ranks), of a process of its own: every tensor of a process counts."""
    code = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import rtp; model = json.loads(sys.argv[2]); "
        "found = [rtp.peak(model, name, rows=2, tokens=64, ranks=n) for name, n in json.loads(sys.argv[3])]; "
        "print(json.dumps(found))"
    )
    command = [sys.executable, "-c", code, str(Path(rtp.__file__).parent), json.dumps(TINY), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("parallel", [LAYOUTS[0], pytest.param(LAYOUTS[1], marks=pytest.mark.slow)])
def test_a_rank_with_faked_neighbours_holds_what_a_real_one_does(parallel, warm):
    real = run_ranks(peak_of, rtp.task_of(TINY, ranks=2, rows=2, tokens=64), parallel, num_ranks=2)[0]
    (found,) = faked((parallel, 2)).values()
    assert found["peak_bytes"] == pytest.approx(real, rel=0.01)
    assert sum(n for name, n in found.items() if name != "peak_bytes") == found["peak_bytes"]


@pytest.mark.slow
def test_baselines_hold_more():
    peaks = [found["peak_bytes"] for found in faked(*((name, rtp.RANKS) for name in COMPARED)).values()]
    whole, one_unit, blocks, out_of_place = peaks
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
    assert min(row["of_ideal"] for row in record["shares"]) >= 0.97
    assert record["capacity"][-1]["times_one_process"] >= rtp.RANKS
    for row in record["capacity"]:
        assert row["peak_bytes"] <= row["limit_bytes"] < row["peak_bytes_one_layer_more"]
