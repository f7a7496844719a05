"""Flyweight loading: each rank reads its slices, and one line lists all that does not fit."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rotorch.core.errors import ConfigError
from rotorch.core.spec import Cut, Weight
from rotorch.shard.load import load_directory, load_stored
from rotorch.shard.safetensors_files import open_safetensors
from rotorch.shard.sharded_weight import ShardedWeight, cut_chunks
from rotorch.shard.stored import Computed, Joined, Stacked

WEIGHTS = (
    Weight("embed.weight", (10, 4), 4, Cut(0, 10), aliases=("head.weight",)),
    Weight("up.weight", (12, 4), 4, Cut(0, 3, blocks=2)),
    Weight("down.weight", (4, 6), 4, Cut(1, 3)),
    Weight("norm.weight", (4,), 4),
    Weight("scale", (), 4),
)
STORED = {
    w.name: torch.randn(w.shape, generator=torch.Generator().manual_seed(n)) for n, w in enumerate(WEIGHTS)
}  # fmt: skip


def held(num_slices=1, index=0, dtype=torch.float32, weights=WEIGHTS):
    found = {}
    for weight in weights:
        local = torch.full(weight.slice_shape(num_slices=num_slices, index=index), float("nan"), dtype=dtype)
        chunks = cut_chunks(weight, num_slices=num_slices, index=index)
        found[weight.name] = ShardedWeight(weight, local, chunks, nn.Parameter(local))
    return found


def write(directory, tensors=STORED, *, shards=1):
    directory.mkdir(exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names = sorted(tensors)
    files = {name: f"model-{n % shards + 1:05}-of-{shards:05}.safetensors" for n, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return directory


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("num_slices", [1, 2, 4])
def test_every_rank_gets_its_chunks(tmp_path, shards, num_slices):
    directory = write(tmp_path / "model", shards=shards)
    for index in range(num_slices):
        weights = held(num_slices, index)
        load_directory(str(directory), weights=weights)
        for name, found in weights.items():
            assert not found.local.isnan().any()
            for chunk in found.chunks:
                assert torch.equal(chunk.of_local(found.local), chunk.of_whole(STORED[name]))


def test_a_tied_weight_may_be_stored_under_any_of_its_names(tmp_path):
    tensors = {("head.weight" if n == "embed.weight" else n): t for n, t in STORED.items()}
    weights = held()
    load_directory(str(write(tmp_path / "model", tensors)), weights=weights)
    assert torch.equal(weights["embed.weight"].local, STORED["embed.weight"])


def test_a_tied_weight_may_be_stored_under_all_of_its_names(tmp_path):
    tensors = STORED | {"head.weight": STORED["embed.weight"].clone()}
    weights = held()
    load_directory(str(write(tmp_path / "model", tensors)), weights=weights)
    assert torch.equal(weights["embed.weight"].local, STORED["embed.weight"])


@pytest.mark.parametrize(("stored", "kept"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_values_are_converted(tmp_path, stored, kept):
    weights = held(2, 1, dtype=kept)
    load_directory(str(write(tmp_path / "model", {n: t.to(stored) for n, t in STORED.items()})), weights=weights)
    found = weights["down.weight"]
    assert torch.equal(found.local, found.chunks[0].of_whole(STORED["down.weight"].to(stored).to(kept)))


def refused(directory, *words, weights=None):
    weights = held() if weights is None else weights
    with pytest.raises(ConfigError) as caught:
        load_directory(str(directory), weights=weights)
    message = str(caught.value)
    assert "\n" not in message
    assert str(directory) in message
    for word in words:
        assert re.search(word, message), message
    assert all(h.local.isnan().all() for h in weights.values()), "nothing is read before all is known to fit"


def test_no_directory(tmp_path):
    refused(tmp_path / "nowhere", "is not a directory. Write a Hugging Face model directory")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is not a directory")


def test_no_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "no safetensors files in")


def test_all_that_does_not_fit_is_listed_in_one_line(tmp_path):
    tensors = dict(STORED)
    del tensors["norm.weight"], tensors["scale"]
    tensors["up.weight"] = torch.zeros(12, 5)
    tensors["surplus.weight"] = torch.zeros(2)
    refused(
        write(tmp_path / "model", tensors),
        "does not fit the model",
        "missing: norm.weight, scale",
        "unknown: surplus.weight",
        r"shape of up.weight: \(12, 5\) in the file, \(12, 4\) in the model",
    )


def test_a_file_that_is_not_safetensors(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor in here, nor anywhere near")
    refused(tmp_path, "cannot read")


def test_an_empty_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    refused(tmp_path, "cannot read")


@pytest.mark.parametrize("kept", [9, 300, -1])
def test_a_truncated_file(tmp_path, kept):
    file = write(tmp_path / "model") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(tmp_path / "model", "cannot read")


def test_an_index_that_is_not_json(tmp_path):
    directory = write(tmp_path / "model", shards=2)
    (directory / "model.safetensors.index.json").write_text("{")
    refused(directory, "cannot read")


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_of_another_form(tmp_path, index):
    directory = write(tmp_path / "model", shards=2)
    (directory / "model.safetensors.index.json").write_text(index)
    refused(directory, "cannot read|does not fit")


def test_a_shard_that_is_missing(tmp_path):
    directory = write(tmp_path / "model", shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    refused(directory, "cannot read", "model-00002-of-00002")


def test_a_shard_that_lacks_what_the_index_promises(tmp_path):
    directory = write(tmp_path / "model", shards=2)
    save_file({"other": torch.zeros(1)}, directory / "model-00002-of-00002.safetensors")
    refused(directory, "says that model-00002-of-00002.safetensors holds embed.weight, scale, and it does not")


def test_an_index_may_not_lead_out_of_the_directory(tmp_path):
    outside = tmp_path / "outside"
    write(outside)
    directory = tmp_path / "model"
    directory.mkdir()
    names = dict.fromkeys(STORED, "../outside/model.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refused(directory, "names '../outside/model.safetensors', which is not a file of this directory")


# ---------------------------------------------------------------- values that are no weights


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64])
def test_what_is_no_real_number_is_not_a_weight(tmp_path, dtype):
    tensors = STORED | {"down.weight": torch.ones(4, 6, dtype=dtype)}
    refused(
        write(tmp_path / "model", tensors),
        rf"of a dtype that is not converted: down\.weight \({dtype} in the file, torch\.float32 in the model\)",
        "Write a model that is not quantised",
    )


def test_exponents_of_a_scale_are_not_weights(tmp_path):
    directory = write(tmp_path / "model", STORED | {"norm.weight": torch.ones(4).to(torch.float8_e8m0fnu)})
    refused(directory, "norm.weight .torch.float8_e8m0fnu in the file")


def test_one_expert_of_another_dtype_is_seen_among_those_that_are_stacked():
    real, whole = (Computed((2,), dtype, lambda: torch.ones(2)) for dtype in (torch.bfloat16, torch.int32))
    wide = Computed((2,), torch.float32, lambda: torch.ones(2))
    for put_together in (Stacked, Joined):
        assert put_together([real, whole, wide], dim=0).dtype is torch.int32
        assert put_together([real, wide], dim=0).dtype is torch.float32


def test_a_box_of_joined_parts_opens_those_that_it_meets():
    opened, parts = [], [torch.arange(2.0 * n).view(2, n) + 10 * n for n in (3, 1, 4)]

    def stored(number, part):
        return Computed(part.shape, part.dtype, lambda: opened.append(number) or part)

    joined, whole = Joined([stored(*each) for each in enumerate(parts)], dim=1), torch.cat(parts, dim=1)
    assert torch.equal(joined.read_whole(), whole) and opened == [0, 1, 2]
    for columns, met in ((range(1, 3), [0]), (range(2, 6), [0, 1, 2]), (range(4, 8), [2]), (range(3, 4), [1])):
        opened.clear()
        joined.read((range(1, 2), columns), out=(out := torch.empty(1, len(columns))))
        assert torch.equal(out, whole[1:2, columns.start : columns.stop]) and opened == met


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("index", [0, 1])
def test_a_weight_that_is_not_finite_is_named_with_its_place(tmp_path, value, index):
    spoilt = STORED["down.weight"].clone()
    spoilt[2, 5] = value
    directory = write(tmp_path / "model", STORED | {"down.weight": spoilt})
    weights = held(2, index)
    if index == 0:  # whose slice has other columns
        load_directory(str(directory), weights=weights)
        return
    with pytest.raises(ConfigError, match=rf"down\.weight\[2, 5\] is {value} in the file: .* Write a model whose"):
        load_directory(str(directory), weights=weights)


def test_a_number_that_is_not_finite_is_named(tmp_path):
    with pytest.raises(ConfigError, match="scale is nan in the file"):
        load_directory(str(write(tmp_path, STORED | {"scale": torch.tensor(float("nan"))})), weights=held())


def test_a_value_beyond_the_weights_dtype_is_refused(tmp_path):
    spoilt = STORED["norm.weight"].clone()
    spoilt[3] = -70_000.0
    directory = write(tmp_path / "model", STORED | {"norm.weight": spoilt})
    with pytest.raises(ConfigError, match=r"norm\.weight\[3\] is -70000, and torch\.float16 ends at 65504\. Make the"):
        load_directory(str(directory), weights=held(dtype=torch.float16))
    load_directory(str(directory), weights=held(dtype=torch.bfloat16))


def test_values_of_eight_bits_are_converted(tmp_path):
    weights = held()
    eight = STORED["down.weight"].to(torch.float8_e4m3fn)
    load_directory(str(write(tmp_path / "model", STORED | {"down.weight": eight})), weights=weights)
    assert torch.equal(weights["down.weight"].local, eight.float())


def test_buffers_keep_their_kind_of_number(tmp_path):
    weights, steps = held(), torch.zeros((), dtype=torch.int64)
    for stored, fits in ((torch.tensor(7, dtype=torch.int32), True), (torch.tensor(7.5), False)):
        directory = write(tmp_path / str(fits), STORED | {"steps": stored})
        with open_safetensors(directory) as found:
            if fits:
                load_stored(found, weights=weights, source="x", buffers={"steps": steps})
                assert int(steps) == 7
            else:
                with pytest.raises(ConfigError, match=r"steps \(torch.float32 in the file, torch.int64 in the model"):
                    load_stored(found, weights=weights, source="x", buffers={"steps": steps})
