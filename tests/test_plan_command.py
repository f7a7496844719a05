"""`rotorch plan`: figures, tables, and what is wrong said in one line."""

import json
import re
from pathlib import Path

import pytest

from rotorch import cli
from rotorch.cli.plan import _traced
from rotorch.core.errors import ConfigError
from rotorch.planner.search import Batch
from rotorch.strategies import batch_ranks, num_ranks, parse_parallel

MODEL = "configs/tiny/llama.json"
PLAN = ["plan", MODEL, "--cluster", "cpu2", "--batch", "16x32", "--precision", "float32"]
FIELDS = {"parallel", "micro_batch", "accumulation", "memory_bytes", "step_s", "tokens_per_s", "fits", "why_not"}


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def test_figures_are_printed_and_written(capsys, tmp_path):
    assert cli.run([*PLAN, "--json", str(tmp_path / "plan.json")]) == 0
    found = json.loads((tmp_path / "plan.json").read_text())
    assert {"model", "cluster", "plans", "chosen"} <= found.keys()
    assert all(plan.keys() >= FIELDS for plan in found["plans"])
    assert found["chosen"] == found["plans"][0]["parallel"]
    assert {"ddp=2", "fsdp=2", "rtp=2", "megatron=2"} <= {plan["parallel"] for plan in found["plans"]}
    printed = capsys.readouterr().out
    assert f"chosen: --parallel {found['chosen']}" in printed and "rtp=2[recompute=none]" in printed


def test_a_model_that_was_planned_before_is_not_traced_again(tmp_path, monkeypatch):
    files = [tmp_path / f"{number}.json" for number in range(3)]
    assert cli.run([*PLAN, "--no-cache", "--json", str(files[0])]) == 0
    assert cli.run([*PLAN, "--json", str(files[1])]) == 0
    monkeypatch.setattr("rotorch.cli.plan._traced", None)
    assert cli.run([*PLAN, "--json", str(files[2])]) == 0
    assert len({file.read_text() for file in files}) == 1
    assert cli.run([*PLAN, "--no-cache"]) != 0


@pytest.mark.parametrize("context", [1, 2])
def test_a_table_that_is_the_head_too_counts_once(context):
    """Models are made without first values here, which is where transformers ties weights."""
    config = json.loads(Path("configs/tiny/gemma2.json").read_text())
    config.pop("tie_word_embeddings", None)  # as in files of models: by default they are tied
    found = _traced(config, batch=Batch(2, 32), precision="float32", context=context)
    names = [weight.name for weight in found.spec.weights]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_the_table_is_readable_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.run([*PLAN, "--nodes", "4"]) == 0
    printed = capsys.readouterr().out
    assert "with 4 nodes (8 ranks)" in " ".join(printed.split())
    assert "…" not in printed and " slower: " in printed
    rows = [line for line in printed.splitlines() if re.match(r" *[\d.e-]+ s +[\d.]", line)]
    assert rows and all(len(line) <= 80 and "=" in line for line in rows)


def test_a_layout_that_was_asked_for_is_judged_alone(tmp_path):
    file = tmp_path / "plan.json"
    assert cli.run([*PLAN, "--parallel", "fsdp=2", "--objective", "frontier", "--json", str(file)]) == 0
    assert {plan["parallel"] for plan in json.loads(file.read_text())["plans"]} == {"fsdp=2"}


def test_ranks_that_share_a_sequence_take_a_part_of_it_each(tmp_path):
    """One sequence on two ranks, of which each computes half."""
    whole, shared = tmp_path / "whole.json", tmp_path / "shared.json"
    assert cli.run([*PLAN[:5], "2x128", *PLAN[6:], "--parallel", "rtp=2", "--json", str(whole)]) == 0
    assert cli.run([*PLAN[:5], "1x128", *PLAN[6:], "--parallel", "tsp=2", "--json", str(shared)]) == 0
    (of_two,), (of_one,) = (json.loads(file.read_text())["plans"] for file in (whole, shared))
    assert 0.5 < of_one["memory_by_category"]["activations"] / of_two["memory_by_category"]["activations"] < 0.6
    assert of_one["time_by_part"]["computing"] < of_two["time_by_part"]["computing"]
    assert of_one["time_by_part"]["waiting for messages"] > of_two["time_by_part"]["waiting for messages"]
    assert cli.run([*PLAN[:5], "1x128", *PLAN[6:], "--json", str(shared)]) == 0
    assert any("context=2" in plan["parallel"] for plan in json.loads(shared.read_text())["plans"])


def test_the_page_needs_nothing_else(tmp_path):
    file = tmp_path / "plan.html"
    assert cli.run([*PLAN, "--html", str(file)]) == 0
    text = file.read_text("utf-8")
    assert text.count("<html") == text.count("<svg") == 1 and "http" not in text and "<script" not in text
    assert "rtp=2[recompute=slice]" in text and "slower: " in text


def test_a_run_is_planned(tmp_path):
    from rotorch.cli.auto import planned
    from rotorch.run_config import load_run_config

    overrides = ["parallel.layout=auto", "train.global_batch=8", f"train.out={tmp_path}/run"]
    config = load_run_config("configs/demo.toml", overrides=overrides)
    chosen = planned(config, nproc=2)
    assert chosen.changes[0] == f"parallel.layout={chosen.plan.parallel}"
    assert chosen.told[0].startswith(f"auto: {chosen.plan.parallel} with a micro-batch of")
    assert any("slower: " in line for line in chosen.told[1:])
    assert chosen.micro_batch == chosen.plan.micro_batch
    of_pairs = planned(load_run_config("configs/demo.toml", overrides=[*overrides, "data.kind=preferences"]), nproc=2)
    assert of_pairs.plan.micro_batch == 2 * of_pairs.micro_batch and "pp" not in of_pairs.plan.parallel
    assert of_pairs.plan.tokens == 2 * chosen.plan.tokens  # two rows of each
    with pytest.raises(ConfigError, match="cluster = h100x8 has 8 ranks, and the run 2"):
        planned(load_run_config("configs/demo.toml", overrides=[*overrides, "parallel.cluster=h100x8"]), nproc=2)


def test_a_run_of_one_sequence_on_two_ranks_is_planned(tmp_path):
    from rotorch.cli.auto import planned
    from rotorch.run_config import load_run_config

    overrides = ["parallel.layout=auto", "train.global_batch=1", f"train.out={tmp_path}/run"]
    chosen = planned(load_run_config("configs/demo.toml", overrides=overrides), nproc=2)
    assert chosen.plan.micro_batch * chosen.plan.accumulation * batch_ranks(parse_parallel(chosen.plan.parallel)) == 1
    said = " ".join(chosen.told)
    assert "context=2" in said
    compiled = load_run_config("configs/demo.toml", overrides=[*overrides, "train.compile=true"])
    assert "context=2" not in planned(compiled, nproc=2).plan.parallel


def test_a_run_is_planned_again_for_fewer_ranks(tmp_path, capsys, monkeypatch):
    from rotorch.cli.auto import compared, planned
    from rotorch.run_config import load_run_config

    overrides = ["parallel.layout=auto", f"train.out={tmp_path}/run", "train.elastic='1:4'", "train.micro_batch=3"]
    chosen = planned(load_run_config("configs/demo.toml", overrides=overrides), nproc=4)
    config = load_run_config("configs/demo.toml", overrides=[*overrides, *chosen.changes])
    fewer = chosen.resize(config, num_ranks=3)
    ranks, train = batch_ranks(parse_parallel(fewer.parallel.layout)), fewer.train
    assert num_ranks(parse_parallel(fewer.parallel.layout)) == 3
    assert train.global_batch == train.micro_batch * train.accumulation * ranks == 3 * 4
    assert capsys.readouterr().out.startswith(f"auto: {fewer.parallel.layout} with a micro-batch of")
    (tmp_path / "run.json").write_text(json.dumps({"parallel": fewer.parallel.layout}))
    (tmp_path / "metrics.jsonl").write_text('{"tokens": 1, "tokens_per_s": 1}\n' * 9)
    assert compared(chosen, run_directory=tmp_path) == ""  # planned for 4 ranks, and done by 3
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"train.elastic = '1:4' with layout = auto: .* Write train.global_batch"):
        planned(load_run_config("configs/demo.toml", overrides=overrides), nproc=None)


def test_ranks_that_are_left_are_planned_on_their_part_of_a_cluster(tmp_path):
    from rotorch.cli.auto import planned
    from rotorch.run_config import load_run_config

    overrides = ["parallel.cluster=h100x16", f"train.out={tmp_path}/run", "parallel.layout=atp=auto"]
    chosen = planned(load_run_config("configs/demo.toml", overrides=[*overrides, "train.elastic='2:16'"]), nproc=4)
    assert num_ranks(parse_parallel(chosen.plan.parallel)) == 4 and chosen.plan.parallel.startswith("atp=")
    assert all(" not atp=" in line for line in chosen.told[1:]) and len(chosen.told) > 2
    with pytest.raises(ConfigError, match="cluster = h100x16 has 16 ranks, and the run 4"):
        planned(load_run_config("configs/demo.toml", overrides=overrides), nproc=4)


def test_a_model_without_a_plan_of_layers_is_planned(capsys, tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    (tmp_path / "bert.json").write_text(
        json.dumps({"model_type": "bert", "is_decoder": True, "vocab_size": 99, **sizes})
    )
    assert cli.run(["plan", str(tmp_path / "bert.json"), *PLAN[2:]]) == 0
    printed = capsys.readouterr().out
    assert "ddp=2" in printed and "pp=2" not in printed


def test_a_grid_is_chosen(capsys):
    assert cli.run([*PLAN, "--parallel", "atp=auto"]) == 0
    assert "chosen: --parallel atp=2x1 " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cluster", "h100x9"], "no cluster that rotorch brings"),
        (["--batch", "16"], "--batch 16: write sequences of a step by tokens of each"),
        (["--batch", "0x32"], "--batch 0x32: write"),
        (["--budget", "much"], "--budget much: no number of bytes"),
        (["--budget", "1TiB"], "has 11.6 GiB. Write that or less"),
        (["--budget", "1MiB"], "nothing fits within 1.00 MiB per rank: the least is"),
        (["--nodes", "0"], "--nodes 0: write 1 or more"),
        (["--objective", "beauty"], "--objective beauty: write one of speed, memory, frontier"),
        (["--precision", "float16"], "--precision float16: write float32, bfloat16 or autocast_bfloat16"),
        (["--parallel", "megatron=3"], "3 ranks, but '2 cores of one machine' has 2"),
        (["--parallel", "rtq=2"], "unknown strategy 'rtq'"),
        (["--parallel", "ddp=3,atp=auto"], "its other sizes are 3 ranks, which do not divide 2"),
        (["--batch", "16x100000"], "the model takes 128"),
    ],
)
def test_wrong_input_is_said_in_one_line(options, words, capsys):
    assert cli.run([*PLAN, *options]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
