"""Several sources with weights: shares, order, layouts, going on, and what is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import rotorch, write_news, write_run

from rotorch.core.errors import ConfigError
from rotorch.run_config import load_run_config
from rotorch.train.data.batches import check_source, open_windows, prepare_corpus
from rotorch.train.data.mixture import BLOCK, MixedWindows, places
from rotorch.train.metrics import read_metrics
from rotorch.train.run import check_same_corpus

SOURCES = """
[[data.sources]]
name = "rings"
source = "text.txt"
weight = 3
[[data.sources]]
name = "news"
source = "news.jsonl"
text_field = "body"
"""


@pytest.fixture
def run_toml(tmp_path):
    path = write_run(tmp_path)
    write_news(tmp_path, num_records=60)
    path.write_text(path.read_text().replace('source = "text.txt"\n', "") + SOURCES)
    return path


def mixed(tmp_path, *, weights, seed=3):
    parts = []
    for number in range(len(weights)):
        file = tmp_path / f"{number}.txt"
        file.write_text(chr(ord("a") + number) * 9 * (40 + number))
        checked = check_source(file, sequence_length=8, held_out_fraction=0.1, cache_dir=tmp_path / "cache")
        prepare_corpus(checked)
        parts.append(open_windows(checked, seed=seed)[0])
    return MixedWindows(parts, weights=weights), parts


@pytest.mark.parametrize(
    ("weights", "expected"), [([1, 1], [500, 500]), ([1, 1, 1], [334, 333, 333]), ([0.7, 0.299, 0.001], [700, 299, 1])]
)
def test_places_are_the_shares_in_whole_numbers(weights, expected):
    assert places(weights) == expected and sum(expected) == BLOCK


def test_a_source_that_would_hardly_be_read_is_refused():
    with pytest.raises(ConfigError, match="less than one sample in 1000"):
        places([1.0, 1e-5])


def test_every_block_has_the_shares_and_each_source_its_own_order(tmp_path):
    windows, parts = mixed(tmp_path, weights=[7, 2, 1])
    found = [windows.source_of(sample) for sample in range(2 * BLOCK)]
    for block in (found[:BLOCK], found[BLOCK:]):
        assert np.bincount([part for part, _ in block]).tolist() == [700, 200, 100]
    for part in range(3):
        assert sorted(number for p, number in found if p == part) == list(range(2 * places([7, 2, 1])[part]))
    assert [part for part, _ in found[:BLOCK]] != [part for part, _ in found[BLOCK:]]
    for sample in (0, 5, 1234):
        part, number = found[sample]
        assert np.array_equal(windows.window(sample), parts[part].window(number))
    shares = windows.shares(1500, names=["a", "b", "c"])
    assert sum(share.samples for share in shares) == 1500 and shares[0].asked == 0.7
    assert shares[1].samples == sum(part == 1 for part, _ in found[:1500])
    assert shares[1].epochs == shares[1].samples / len(parts[1])


def test_a_step_is_the_same_for_any_number_of_ranks(tmp_path):
    windows, _ = mixed(tmp_path, weights=[2, 1])
    whole = windows.global_batch(3, global_batch=12)["input_ids"]
    for ranks, rows in ((1, 4), (2, 3), (3, 2)):
        parts = [
            batch["input_ids"]
            for rank in range(ranks)
            for batch in windows.micro_batches(
                3, global_batch=12, micro_batch=rows, batch_rank=rank, num_batch_ranks=ranks
            )
        ]
        assert torch.equal(torch.cat(parts), whole)
    assert len({int(row[1]) for row in whole}) == 2  # letters of both sources


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.source=stdlib"], "data.source beside data.sources"),
        (['data.sources=[{name="a", source="x"}, {name="a", source="y"}]'], "data.sources: the name 'a' is taken"),
        (['train.eval=[{name="news", source="x"}]'], "the name 'news' is taken"),
        (['data.sources=[{name="a", source="x", weight=0}]'], "data.sources.0.weight"),
        (['data.sources=[{name="a", source="x", wieght=1}]'], "did you mean 'data.sources.weight'"),
    ],
)
def test_what_is_no_mixture_is_refused(run_toml, overrides, said):
    with pytest.raises(ConfigError) as refused:
        load_run_config(run_toml, overrides=overrides)
    assert said in str(refused.value)


def test_a_mixture_is_trained_alike_under_every_layout_and_goes_on_where_it_was(run_toml, tmp_path, warm):
    found = {}
    for layout, rows in {"single": 4, "rtp=2": 2}.items():
        told = [f"train.micro_batch={rows}", "train.global_batch=4", "optimizer.schedule=constant"]
        told += ["--parallel", layout]
        file = tmp_path / f"{layout}.json"
        done = rotorch(tmp_path / "log", "train", run_toml, *told, f"train.out={tmp_path / layout}", "--json", file)
        assert done.code == 0, done.stderr
        assert "data    rings 75.0%: " in done.stdout and "data    news 25.0%: " in done.stdout
        found[layout] = read_metrics(tmp_path / layout)
        numbers = json.loads(file.read_text())
        assert sum(share["samples"] for share in numbers["sources"].values()) == 6 * 4
        assert set(numbers["evals"]) == {"rings", "news"} and "eval_news_loss" in found[layout][-1]
    reference = [line["loss"] for line in found["single"]]
    assert [line["loss"] for line in found["rtp=2"]] == pytest.approx(reference, rel=1e-5)

    parts = ["train", run_toml, "train.micro_batch=4", f"train.out={tmp_path / 'parts'}", "optimizer.schedule=constant"]
    assert rotorch(tmp_path / "log", *parts, "train.steps=3").code == 0
    rings = f'{{name="rings", source="{tmp_path / "text.txt"}"}}'
    other = rotorch(tmp_path / "log", *parts, "--resume", f"data.sources=[{rings}]")
    assert other.code == 2
    assert "data.sources = [['rings', 3.0], ['news', 1.0]], and here" in other.stderr
    assert "Write [[data.sources]] as they were then" in other.stderr
    assert rotorch(tmp_path / "log", *parts, "--resume").code == 0
    went_on = [line["loss"] for line in read_metrics(tmp_path / "parts")]
    assert went_on == reference and len(went_on) == 6

    measured = rotorch(tmp_path / "log", "eval", tmp_path / "single")
    assert measured.code == 0 and "news.jsonl, held out" in measured.stdout


@pytest.mark.parametrize(
    ("names", "said"), [([], "data.source = 'stdlib' is"), (["a", "b"], "data.sources 'a', 'b' is")]
)
def test_another_text_than_that_of_the_checkpoint_is_named_as_it_is_written(names, said):
    run = SimpleNamespace(
        resume=SimpleNamespace(manifest=SimpleNamespace(data={"corpus": "then"}), checkpoint="there"),
        source=SimpleNamespace(parts=[SimpleNamespace(name=name) for name in names]),
        config=SimpleNamespace(data=SimpleNamespace(source="stdlib")),
    )
    check_same_corpus(run, "then")
    with pytest.raises(ConfigError, match=f"--resume: {said} not the text that there was trained on"):
        check_same_corpus(run, "now")
