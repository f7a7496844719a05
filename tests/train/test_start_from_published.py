"""From a published model through training to an export: the same bytes, and what does not fit is said first."""

import json
import shutil

import pytest
import torch
from commands import rotorch as command
from commands import write_run
from failures import seen
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import rotorch
from rotorch import cli
from rotorch.testing.ranks import run_ranks
from rotorch.train.checkpoint.auxiliary_files import auxiliary_files
from rotorch.train.checkpoint.export import export_checkpoint
from rotorch.train.checkpoint.saving import save
from rotorch.train.state import TrainState

CONFIG = AutoConfig.for_model(
    "llama",
    vocab_size=300,
    hidden_size=18,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=32,
)
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


@pytest.fixture
def published(tmp_path, byte_level_bpe, request):
    """A directory as one is published: sharded weights, configurations, a tokenizer with a chat template."""
    directory = tmp_path / "published"
    torch.manual_seed(1)
    config = CONFIG
    config.tie_word_embeddings = getattr(request, "param", False)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    model.save_pretrained(directory, max_shard_size="20KB")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_bpe, eos_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def load_and_save(published, run, parallel):
    """Loads a model and saves it untrained."""
    with rotorch.on_meta():
        module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(published))
    model = rotorch.parallelize(module, parallel).load(str(published))
    along = auxiliary_files(tokenizer=published, pretrained=published)
    save(run, TrainState(model=model, step=1, auxiliary_files=along), keep=1)
    model.close()


def tensors(directory):
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("published", [False, True], indirect=True, ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("parallel", "num_ranks"), [("rtp=2", 2), pytest.param("rtp=4", 4, marks=pytest.mark.slow), ("fsdp=2", 2)]
)
def test_what_was_not_trained_comes_out_as_it_was(published, tmp_path, warm, parallel, num_ranks):
    run_ranks(load_and_save, published, tmp_path / "run", parallel, num_ranks=num_ranks)
    export_checkpoint(tmp_path / "run", tmp_path / "out", max_shard_bytes=20_000)
    before, after = tensors(published), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype and torch.equal(value, after[name]), name
    weight_map = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map.keys() == before.keys() and len(set(weight_map.values())) > 1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "[user]x"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.temperature == 0.5


def test_a_published_model_needs_no_more_than_its_directory(published, tmp_path, warm):
    run = tmp_path / "train"
    run.mkdir()
    write_run(run)
    start = f'[model]\ninit = "{published}"\n[data]\ntokenizer = "model"\n'
    config = (run / "run.toml").read_text()
    config = start + config[config.index("[data]") :].removeprefix("[data]\n")
    (run / "run.toml").write_text(config)
    done = command(
        run / "log", "train", run / "run.toml", "--parallel", "rtp=2", "train.steps=1", "optimizer.warmup_steps=1"
    )
    assert done.code == 0, done.stderr
    assert cli.run(["export", str(run / "run"), str(tmp_path / "out")]) == 0
    trained, before = tensors(tmp_path / "out"), tensors(published)
    assert trained.keys() == before.keys()
    largest = max(float((trained[name] - before[name]).abs().max()) for name in before)
    assert 0 < largest < 0.05
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (published / "tokenizer.json").read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == TEMPLATE


def spoil_config(published):
    (published / "config.json").unlink()


def spoil_file(published):
    next(published.glob("*.safetensors")).write_bytes(b"not a tensor in here")


def truncate_file(published):
    file = next(published.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])


def lose_blob(published):
    """As where a cache of downloads has lost what its links lead to."""
    file = next(published.glob("*.safetensors"))
    file.unlink()
    file.symlink_to("../blobs/gone")


def link_to_itself(published):
    file = next(published.glob("*.safetensors"))
    file.unlink()
    file.symlink_to(file.name)


def spoil_shape(published):
    file = next(published.glob("*.safetensors"))
    values = load_file(file)
    name = next(iter(values))
    save_file(values | {name: torch.zeros(3, 3)}, file, metadata={"format": "pt"})


def spoil_dtype(published):
    file = next(published.glob("*.safetensors"))
    values = load_file(file)
    name = next(iter(values))
    save_file(values | {name: values[name].to(torch.int32)}, file, metadata={"format": "pt"})


def lose_tensor(published):
    values = tensors(published)
    shutil.rmtree(published / "nowhere", ignore_errors=True)
    for file in published.glob("*.safetensors*"):
        file.unlink()
    del values["model.norm.weight"]
    save_file(values | {"surplus": torch.zeros(1)}, published / "model.safetensors")


def lose_head(published):
    config = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps({**config, "model_type": "siglip_vision_model"}))


def make_it_an_encoder(published):
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    (published / "config.json").write_text(json.dumps({"model_type": "bert", **sizes}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (make_it_an_encoder, "'bert' reads in both directions: its tokens see the next one. Write is_decoder = true"),
        (spoil_config, "Write the path of a Hugging Face config.json"),
        (spoil_file, "is no safetensors file, or a corrupt or truncated one"),
        (truncate_file, "is no safetensors file, or a corrupt or truncated one"),
        (lose_blob, "No such file or directory (it is a link to ../blobs/gone)"),
        (link_to_itself, "Too many levels of symbolic links (it is a link to "),
        (spoil_shape, "(3, 3) in the file"),
        (spoil_dtype, "of a dtype that is not converted: "),
        (lose_tensor, "missing: model.norm.weight; unknown: surplus"),
        (lose_head, "has no causal language-model head"),
    ],
)
def test_what_does_not_fit_is_said_before_a_rank_starts(published, tmp_path, warm, capsys, monkeypatch, spoil, words):
    from rotorch.train import run as train_run

    monkeypatch.setattr(train_run, "launch", lambda *a, **k: pytest.fail("a rank was started"))
    write_run(tmp_path)
    spoil(published)
    threads = torch.get_num_threads()
    try:
        code = cli.run(["train", str(tmp_path / "run.toml"), f"model.config={published}", f"model.init={published}"])
    finally:
        torch.set_num_threads(threads)
    line = capsys.readouterr().err
    assert code == 2 and line.count("\n") == 1 and words in line, line
    assert not (tmp_path / "run").exists()


def spoilt_by(published, value):
    """Puts a value into the second half of a matrix: under rtp=2 that is on rank 1 alone."""
    for file in published.glob("*.safetensors"):
        values = load_file(file)
        if (name := "model.layers.1.mlp.up_proj.weight") in values:
            values[name][-1, 3] = value
            save_file(values, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        (float("nan"), 2, ["load: ", "model.layers.1.mlp.up_proj.weight[19, 3] is nan in the file"]),
        (3e38, 3, ["No step was taken yet: these are the numbers of the given weights. Check that model.init"]),
    ],
    ids=["nan", "too large"],
)
def test_given_weights_that_give_no_loss(published, tmp_path, warm, value, code, words):
    write_run(tmp_path)
    spoilt_by(published, value)
    given = (f"model.config={published}", f"model.init={published}")
    done = command(tmp_path / "log", "train", tmp_path / "run.toml", "--parallel", "rtp=2", *given)
    assert done.code == code, done.stderr
    assert len(done.stderr.splitlines()) == 1 and all(word in done.stderr for word in words), done.stderr
    assert "optimizer.lr" not in done.stderr
    assert (tmp_path / "run").exists() == (code == 3)  # wrong input leaves no run behind, on whichever rank it is found
    if code == 2:
        seen("Given weights are not finite", done.stderr, instead={r"'/\S*/published'": "'my_model'"})
