"""`rotorch.save` and `rotorch.load` in a loop of one's own: whole or not at all, on any number of ranks."""

import json
import os
import re

import pytest
import torch
from muon_runs import build, config_of, rows

import rotorch
from rotorch.core.errors import ConfigError
from rotorch.models.conversions import is_pretrained
from rotorch.parallelize import load_step_code
from rotorch.testing.arithmetic import exact_arithmetic
from rotorch.testing.compare import value_errors
from rotorch.testing.ranks import run_ranks

BAR = 1e-10


class Reader:
    """A loader whose place is its share's own."""

    def __init__(self, model, *, place=0):
        self.share, self.num_shares, self.place = model.batch_rank, model.num_batch_ranks, place

    def next(self):
        self.place += 1
        return rows(61, step=self.place, share=self.share, num_shares=self.num_shares)

    def state_dict(self):
        return {"place": self.place, "share": self.share, "order": torch.arange(3)}

    def load_state_dict(self, state):
        assert state["share"] == self.share
        self.place = state["place"]


class Loop:
    def __init__(self, config, layout):
        self.model = rotorch.parallelize(build(config), layout, device="cpu") if layout else build(config)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)

    def go(self, loader, *, steps):
        with exact_arithmetic():
            for _ in range(steps):
                if hasattr(self.model, "forward_backward"):
                    self.model.forward_backward([loader.next()])
                else:
                    self.model(**loader.next()).loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()


class One:
    batch_rank, num_batch_ranks = 0, 1


def written(config, layout, folder):
    """Three steps, saved twice, and refusals that write nothing."""
    loop = Loop(config, layout)
    loader = Reader(loop.model)
    loop.go(loader, steps=3)
    for step in (2, 3):
        rotorch.save(folder, loop.model, loop.optimizer, loader, step=step, scheduler=loop.scheduler)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    return [
        _said(lambda: rotorch.save(folder / "no", loop.model, other, step=1)),
        _said(lambda: rotorch.save(folder / "no", torch.nn.Linear(2, 2), step=1)),
        _said(lambda: rotorch.save(folder / "no", loop.model, loader=[1], step=1)),
        _said(lambda: rotorch.save(folder / "no", loop.model, ema=Odd(), step=1)),
        _said(lambda: rotorch.save(folder / "no", loop.model, step=-1)),
        _said(lambda: rotorch.save(folder / "no", loop.model, step="3")),
    ]


def differently(config, layout, folder, directory):
    """Messages of ranks that save other steps, or to other directories."""
    model, rank = Loop(config, layout).model, int(os.environ["RANK"])
    said = [
        _said(lambda: rotorch.save(folder, model, step=3 + rank % 2)),
        _said(lambda: rotorch.save(folder / f"of-{rank}", model, step=3)),
    ]
    os.chdir(directory / str(rank))
    return [*said, _said(lambda: rotorch.save("here", model, step=3))]


class Odd:
    def state_dict(self):
        return {"odd": Odd}

    def load_state_dict(self, state):
        return None


def read(config, layouts, folder, expected):
    found = {}
    for layout in layouts:
        loop = Loop(config, layout)
        loader = Reader(loop.model)
        refused = None
        try:
            step = rotorch.load(folder, loop.model, loop.optimizer, loader, scheduler=loop.scheduler)
        except ConfigError as error:
            refused = str(error)
            step = rotorch.load(folder, loop.model, loop.optimizer, scheduler=loop.scheduler)
            loader.place = step
        loop.go(loader, steps=2)
        error = max(value_errors(loop.model.weights, expected).items(), key=lambda pair: pair[1])
        found[layout] = {"step": step, "refused": refused, "error": error, "lr": loop.scheduler.get_last_lr()}
    return found


def bad(config, folder, damaged):
    """Messages about checkpoints that cannot be loaded; the model stays as it is."""
    loop = Loop(config, "rtp=2")
    before = [p.detach().clone() for p in loop.model.parameters()]
    wider = config_of_size(config, intermediate_size=44)
    other = rotorch.parallelize(build(wider), "rtp=2", device="cpu")
    sgd = torch.optim.SGD([p for p in loop.model.parameters() if p.requires_grad], lr=0.1)
    said = [
        _said(lambda: rotorch.load(folder / "none", loop.model)),
        _said(lambda: rotorch.load(damaged, loop.model, loop.optimizer)),
        _said(lambda: rotorch.load(folder, other)),
        _said(lambda: rotorch.load(folder, loop.model, sgd)),
        _said(lambda: rotorch.load(folder, loop.model, schedular=loop.scheduler)),
    ]
    same = all(bool((p == b).to_local().all()) for p, b in zip(loop.model.parameters(), before, strict=True))
    return said, same and not loop.optimizer.state


def config_of_size(config, **sizes):
    changed = type(config)(**config.to_dict())
    for name, size in sizes.items():
        setattr(changed, name, size)
    return changed


def _said(call):
    try:
        call()
    except ConfigError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def config(tiny):
    load_step_code(["ddp", "fsdp", "rtp"])
    return config_of(tiny("llama"))


@pytest.fixture(scope="module")
def saved(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(written, config, "ddp=2", folder, num_ranks=2)


@pytest.fixture(scope="module")
def expected(config):
    loop = Loop(config, None)
    loop.go(Reader(One), steps=5)
    return {name: p.detach().clone() for name, p in loop.model.named_parameters()}, loop.scheduler.get_last_lr()


@pytest.mark.parametrize(("num_ranks", "layouts"), [(2, ["rtp=2", "fsdp=2"]), (3, ["rtp=3"]), (1, ["single"])])
def test_a_loop_goes_on_under_any_layout(config, saved, expected, num_ranks, layouts):
    values, lr = expected
    for found in run_ranks(read, config, layouts, saved[0], values, num_ranks=num_ranks):
        for layout in layouts:
            assert found[layout]["step"] == 3 and found[layout]["lr"] == lr
            assert found[layout]["error"][1] <= BAR, found[layout]["error"]
            if num_ranks == 2:
                assert found[layout]["refused"] is None
            else:  # shares read different data, and here are not as many
                assert "'loader' is that of 2 shares of the data" in found[layout]["refused"]


def test_what_cannot_be_saved_is_refused_and_nothing_written(saved):
    folder, told = saved
    for of_rank in told:
        for said, wanted in zip(
            of_rank,
            [
                "is none of the model's",
                "is not what parallelize returned",
                "StatefulDataLoader",
                "ema",
                "step=-1: write a whole number, 0 or more",
                "step='3': write a whole number",
            ],
            strict=True,
        ):
            assert said is not None and wanted in said and "\n" not in said
    assert not (folder / "no").exists()
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]


def test_ranks_that_save_different_things_are_refused(config, tmp_path):
    """Rank 0's step and directory were taken."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    run = tmp_path / ("long" * 30) / "run"  # the message has both ends of it
    for steps, paths, relative in run_ranks(differently, config, "rtp=2", run, tmp_path, num_ranks=2):
        assert steps == (
            "rotorch.save: ranks save different things: step is 3 on rank 0 and 4 on rank 1. Give all of them the same "
            "directory and the same step"
        )
        assert re.search(r"path is .*/run/of-0\S* on rank 0 and .*/run/of-1\S* on rank 1\. Give all", paths), paths
        assert "/0/here" in relative and "/1/here" in relative
    assert not run.exists() and [*tmp_path.rglob("here")] == []


def test_what_cannot_be_loaded_is_refused_and_nothing_changed(config, saved, tmp_path):
    folder = saved[0]
    whole = folder / "checkpoints" / "step-00000003"
    damaged = tmp_path / whole.name
    damaged.mkdir()
    for file in whole.iterdir():
        content = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            content[-1] ^= 1
        (damaged / file.name).write_bytes(content)
    for said, same in run_ranks(bad, config, folder, damaged, num_ranks=2):
        wanted = ["none", "damaged", "of another model", "written by a run with AdamW", "did you mean 'scheduler'?"]
        for line, words in zip(said, wanted, strict=True):
            assert line is not None and words in line and "\n" not in line
        assert same


def whole_tensors(configs):
    found = {}
    for name, config in configs.items():
        plain, model = build(config), rotorch.parallelize(build(config), "rtp=2", device="cpu")
        theirs = {key: value.to(torch.bfloat16) for key, value in plain.state_dict().items()}
        ours = dict(model.iter_full_tensors(dtype=torch.bfloat16))
        found[name] = {
            "names": sorted(ours),
            "same": all(torch.equal(ours[key], theirs[key]) for key in ours if key in theirs),
            "bytes": sum(t.nbytes for t in ours.values()),
            "pretrained": is_pretrained(model),
        }
    return found


def test_whole_tensors_come_one_by_one_in_published_names(tiny, tmp_path):
    configs = {
        "llama": config_of(tiny("llama")),
        "tied": config_of(tiny("llama"), tie_word_embeddings=True),
        "mixtral": config_of(tiny("mixtral")),
    }
    expected = {}
    for name, config in configs.items():
        module = build(config).to(torch.bfloat16)
        module.save_pretrained(tmp_path / name)
        from safetensors import safe_open

        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            expected[name] = sorted(file.keys()), sum(file.get_tensor(key).nbytes for key in sorted(file.keys()))
    load_step_code(["rtp"])
    for found in run_ranks(whole_tensors, configs, num_ranks=2):
        for name, of_model in found.items():
            assert of_model["pretrained"] and of_model["same"]
            assert (of_model["names"], of_model["bytes"]) == expected[name]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_of_torchdata_goes_on_where_it_was(config, tmp_path):
    data = pytest.importorskip("torchdata.stateful_dataloader")

    def work(folder):
        model = rotorch.parallelize(build(config), "rtp=2", device="cpu")
        loaders = [data.StatefulDataLoader(list(range(20)), batch_size=2) for _ in range(2)]
        reading = iter(loaders[0])
        seen = [next(reading).tolist() for _ in range(3)]
        rotorch.save(folder, model, None, loaders[0], step=3)
        rotorch.load(folder, model, None, loaders[1])
        return seen, [batch.tolist() for batch in loaders[1]]

    for seen, rest in run_ranks(work, tmp_path, num_ranks=2):
        assert json.dumps(seen + rest) == json.dumps([[n, n + 1] for n in range(0, 20, 2)])


def merged_tensors(config):
    from rotorch.models.lora import add_lora

    found = []
    for layout in ("single", "rtp=2"):
        torch.manual_seed(0)
        module = add_lora(build(config), rank=2)
        with torch.no_grad():
            for number, (name, parameter) in enumerate(module.named_parameters()):
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)))
        model = rotorch.parallelize(module, layout.replace("single", "ddp=2"), device="cpu")
        found.append(dict(model.iter_full_tensors()))
    names = sorted(build(config).state_dict())
    plain = build(config).state_dict()["model.layers.0.mlp.up_proj.weight"]
    one, two = found
    return (
        sorted(one) == sorted(two) == names,
        all(torch.allclose(one[name], two[name], atol=1e-12) for name in one),
        not torch.allclose(one["model.layers.0.mlp.up_proj.weight"], plain),
    )


def test_adapters_are_merged_into_whole_tensors(config):
    pytest.importorskip("peft")
    load_step_code(["ddp", "rtp"])
    assert run_ranks(merged_tensors, config, num_ranks=2) == [(True, True, True)] * 2
