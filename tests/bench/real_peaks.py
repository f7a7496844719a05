"""Peaks of real steps, for tests that hold predicted ones to them."""

from rotorch.bench.contender import UnderLayout
from rotorch.bench.tensor_memory import measure_tensors
from rotorch.core.precision import copies_itemsize
from rotorch.models.describe import describe
from rotorch.models.hf import causal_lm
from rotorch.planner.cluster import load_cluster
from rotorch.planner.search import Batch, Task
from rotorch.planner.speeds import speeds_of
from rotorch.planner.workload import fold
from rotorch.shard.materialize import on_meta
from rotorch.traced.passes import trace_memory


def peak_of(task, layout, steps=1):
    """Bytes of a rank's tensors at the highest moment of a step, the least of some after the first. All ranks."""
    contender = UnderLayout(task, parallel=layout)
    contender.forward_backward(0)
    contender.update()
    found = [measure_tensors(contender, step=1 + step).peak_bytes for step in range(steps)]
    contender.close()
    return min(found)


def planned(config, *, rows, tokens, precision="float32", features=False, **more):
    """A planner's task: a step of so many rows of all ranks together; `features`: for grids that cut them."""
    cluster = load_cluster("cpu2")
    with on_meta():
        spec = describe(causal_lm(config), features=features).with_copies(copies_itemsize(precision))
    return Task(
        spec=spec,
        traced=trace_memory(config, fold(spec), tokens=tokens, precision=precision),
        cluster=cluster,
        speeds=speeds_of(cluster, dtype="float32"),
        batch=Batch(rows, tokens),
        precision=precision,
        budget_bytes=float("inf"),
        **more,
    )
