"""Loops of other libraries over replicas: those that accumulate sum once for each step, by `no_sync`."""

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("lightning")

import accelerate_loops
import lightning_loops
from adapter_loops import run_all

from rotorch.hold.put_off import PutOffSums
from rotorch.testing.ranks import run_ranks

LOOPS = {
    "accelerate": accelerate_loops.loop,
    "fabric": lightning_loops.fabric_loop,
    "trainer": lightning_loops.trainer_loop,
}


def put_off(directory):
    """By loop: of each backward, whether it has left its sums to a later one."""
    found, end = {}, PutOffSums.end
    with pytest.MonkeyPatch.context() as patch:
        for name, loop in LOOPS.items():
            seen = found[name] = []
            patch.setattr(
                PutOffSums, "end", lambda self, weights, seen=seen: (seen.append(self.asked), end(self, weights))
            )
            run_all([(name, loop, "ddp=2", directory / name, {})])
    return found


def test_all_but_the_last_micro_batch_of_a_step_leave_their_sums_to_it(tmp_path):
    for found in run_ranks(put_off, tmp_path, num_ranks=2):
        assert found == {name: [True, False] * 6 for name in LOOPS}
