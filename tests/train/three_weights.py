"""A model of three weights, cut by hand, whose steps compute nothing: for tests of checkpoints."""

import json
import os

import torch
from torch import nn

from rotorch.core.spec import Combine, Cut, ModelSpec, Unit, UnitKind, Weight
from rotorch.hold.sharded_model import ShardedModel
from rotorch.mesh import make_mesh
from rotorch.parallel_model import ParallelModel
from rotorch.shard.sharded_weight import ShardedWeight, cut_chunks
from rotorch.strategies import parse_parallel
from rotorch.train.checkpoint.saving import latest, load
from rotorch.train.state import TrainState

WEIGHTS = (Weight("up", (64, 16), 4, Cut(0, 64)), Weight("down", (16, 64), 4, Cut(1, 64)), Weight("norm", (16,), 4))


class ByHand(ShardedModel):
    """Holds the weights in slices, as plain parameters."""

    def __init__(self, weights, *, rank, num_ranks, dtype):
        self.weights = {}
        for weight in weights:
            local = torch.full(weight.slice_shape(num_slices=num_ranks, index=rank), 0.5, dtype=dtype)
            chunks = cut_chunks(weight, num_slices=num_ranks, index=rank)
            self.weights[weight.name] = ShardedWeight(weight, local, chunks, nn.Parameter(local))

    def unsharded(self):
        raise NotImplementedError


class Config:
    """As much of a Hugging Face config as a checkpoint looks at."""

    def __init__(self, **entries):
        self.entries = {"model_type": "three_weights", "rope_theta": 1e4, **entries}

    def to_json_string(self, *, use_diff):
        return json.dumps(self.entries)


def make(*, weights=WEIGHTS, dtype=torch.float32, optimizer=torch.optim.AdamW, config=None):
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    strategies = parse_parallel(f"rtp={num_ranks}")
    mesh = make_mesh(strategies, device=torch.device("cpu"))
    sharded = ByHand(weights, rank=mesh.get_rank(), num_ranks=num_ranks, dtype=dtype)
    module = nn.Module()
    module.config = config or Config()
    spec = ModelSpec("by hand", (Unit("all", UnitKind.MODULE, Combine.SUM, weights),))
    model = ParallelModel(module, sharded=sharded, mesh=mesh, strategies=strategies, spec=spec, recipes={})
    state = TrainState(model=model, optimizer=optimizer([h.parameter for h in sharded.weights.values()], lr=0.1))
    return state


def step(state):
    for held in state.model.weights.values():
        held.parameter.grad = torch.ones_like(held.parameter)
    state.optimizer.step()
    state.step += 1


def read_back(run_dir):
    state = make()
    load(latest(run_dir), state)
    expected = make()
    for _ in range(state.step):
        step(expected)
    same = all(torch.equal(h.local, expected.model.weights[name].local) for name, h in state.model.weights.items())
    return state.step, same


def steps_of(run_dir):
    return sorted(int(p.name.removeprefix("step-")) for p in (run_dir / "checkpoints").glob("step-*"))
