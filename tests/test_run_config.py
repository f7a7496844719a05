"""The run's configuration: TOML, overrides, and one line for everything that can be wrong with them."""

import tomllib

import pytest

from rotorch.core.errors import ConfigError
from rotorch.run_config import BatchSizes, TrainSection, batch_sizes, load_run_config

RUN = """
[model]
config = "model/config.json"
[train]
steps = 10
"""


@pytest.fixture
def run_toml(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(RUN)
    return path


def test_defaults_and_paths(run_toml, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    config = load_run_config(run_toml)
    assert config.model.config == str(tmp_path / "model" / "config.json")
    assert config.train.out == str(tmp_path.parent / "runs" / "tiny")
    assert (config.data.source, config.data.tokenizer, config.model.init) == ("stdlib", "bytes", "random")


def test_overrides_are_toml_values_with_bare_text_allowed(run_toml, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    config = load_run_config(
        run_toml,
        overrides=[
            "parallel.layout=ddp=2,rtp=2",
            "optimizer.betas=[0.8, 0.9]",
            "train.precision=bfloat16",
            "train.tensorboard=false",
            "sample.prompt = 'def f('",
            "train.out=elsewhere",
            "data.source=./stdlib",
            "train.steps=3",
        ],
    )
    assert config.parallel.layout == "ddp=2,rtp=2"
    assert config.optimizer.betas == (0.8, 0.9)
    assert (config.train.precision, config.train.tensorboard, config.train.steps) == ("bfloat16", False, 3)
    assert config.sample.prompt == "def f("
    assert config.train.out == str(tmp_path.parent / "elsewhere")
    assert config.data.source == str(tmp_path.parent / "stdlib")


def test_a_model_may_be_a_table_and_overridden_inside(run_toml):
    run_toml.write_text('[model.config]\nmodel_type = "llama"\nhidden_size = 8\n[train]\nsteps = 1')
    config = load_run_config(run_toml, overrides=["model.config.hidden_size=16"])
    assert config.model.config == {"model_type": "llama", "hidden_size": 16}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stpes=3", "unknown key 'train.stpes' (did you mean 'train.steps'?)"),
        ("train.lr=3", "unknown key 'train.lr' (did you mean 'optimizer.lr'?)"),
        ("lr=3", "names no section (did you mean 'optimizer.lr'?)"),
        ("optimzer.lr=3", "unknown key 'optimzer' (did you mean 'optimizer'?)"),
        ("train=3", "'train' is a section"),
        ("train.steps", "write section.key=value"),
        ("train.steps=many", "train.steps = 'many': input should be a valid integer"),
        ("train.steps=0", "train.steps = 0: input should be greater than 0"),
        ("train.steps=[1", "not a TOML value"),
        ("train.precision=fp16", "input should be 'float32', 'bfloat16' or 'autocast_bfloat16'"),
        ("optimizer.lr=nan", "input should be a finite number"),
        ("optimizer.betas=[0.9]", "optimizer.betas"),
        ("model.config.hidden_size=3", "not a table"),
        ("data.held_out_fraction=0.9", "less than or equal to 0.5"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run_toml, override, words):
    with pytest.raises(ConfigError) as caught:
        load_run_config(run_toml, overrides=[override])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nsteps = 1", "model is missing"),
        ('[model]\nconfig = "x"', "train is missing"),
        ('[model]\nconfig = "x"\n[train]', "train.steps is missing"),
        ("[model", "not valid TOML"),
    ],
)
def test_what_is_wrong_with_a_file(run_toml, text, words):
    run_toml.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_run_config(run_toml)


def test_a_missing_file_names_its_neighbour(run_toml):
    with pytest.raises(ConfigError, match=r"no such file \(did you mean 'tiny.toml'\?\)"):
        load_run_config(run_toml.with_name("tinny.toml"))
    with pytest.raises(ConfigError, match="is a directory"):
        load_run_config(run_toml.parent)


def test_batch_sizes_complete_each_other():
    assert batch_sizes(TrainSection(steps=1, micro_batch=2), batch_ranks=3) == BatchSizes(2, 1, 3)
    assert batch_sizes(TrainSection(steps=1, micro_batch=2, accumulation=4), batch_ranks=3).global_batch == 24
    assert batch_sizes(TrainSection(steps=1, micro_batch=2, global_batch=24), batch_ranks=3).accumulation == 4


@pytest.mark.parametrize(
    ("given", "write"),
    [
        ({"micro_batch": 2, "global_batch": 13}, "train.global_batch=12"),
        ({"micro_batch": 4, "global_batch": 2}, "train.global_batch=12"),
        ({"micro_batch": 2, "accumulation": 3, "global_batch": 12}, "train.global_batch=18"),
    ],
)
def test_the_one_identity_of_a_batch_is_checked(given, write):
    with pytest.raises(ConfigError, match="batch ranks") as caught:
        batch_sizes(TrainSection(steps=1, **given), batch_ranks=3)
    assert write in str(caught.value)


def test_a_micro_batch_that_fits_a_global_batch_is_named_and_fits():
    """A run goes on with no other global batch, so that is not always what can be written instead."""
    given = TrainSection(steps=1, micro_batch=4, global_batch=18)
    with pytest.raises(ConfigError, match=r"Write train\.micro_batch=3 train\.accumulation=2 to keep it, or train\.g"):
        batch_sizes(given, batch_ranks=3)
    written = given.model_copy(update={"micro_batch": 3, "accumulation": 2})
    assert batch_sizes(written, batch_ranks=3).global_batch == 18


def test_the_configurations_that_come_along_are_valid():
    from pathlib import Path

    root = Path(__file__).parents[1] / "configs"
    for path in (root / "demo.toml", root / "bench" / "llama-h384.toml"):
        config = load_run_config(path)
        assert config.model.config["model_type"] == "llama"
        assert tomllib.loads(path.read_text())["train"]["steps"] == config.train.steps


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            'train.steps = "6"',
            "train.steps = '6': input should be a valid integer. Write a whole number, without quotes",
        ),
        ("train.steps = 2.0", "train.steps = 2.0: input should be a valid integer"),
        ("train.steps = true", "train.steps = True: input should be a valid integer"),
        ('train.compile = "yes"', "train.compile = 'yes': write true, false or \"reduce-overhead\""),
        ("train.compile = 1", 'train.compile = 1: write true, false or "reduce-overhead"'),
        ('train.async_save = "yes"', "train.async_save = 'yes': input should be a valid boolean. Write true or false"),
        ('optimizer.lr = "1e-3"', "optimizer.lr = '1e-3': input should be a valid number. Write a number, without"),
        ('optimizer.betas = ["0.9", 0.9]', "optimizer.betas.0 = '0.9': input should be a valid number"),
        ("optimizer.betas = 0.9", "input should be a valid tuple. Write a list"),
        ("data.source = 3", "data.source = 3: input should be a valid string. Write text, in quotes"),
        ("train.seed = 2361183241434822606848", "train.seed = 2361183241434822606848: input should be less than or"),
        ("optimizer.warmup_steps = 2", "optimizer.warmup_steps = 2 is longer than the run, train.steps = 1"),
        ("optimizer.lr = 100.0", "lr = 100 times optimizer.weight_decay = 0.1 is 1 or more"),
        ("optimizer.eps = 1e-300", "optimizer.eps = 1e-300: input should be greater than or equal to 0.0000"),
        ("sample.temperature = 1e-9", "write 0 for the likeliest token"),
        ('data.tokenizer = ""', "should have at least 1 character. Write one, or leave the key out"),
    ],
)
def test_types_and_ranges_of_a_file_are_strict(tmp_path, line, words):
    file = tmp_path / "run.toml"
    file.write_text(f'model.config = "x"\n{line}\n' + ("" if "steps =" in line[:14] else "train.steps = 1\n"))
    with pytest.raises(ConfigError) as caught:
        load_run_config(file)
    assert words in str(caught.value)


def test_a_whole_number_may_stand_for_a_float_and_a_list_for_a_tuple(run_toml):
    config = load_run_config(run_toml, overrides=["optimizer.clip_norm=2", 'data.suffixes=[".py"]'])
    assert (config.optimizer.clip_norm, config.data.suffixes) == (2.0, (".py",))


def test_how_a_file_is_encoded(run_toml):
    text = run_toml.read_text()
    run_toml.write_bytes(text.encode("utf-8-sig"))
    load_run_config(run_toml)
    for encoding, words in {
        "utf-16": "the file is UTF-16, and TOML is UTF-8. Save it as UTF-8",
        "utf-32": "the file is UTF-32",
    }.items():
        run_toml.write_bytes(text.encode(encoding))
        with pytest.raises(ConfigError, match=words):
            load_run_config(run_toml)
    run_toml.write_bytes(b"a = 1\nb = '\xff'\n")
    with pytest.raises(ConfigError, match=r"line 2 is not UTF-8 \(byte 0xff\)"):
        load_run_config(run_toml)


def test_what_is_no_file_is_not_opened(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(ConfigError, match="is a pipe, and a run's TOML file is a file"):
        load_run_config(tmp_path / "pipe.toml")
