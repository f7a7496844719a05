"""Checkpoints: every cut and layout in every direction, bit for bit on the same one."""

import importlib.util
import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.core.spec import Combine, Cut, ModelSpec, Unit, UnitKind, Weight
from rotorch.hold.sharded_model import ShardedModel
from rotorch.mesh import make_mesh
from rotorch.parallel_model import ParallelModel
from rotorch.shard.sharded_weight import ShardedWeight, cut_chunks
from rotorch.strategies import parse_parallel
from rotorch.testing.ranks import run_ranks
from rotorch.train.checkpoint.contents import inspect_checkpoint
from rotorch.train.checkpoint.saving import check, latest, load, save
from rotorch.train.state import TrainState

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "tiny"
CPU = torch.device("cpu")


def config_of(family):
    """One layer of a tiny model: what a checkpoint has to deal with is all there, and DTensor's cost is per weight."""
    layer = {"layer_types": ["full_attention"]} if family == "qwen3" else {}
    return AutoConfig.from_pretrained(CONFIGS / f"{family}.json", num_hidden_layers=1, **layer)


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Imports here what torch and transformers import on first use, so that not every forked rank does it."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter]).step()
    for family in ("llama", "qwen3"):
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config_of(family))


# ---------------------------------------------------------------- cuts made by hand

WEIGHTS = (
    Weight("rows", (7, 4), 4, Cut(0, 7)),
    Weight("columns", (4, 6), 4, Cut(1, 3)),  # over 2 ranks: 4 columns and 2
    Weight("packed", (12, 5), 4, Cut(0, 3, blocks=2)),  # gate and up in one: each half is cut
    Weight("packed_columns", (2, 4, 12), 4, Cut(2, 3, blocks=2)),
    Weight("few", (2, 3), 4, Cut(0, 2)),  # over 3 ranks: the last has nothing
    Weight("whole", (5,), 4),
    Weight("number", (), 4),
)


class ByHand(ShardedModel):
    """Holds the weights in slices, as plain parameters."""

    def __init__(self, weights: tuple[Weight, ...], *, rank: int, num_ranks: int, dtype: torch.dtype) -> None:
        self.weights = {}
        for weight in weights:
            local = torch.zeros(weight.slice_shape(num_slices=num_ranks, index=rank), dtype=dtype)
            chunks = cut_chunks(weight, num_slices=num_ranks, index=rank)
            self.weights[weight.name] = ShardedWeight(weight, local, chunks, nn.Parameter(local))

    def unsharded(self):
        raise NotImplementedError


def by_hand(num_ranks, *, weights=WEIGHTS, dtype=torch.float32, optimizer=torch.optim.AdamW, **options):
    strategies = parse_parallel(f"rtp={num_ranks}")
    mesh = make_mesh(strategies, device=CPU)
    sharded = ByHand(weights, rank=mesh.get_rank(), num_ranks=num_ranks, dtype=dtype)
    spec = ModelSpec("by hand", (Unit("all", UnitKind.MODULE, Combine.SUM, weights),))
    model = ParallelModel(nn.Module(), sharded=sharded, mesh=mesh, strategies=strategies, spec=spec, recipes={})
    parameters = [held.parameter for held in sharded.weights.values()]
    return TrainState(model=model, optimizer=optimizer(parameters, **{"lr": 0.1, **options}), seed=3)


def whole_values(weight, *, salt=0):
    """Values of a whole weight that tell every element from every other."""
    return torch.arange(weight.numel, dtype=torch.float32).view(weight.shape) + 1 + salt


def fill(state):
    """Gives weights known values and takes one step with known gradients: elementwise, so that no cut shows."""
    for held in state.model.weights.values():
        held.parameter.grad = torch.zeros_like(held.parameter)
        for chunk in held.chunks:
            chunk.of_local(held.local).copy_(chunk.of_whole(whole_values(held.weight)))
            chunk.of_local(held.parameter.grad).copy_(chunk.of_whole(whole_values(held.weight, salt=7)))
    state.optimizer.step()
    state.step, state.tokens = 5, 640


def dense_step(optimizer, **options):
    """The same on whole weights."""
    parameters = {w.name: nn.Parameter(whole_values(w)) for w in WEIGHTS}
    dense = optimizer(list(parameters.values()), **{"lr": 0.1, **options})
    for weight in WEIGHTS:
        parameters[weight.name].grad = whole_values(weight, salt=7)
    dense.step()
    return parameters, dense


def save_by_hand(run_dir, num_ranks, optimizer=torch.optim.AdamW, options=None):
    state = by_hand(num_ranks, optimizer=optimizer, **(options or {}))
    fill(state)
    return str(save(run_dir, state, keep=3))


def differences(path, num_ranks, optimizer=torch.optim.AdamW, options=None):
    """Loads a checkpoint of `fill` and names what differs from the dense step."""
    state = by_hand(num_ranks, optimizer=optimizer, **(options or {}))
    state.seed = 4  # the checkpoint's counts
    load(path, state)
    parameters, dense = dense_step(optimizer, **(options or {}))
    wrong = [] if (state.step, state.tokens, state.seed) == (5, 640, 3) else ["counters"]
    for name, held in state.model.weights.items():
        whole = {"weight": parameters[name].detach(), **dense.state[parameters[name]]}
        ours = {"weight": held.local, **state.optimizer.state[held.parameter]}
        if whole.keys() != ours.keys():
            wrong.append(f"{name}: {sorted(ours)} instead of {sorted(whole)}")
        for key, value in whole.items():
            if not isinstance(value, torch.Tensor):
                same = ours[key] == value
            elif ours[key].shape == held.local.shape and key != "step":
                same = all(torch.equal(p.of_local(ours[key]), p.of_whole(value)) for p in held.chunks)
            else:
                same = torch.equal(ours[key], value)
            if not same:
                wrong.append(f"{name}: {key}")
    return wrong


@pytest.mark.parametrize("writers", [1, 2, 3])
def test_every_cut_loads_under_every_number_of_ranks(writers, tmp_path):
    path = run_ranks(save_by_hand, tmp_path, writers, num_ranks=writers)[0]
    assert check(path).num_ranks == writers
    for readers in (1, 2, 3):
        assert run_ranks(differences, path, readers, num_ranks=readers) == [[]] * readers


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
        (torch.optim.NAdam, {}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or "-".join(value),
)
def test_any_elementwise_optimizer(optimizer, options, tmp_path):
    path = run_ranks(save_by_hand, tmp_path, 2, optimizer, options, num_ranks=2)[0]
    assert run_ranks(differences, path, 1, optimizer, options, num_ranks=1) == [[]]


def save_with_adafactor(run_dir):
    state = by_hand(1, optimizer=torch.optim.Adafactor)
    fill(state)
    save(run_dir, state, keep=1)


def test_state_that_cannot_be_cut_is_refused(tmp_path):
    with pytest.raises(rotorch.RankFailure, match=r"ConfigError: .*Adafactor keeps 'row_var' of shape .* e\.g\. AdamW"):
        run_ranks(save_with_adafactor, tmp_path, num_ranks=1)


def load_other_options(path):
    state = by_hand(2, weight_decay=0.5, betas=(0.5, 0.6))
    state.schedule = {"peak": 2.0, "warm_up_steps": 10}
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("rotorch").addHandler(handler)
    load(path, state)
    group = state.optimizer.param_groups[0]
    return group["weight_decay"], group["betas"], lines


def save_with_schedule(run_dir):
    state = by_hand(2)
    state.schedule, state.data, state.run = {"peak": 1.0, "warm_up_steps": 10}, {"position": 4}, {"model": "x"}
    fill(state)
    return str(save(run_dir, state, keep=1))


def test_changed_hyperparameters_and_schedule_are_said_once(tmp_path):
    path = run_ranks(save_with_schedule, tmp_path, num_ranks=2)[0]
    (weight_decay, betas, lines), (*_, other_lines) = run_ranks(load_other_options, path, num_ranks=2)
    assert (weight_decay, betas) == (0.01, (0.9, 0.999))
    assert other_lines == []  # rank 0 speaks
    assert [line.removeprefix(f"checkpoint: {path}: ") for line in lines] == [
        "schedule: peak was 1.0 and is 2.0 from here on",
        "optimizer group 0: betas stays [0.9, 0.999] as saved, not [0.5, 0.6]",
        "optimizer group 0: weight_decay stays 0.01 as saved, not 0.5",
    ]
    manifest = check(path)
    assert (manifest.data, manifest.run) == ({"position": 4}, {"model": "x"})


def grouped(*groups):
    """A state whose optimizer has its weights in two groups, of which the first is decayed."""
    state = by_hand(2)
    names = list(state.model.weights)
    made = [{"params": [state.model.weights[names[k]].parameter for k in group]} for group in groups]
    state.optimizer = torch.optim.AdamW(made, lr=0.1)
    state.optimizer.param_groups[1]["weight_decay"] = 0.0
    return state


def save_in_groups(run_dir):
    state = grouped([0, 1], range(2, 3))
    fill(state)
    return str(save(run_dir, state, keep=1)), list(state.model.weights)


def load_in_groups(path, groups):
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("rotorch").addHandler(handler)
    load(path, grouped(*groups))
    return [line.removeprefix(f"checkpoint: {path}: ") for line in lines]


def test_weights_that_are_decayed_from_here_on_are_said(tmp_path):
    path, names = run_ranks(save_in_groups, tmp_path, num_ranks=2)[0]
    assert run_ranks(load_in_groups, path, [[0, 1], [2]], num_ranks=2) == [[], []]
    assert run_ranks(load_in_groups, path, [[0, 1, 2], []], num_ranks=2)[0] == [
        f"optimizer group 0 (weight_decay 0.01) has {names[2]!r} from here on, which group 1 had"
    ]
    assert run_ranks(load_in_groups, path, [[2], [0, 1]], num_ranks=2)[0][1] == (
        f"optimizer group 1 (weight_decay 0.0) has {min(names[:2])!r} and 1 more from here on, which group 0 had"
    )


# ---------------------------------------------------------------- real models

HAVE_RTP = importlib.util.find_spec("rotorch.strategies.rtp.apply") is not None
LAYOUTS = {
    1: ["single"],
    2: ["ddp=2", "fsdp=2", *(["rtp=2"] if HAVE_RTP else [])],
    3: ["fsdp=3", *(["rtp=3"] if HAVE_RTP else [])],
}


def build(parallel, family="llama"):
    with rotorch.on_meta():
        module = AutoModelForCausalLM.from_config(config_of(family))
    model = rotorch.parallelize(module, parallel).materialize(seed=0)
    return TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), seed=11)


def train(state, num_steps):
    """Trains on a batch that is a function of the step; also draws random numbers, as dropout would."""
    losses, model = [], state.model
    for _ in range(num_steps):
        ids = torch.randint(0, 300, (6, 8), generator=torch.Generator().manual_seed(state.step))
        mine = ids.chunk(model.num_batch_ranks)[model.batch_rank]
        state.optimizer.zero_grad()
        losses.append(float(model.forward_backward({"input_ids": mine, "labels": mine})))
        state.optimizer.step()
        state.step += 1
        state.tokens += 6 * 7
    return losses


def draw():
    return torch.rand(3).tolist(), random.random(), np.random.rand()


def local_bits(state):
    """Every bit of weights and optimizer state that this rank holds."""
    found = {}
    for name, held in state.model.weights.items():
        found[name] = held.local.numpy().tobytes()
        for key, value in state.optimizer.state[held.parameter].items():
            local = value.to_local() if hasattr(value, "to_local") else value
            found[f"{name}/{key}"] = local.numpy().tobytes()
    return found


def write(run_dir, family, layouts):
    """Under each layout: two steps, a save, two more; returns what an undisturbed run does."""
    done = {}
    for parallel in layouts:
        state = build(parallel, family)
        train(state, 2)
        draw()
        path = str(save(Path(run_dir, parallel), state, keep=2))
        done[parallel] = (path, draw(), train(state, 2), local_bits(state))
        state.model.close()
    return done


def read(paths, family, layouts):
    """Continues each checkpoint under each layout."""
    done = {}
    for parallel in layouts:
        for source, path in paths.items():
            state = build(parallel, family)
            torch.manual_seed(99)
            load(path, state)
            assert state.tokens == 2 * 6 * 7
            done[source, parallel] = (draw(), train(state, 2), local_bits(state))
            state.model.close()
    return done


EACH = {1: ["single"], 3: LAYOUTS[3][-1:]}
"""Whole and, unevenly, in slices; tests/train/test_resharding.py has shards and blocks."""


@pytest.mark.parametrize(
    ("family", "chosen"),
    [
        ("qwen3", EACH),  # tied embedding and head
        pytest.param("llama", LAYOUTS, marks=pytest.mark.slow),
    ],
)
def test_every_layout_continues_every_other(family, chosen, tmp_path):
    written = {}  # by layout: what each rank of it did
    for num_ranks, layouts in chosen.items():
        by_rank = run_ranks(write, tmp_path, family, layouts, num_ranks=num_ranks)
        written.update({parallel: [done[parallel] for done in by_rank] for parallel in by_rank[0]})
    paths = {parallel: by_rank[0][0] for parallel, by_rank in written.items()}
    for num_ranks, layouts in chosen.items():
        for rank, done in enumerate(run_ranks(read, paths, family, layouts, num_ranks=num_ranks)):
            for (source, parallel), (drawn, losses, bits) in done.items():
                undisturbed = written[source][0][2]
                assert losses == pytest.approx(undisturbed, rel=1e-6), (source, parallel)
                if len(written[source]) == num_ranks:  # random states go with the rank, whatever the layout
                    assert drawn == written[source][rank][1], (source, parallel)
                if source == parallel:
                    assert losses == undisturbed, source
                    assert bits == written[source][rank][3], source


def derived(path):
    state = build("single")
    load(path, state)
    return draw()


def test_random_states_on_other_ranks_depend_on_seed_and_step_only(tmp_path):
    path = run_ranks(write, tmp_path, "llama", ["ddp=2"], num_ranks=2)[0]["ddp=2"][0]
    assert run_ranks(derived, path, num_ranks=1) == run_ranks(derived, path, num_ranks=1)


def test_inspect_tells_what_is_there(tmp_path):
    path = run_ranks(write, tmp_path, "qwen3", ["fsdp=2"], num_ranks=2)[0]["fsdp=2"][0]
    found = inspect_checkpoint(path)
    assert json.loads(json.dumps(found)) == found
    assert (found["step"], found["parallel"], found["num_ranks"], found["optimizer"]) == (2, "fsdp=2", 2, "AdamW")
    assert found["model"] == "Qwen3ForCausalLM"
    assert found["bytes"]["weights"] == 4 * found["num_parameters"]
    assert "model/lm_head.weight" not in found["tensors"]  # tied: once
    embedding = found["tensors"]["model/model.embed_tokens.weight"]
    assert embedding == {"dtype": "F32", "shape": [512, 96], "bytes": 512 * 96 * 4, "num_chunks": 2}
    assert found["total_bytes"] == sum(p.stat().st_size for p in Path(path).iterdir() if p.name != "manifest.json")
    assert inspect_checkpoint(Path(path).parents[1]) == found  # a run's directory: its latest
    assert latest(Path(path).parents[1]) == Path(path)


def test_files_are_ordinary_safetensors(tmp_path):
    from safetensors import safe_open

    path = Path(run_ranks(save_by_hand, tmp_path, 2, num_ranks=2)[0])
    with safe_open(path / "rank-00000.safetensors", framework="pt") as file:
        assert {"model/rows[0:4,0:4]", "model/packed[0:4,0:5]", "model/packed[6:10,0:5]"} <= set(file.keys())
        expected = dense_step(torch.optim.AdamW)[0]["rows"][:4]
        assert torch.equal(file.get_tensor("model/rows[0:4,0:4]"), expected)


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ConfigError, match="keep=0: write at least 1"):
        save(tmp_path, TrainState(model=None), keep=0)
