"""The table of schedules in docs/pipelines.md is what the simulator says."""

import re
from pathlib import Path

from rotorch.pipelining.baselines import BASELINES, make_schedule
from rotorch.pipelining.simulate import ACTIVATIONS, simulate
from rotorch.strategies.zeropp.schedule import make_zeropp_schedule

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pipelines.md"
RANKS, MICRO_BATCHES = 4, 28
ROW = re.compile(r"\| `(\w+)` \| (\d) \| (-|\d) \| (\.\d+) \| ([\d.]+) \|")


def test_bubbles_and_what_is_kept_are_simulated():
    rows = ROW.findall(PAGE.read_text().partition("<!-- tables")[2].partition("<!-- end -->")[0])
    assert {name for name, *_ in rows} == {"zeropp", *BASELINES}
    for name, chunks, unit, bubble, kept in rows:
        sizes = {"num_ranks": RANKS, "num_chunks": int(chunks), "num_micro_batches": MICRO_BATCHES}
        schedule = make_zeropp_schedule(**sizes, unit=int(unit)) if name == "zeropp" else make_schedule(name, **sizes)
        found = simulate(schedule)
        peak = max(found.peak_bytes(rank, category=ACTIVATIONS) for rank in range(RANKS)) / int(chunks)
        assert (f"{found.bubble_ratio:.3f}"[1:], peak) == (bubble, float(kept)), name
