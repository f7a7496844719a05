"""Numbers of a checkpoint that are not finite are found wherever they lie, and the one before is taken."""

import logging
import math
import re
import shutil

import pytest
import torch
from three_weights import make, step

from rotorch.core.errors import ConfigError
from rotorch.testing.ranks import run_ranks
from rotorch.train.checkpoint import manifest
from rotorch.train.checkpoint.manifest import DamagedCheckpoint, Manifest, ModelEntry, TensorEntry, check_contents
from rotorch.train.checkpoint.saving import latest, load_newest, save
from rotorch.train.checkpoint.storage import DTYPE_NAMES, LazyTensor, write_safetensors
from rotorch.train.checkpoint.stored_values import StoredValues


def stored(path, tensors):
    """Writes tensors as one file, and returns what a manifest says of them."""
    (path / "rank-00000.safetensors").unlink(missing_ok=True)
    entries = [LazyTensor(name, DTYPE_NAMES[t.dtype], tuple(t.shape), lambda t=t: t) for name, t in tensors.items()]
    written = write_safetensors(path / "rank-00000.safetensors", entries)
    chunk = {"file": "rank-00000.safetensors"}
    return Manifest(
        step=1,
        tokens=0,
        seed=0,
        parallel="single",
        num_ranks=1,
        versions={},
        model=ModelEntry(name="Model", config=None, config_sha256=None, aliases={}),
        optimizer=None,
        schedule={},
        data={},
        run={},
        tensors={
            e.name: TensorEntry(
                dtype=e.dtype,
                shape=e.shape,
                chunks=({**chunk, "offsets": (0,) * len(e.shape), "sizes": e.shape, "start": start},),
            )
            for e, start in zip(entries, written.starts, strict=True)
        },
        files={"rank-00000.safetensors": written.file},
    )


def check(path, tensors):
    held = stored(path, tensors)
    values = StoredValues(path, held, names=tensors)
    check_contents(path, held, look=values.look)
    values.check()


SHAPES = {"model/a": (3, 5), "model/empty": (0, 4), "model/b": (2, 3, 7), "model/scalar": ()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("block_bytes", [8, 64, 1 << 22])
def test_any_element_of_any_block(dtype, block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "_READ_BYTES", block_bytes)
    tensors = {name: torch.full(shape, 1.5).to(dtype) for name, shape in SHAPES.items()}
    check(tmp_path, tensors)
    for name, tensor in tensors.items():
        for at in range(tensor.numel()):
            spoilt = torch.full([tensor.numel()], 1.5)
            spoilt[at] = math.inf
            place = [int(index) for index in torch.unravel_index(torch.tensor(at), tensor.shape)]
            with pytest.raises(DamagedCheckpoint) as caught:
                check(tmp_path, {**tensors, name: spoilt.view(tensor.shape).to(dtype)})
            assert f"rank-00000.safetensors: the weight {name[6:]!r}{place or ''} is inf" in str(caught.value)


def test_whole_numbers_of_any_bits(tmp_path):
    check(tmp_path, {"model/a": torch.full((9,), -1, dtype=torch.int64), "model/b": torch.ones(3, dtype=torch.bool)})


def save_one_gone_astray(run_dir, key, place, value):
    """Two whole saves; of the second, on rank 1, one number of a weight or of its moment is not finite."""
    state = make()
    for number in (1, 2):
        step(state)
        if number == 2 and state.rank == 1:
            held = state.model.weights["down"]
            values = held.parameter if key is None else state.optimizer.state[held.parameter][key]
            values.data[place] = value
        save(run_dir, state, keep=2)


def go_on_from(path):
    """The checkpoint that is loaded, the run's step then, and the messages; or the error."""
    state, lines, handler = make(), [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("rotorch").addHandler(handler)
    try:
        return load_newest(path, state).name, state.step, lines
    except ConfigError as error:
        assert all((held.local == 0.5).all() for held in state.model.weights.values())  # as `make` left them
        return str(error), state.step, lines


@pytest.mark.parametrize(
    ("key", "place", "said"),
    [
        (None, (15, 31), r"the weight 'down'\[15, 63\] is nan"),
        ("exp_avg_sq", (0, 0), r"the optimizer's exp_avg_sq of 'down'\[0, 32\] is nan"),
    ],
)
def test_one_with_numbers_that_are_not_finite_gives_way_to_the_one_before(key, place, said, tmp_path):
    run_ranks(save_one_gone_astray, tmp_path, key, place, math.nan, num_ranks=2)
    path = latest(tmp_path)
    (loaded, steps, lines), other = run_ranks(go_on_from, path, num_ranks=2)
    assert (loaded, steps) == other[:2] == ("step-00000001", 1)
    assert re.search(rf"{path}/rank-00001\.safetensors: {said}: .*: skipped, going on from ", lines[-1])
    shutil.rmtree(path.parent / "step-00000001")
    (told, steps, _), other = run_ranks(go_on_from, path, num_ranks=2)
    assert other[:2] == (told, steps) and steps == 0 and "there is none before it" in told
