"""Inputs that cannot work: how each is made, and words of the line that refuses it. Their table: `bad_input_page.py`.

`CASES` is data; `test_bad_inputs.py` runs it. A case spoils a run that is well in one way.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spoils import (
    both,
    config_json,
    directory_at,
    encoded,
    int32_weight,
    link,
    nan_weight,
    pipe,
    socket_at,
    weights_with,
    written,
)


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        section: of the page.
        shown: what was done, for the page and the test's name.
        arguments: of the command; "RUN" stands for the path of the run's file.
        words: part of the message.
        spoil: changes files in the directory of the run.
        environment: variables that the command has.
    """

    section: str
    shown: str
    arguments: tuple[str, ...]
    words: str
    spoil: Callable[[Path], object] = lambda directory: None
    environment: Mapping[str, str] = field(default_factory=dict)


def overrides(section: str, cases: Mapping[str, str]) -> list[Case]:
    """Cases that are a few words after `rotorch train run.toml`, as they are typed into a shell."""
    return [Case(section, text, ("train", "RUN", *shlex.split(text)), words) for text, words in cases.items()]


def lines(section: str, cases: Mapping[str, str]) -> list[Case]:
    """Cases that are a line of the file: it replaces the line of the same key, or begins the file."""
    return [Case(section, line, ("train", "RUN"), words, replaced(line)) for line, words in cases.items()]


def replaced(line: str) -> Callable[[Path], object]:
    def spoil(directory: Path) -> None:
        file, key = directory / "run.toml", line.partition("=")[0].strip().rpartition(".")[2]
        text = file.read_text()
        spoilt = re.sub(rf"^{re.escape(key)} = .*$", lambda _: _own(line), text, flags=re.MULTILINE)
        file.write_text(spoilt if spoilt != text else f"{line}\n{text}")

    return spoil


def _own(line: str) -> str:
    """A line without its section: `train.steps = 3` within `[train]`."""
    key, _, value = line.partition("=")
    return f"{key.strip().rpartition('.')[2]} = {value.strip()}"


PLACE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
"""What a launcher tells the first of two ranks."""


def told(shown: str, words: str) -> Case:
    """A case that is one variable of such a rank: `NAME=value`, or `no NAME`."""
    name, has_value, value = shown.removeprefix("no ").partition("=")
    environment = {**PLACE, name: value} if has_value else {key: PLACE[key] for key in PLACE if key != name}
    return Case("Ranks that something else starts", shown, ("train", "RUN"), words, environment=environment)


FROM_WEIGHTS = ("train", "RUN", "model.init=weights", "model.config=weights")
INDEX = "weights/model.safetensors.index.json"


# ---------------------------------------------------------------- the cases

CASES = [
    *lines(
        "Types and ranges",
        {
            'train.steps = "6"': "Write a whole number, without quotes",
            "train.steps = 2.0": "Write a whole number",
            "train.steps = true": "Write a whole number",
            "train.steps = 0": "greater than 0",
            "train.steps = -3": "greater than 0",
            "train.steps = nan": "valid integer",
            "train.steps = [6]": "Write a whole number",
            "train.steps = 1979-05-27": "Write a whole number",
            "train.steps = 1000000000000000000000000000000": "less than or equal to",
            'train.seed = "3"': "Write a whole number",
            "train.seed = -1": "greater than or equal to 0",
            "train.seed = 1180591620717411303424": "less than or equal to",
            "train.seed = 1.5": "Write a whole number",
            'train.micro_batch = "2"': "Write a whole number",
            "train.micro_batch = 0": "greater than 0",
            "train.micro_batch = 2.5": "Write a whole number",
            "train.micro_batch = 1000000000000": "less than or equal to",
            "train.tensorboard = 0": "Write true or false",
            'train.tensorboard = "false"': "Write true or false",
            "train.out = 5": "Write text, in quotes",
            'train.timeout_s = "300"': "Write a number",
            "train.timeout_s = 0": "greater than 0",
            "train.timeout_s = inf": "finite number",
            "train.timeout_s = 1e300": "less than or equal to",
            "train.eval_windows = 0": "greater than 0",
            "data.sequence_length = 0": "greater than 0",
            "data.sequence_length = 16.0": "Write a whole number",
            'data.sequence_length = "16"': "Write a whole number",
            "data.held_out_fraction = 0.9": "less than or equal to 0.5",
            "data.held_out_fraction = -0.1": "greater than or equal to 0",
            "data.held_out_fraction = nan": "finite number",
            'data.held_out_fraction = "5%"': "Write a number",
            "data.source = 5": "Write text, in quotes",
            "data.cache_dir = true": "Write text, in quotes",
            'optimizer.lr = "5e-3"': "Write a number, without quotes",
            "optimizer.lr = 0": "greater than 0",
            "optimizer.lr = -1e-3": "greater than 0",
            "optimizer.lr = nan": "finite number",
            "optimizer.lr = inf": "finite number",
            "optimizer.lr = 1e30": "less than or equal to",
            "optimizer.lr = true": "Write a number",
            "optimizer.warmup_steps = -1": "greater than or equal to 0",
            "optimizer.warmup_steps = 2.0": "Write a whole number",
            "optimizer.warmup_steps = 7": "is longer than the run, train.steps = 6",
            "sample.length = -1": "greater than or equal to 0",
            "sample.length = 1000000000000": "less than or equal to",
        },
    ),
    *overrides(
        "Types and ranges",
        {
            "train.compile='\"yes\"'": 'write true, false or "reduce-overhead"',
            "train.compile=1": 'write true, false or "reduce-overhead"',
            "train.compile=reduce-overhead parallel.layout=fsdp=2": "compile = 'reduce-overhead': fsdp=2: its passes",
            "train.async_save=on": "Write true or false",
            "data.pack=0": "Write true or false",
            "train.precision=fp16": "'float32', 'bfloat16' or 'autocast_bfloat16'",
            "train.precision=16": "'float32', 'bfloat16' or 'autocast_bfloat16'",
            "train.device=tpu": "'auto', 'cpu' or 'cuda'",
            "train.device=cuda:0": "'auto', 'cpu' or 'cuda'",
            "train.on_nonfinite=ignore": "'stop', 'skip' or 'roll_back'",
            "train.keep=0": "greater than 0",
            "train.checkpoint_every=-1": "greater than or equal to 0",
            "train.check_every=often": "Write a whole number",
            "train.spike_factor=-2": "greater than or equal to 0",
            "train.spike_factor=0.5": "Write more than 1",
            "train.spike_factor=3": "write train.checkpoint_every",
            "train.on_nonfinite=roll_back": "write train.checkpoint_every",
            "train.max_restarts=2": "write train.checkpoint_every",
            "train.max_restarts=-1": "greater than or equal to 0",
            "train.elastic=2": "Write text, in quotes",
            "train.elastic=4:2": "the least and the most ranks",
            "train.elastic=0:2": "the least and the most ranks",
            "train.elastic=a:b": "the least and the most ranks",
            "train.elastic=2:4": "takes 1 ranks",
            "train.elastic=": "the least and the most ranks",
            "train.accumulation=0": "greater than 0",
            "train.global_batch=0": "greater than 0",
            "train.global_batch=3": "is not micro_batch 2",
            "train.accumulation=3 train.global_batch=4": "is not micro_batch 2",
            "optimizer.betas=0.9": "Write a list",
            "optimizer.betas=[0.9]": "optimizer.betas",
            "optimizer.betas=[0.9,0.95,0.99]": "optimizer.betas",
            "optimizer.betas=[0.9,1.0]": "less than 1",
            "optimizer.betas=[-0.1,0.9]": "greater than or equal to 0",
            "optimizer.betas=['\"0.9\"',0.9]": "Write a number",
            "optimizer.eps=0": "greater than or equal to",
            "optimizer.eps=1e-300": "greater than or equal to",
            "optimizer.eps=-1e-8": "greater than or equal to",
            "optimizer.weight_decay=-0.1": "greater than or equal to 0",
            "optimizer.weight_decay=1e9": "1 or more",
            "optimizer.clip_norm=-1": "greater than or equal to 0",
            "optimizer.clip_norm=nan": "finite number",
            "optimizer.schedule=spam": "'cosine', 'linear', 'wsd' or 'constant'",
            "optimizer.min_lr_ratio=2": "less than or equal to 1",
            "sample.temperature=-1": "greater than or equal to 0",
            "sample.temperature=1e-30": "write 0 for the likeliest token",
            "sample.temperature=inf": "finite number",
            "sample.prompt=5": "Write text, in quotes",
            "data.suffixes=.py": "Write a list",
            "data.suffixes=[]": "at least 1 item",
            "data.suffixes=[5]": "Write text, in quotes",
            "data.suffixes=['\"\"']": "at least 1 character",
            "data.kind=images": "'text', 'instructions' or 'preferences'",
            "dpo.beta=0": "greater than 0",
            "data.shuffle_buffer=0": "greater than 0",
            "data.source=": "at least 1 character",
            "data.tokenizer=": "at least 1 character",
            "data.text_field=": "at least 1 character",
            "data.eos_token=": "at least 1 character",
            "data.cache_dir=": "at least 1 character",
            "model.init=": "at least 1 character",
            "train.checkpoint_dir=": "at least 1 character",
            "lora.rank=0": "greater than 0",
            "lora.alpha=3": "lora.rank is missing",
            "lora.rank=2": "model.init = 'random'",
            "lora.rank=2 lora.targets=[]": "at least 1 item",
            "lora.rank=2 lora.dropout=1": "less than 1",
            "lora.rank=2 lora.alpha=-1": "greater than 0",
        },
    ),
    *overrides(
        "Keys and overrides",
        {
            "train.stpes=3": "did you mean 'train.steps'?",
            "train.lr=3": "did you mean 'optimizer.lr'?",
            "lr=3": "did you mean 'optimizer.lr'?",
            "optimzer.lr=3": "did you mean 'optimizer'?",
            "train=3": "is a section",
            "train.steps": "write section.key=value",
            "=3": "write section.key=value",
            "train.=3": "write section.key=value",
            "train.steps=[1": "not a TOML value",
            "train.steps.more=3": "not a table",
            "parallel.layout=5": "Write text, in quotes",
            "data.mixture=0.5": "unknown key",
            "model.config.hidden_size.x=5": "not a table",
        },
    ),
    *lines(
        "Keys and overrides",
        {
            "stpes = 3": "unknown key 'stpes'",
            "[trian]": "did you mean 'train'?",
            "steps = 3 = 4": "not valid TOML",
            "train = 3": "not valid TOML",
        },
    ),
    *overrides(
        "The model's configuration",
        {
            "model.config.num_hidden_layer=3": "did you mean 'num_hidden_layers'?",
            "model.config.hiden_size=3": "did you mean 'hidden_size'?",
            "model.config.anything=3": "has no such key",
            "model.config.n_layer=3": "has no such key",
            "model.config.num_hidden_layers=0": "Write 1 or more",
            "model.config.num_hidden_layers=-1": "Write 1 or more",
            "model.config.num_hidden_layers=1000000": "Write 4096 or less",
            "model.config.num_hidden_layers=1.5": "expected int, got float",
            "model.config.hidden_size=0": "Write 1 or more",
            "model.config.hidden_size=-4": "Write 1 or more",
            "model.config.hidden_size=18": "not a multiple of the number of attention heads",
            "model.config.hidden_size=12": "an odd number",
            "model.config.hidden_size=1000000": "would take",
            "model.config.hidden_size=100000000": "would take",
            "model.config.hidden_size=true": "expected int, got bool",
            "model.config.hidden_size='\"16\"'": "expected int, got str",
            "model.config.intermediate_size=0": "Write 1 or more",
            "model.config.intermediate_size=10000000000": "this machine",
            "model.config.num_attention_heads=0": "Write 1 or more",
            "model.config.num_attention_heads=3": "not a multiple of the number of attention heads",
            "model.config.num_key_value_heads=3": "does not divide num_attention_heads = 4. Write one of 1, 2, 4",
            "model.config.num_key_value_heads=0": "Write 1 or more",
            "model.config.num_key_value_heads=8": "does not divide",
            "model.config.head_dim=3": "an odd number",
            "model.config.head_dim=-2": "Write 1 or more",
            "model.config.vocab_size=200": "the tokens need 257 ids, the model has 200",
            "model.config.vocab_size=0": "Write 1 or more",
            "model.config.vocab_size=1000000000000": "would take",
            "model.config.max_position_embeddings=8": "longer than the model's max_position_embeddings 8",
            "model.config.max_position_embeddings=0": "Write 1 or more",
            "model.config.hidden_act=silly": "hidden_act = 'silly'",
            "model.config.attention_dropout=2.0": "not a fraction",
            "model.config.attention_dropout=-0.5": "not a fraction",
            "model.config.rms_norm_eps=-1.0": "Write a small positive number",
            "model.config.rms_norm_eps=0": "Write a small positive number",
            "model.config.initializer_range=-1.0": "initializer_range",
            "model.config.pad_token_id=1000": "Padding_idx",
            "model.config.rope_theta=x": "cannot build",
            "'model.config.rope_scaling={type=\"silly\"}'": "silly",
            "'model.config.rope_parameters={rope_type=\"yarn\"}'": "factor",
            "model.config.tie_word_embeddings=yes": "expected bool, got str",
            "model.config.torch_dtype=float99": "float99",
            "model.config.attn_implementation=silly": "silly",
            "model.config.layer_types=[1]": "layer_types",
            "model.config.id2label=3": "not a valid llama configuration",
            "model.config.model_type=lama": "did you mean 'llama'",
            "model.config.model_type=5": "knows no model_type",
            "model.config={}": "model_type",
            "model.config=5": "model.config = 5",
            "model.config=": "at least 1 character",
            "model.config=nowhere": "Write the path of a Hugging Face config.json",
            "model.config=text.txt": "not readable JSON",
            "'model.config={model_type=\"bert\"}'": "reads in both directions",
            "'model.config={model_type=\"vit\"}'": "no causal language-model head",
            "model.init=nowhere": "no directory",
            "model.init=.": "no *.safetensors",
            "model.init=text.txt": "no directory",
        },
    ),
    Case(
        "The model's configuration", "model.init=weights, with a norm of int32", ("train", "RUN", "model.init=weights"),
        "of a dtype that is not converted: model.norm.weight", int32_weight,
    ),
    Case(
        "The model's weights", "verify: weights, with a norm of int32", ("verify", "weights", "--parallel=rtp=2"),
        "of a dtype that is not converted: model.norm.weight", int32_weight,
    ),
    Case(
        "The model's weights", "verify: weights, with a norm that is NaN", ("verify", "weights", "--parallel=rtp=2"),
        "model.norm.weight[0] is nan in the file", nan_weight,
    ),
    *(
        Case("The model's weights", shown, arguments, words, weights_with(spoil))
        for shown, arguments, words, spoil in [
            ("weights/model.safetensors: a pipe", FROM_WEIGHTS, "is a pipe", pipe("weights/model.safetensors")),
            ("weights/model.safetensors: a socket", FROM_WEIGHTS, "a socket", socket_at("weights/model.safetensors")),
            (
                "weights/model.safetensors.index.json, and a file of it that is a pipe", FROM_WEIGHTS, "is a pipe",
                both(written(INDEX, '{"weight_map": {"lm_head.weight": "a.safetensors"}}'),
                     pipe("weights/a.safetensors")),
            ),
            (
                "model.init=model.gguf: a pipe", ("train", "RUN", "model.init=model.gguf"), "is a pipe",
                pipe("model.gguf"),
            ),
            (
                "model.config=only, with only/model.gguf: a pipe", ("train", "RUN", "model.config=only"), "is a pipe",
                both(directory_at("only"), pipe("only/model.gguf")),
            ),
            (
                "verify: weights/model.safetensors: a pipe", ("verify", "weights", "--parallel=rtp=2"), "is a pipe",
                pipe("weights/model.safetensors"),
            ),
            (
                "verify: weights/model.safetensors: text", ("verify", "weights", "--parallel=rtp=2"),
                "no safetensors file", written("weights/model.safetensors", "text"),
            ),
            (
                "init: weights/model.safetensors: a pipe",
                ("init", "weights", "--data=text.txt", "--out=new.toml", "--parallel=single"), "is a pipe",
                pipe("weights/model.safetensors"),
            ),
        ]
    ),
    *(
        Case("A configuration's file", shown, ("train", "RUN", f"model.config={name}"), words, spoil)
        for shown, name, words, spoil in [
            ("config.json: a misspelt hidden_actt", "config.json", "hidden_act", config_json(hidden_actt="relu")),
            ("config.json: num_hidden_layers 0", "config.json", "Write 1 or more", config_json(num_hidden_layers=0)),
            ("config.json: 3 KV heads of 4", "config.json", "does not divide", config_json(num_key_value_heads=3)),
            ("config.json: hidden_act silly", "config.json", "'silly'", config_json(hidden_act="silly")),
            ("config.json: hidden_size 1000000", "config.json", "would take", config_json(hidden_size=10**6)),
            ("config.json: no model_type", "config.json", "model_type", config_json(model_type=None)),
            ("config.json: empty", "config.json", "not readable JSON", written("config.json", "")),
            ("config.json: a list", "config.json", "has no 'model_type'", written("config.json", "[1]")),
            ("config.json: cut off", "config.json", "not readable JSON", written("config.json", '{"model_type": "ll')),
            ("config.json: bytes", "config.json", "not readable JSON", written("config.json", b"\xff\x00\x81")),
            ("config.json: nested deep", "config.json", "not readable JSON", written("config.json", "[" * 100_000)),
            ("config.json: a pipe", "config.json", "pipe", pipe("config.json")),
            ("config.json: a socket", "config.json", "socket", socket_at("config.json")),
            ("config.json: a device", "config.json", "device", link("config.json", "/dev/zero")),
            ("config.json: a link in a circle", "config.json", "", link("config.json", "config.json")),
            (
                "config.json: quantization_config of gptq", "config.json", "quantised weights are not trained",
                config_json(quantization_config={"quant_method": "gptq", "bits": 4}),
            ),
            ("a directory without config.json", "empty", "config.json", directory_at("empty")),
            ("model.gguf: text", "model.gguf", "model.gguf", written("model.gguf", "no GGUF")),
            ("model.gguf: missing", "model.gguf", "no file", lambda directory: None),
        ]
    ),
    *(
        Case("The run's file", shown, ("train", "RUN"), words, spoil)
        for shown, words, spoil in [
            ("run.toml: missing", "no such file", lambda directory: (directory / "run.toml").unlink()),
            ("run.toml: a directory", "is a directory", directory_at("run.toml")),
            ("run.toml: a pipe", "is a pipe", pipe("run.toml")),
            ("run.toml: a socket", "is a socket", socket_at("run.toml")),
            ("run.toml: /dev/zero", "is a device", link("run.toml", "/dev/zero")),
            ("run.toml: a link in a circle", "cannot read", link("run.toml", "run.toml")),
            ("run.toml: empty", "model is missing", written("run.toml", "")),
            ("run.toml: UTF-16", "Save it as UTF-8", encoded("utf-16")),
            ("run.toml: UTF-32", "Save it as UTF-8", encoded("utf-32")),
            ("run.toml: Latin-1", "line 1 is not UTF-8", written("run.toml", "# caf\xe9".encode("latin-1"))),
            ("run.toml: null bytes", "not valid TOML", written("run.toml", b"\0" * 10)),
            ("run.toml: JSON", "not valid TOML", written("run.toml", '{"train": 1}')),
            ("run.toml: no [train]", "train is missing", written("run.toml", '[model]\nconfig = "x"\n')),
            ("run.toml: no steps", "train.steps is missing", written("run.toml", 'model.config = "x"\n[train]\n')),
            ("run.toml: no model", "model is missing", written("run.toml", "[train]\nsteps = 1\n")),
            ("run.toml: a list", "Write a table of keys", written("run.toml", "model = 1\n[train]\nsteps = 1\n")),
            ("run.toml: 5 MiB", "has at most", written("run.toml", "#" * (5 << 20))),
        ]
    ),
    *overrides(
        "Layout and ranks",
        {
            "--parallel ''": "Write kind=size",
            "--parallel rtp=0": "positive number of ranks",
            "--parallel rtp=-2": "positive number of ranks",
            "--parallel rtp=two": "positive number of ranks",
            "--parallel rtp": "positive number of ranks",
            "--parallel rpt=2": "did you mean 'rtp'?",
            "--parallel rtp=2,": "Write kind=size",
            "--parallel rtp=2,ddp=2": "cannot be composed",
            "--parallel rtp=2[nothing=1]": "has no option",
            "--parallel single=2": "takes no size",
            "--parallel tesseract=2": "needs the sizes of a grid",
            "--parallel rtp=300": "ranks would hold nothing",
            "--parallel ddp=1000000": "ranks on one machine",
            "--parallel rtp=5 --nproc 2": "needs 5 ranks, but there are 2",
            "--nproc 0": "write a positive number of ranks",
            "--nproc -1": "write a positive number of ranks",
            "--nproc two": "--nproc",
            "--nprocs 2": "--nprocs",
            "--max-restarts -1": "--max-restarts",
            "--elastic 3": "the least and the most ranks",
            "--elastic ''": "the least and the most ranks",
            "--resume": "holds no run to go on with",
            "--json nowhere/summary.json": "its directory is missing",
            "--json .": "its directory is missing, or it is one",
        },
    ),
    *(
        told(shown, words)
        for shown, words in {
            "RANK=zero": "write this rank's number among WORLD_SIZE=2, a number from 0 to 1",
            "RANK=5": "write this rank's number among WORLD_SIZE=2, a number from 0 to 1",
            "RANK=-1": "RANK='-1': write",
            "RANK=": "RANK='': write",
            "RANK=\u0663": "RANK='\u0663': write",
            "no RANK": "WORLD_SIZE='2' is set, and RANK is not",
            "WORLD_SIZE=0": "write how many ranks there are",
            "WORLD_SIZE=two": "write how many ranks there are",
            f"WORLD_SIZE={'9' * 30}": "write how many ranks there are",
            "no WORLD_SIZE": "RANK='0' is set, and WORLD_SIZE is not",
            "LOCAL_RANK=first": "write this rank's number on its host",
            "LOCAL_RANK=2": "write this rank's number on its host, a number from 0 to 1",
            "LOCAL_WORLD_SIZE=3": "write how many ranks this host has",
            "no MASTER_ADDR": "RANK is set, and MASTER_ADDR is not",
            "MASTER_ADDR=": "RANK is set, and MASTER_ADDR is not",
            "no MASTER_PORT": "RANK is set, and MASTER_PORT is not",
            "MASTER_PORT=abc": "write a free port of rank 0's host, a number from 1 to 65535",
            "MASTER_PORT=0": "MASTER_PORT='0': write",
            "MASTER_PORT=70000": "MASTER_PORT='70000': write",
        }.items()
    ),
    *overrides(
        "Text and tokenizer",
        {
            "data.source=nowhere.txt": "no such file or directory",
            "data.source=text.tx": "did you mean 'text.txt'",
            "data.source=/dev/zero": "not a regular file",
            "data.source=/dev/null": "not a regular file",
            "data.sequence_length=64": "longer than the model's max_position_embeddings 32",
            "data.tokenizer=nowhere.json": "no such file",
            "data.tokenizer=text.txt": "tokenizer",
            "data.tokenizer=.": "no such file",
            "data.tokenizer=/dev/zero": "device",
            "data.tokenizer=model": "name no directory",
            "data.kind=instructions": "reads .jsonl files",
            "data.kind=preferences": "reads .jsonl files",
            "dpo.beta=0.3": "[dpo] is the loss of data.kind = 'preferences'",
            "data.stream=true": "so nothing is held out of it",
            "data.stream=true data.held_out_fraction=0": "is no JSONL and no Parquet",
            "data.shuffle_buffer=9": "is of streams",
            "train.micro_batch=1000000000": "samples of data.sequence_length",
            "train.micro_batch=100000": "times in one step",
            "train.accumulation=1000000000": "times in one step",
            "data.cache_dir=text.txt": "is a file",
            "data.cache_dir=/proc/nothing": "/proc",
        },
    ),
    *(
        Case("Text and tokenizer", shown, ("train", "RUN", f"data.source={name}"), words, spoil)
        for shown, name, words, spoil in [
            ("a text: empty", "a.txt", "empty", written("a.txt", "")),
            ("a text: too short", "a.txt", "Write sequence_length = ", written("a.txt", "too short")),
            ("a text: a pipe", "a.txt", "not a regular file", pipe("a.txt")),
            ("a text: a socket", "a.txt", "not a regular file", socket_at("a.txt")),
            ("a text: a link to nothing", "a.txt", "no such file", link("a.txt", "nothing")),
            ("a directory without files", "empty", "holds no files", directory_at("empty")),
            ("a.jsonl: no JSON", "a.jsonl", "line 1", written("a.jsonl", "no JSON\n")),
            ("a.jsonl: another field", "a.jsonl", "text", written("a.jsonl", '{"txet": "a"}\n')),
            ("a.jsonl: a number as text", "a.jsonl", "text", written("a.jsonl", '{"text": 5}\n')),
            ("a.jsonl: a list", "a.jsonl", "line 1", written("a.jsonl", "[1]\n")),
            ("a.jsonl: UTF-16", "a.jsonl", "line 1", written("a.jsonl", '{"text": "a"}\n'.encode("utf-16"))),
            ("a.parquet: text", "a.parquet", "a.parquet", written("a.parquet", "no Parquet")),
        ]
    ),
    *(
        Case("Text and tokenizer", shown, ("train", "RUN", f"data.tokenizer={name}"), words, spoil)
        for shown, name, words, spoil in [
            ("tokenizer.json: a pipe", "tokenizer.json", "is a pipe", pipe("tokenizer.json")),
            ("tokenizer.json: a socket", "tokenizer.json", "is a socket", socket_at("tokenizer.json")),
            ("tokenizer.json: empty", "tokenizer.json", "tokenizer", written("tokenizer.json", "")),
            ("tokenizer.json: {}", "tokenizer.json", "tokenizer", written("tokenizer.json", "{}")),
            ("tokenizer.json: UTF-16", "tokenizer.json", "tokenizer", written("tokenizer.json", "{}".encode("utf-16"))),
        ]
    ),
    *overrides(
        "Where a run writes",
        {
            "train.out=text.txt": "is a file",
            "train.out=/proc/run": "/proc/run",
            "train.out=text.txt/run": "text.txt",
            "train.out='\"a\\u0000b\"'": "is no path",
            "train.out=s3://bucket/run": "metrics and messages go to a directory",
            "train.checkpoint_dir=text.txt": "is a file",
            "train.checkpoint_dir=memory://run": "memory of one process",
            "train.checkpoint_dir=s4://bucket/run": "s4",
            "train.keep=1000000000000": "Free some",
        },
    ),
    *(
        Case("Where a run writes", shown, arguments, words, both(directory_at("run"), spoil))
        for shown, arguments, words, spoil in [
            ("run/.rotorch-lock: a pipe", ("train", "RUN"), "is no file", pipe("run/.rotorch-lock")),
            ("run/.rotorch-lock: a directory", ("train", "RUN"), "is no file", directory_at("run/.rotorch-lock")),
            ("run/run.json: a pipe", ("train", "RUN"), "is no file", pipe("run/run.json")),
            ("run/metrics.jsonl: a pipe", ("train", "RUN", "--resume"), "is no file", pipe("run/metrics.jsonl")),
            ("run/events.jsonl: a pipe", ("train", "RUN", "--resume"), "is no file", pipe("run/events.jsonl")),
        ]
    ),
    Case(
        "Where a run writes", "train.checkpoint_dir=saves, with a pipe for a lock",
        ("train", "RUN", "train.checkpoint_dir=saves"), "is no file",
        both(directory_at("saves"), pipe("saves/.rotorch-lock")),
    ),
    Case(
        "Where a run writes", "train.out=full, with a thesis in it", ("train", "RUN", "train.out=full"),
        "is not empty, and is no run of rotorch",
        both(directory_at("full"), written("full/thesis.tex", "x")),
    ),
    *(
        Case("Other commands", " ".join(arguments), tuple(arguments), words)
        for arguments, words in [
            (["trian", "RUN"], "No such command 'trian'"),
            (["train"], "Missing argument"),
            (["verify", "nowhere.json", "--parallel", "rtp=2"], "nowhere.json"),
            (["verify", "text.txt", "--parallel", "rtp=2"], "not readable JSON"),
            (["verify", "text.txt", "--parallel", ""], "Write kind=size"),
            (["verify", "text.txt"], "Missing option"),
            (["verify", "text.txt", "--parallel", "rtp=2", "--layers", "0"], "layers 0: write 1 or more"),
            (["verify", "text.txt", "--parallel", "rtp=2", "--steps", "0"], "steps 0: write 1 or more"),
            (["bench", "RUN"], "--parallel"),
            (["bench", "RUN", "--parallel", ""], "Write kind=size"),
            (["bench", "RUN", "--parallel", "rpt=2"], "did you mean 'rtp'"),
            (["bench", "RUN", "--parallel", "rtp=2", "--peer", "fdsp2"], "fdsp2"),
            (["bench", "RUN", "--parallel", "rtp=2", "--rounds", "0"], "rounds"),
            (["bench", "RUN", "--parallel", "rtp=2", "--steps", "0"], "steps"),
            (["bench", "RUN", "--parallel", "rtp=2", "--bar", "silly"], "silly"),
            (["bench", "RUN", "--parallel", "rtp=2", "--virtual-time", "0"], "write seconds above 0"),
            (["bench", "RUN", "--parallel", "rtp=2", "--virtual-time", "nan"], "write seconds above 0"),
            (["bench", "RUN", "--parallel", "rtp=2", "--virtual-time", "1", "--compile"], "(train.compile) out"),
            (["bench", "RUN", "--parallel", "rtp=2", "--virtual-time", "1", "train.device=cuda"], "train.device=cpu"),
            (["bench", "RUN", "--parallel", "rtp=2", "model.config.num_hidden_layer=1"], "did you mean"),
            (["bench", "RUN", "--parallel", "rtp=2", "model.config.num_key_value_heads=3"], "does not divide"),
            (["bench", "RUN", "--parallel", "rtp=2", "model.config.hidden_act=silly"], "'silly'"),
            (["bench", "RUN", "--parallel", "rtp=2", "data.sequence_length=64"], "Write data.sequence_length=32"),
            (["suite", "nowhere.toml"], "nowhere.toml"),
            (["export", "nowhere", "out"], "nowhere"),
            (["export", "text.txt", "out"], "text.txt"),
            (["inspect", "nowhere"], "nowhere"),
            (["inspect", "text.txt"], "text.txt"),
            (["schedule", "zeropp"], "Missing option"),
            (["generate", "nowhere", "--temperature", "inf"], "--temperature inf: write 0"),
            (["generate", "nowhere", "--temperature", "nan"], "from 0.001 to 1000"),
            (["generate", "nowhere", "--temperature", "1e-300"], "from 0.001 to 1000"),
            (["generate", "nowhere", "--temperature", "-1"], "from 0.001 to 1000"),
            (["generate", "nowhere", "--top-p", "nan"], "--top-p nan: write a number from 0.01 to 1"),
            (["generate", "nowhere", "--seed", "99999999999999999999999"], "--seed"),
            (["schedule", "zeropq", "--stages", "2", "--micro-batches", "4"], "did you mean 'zeropp'"),
            (["schedule", "gpipe", "--stages", "0", "--micro-batches", "4"], "Write 1 or more"),
            (["schedule", "gpipe", "--stages", "2", "--micro-batches", "0"], "micro"),
            (["zoo", "LlamaConfig", "--out", "x.md"], "Leave out one of the two"),
            (["doctor", "--json", "nowhere/x.json"], "its directory is missing"),
        ]
    ),
    *(
        Case("Other commands", f"verify config.json: {shown}", ("verify", "config.json", "--parallel=rtp=2"), *rest)
        for shown, *rest in [
            ("a misspelt hidden_actt", "hidden_act", config_json(hidden_actt="relu")),
            ("no layers", "Write 1 or more", config_json(num_hidden_layers=0)),
            ("3 KV heads of 4", "does not divide", config_json(num_key_value_heads=3)),
            ("hidden_act silly", "'silly'", config_json(hidden_act="silly")),
            ("hidden_size 1000000", "would take", config_json(hidden_size=10**6)),
            ("a pipe", "pipe", pipe("config.json")),
            ("eos_token_id 999, 3 KV heads", "does not divide", config_json(eos_token_id=999, num_key_value_heads=3)),
        ]
    ),
]  # fmt: skip
